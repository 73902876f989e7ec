#include <algorithm>
#include <numeric>
#include <vector>

#include "hyper.h"

namespace bellmax {

using std::int32_t;
using std::int64_t;

namespace {

// Turns counts[i + 1] into the sum of the counts up to i.
void add_up(std::vector<int32_t>& counts) { std::partial_sum(counts.begin(), counts.end(), counts.begin()); }

// The second numbers of pairs by their first: those with i come from first[i] to before first[i + 1].
struct Neighbours {
    std::vector<int32_t> first, node;

    // `side` is 0, or 1 to swap the numbers of each pair.
    Neighbours(const int64_t* pairs, int64_t num_pairs, int64_t num_nodes, int side)
        : first(num_nodes + 1, 0), node(num_pairs) {
        for (int64_t e = 0; e < num_pairs; ++e) ++first[pairs[2 * e + side] + 1];
        add_up(first);
        std::vector<int32_t> next(first.begin(), first.end() - 1);
        for (int64_t e = 0; e < num_pairs; ++e) node[next[pairs[2 * e + side]]++] = int32_t(pairs[2 * e + 1 - side]);
    }
};

// Sorts the numbers in `order` by key(number) from 0 to `most`; equal keys keep their order.
template <class Key>
void sort_by(Key key, int64_t most, std::vector<int32_t>& order) {
    std::vector<int32_t> next(most + 2, 0);
    for (const int32_t number : order) ++next[key(number) + 1];
    add_up(next);
    std::vector<int32_t> sorted(order.size());
    for (const int32_t number : order) sorted[next[key(number)]++] = number;
    order.swap(sorted);
}

// Sorts the nodes, and returns the number of each node in that order.
std::vector<int32_t> sort_nodes(const UnsortedGraph& graph, const SortedGraph& sorted) {
    std::vector<int32_t> degree(graph.num_nodes, 0), order(graph.num_nodes), number(graph.num_nodes);
    for (int64_t e = 0; e < graph.num_edges; ++e) ++degree[graph.head[e]];
    std::iota(order.begin(), order.end(), 0);
    sort_by([&](int32_t i) { return degree[i]; }, graph.num_edges, order);
    sort_by([&](int32_t i) { return graph.level[i]; }, graph.num_nodes, order);
    sorted.offset[0] = 0;
    for (int64_t i = 0; i < graph.num_nodes; ++i) {
        const int32_t own = order[i], before = i ? order[i - 1] : own;
        number[own] = int32_t(i);
        sorted.offset[i + 1] = sorted.offset[i] + degree[own];
        sorted.begins_group[i] = i == 0 || graph.level[own] != graph.level[before] || degree[own] != degree[before];
    }
    return number;
}

// Writes the tails of all slots, for edges that have one each.
void sort_single_tails(const UnsortedGraph& graph, const std::vector<int32_t>& number, const SortedGraph& sorted) {
    for (int64_t slot = 0; slot < graph.num_edges; ++slot) {
        sorted.tail[slot] = number[graph.tail[sorted.edge[slot]]];
    }
}

// The same for edges with any number of tails.
void sort_tails(const UnsortedGraph& graph, const std::vector<int32_t>& number, const SortedGraph& sorted) {
    std::vector<int32_t> first(graph.num_edges + 1, 0);
    for (int64_t e = 0; e < graph.num_edges; ++e) first[e + 1] = first[e] + int32_t(graph.arity[e]);
    sorted.tail_offset[0] = 0;
    for (int64_t slot = 0; slot < graph.num_edges; ++slot) {
        const int32_t e = sorted.edge[slot];
        int32_t to = sorted.tail_offset[slot];
        for (int32_t t = first[e]; t < first[e + 1]; ++t) sorted.tail[to++] = number[graph.tail[t]];
        sorted.tail_offset[slot + 1] = to;
    }
}

}  // namespace

void levels(const int64_t* pairs, int64_t num_pairs, int64_t* level, int64_t num_nodes) {
    const Neighbours children(pairs, num_pairs, num_nodes, 0);
    std::vector<int32_t> waiting(num_nodes, 0), depth(num_nodes, 0), ready;
    for (const int32_t child : children.node) ++waiting[child];
    ready.reserve(num_nodes);
    for (int64_t i = 0; i < num_nodes; ++i) {
        level[i] = -1;
        if (waiting[i] == 0) ready.push_back(int32_t(i));
    }
    for (std::size_t n = 0; n < ready.size(); ++n) {
        const std::size_t parent = ready[n];
        level[parent] = depth[parent];
        for (int32_t c = children.first[parent]; c < children.first[parent + 1]; ++c) {
            const std::size_t i = children.node[c];
            depth[i] = std::max(depth[i], depth[parent] + 1);
            if (--waiting[i] == 0) ready.push_back(int32_t(i));
        }
    }
}

void reachable(const int64_t* pairs, int64_t num_pairs, bool is_reversed, int64_t source, bool* is_reachable,
               int64_t num_nodes) {
    const Neighbours neighbours(pairs, num_pairs, num_nodes, is_reversed);
    std::fill_n(is_reachable, num_nodes, false);
    is_reachable[source] = true;
    std::vector<int32_t> open{int32_t(source)};
    while (!open.empty()) {
        const std::size_t i = open.back();
        open.pop_back();
        for (int32_t n = neighbours.first[i]; n < neighbours.first[i + 1]; ++n) {
            const int32_t other = neighbours.node[n];
            if (is_reachable[other]) continue;
            is_reachable[other] = true;
            open.push_back(other);
        }
    }
}

void sort_graph(const UnsortedGraph& graph, const SortedGraph& sorted) {
    const std::vector<int32_t> number = sort_nodes(graph, sorted);
    std::vector<int32_t> next(sorted.offset, sorted.offset + graph.num_nodes);
    for (int64_t e = 0; e < graph.num_edges; ++e) sorted.edge[next[number[graph.head[e]]]++] = int32_t(e);
    graph.arity ? sort_tails(graph, number, sorted) : sort_single_tails(graph, number, sorted);
}

}  // namespace bellmax
