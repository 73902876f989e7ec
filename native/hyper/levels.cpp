#include <vector>

#include "hyper.h"

namespace bellmax {

using std::int64_t;

void levels(const int64_t* pairs, int64_t num_pairs, int64_t* level, int64_t num_nodes) {
    std::vector<int64_t> offset(num_nodes + 1, 0), child(num_pairs), waiting(num_nodes, 0), ready;
    for (int64_t e = 0; e < num_pairs; ++e) {
        ++offset[pairs[2 * e] + 1];
        ++waiting[pairs[2 * e + 1]];
    }
    for (int64_t i = 0; i < num_nodes; ++i) offset[i + 1] += offset[i];
    std::vector<int64_t> next(offset.begin(), offset.end() - 1);
    for (int64_t e = 0; e < num_pairs; ++e) child[next[pairs[2 * e]]++] = pairs[2 * e + 1];

    ready.reserve(num_nodes);
    std::vector<int64_t> depth(num_nodes, 0);
    for (int64_t i = 0; i < num_nodes; ++i) {
        level[i] = -1;
        if (waiting[i] == 0) ready.push_back(i);
    }
    for (std::size_t n = 0; n < ready.size(); ++n) {
        const int64_t parent = ready[n];
        level[parent] = depth[parent];
        for (int64_t c = offset[parent]; c < offset[parent + 1]; ++c) {
            const int64_t i = child[c];
            if (depth[i] < depth[parent] + 1) depth[i] = depth[parent] + 1;
            if (--waiting[i] == 0) ready.push_back(i);
        }
    }
}

}  // namespace bellmax
