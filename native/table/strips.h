// A grid in strips of 64 rows, a strip in chunks of 64 steps: at step t, row r of a strip is in column first + t − r,
// so that a step is an anti-diagonal. Matrices are read into tiles and written from them: tile[k * strip_rows + r] is
// row r at step k of a chunk.
#pragma once

#include "cells.h"
#include "region.h"

// LATTICE_SELDOM: not worth the compiler's time. It takes what is called beside such a function for seldom, too, so
// such a call stands behind a condition.
#define LATTICE_APART __attribute__((noinline))
#define LATTICE_SELDOM __attribute__((noinline, cold))

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace table_engine {

constexpr int64_t strip_rows = 64, chunk_steps = 64, tile_size = strip_rows * chunk_steps;
constexpr int64_t group = 8;  // rows that wake and sleep together

struct Strip {
    int64_t row, rows, groups, first, last, steps, chunks;          // row, rows: in the grid; first, last: columns
    int64_t from[strip_rows], to[strip_rows];                       // the columns of each row
    std::int32_t begins[strip_rows], ends[strip_rows];              // its first and last step
    int64_t wakes[strip_rows / group], sleeps[strip_rows / group];  // of a group: its first and last step
    int64_t enter[strip_rows / group], leave[strip_rows / group];   // and those with all of it inside
    int64_t all_enter = 0, all_leave;                               // and those with all groups inside

    LATTICE_APART Strip(const Region& region, int64_t s)
        : row(s * strip_rows), rows(std::min(strip_rows, region.rows - row)) {
        for (int64_t r = 0; r < strip_rows; ++r) {
            from[r] = r < rows ? region.first(row + r) : region.columns + strip_rows;
            to[r] = r < rows ? region.last(row + r) : -1;
        }
        groups = (rows + group - 1) / group;
        first = from[0];
        last = to[rows - 1];
        steps = last - first + rows;
        chunks = (steps + chunk_steps - 1) / chunk_steps;
        all_leave = steps;
        for (int64_t r = 0; r < strip_rows; ++r) {
            begins[r] = std::int32_t(from[r] + r - first);
            ends[r] = r < rows ? std::int32_t(to[r] + r - first) : -1;
        }
        for (int64_t g = 0; g < groups; ++g) {
            const int64_t top = group * g, bottom = std::min(group * (g + 1), rows) - 1;
            wakes[g] = begins[top];
            sleeps[g] = ends[bottom];
            enter[g] = begins[group * (g + 1) - 1];
            leave[g] = bottom == group * (g + 1) - 1 ? ends[top] : -1;
            all_enter = std::max(all_enter, enter[g]);
            all_leave = std::min(all_leave, leave[g]);
        }
    }

    // The rows with a cell at step t, whole groups: r from low to below high.
    struct Rows {
        int64_t low = 0, high = 0;
    };
    Rows awake(int64_t t) const {
        if (t >= wakes[groups - 1] && t <= sleeps[0]) return {0, groups * group};
        Rows awake;
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

// What was seen of scores.
struct Seen {
    double greatest = 0;  // of the finite magnitudes
    bool bad = false;     // +∞ or NaN

    void add(const Seen& other) {
        greatest = std::max(greatest, other.greatest);
        bad = bad || other.bad;
    }
};

template <class S>
struct Look {
    using V = Vec<S>;
    V greatest{};
    typename Shape<V>::Int bad{};

    // As many vectors as a vector has lanes. Magnitudes are in order by their bits too, where ∞ and NaN come last: few
    // have to be looked at more closely.
    __attribute__((always_inline)) void at(const V* v, S sign) {
        if constexpr (std::is_same_v<S, float>) {
            using Int = typename Shape<V>::Int;
            Int most{};
            for (int l = 0; l < lanes_of<S>; ++l) most = greater_int(most, bits<Int>(v[l]) & 0x7fffffff);
            greatest = greater<S>(greatest, most < 0x7f800000 ? bits<V>(most) : V{});
            if (!any(most >= 0x7f800000)) return;
        }
        for (int l = 0; l < lanes_of<S>; ++l) {
            bad |= ~(v[l] * sign < V{} + infinity<S>);
            const V size = v[l] < V{} ? -v[l] : v[l];
            greatest = greater<S>(size < V{} + infinity<S> ? size : V{}, greatest);
        }
    }
    Seen seen() const { return {double(greatest_lane<S>(greatest)[0]), any(bad)}; }
};

// A matrix of floats or doubles that holds a part of the grid, which begins at (row, column).
struct Matrix {
    void* numbers;
    bool is_double;
    int64_t stride, row, column;

    template <class S>
    S* at(int64_t i, int64_t j) const {
        return static_cast<S*>(numbers) + ((i - row) * stride + (j - column));
    }
};

// Whether the chunks of a strip are swept from the first to the last, or back.
enum class Way { forth, back };

// How far on a row the same place of the next chunk is or, after the last one, of the next strip. There are too many
// rows for the processor to foresee that.
inline int64_t next_chunk(const Strip& strip, int64_t column, int64_t stride, Way way) {
    const int64_t turn = strip_rows * stride - (strip.last + 1 - strip.first);
    if (way == Way::forth) return chunk_steps + (column + chunk_steps > strip.last ? turn : 0);
    return -chunk_steps - (column - chunk_steps < strip.first ? turn : 0);
}

// The part of a matrix that chunk c has, and what was seen of it, if `looks`. Rows outer, so that few lines of the
// cache are in use at once.
template <class S, class Real>
Seen fill_from(const Matrix& matrix, const Strip& strip, int64_t c, Way way, double scale, bool looks,
               Real* __restrict tile) {
    constexpr int V = lanes_of<S>;
    const int64_t count = strip.steps_in(c), stride = matrix.stride;
    Look<S> look;
    for (int64_t r = 0; r < strip.groups * group; r += V) {
        for (int64_t k = 0; k < count; k += V) {
            const int64_t t = c * chunk_steps + k;
            if (!strip.is_awake(r, t, V)) continue;
            const int64_t column = strip.first + t - r;
            const S* const corner = matrix.at<S>(strip.row + r, column);
            Vec<S> v[V];
            if (strip.covers(r, t, V)) {
                const int64_t next = next_chunk(strip, column, stride, way);
                for (int l = 0; l < V; ++l) {
                    v[l] = load<S>(corner + l * (stride - 1));
                    __builtin_prefetch(corner + l * (stride - 1) + next);
                }
            } else {
                for (int l = 0; l < V; ++l) {
                    v[l] = load_between<S>(corner + l * (stride - 1), strip.from[r + l] - (column - l),
                                           strip.to[r + l] - (column - l), S(0));
                }
            }
            if (looks) look.at(v, S(scale));
            transpose(v);
            for (int l = 0; l < V; ++l) {
                const auto own = __builtin_convertvector(v[l], Part<Real, V>);
                std::memcpy(tile + (k + l) * strip_rows + r, &own, sizeof own);
            }
        }
    }
    return look.seen();
}

template <class Real>
Seen fill(const Matrix& matrix, const Strip& strip, int64_t c, Way way, double scale, bool looks, Real* tile) {
    if constexpr (std::is_same_v<Real, double>) {
        if (matrix.is_double) return fill_from<double>(matrix, strip, c, way, scale, looks, tile);
    }
    return fill_from<float>(matrix, strip, c, way, scale, looks, tile);
}

// A tile of masses to where they belong.
template <class S, class Real>
void drain_to(const Matrix& matrix, const Strip& strip, int64_t c, const Real* __restrict tile) {
    constexpr int V = lanes_of<S>;
    using InTile = Part<Real, V>;
    const int64_t count = strip.steps_in(c), stride = matrix.stride;
    for (int64_t r = 0; r < strip.groups * group; r += V) {
        for (int64_t k = 0; k < count; k += V) {
            const int64_t t = c * chunk_steps + k;
            if (!strip.is_awake(r, t, V)) continue;
            const int64_t column = strip.first + t - r;
            S* const corner = matrix.at<S>(strip.row + r, column);
            Vec<S> v[V];
            for (int l = 0; l < V; ++l) {
                v[l] = __builtin_convertvector(load_vector<InTile>(tile + (k + l) * strip_rows + r), Vec<S>);
            }
            transpose(v);
            if (strip.covers(r, t, V)) {
                const int64_t next = next_chunk(strip, column, stride, Way::back);
                for (int l = 0; l < V; ++l) {
                    store<S>(corner + l * (stride - 1), v[l]);
                    __builtin_prefetch(corner + l * (stride - 1) + next, 1);
                }
            } else {
                for (int l = 0; l < V; ++l) {
                    store_between<S>(corner + l * (stride - 1), v[l], strip.from[r + l] - (column - l),
                                     strip.to[r + l] - (column - l));
                }
            }
        }
    }
}

template <class Real>
void drain(const Matrix& matrix, const Strip& strip, int64_t c, const Real* tile) {
    if (matrix.is_double) return drain_to<double>(matrix, strip, c, tile);
    drain_to<float>(matrix, strip, c, tile);
}

// Zero for the cells of rows begin to end − 1 that no path may pass.
template <class S>
void clear_outside(const Matrix& matrix, const Region& region, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
        S* const line = matrix.at<S>(i, matrix.column);
        const int64_t from = i < region.rows ? region.first(i) - matrix.column : 0;
        const int64_t to = i < region.rows ? region.last(i) + 1 - matrix.column : 0;
        std::fill(line, line + from, S(0));
        std::fill(line + to, line + matrix.stride, S(0));
    }
}

}  // namespace table_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
