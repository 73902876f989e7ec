// W sequences side by side, one in each lane: which they are, and their numbers step by step.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../base/memory.h"
#include "problem.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

using std::int64_t;

// `count` numbers from each of W places become count vectors, `gap` apart.
template <class Real, class S>
__attribute__((noinline)) void fetch(const S* const* lane, int64_t count, Real* tile, int64_t gap = lanes_of<Real>) {
    constexpr int W = lanes_of<Real>;
    int64_t k = 0;
    for (; k + W <= count; k += W) {
        Vec<Real> v[W];
#pragma GCC unroll 8
        for (int l = 0; l < W; ++l) v[l] = load_as<Real>(lane[l] + k);
        transpose(v);
#pragma GCC unroll 8
        for (int j = 0; j < W; ++j) store(tile + (k + j) * gap, v[j]);
    }
    if (k == count) return;
    Vec<Real> v[W];
#pragma GCC unroll 8
    for (int l = 0; l < W; ++l) v[l] = load_some<Real>(lane[l] + k, count - k);
    transpose(v);
    for (int j = 0; k + j < count; ++j) store(tile + (k + j) * gap, v[j]);
}

// And back, to the first `valid` places. The tile is readable up to a whole number of vectors.
template <class Real, class S>
__attribute__((noinline)) void flush(S* const* lane, int valid, int64_t count, const Real* tile,
                                     int64_t gap = lanes_of<Real>) {
    constexpr int W = lanes_of<Real>;
    for (int64_t k = 0; k < count; k += W) {
        Vec<Real> v[W];
#pragma GCC unroll 8
        for (int j = 0; j < W; ++j) v[j] = load<Real>(tile + (k + j) * gap);
        transpose(v);
        if (k + W > count) {
            for (int l = 0; l < valid; ++l) store_some<S, Real>(lane[l] + k, v[l], count - k);
        } else if (valid == W) {
#pragma GCC unroll 8
            for (int l = 0; l < W; ++l) store_as<S, Real>(lane[l] + k, v[l]);
        } else {
            for (int l = 0; l < valid; ++l) store_as<S, Real>(lane[l] + k, v[l]);
        }
    }
}

// The sequences of a unit of work. Lanes without one repeat the first, with length 0. So many of them as `sharing` says,
// one after another, have their steps in common.
template <int W>
struct Lanes {
    int valid;
    int64_t steps, longest;
    int64_t sequence[W], length[W];
    const int64_t* kept[W];

    template <class S>
    Lanes(const ScoresProblem<S>& problem, const int64_t* sequences, int64_t count, int64_t sharing = 1)
        : valid(int(std::min<int64_t>(W, count))), steps(problem.steps), longest(0) {
#pragma GCC unroll 8
        for (int l = 0; l < W; ++l) {
            sequence[l] = sequences[l < valid ? l : 0];
            const int64_t row = sequence[l] / sharing;
            length[l] = l < valid ? problem.lengths[row] : 0;
            kept[l] = problem.kept ? problem.kept + row * steps : nullptr;
            longest = std::max(longest, length[l]);
        }
    }

    bool has_holes() const { return kept[0] != nullptr; }

    // The n-th unmasked step; any step for a sequence that has ended.
    int64_t step(int l, int64_t n) const {
        return kept[l] ? (length[l] ? kept[l][std::min(n, length[l] - 1)] : 0) : n;
    }
};

// How numbers lie: a record of `size` for each step, `stride` apart, of each sequence, `batch` apart.
struct Records {
    int64_t size, stride, batch;
    int64_t shift = 0;     // the first step's record is missing
    bool compact = false;  // one for each unmasked step, rather than for each step
    int64_t more = 0;      // records after the last step's
};

// Reads or writes the records of a unit, several steps at a time where they are small. `T` is const for reading.
template <class T, class Real>
class Stream {
    static constexpr int W = lanes_of<Real>;
    Lanes<W> lanes;
    Records records;
    T* base[W];
    int64_t chunk, first = -1, total;  // chunk: steps at a time, a power of two
    Array<Real> tile;

    void places(int64_t n, T** lane) const {
#pragma GCC unroll 8
        for (int l = 0; l < W; ++l) {
            const int64_t step = records.compact ? n : lanes.step(l, n + records.shift) - records.shift;
            lane[l] = base[l] + std::max<int64_t>(step, 0) * records.stride;
        }
    }

    int64_t chunk_of(int64_t n) const { return n & -chunk; }

public:
    Stream(const Lanes<W>& of, T* data, const Records& layout)
        : lanes(of), records(layout), total(of.longest - layout.shift + layout.more) {
#pragma GCC unroll 8
        for (int l = 0; l < W; ++l) base[l] = data + lanes.sequence[l] * records.batch;
        const bool contiguous = records.stride == records.size && (records.compact || !lanes.has_holes());
        for (chunk = 1; contiguous && 2 * chunk * records.size <= 64;) chunk *= 2;
        tile = scratch<Real>((chunk * records.size + W) * W);
    }

    // The records of step n, number by number.
    const Real* read(int64_t n) {
        n -= records.shift;
        const int64_t start = chunk_of(n);
        if (start != first) {
            const T* lane[W];
            places(start, const_cast<T**>(lane));
            fetch<Real>(lane, std::min(chunk, total - start) * records.size, tile.get());
            first = start;
        }
        return &tile[(n - start) * records.size * W];
    }

    // Room for the records of step n; steps come in descending order, and all of a chunk is written before it is left.
    Real* room(int64_t n) {
        n -= records.shift;
        return &tile[(n - chunk_of(n)) * records.size * W];
    }

    // Writes the records of step n out, if with them their chunk is complete.
    void finish(int64_t n, bool ascending = false) {
        n -= records.shift;
        const int64_t start = chunk_of(n), count = std::min(chunk, total - start);
        if (n != (ascending ? start + count - 1 : start)) return;
        T* lane[W];
        places(start, lane);
        flush<Real>(lane, lanes.valid, count * records.size, tile.get());
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
