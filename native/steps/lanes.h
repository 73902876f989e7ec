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
    for (int l = 0; l < W; ++l) v[l] = load_some_as<Real>(lane[l] + k, count - k);
    transpose(v);
    for (int j = 0; k + j < count; ++j) store(tile + (k + j) * gap, v[j]);
}

// And back, to the first `valid` places. The tile is readable up to a whole number of vectors.
template <class Real, class S>
__attribute__((noinline)) void flush(S* const* lane, int valid, int64_t count, const Real* tile,
                                     int64_t gap = lanes_of<Real>) {
    constexpr int W = lanes_of<Real>;
    int64_t k = 0;
    for (; valid == W && k + W <= count; k += W) {  // apart from the loop below, which has v in memory
        Vec<Real> v[W];
#pragma GCC unroll 8
        for (int j = 0; j < W; ++j) v[j] = load<Real>(tile + (k + j) * gap);
        transpose(v);
#pragma GCC unroll 8
        for (int l = 0; l < W; ++l) store_as<S, Real>(lane[l] + k, v[l]);
    }
    for (; k < count; k += W) {
        Vec<Real> v[W];
#pragma GCC unroll 8
        for (int j = 0; j < W; ++j) v[j] = load<Real>(tile + (k + j) * gap);
        transpose(v);
        for (int l = 0; l < valid; ++l) store_some<S, Real>(lane[l] + k, v[l], count - k);
    }
}

// The sequences of a unit of work. Lanes without one repeat the first, with length 0. So many of them as `sharing`
// says, one after another, have their steps in common.
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

// How numbers lie: a record of `size` for each step, `stride` apart (0: one for all), of each sequence, `batch` apart.
struct Records {
    int64_t size, stride, batch;
    int64_t shift = 0;     // the first steps that have none
    bool compact = false;  // one for each unmasked step, rather than for each step
};

// Reads or writes them, as Real: where they lie, if there is one sequence, or transposed ("across"), several steps at a
// time where records are small. `T` is const for reading; a lane whose sequence has ended reads zeros.
template <class T, class Real, bool across>
class LaneNumbers {
    static constexpr int W = lanes_of<Real>;

    const Lanes<W>& lanes;
    Records records;
    T* data;
    int64_t chunk = 1, first = -1;  // the steps of the tile: their number, a power of two, and the first
    Array<Real> tile;

    T* place(int l, int64_t n) const {
        if (!records.compact) n = std::max<int64_t>(lanes.step(l, n + records.shift) - records.shift, 0);
        return data + lanes.sequence[l] * records.batch + n * records.stride;
    }

    __attribute__((noinline)) void move(int64_t start) {
        T* lane[W];
        for (int l = 0; l < W; ++l) lane[l] = place(l, start);
        const int64_t steps = across ? std::min(chunk, lanes.longest - records.shift - start) : 1;
        const int64_t count = steps * records.size;
        if constexpr (across && std::is_const_v<T>) {
            fetch<Real>(lane, count, tile.get());
            for (int l = 0; l < W; ++l) {
                const int64_t own = std::max<int64_t>(lanes.length[l] - records.shift - start, 0) * records.size;
                for (int64_t k = own; k < count; ++k) tile[k * W + l] = 0;
            }
        } else if constexpr (across) {
            flush<Real>(lane, lanes.valid, count, tile.get());
        } else if constexpr (std::is_const_v<T>) {
            std::copy_n(lane[0], count, tile.get());
        } else {
            std::copy_n(tile.get(), count, lane[0]);
        }
    }

public:
    static constexpr bool in_place = !across && std::is_same_v<std::remove_const_t<T>, Real>;

    LaneNumbers(const Lanes<W>& of, T* given, const Records& layout) : lanes(of), records(layout), data(given) {
        if (in_place || !data) return;
        const bool contiguous = records.stride == records.size && (records.compact || !lanes.has_holes());
        while (across && contiguous && chunk < 64 && 2 * chunk * records.size <= 64) chunk *= 2;
        tile = scratch<Real>((chunk * records.size + W) * (across ? W : 1));
    }

    explicit operator bool() const { return data != nullptr; }

    // Those of step n, or room for them.
    auto at(int64_t n) {
        n = records.stride ? n - records.shift : 0;
        if constexpr (in_place) {
            return place(0, n);
        } else {
            const int64_t start = n & -chunk;
            if (std::is_const_v<T> && start != first) move(first = start);
            return &tile[(n - start) * records.size * W];
        }
    }

    // Numbers in the room are written when the steps, in ascending or descending order, leave its chunk. A lane
    // that has ended writes, too: zeros, in descending order, which are overwritten where it has steps.
    void finish(int64_t n, bool ascending) {
        if (in_place || !data) return;
        n -= records.shift;
        const int64_t start = n & -chunk, end = std::min(start + chunk, lanes.longest - records.shift);
        if (n == (ascending ? end - 1 : start)) move(start);
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
