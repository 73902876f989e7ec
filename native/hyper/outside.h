// The best derivation that uses each edge of a graph with the interface of Trellis (trellis.h), by the hard maximum.
#pragma once

#include <algorithm>
#include <vector>

#include "../base/memory.h"
#include "../base/threads.h"
#include "../omega/omega.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// Calls visit(edges, node, k, score) for the k-th of the edges into each node, with the score of the best derivation of
// the last node that uses the edge; −∞ if there is none. False if a weight is +∞ or NaN.
template <class Graph, class Visit>
bool visit_best_through(const Graph& graph, Visit visit) {
    const std::int64_t nodes = graph.num_nodes(), first = graph.has_start() ? 1 : 0;
    const auto inside = filled<double>(nodes, -infinity<double>), outside = filled<double>(nodes, -infinity<double>);
    if (first) inside[0] = 0;
    outside[nodes - 1] = 0;
    bool is_sound = true;
    Pace pace;
    const auto sum_of_tails = [&](const auto& edges, std::int64_t k) {
        double sum = 0;
        for (std::int64_t t = 0; t < edges.num_tails(k); ++t) sum += inside[edges.tail(k, t)];
        return sum;
    };
    for (std::int64_t node = first; node < nodes; ++node) {
        const auto edges = graph.into(node);
        pace.spend(edges.count);
        double best = -infinity<double>;
        for (std::int64_t k = 0; k < edges.count; ++k) {
            const double weight = edges.weight(k) + edges.of_head();
            is_sound = is_sound && weight < infinity<double>;
            best = std::max(best, weight + sum_of_tails(edges, k));
        }
        inside[node] = best;
    }
    std::vector<double> later;  // sums over the tails after each tail: v may be −∞, so no term can be subtracted
    for (std::int64_t node = nodes - 1; node >= first; --node) {
        const auto edges = graph.into(node);
        pace.spend(edges.count);
        for (std::int64_t k = 0; k < edges.count; ++k) {
            const std::int64_t tails = edges.num_tails(k);
            double above = edges.weight(k) + edges.of_head() + outside[node];
            visit(edges, node, k, above + sum_of_tails(edges, k));
            if (tails > 1) later.assign(std::size_t(tails), 0);
            for (std::int64_t t = tails - 1; t > 0; --t) {
                later[std::size_t(t - 1)] = later[std::size_t(t)] + inside[edges.tail(k, t)];
            }
            for (std::int64_t t = 0; t < tails; ++t) {
                const std::int64_t tail = edges.tail(k, t);
                outside[tail] = std::max(outside[tail], tails > 1 ? above + later[std::size_t(t)] : above);
                above += inside[tail];
            }
        }
    }
    return is_sound;
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
