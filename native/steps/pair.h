// Chains of two states from scores that the batch shares, but for the emissions: their marginals, and how these change.
#pragma once

#include "problem.h"

namespace bellmax {

// Attention over segments: state 0 scores 0, state 1 what `scores` (batch, steps) say times `scale`, and the
// transitions out of state 0 begin the sequence as well. So many queries as `sharing` says, one after another, see the
// same keys.
template <class S>
struct AttentionProblem {
    ScoresProblem<S> chain;  // but for its emissions, start and end
    const S* scores;
    S scale;
    std::int64_t sharing;
};

// The interface for the binding, compiled once for each instruction set. Emissions and the like are (batch, steps, 2).
template <class S>
struct PairKernels {
    // Whether it could: not where a score is NaN, both states of a step are forbidden, or a shared score is infinite.
    bool (*marginals)(const ScoresProblem<S>&, S* marginals);
    // The derivative of Σ ⟨cotangent, marginals⟩, in all scores.
    void (*marginals_vjp)(const ScoresProblem<S>&, const S* cotangent, const Scores<S>& gradient);
    // Marginals (batch, steps) of state 1 by their totals (batch,), or 0 where these are; whether it could.
    bool (*weights)(const AttentionProblem<S>&, S* weights, S* totals);
    // The derivative of Σ ⟨cotangent, weights⟩, in scores and transitions.
    void (*weights_vjp)(const AttentionProblem<S>&, const S* weights, const S* totals, const S* cotangent, S* to_scores,
                        S* to_transitions);
};

BELLMAX_KERNELS(template <class S> PairKernels<S> pair_kernels())

}  // namespace bellmax
