// What the binding calls: the sweeps of a chain, compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "regularizers.h"

namespace bellmax {

// θ and everything of its shape is (batch, steps, states, states) [t, current, previous]; a tape is
// (batch, 2, steps + 1, states): values v_0 … v_T, then thresholds at the place of the values they belong to, which count
// from the greatest score into a state, or name the previous state for the hard max.
template <class S>
struct ChainProblem {
    std::int64_t batch, steps, states;
    const std::int64_t* lengths;
    OmegaParameters omega;
    int threads;
    const S* theta;
    const double* tape;  // null for forward and topk
};

template <class S>
struct ChainKernels {
    // Whether every θ that is an edge was below +∞ and not NaN.
    bool (*forward)(const ChainProblem<S>&, S* value, double* tape);
    void (*backward)(const ChainProblem<S>&, S* path);
    void (*hessian)(const ChainProblem<S>&, const S* z, S* product);
    void (*log_transitions)(const ChainProblem<S>&, S* log_q);
    void (*log_transitions_jvp)(const ChainProblem<S>&, const S* z, S* product);
    void (*log_transitions_vjp)(const ChainProblem<S>&, const S* cotangent, S* product);
    // Sequences (batch, draws, steps), −1 past the end.
    void (*sample)(const ChainProblem<S>&, std::int64_t draws, const double* uniforms, std::int64_t* sequences);
    void (*topk)(const ChainProblem<S>&, std::int64_t k, S* scores, std::int64_t* sequences);
};

namespace baseline {
template <class S>
ChainKernels<S> chain_kernels();
}
namespace avx2 {
template <class S>
ChainKernels<S> chain_kernels();
}

}  // namespace bellmax
