// The interface for the binding: the sweeps of any stored graph, compiled once for each instruction set.
//
// An edge leads from its tails, any number of nodes, to its head: its score is its weight and the values of its tails.
// A derivation of a node is one of the edges into it and a derivation of each tail. With one tail an edge, that is a
// DAG, and derivations of its last node are its paths.
#pragma once

#include <cstdint>

#include "../omega/omega.h"

namespace bellmax {

// Nodes are in topological order, the root last. The edges into node i are the slots offset[i] … offset[i + 1] − 1.
// Nodes of a group, from group[g] to before group[g + 1], have as many edges each and do not depend on each other.
struct Hypergraph {
    std::int64_t num_nodes, num_edges, num_weights, num_groups;
    std::int64_t num_forms, num_terms;  // without terms: num_weights and 0
    std::int64_t most_edges;            // into any node
    const std::int32_t *offset, *group;
    const std::int32_t* tail_offset;  // the tails of a slot, as for offset; null for a DAG: tail[slot], and node 0 is 0
    const std::int32_t* tail;
    const std::int32_t* edge;    // the caller's number of a slot's edge
    const std::int32_t* weight;  // the number of its weight, which edges may share; `edge` itself if they do not
    // If they are not null, `weight` is the number of a slot's form: a sum of weights, times coefficients, over the
    // terms term_offset[form] … term_offset[form + 1] − 1. `entry` is the weight of a term. `coefficient` is null if
    // all are 1.
    const std::int32_t *term_offset, *entry;
    const double* coefficient;

    bool shares_weights() const { return weight != edge || term_offset; }
};

// body(weight, coefficient) for the terms of a form.
template <class Body>
inline void for_terms(const Hypergraph& graph, std::int64_t form, Body body) {
    for (std::int32_t t = graph.term_offset[form]; t < graph.term_offset[form + 1]; ++t) {
        body(std::int64_t(graph.entry[t]), graph.coefficient ? graph.coefficient[t] : 1.0);
    }
}

// θ and other numbers by weight are (batch, num_weights); numbers by edge are (batch, num_edges); a tape is
// (batch, 2, num_nodes + room_on_tape): values and thresholds, and room for a vector behind the last.
constexpr std::int64_t room_on_tape = 3;

template <class S>
struct HyperProblem {
    Hypergraph graph;
    OmegaParameters omega;
    std::int64_t batch;
    int threads;
    const S* theta;
    const double* tape;  // null for forward and topk
};

template <class S>
struct HyperKernels {
    // Whether every score was below +∞ and not NaN.
    bool (*forward)(const HyperProblem<S>&, S* value, double* tape);
    void (*backward)(const HyperProblem<S>&, const S* seed, S* by_weight);
    void (*hessian)(const HyperProblem<S>&, const S* seed, const S* z, S* by_weight);
    void (*log_transitions)(const HyperProblem<S>&, S* by_edge);
    void (*log_transitions_jvp)(const HyperProblem<S>&, const S* z, S* by_edge);
    void (*log_transitions_vjp)(const HyperProblem<S>&, const S* cotangent_by_edge, S* by_weight);
    // How often a derivation has each edge, (batch, draws, num_edges). Its n-th choice, from the root, first tails
    // first, takes the n-th of its uniforms; false if there are fewer than it makes.
    bool (*sample)(const HyperProblem<S>&, std::int64_t draws, std::int64_t choices, const double* uniforms, S* counts);
    // (batch, k) and (batch, k, num_edges), best first. As for forward; where it is false there is no result.
    bool (*topk)(const HyperProblem<S>&, std::int64_t k, S* scores, S* counts);
    // The score of the best derivation that uses each weight, −∞ if there is none. As for forward.
    bool (*max_marginals)(const HyperProblem<S>&, S* by_weight);
};

BELLMAX_KERNELS(template <class S> HyperKernels<S> hyper_kernels())

// Longest path to each node, in edges; −1 on cycles and behind them. Pairs are (tail, head).
void levels(const std::int64_t* pairs, std::int64_t num_pairs, std::int64_t* level, std::int64_t num_nodes);

// True for the source, and for each node that pairs (from, to) lead to from it. If `is_reversed`, pairs are (to, from).
void reachable(const std::int64_t* pairs, std::int64_t num_pairs, bool is_reversed, std::int64_t source,
               bool* is_reachable, std::int64_t num_nodes);

// The caller's nodes and edges: the head of each edge, the tails of all edges in order, and the level of each node,
// from 0 to num_nodes. `arity` is the number of tails of each edge, or null if all edges have one.
struct UnsortedGraph {
    std::int64_t num_nodes, num_edges;
    const std::int64_t *head, *tail, *level, *arity;
};

// The arrays of Hypergraph, as outputs. Instead of `group`, `begins_group` is true for the first node of each group.
struct SortedGraph {
    std::int32_t *offset, *tail, *edge, *tail_offset;
    bool* begins_group;
};

// Sorts nodes by level, then by the number of edges into them; edges into a node keep their order.
void sort_graph(const UnsortedGraph&, const SortedGraph&);

}  // namespace bellmax
