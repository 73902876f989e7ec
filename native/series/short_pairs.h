// The interface for the binding: the values of many pairs of short series, compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "../omega/omega.h"

namespace bellmax {

// Series of at most `length` elements of `features` numbers, zeros past their own length.
template <class S>
struct Series {
    std::int64_t count, length, features;
    const S* numbers;             // (count, length, features)
    const std::int64_t* lengths;  // (count)
};

// Pair n aligns series first[n] of x with series second[n] of y. An element costs scale · Σ |x − y|^power, power 1 or
// 2.
template <class S>
struct ShortPairs {
    Series<S> x, y;
    std::int64_t pairs;
    const std::int64_t *first, *second;
    int power;
    double scale;
    OmegaParameters omega;
    int threads;
};

template <class S>
struct ShortPairsKernels {
    // DTW_Ω of each pair.
    void (*values)(const ShortPairs<S>&, S* values);
};

BELLMAX_KERNELS(template <class S> ShortPairsKernels<S> short_pairs_kernels())

}  // namespace bellmax
