// Chains of two states from scores that the batch shares, but for the emissions: their marginals, and how these change.
#pragma once

#include "scores.h"

namespace bellmax {

// What the binding calls, compiled once for each instruction set. Emissions and what is like them: (batch, steps, 2).
template <class S>
struct BinaryKernels {
    // Whether it could: not where a score is NaN, both states of a step are forbidden, or a shared score is infinite.
    bool (*marginals)(const ScoresProblem<S>&, S* marginals);
    // The derivative of Σ ⟨cotangent, marginals⟩, in all scores.
    void (*marginals_vjp)(const ScoresProblem<S>&, const S* cotangent, const Scores<S>& gradient);
};

namespace baseline {
template <class S>
BinaryKernels<S> binary_kernels();
}
namespace avx2 {
template <class S>
BinaryKernels<S> binary_kernels();
}

}  // namespace bellmax
