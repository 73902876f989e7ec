// The edges into one node, checked.
#pragma once

#include <algorithm>
#include <stdexcept>

#include "hyper.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// Numbers of a run's weights, edges or tails, and whether each is one more than the one before it.
struct Names {
    const std::int32_t* at;
    bool follow;
};

struct Run {
    std::int64_t edges;
    Names weight, edge, tail;         // tail: of a DAG
    const std::int32_t* tail_offset;  // of a hypergraph
};

inline bool all_below(const std::int32_t* numbers, std::int64_t count, std::int64_t limit) {
    std::uint32_t most = 0;
    for (std::int64_t n = 0; n < count; ++n) most = std::max(most, std::uint32_t(numbers[n]));
    return count == 0 || std::int64_t(most) < limit;
}

inline Names names(const std::int32_t* numbers, std::int64_t count, std::int64_t limit) {
    if (!all_below(numbers, count, limit)) throw std::invalid_argument("bellmax kernels: an index is out of range");
    std::uint32_t off = 0;
    for (std::int64_t n = 0; n < count; ++n) off |= std::uint32_t(numbers[n]) - std::uint32_t(numbers[0]) - std::uint32_t(n);
    return {numbers, off == 0};
}

inline void check_tails(const Hypergraph& graph, const std::int32_t* offset, std::int64_t edges, std::int64_t head) {
    bool good = all_below(offset, edges + 1, graph.num_tails + 1);
    for (std::int64_t k = 0; k < edges; ++k) {
        good &= offset[k] <= offset[k + 1] && offset[k + 1] - offset[k] <= graph.most_tails;
    }
    if (!good || !all_below(graph.tail + offset[0], offset[edges] - offset[0], head)) {
        throw std::invalid_argument("bellmax kernels: the tails do not fit together");
    }
}

// Whoever makes the graph has checked its offsets: they ascend from 0 to the number of edges.
inline Run run_into(const Hypergraph& graph, std::int64_t node) {
    const std::int64_t begin = graph.offset[node], edges = graph.offset[node + 1] - begin;
    const Names edge = names(graph.edge + begin, edges, graph.num_edges);
    const Names weight = graph.weight == graph.edge ? edge : names(graph.weight + begin, edges, graph.num_weights);
    if (!graph.tail_offset) return {edges, weight, edge, names(graph.tail + begin, edges, node), nullptr};
    check_tails(graph, graph.tail_offset + begin, edges, node);
    return {edges, weight, edge, {graph.tail, false}, graph.tail_offset + begin};
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
