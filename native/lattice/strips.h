// A grid in strips of 64 rows, a strip in chunks of 64 steps: at step t, row r of a strip is in column first + t − r,
// so that a step is an anti-diagonal. Matrices are read into tiles and written from them: tile[k * strip_rows + r] is
// row r at step k of a chunk.
#pragma once

#include "cells.h"
#include "region.h"
#include "lattice.h"

// LATTICE_SELDOM: compiled for size. The compiler also treats other calls in the same branch as rare, so such a call is
// made under a condition.
#define LATTICE_APART __attribute__((noinline))
#define LATTICE_SELDOM __attribute__((noinline, cold))

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

constexpr int64_t strip_rows = lattice_strip, chunk_steps = 64, tile_size = strip_rows * chunk_steps;

// From `low` to `high`: rows of a strip, or columns.
struct Range {
    int64_t low, high;
    bool is_empty() const { return low > high; }
};

struct Strip {
    int64_t row, rows, groups, first, last, steps, chunks;          // row, rows: in the grid; first, last: columns
    int64_t from[strip_rows], to[strip_rows];                       // the columns of each row
    std::int32_t begins[strip_rows], ends[strip_rows];              // its first and last step
    int64_t wakes[strip_rows / group], sleeps[strip_rows / group];  // of a group: its first and last step
    int64_t enter[strip_rows / group], leave[strip_rows / group];   // and those with all of it inside
    int64_t all_enter = 0, all_leave;                               // and those with all groups inside

    Strip(const Region& region, int64_t s);

    // The rows with a cell at step t, whole groups: r from low to below high.
    struct RowRange {
        int64_t low = 0, high = 0;
    };
    RowRange awake(int64_t t) const {
        if (t >= wakes[groups - 1] && t <= sleeps[0]) return {0, groups * group};
        RowRange awake;
        while (awake.low < groups * group && sleeps[awake.low / group] < t) awake.low += group;
        awake.high = awake.low;
        while (awake.high < groups * group && wakes[awake.high / group] <= t) awake.high += group;
        return awake;
    }
    // Whether the group of row r has a cell at one of `count` steps from t, and whether all its rows have one at each.
    bool is_awake(int64_t r, int64_t t, int64_t count) const {
        return t + count > wakes[r / group] && t <= sleeps[r / group];
    }
    bool covers(int64_t r, int64_t t, int64_t count) const {
        return t >= enter[r / group] && t + count - 1 <= leave[r / group];
    }
    // Which of the rows from r have a cell at step t.
    template <class Int>
    Int inside(int64_t r, int64_t t) const {
        Int begin{}, end{};
        for (unsigned l = 0; l < sizeof(Int) / sizeof(begin[0]); ++l) {
            begin[l] = begins[r + l];
            end[l] = ends[r + l];
        }
        const Int now = Int{} + std::int32_t(t);
        return (now >= begin) & (now <= end);
    }

    int64_t steps_in(int64_t c) const { return std::min(chunk_steps, steps - c * chunk_steps); }

    // How many chunks of the strip before must be done for chunk c of this one.
    int64_t chunks_before(const Strip& before, int64_t c) const {
        const int64_t needed = std::min((c + 2) * chunk_steps - 1 + first - before.first, before.steps - 1);
        return needed / chunk_steps + 1;
    }
    // How many chunks of the strip after must be done, from its end, for chunk c of this one.
    int64_t chunks_after(const Strip& after, int64_t c) const {
        const int64_t needed = first + c * chunk_steps - strip_rows - after.first;
        if (needed >= after.steps) return 0;
        return needed < 0 ? after.chunks : after.chunks - needed / chunk_steps;
    }
};

// Some of the cells: a rectangle.
struct Window {
    int64_t row, column, rows, columns;
};

// A matrix of floats or doubles that holds a window of the grid. Cells elsewhere have the number
// `missing`, and what they would get is dropped.
struct WindowMatrix {
    void* numbers;
    bool is_double;
    int64_t stride;
    Window window;
    double missing;

    bool has(int64_t i, int64_t j) const {
        return i >= window.row && i < window.row + window.rows && j >= window.column &&
               j < window.column + window.columns;
    }
    template <class S>
    S* at(int64_t i, int64_t j) const {
        return static_cast<S*>(numbers) + ((i - window.row) * stride + (j - window.column));
    }
};

// Whether the chunks of a strip are swept from the first to the last, or back.
enum class Way { forth, back };

// The part of a matrix that chunk c has, and what was seen of it, if `looks`.
Seen fill(const WindowMatrix& matrix, const Strip& strip, int64_t c, Way way, double scale, bool looks, float* tile);
Seen fill(const WindowMatrix& matrix, const Strip& strip, int64_t c, Way way, double scale, bool looks, double* tile);

// A tile of masses to where they belong.
void drain(const WindowMatrix& matrix, const Strip& strip, int64_t c, const float* tile);
void drain(const WindowMatrix& matrix, const Strip& strip, int64_t c, const double* tile);

// Zero for the cells that no path may pass.
void clear_outside(const WindowMatrix& matrix, const Region& region);

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
