// Chains given by scores, under the negentropy and with the same transitions at every step, in scaled exp space.
#pragma once

#include <cstdint>

#include "problem.h"

namespace bellmax {

// Only for transition_step = 0. backward and hessian leave the sequences alone whose tape is not in exp space.
template <class S>
struct ProductKernels {
    // Whether every unmasked score was below +∞ and not NaN. Where underflowed[b] is set, value and tape of sequence b
    // are undefined. Without a tape only the value is found.
    bool (*forward)(const ScoresProblem<S>&, S* value, S* tape, std::uint8_t* underflowed);
    // Emission rows of a sequence are overwritten, with zeros at steps that are not kept; the rest is added to.
    void (*backward)(const ScoresProblem<S>&, const S* seed, const Scores<S>& gradient);
    void (*hessian)(const ScoresProblem<S>&, const S* seed, const Scores<const S>& z, const Scores<S>& product);
};

BELLMAX_KERNELS(template <class S> ProductKernels<S> product_kernels())

}  // namespace bellmax
