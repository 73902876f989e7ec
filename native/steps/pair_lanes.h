// Sequences side by side, one in each lane: which they are, and their numbers step by step.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../base/memory.h"
#include "../base/math.h"
#include "problem.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

using std::int64_t;

// As many sequences as there are lanes, from one on; where they end, lanes repeat the first with length 0. So many of them
// as `sharing` says, one after another, have their steps in common.
template <class S>
struct SideBySide {
    static constexpr int W = lanes_of<S>;
    using Ints = typename Shape<Vec<S>>::Int;

    const ScoresProblem<S>& problem;
    int valid;
    int64_t longest = 0, sequence[W], row[W];  // row: in lengths and masks
    Ints length{};

    SideBySide(const ScoresProblem<S>& of, int64_t first, int64_t sharing)
        : problem(of), valid(int(std::max<int64_t>(0, std::min<int64_t>(W, of.batch - first)))) {
        for (int l = 0; l < W; ++l) {
            sequence[l] = l < valid ? first + l : std::min(first, of.batch - 1);
            row[l] = sequence[l] / sharing;
            const int64_t own = l < valid ? of.lengths[row[l]] : 0;
            length[l] = typename Format<S>::Int(own);
            longest = std::max(longest, own);
        }
    }

    // The lanes whose sequence has a step n.
    Ints has(int64_t n) const { return length > Ints{} + typename Format<S>::Int(n); }

    // The n-th step of a lane's sequence that is not masked; any step if it has ended.
    int64_t step(int l, int64_t n) const {
        if (!problem.kept) return n;
        return length[l] ? visited(problem, row[l], std::min<int64_t>(n, length[l] - 1)) : 0;
    }
};

// Reads or writes `size` numbers for each step of such sequences, several steps at a time. `T` is const for reading.
template <class T, class S>
class Transposed {
    static constexpr int W = lanes_of<S>;
    static constexpr int64_t most = 32;  // numbers at a time

    const SideBySide<S>& lanes;
    T* data;
    int64_t size, chunk, first = -1;  // chunk: steps at a time, a power of two
    alignas(64) S tile[most * W];

    void places(int64_t n, T** place) const {
        for (int l = 0; l < W; ++l) {
            place[l] = data + (lanes.sequence[l] * lanes.problem.steps + lanes.step(l, n)) * size;
        }
    }
    int64_t count(int64_t start) const { return std::min(chunk, lanes.longest - start) * size; }

public:
    Transposed(const SideBySide<S>& of, T* numbers, int64_t numbers_of_step)
        : lanes(of), data(numbers), size(numbers_of_step), chunk(of.problem.kept ? 1 : most / numbers_of_step) {}

    // The numbers of step n, a vector each.
    const S* read(int64_t n) {
        const int64_t start = n & -chunk;
        if (start != first) {
            T* place[W];
            places(start, place);
            fetch(place, count(start));
            first = start;
        }
        return &tile[(n - start) * size * W];
    }

    // Room for those of step n, to be finished. Steps come in descending order.
    S* room(int64_t n) { return &tile[(n & (chunk - 1)) * size * W]; }
    void finish(int64_t n) {
        if (n & (chunk - 1)) return;
        T* place[W];
        places(n, place);
        flush(place, count(n));
    }

private:
    void fetch(T* const* place, int64_t numbers) {
        for (int64_t k = 0; k < numbers; k += W) {
            Vec<S> v[W];
            for (int l = 0; l < W; ++l) {
                v[l] = k + W <= numbers ? load<S>(place[l] + k) : load_some<S>(place[l] + k, numbers - k);
            }
            transpose(v);
            for (int j = 0; j < W; ++j) store<S>(tile + (k + j) * W, v[j]);
        }
    }

    void flush(T* const* place, int64_t numbers) const {
        for (int64_t k = 0; k < numbers; k += W) {
            Vec<S> v[W];
            for (int j = 0; j < W; ++j) v[j] = load<S>(tile + (k + j) * W);
            transpose(v);
            for (int l = 0; l < lanes.valid; ++l) {
                if (k + W <= numbers) {
                    store<S>(place[l] + k, v[l]);
                } else {
                    store_some<S, S>(place[l] + k, v[l], numbers - k);
                }
            }
        }
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
