// The interface for the binding: the sweeps of a DAG, compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "regularizers.h"

namespace bellmax {

// The edges into node i are the slots offset[i] … offset[i + 1] − 1. Nodes are in topological order.
struct Graph {
    std::int64_t num_nodes, num_edges, max_parents;  // max_parents: of any node
    const std::int64_t* offset;
    const std::int64_t* parent;
    const std::int64_t* edge;  // the caller's number of a slot's edge
};

// θ and everything of its shape is (batch, num_edges); a tape is (batch, 2, num_nodes): values, then thresholds,
// which count from the greatest score into a node, or name its place among the parents for the hard max.
template <class S>
struct Problem {
    Graph graph;
    OmegaParameters omega;
    std::int64_t batch;
    int threads;
    const S* theta;
    const double* tape;  // null for forward and topk
};

template <class S>
struct DagKernels {
    // Whether every θ was below +∞ and not NaN.
    bool (*forward)(const Problem<S>&, S* value, double* tape);
    void (*backward)(const Problem<S>&, const S* seed, S* path);
    void (*hessian)(const Problem<S>&, const S* seed, const S* z, S* product);
    void (*log_transitions)(const Problem<S>&, S* log_q);
    void (*log_transitions_jvp)(const Problem<S>&, const S* z, S* product);
    void (*log_transitions_vjp)(const Problem<S>&, const S* cotangent, S* product);
    // The n-th choice of a walk takes the n-th of its uniforms; false if there are fewer than it makes.
    bool (*sample)(const Problem<S>&, std::int64_t draws, std::int64_t choices, const double* uniforms, S* paths);
    // As for forward; where it is false there is no result.
    bool (*topk)(const Problem<S>&, std::int64_t k, S* scores, S* paths);
};

namespace baseline {
template <class S>
DagKernels<S> dag_kernels();
}
namespace avx2 {
template <class S>
DagKernels<S> dag_kernels();
}

// Longest path to each node, in edges; −1 on cycles and behind them.
void dag_levels(const std::int64_t* pairs, std::int64_t num_edges, std::int64_t* level, std::int64_t num_nodes);

}  // namespace bellmax
