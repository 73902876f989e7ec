// The interface for the binding: the sweeps of a chain, compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "problem.h"

namespace bellmax {

// A chain from scores, or a dense one: that has no emissions, start and end, and its transitions are the potentials
// (batch, steps, states, states) [t, current, previous], of which the first step has those from state 0 alone.
//
// A tape holds the values v_0 … v_T, relative to the greatest of their step, then thresholds at the place of the values
// they belong to, which count from the greatest score into a state, or name the previous state for the hard max.
template <class S>
struct ChainKernels {
    // Whether every score that is an edge was below +∞ and not NaN. Without a tape only the value is found.
    bool (*forward)(const ScoresProblem<S>&, S* value, S* tape);
    void (*backward)(const ScoresProblem<S>&, const S* seed, const Scores<S>& gradient);
    void (*hessian)(const ScoresProblem<S>&, const S* seed, const Scores<const S>& z, const Scores<S>& product);
    // Of a dense chain.
    void (*log_transitions)(const ScoresProblem<S>&, S* log_q);
    void (*log_transitions_jvp)(const ScoresProblem<S>&, const S* z, S* product);
    void (*log_transitions_vjp)(const ScoresProblem<S>&, const S* cotangent, S* product);
    // Sequences (batch, draws, steps), −1 where a step is skipped.
    void (*sample)(const ScoresProblem<S>&, std::int64_t draws, const double* uniforms, std::int64_t* sequences);
    // As for forward, whether every score was sound; else there is no result.
    bool (*topk)(const ScoresProblem<S>&, std::int64_t k, S* scores, std::int64_t* sequences);
    // The score of the best sequence with each transition (batch, steps, states, states), −∞ if there is none.
    bool (*max_marginals)(const ScoresProblem<S>&, S* by_edge);
    // The value of each state at each step (batch, steps, states), −∞ at skipped steps.
    bool (*node_values)(const ScoresProblem<S>&, S* values);
};

BELLMAX_KERNELS(template <class S> ChainKernels<S> chain_kernels())

}  // namespace bellmax
