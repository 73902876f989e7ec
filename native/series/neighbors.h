// The interface for the binding: the nearest series of each under hard DTW, compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "../base/simd.h"

namespace bellmax {

// Series k has the elements begins[k] up to begins[k + 1].
template <class S>
struct Collection {
    std::int64_t count;
    const S* numbers;  // (elements, features)
    const std::int64_t* begins;
};

// Elements cost Σ |x − y|^power, power 1 or 2. The band is the Sakoe–Chiba band of DTW.
template <class S>
struct NeighborsProblem {
    Collection<S> x, y;  // for speed, x of equal length should be adjacent
    std::int64_t features, k;
    int power;
    double band;
    const std::int64_t* without;  // (x.count): a y that is excluded, such as x itself, or −1
    int threads;
};

template <class S>
struct NeighborsKernels {
    // The k nearest of each x, (x.count, k), nearest first, among equals the first; and how many cells were computed.
    void (*search)(const NeighborsProblem<S>&, S* distances, std::int64_t* indices, std::int64_t* cells);
};

BELLMAX_KERNELS(template <class S> NeighborsKernels<S> neighbors_kernels())

}  // namespace bellmax
