// The interface for the binding: trees over a sentence under negentropy, in exp space. A shortcut: the graphs of the
// same trees, stored, are swept under any Ω.
#pragma once

#include <cstdint>

#include "../base/simd.h"

namespace bellmax {

// θ is (batch, places, places): scores of spans [first word, last word], or of arcs [head, modifier], where 0 is the
// root and takes no head. A sentence has the places 0 … lengths − 1, at least one.
template <class S>
struct ChartProblem {
    std::int64_t batch, places;
    int threads;
    const S* theta;
    const std::int64_t* lengths;
    bool single_root;  // of arcs: the root has one modifier
};

// Each is false, and its result is of no use, if numbers leave the range of exp space, or are NaN or +∞.
template <class S>
struct ChartKernels {
    // `expected` may be null; `stride` is the distance from one expected tree to the next.
    bool (*forward)(const ChartProblem<S>&, S* value, S* expected, std::int64_t stride);
    bool (*hessian)(const ChartProblem<S>&, const S* seed, const S* z, S* product);
};

BELLMAX_KERNELS(template <class S> ChartKernels<S> span_kernels())
BELLMAX_KERNELS(template <class S> ChartKernels<S> arc_kernels())

}  // namespace bellmax
