// A grid in strips of 64 rows, a strip in chunks of 64 steps: at step t, row r of a strip is in column first + t − r,
// so that a step is an anti-diagonal. Matrices are read into tiles and written from them: tile[k * strip_rows + r] is
// row r at step k of a chunk.
#pragma once

#include <limits>

#include "region.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

constexpr int64_t strip_rows = 64, chunk_steps = 64, tile_size = strip_rows * chunk_steps;
constexpr int64_t group = 8;  // rows that wake and sleep together

struct Strip {
    static constexpr int64_t never = std::numeric_limits<int64_t>::max();
    int64_t row, rows, first, last, steps, chunks;                // row, rows: in the grid; first, last: columns
    int64_t from[strip_rows], to[strip_rows];                     // the columns of each row
    int64_t enter[strip_rows / group], leave[strip_rows / group];   // of a group: the anti-diagonals wholly inside
    int64_t wakes[strip_rows / group], sleeps[strip_rows / group];  // and the first and the last step that matter

    Strip(const Region& region, int64_t s) : row(s * strip_rows), rows(std::min(strip_rows, region.rows - row)) {
        for (int64_t r = 0; r < strip_rows; ++r) {
            from[r] = r < rows ? region.first(row + r) : region.columns;
            to[r] = r < rows ? region.last(row + r) : -1;
        }
        first = from[0];
        last = to[rows - 1];
        steps = last - first + rows;
        chunks = (steps + chunk_steps - 1) / chunk_steps;
        for (int64_t g = 0; group * g < rows; ++g) {
            enter[g] = 0;
            leave[g] = never;
            for (int64_t r = group * g; r < group * (g + 1); ++r) {
                enter[g] = std::max(enter[g], r < rows ? from[r] + r : never);
                leave[g] = std::min(leave[g], to[r] + r);
            }
            // A row's first cell looks back to the step before, and what it sends back is gone after another one; the
            // row below must see that nothing is behind its last cell.
            const int64_t bottom = std::min(group * (g + 1), rows) - 1;
            wakes[g] = from[group * g] + group * g - first - 2;
            sleeps[g] = to[bottom] + bottom - first + 1;
        }
    }

    // The rows that matter at step t, whole groups: r from low to below high.
    struct Rows {
        int64_t low = 0, high = 0;
    };
    Rows awake(int64_t t) const {
        const int64_t groups = (rows + group - 1) / group;
        if (t >= wakes[groups - 1] && t <= sleeps[0]) return {0, groups * group};
        Rows awake;
        while (sleeps[awake.low / group] < t) awake.low += group;
        awake.high = awake.low + group;
        while (awake.high < rows && wakes[awake.high / group] <= t) awake.high += group;
        return awake;
    }
    // Whether a group from row r matters at one of `count` steps from t.
    bool is_awake(int64_t r, int64_t t, int64_t count) const {
        return t + count > wakes[r / group] && t <= sleeps[r / group];
    }
    // Whether a group from row r is wholly inside on `count` anti-diagonals from d.
    bool covers(int64_t r, int64_t d, int64_t count) const {
        return d >= enter[r / group] && d + count - 1 <= leave[r / group];
    }

    int64_t steps_in(int64_t c) const { return std::min(chunk_steps, steps - c * chunk_steps); }

    // The column of the first row at step k of chunk c.
    int64_t column(int64_t c, int64_t k) const { return first + c * chunk_steps + k; }

    // How many chunks of the strip before must be done for chunk c of this one.
    int64_t chunks_before(const Strip& before, int64_t c) const {
        const int64_t needed = std::min(column(c, chunk_steps - 1), before.last);
        return std::min((needed - before.first + before.rows - 1) / chunk_steps + 1, before.chunks);
    }
    // How many chunks of the strip after must be done, from its end, for chunk c of this one.
    int64_t chunks_after(const Strip& after, int64_t c) const {
        const int64_t needed = column(c, 0) - (rows - 1);
        if (needed >= after.first + after.steps) return 0;
        return needed < after.first ? after.chunks : after.chunks - (needed - after.first) / chunk_steps;
    }
};

// What was seen of costs.
struct Seen {
    double greatest = 0;  // of the finite magnitudes
    bool bad = false;     // −∞ or NaN

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

    // A vector for each lane. Magnitudes are in order by their bits too, where ∞ and NaN come last: few have to be
    // looked at more closely.
    __attribute__((always_inline)) void at(const V* v) {
        if constexpr (std::is_same_v<S, float>) {
            using Int = typename Shape<V>::Int;
            Int most{};
            for (int l = 0; l < lanes_of<S>; ++l) most = greater_int(most, bits<Int>(v[l]) & 0x7fffffff);
            greatest = greater<S>(greatest, most < 0x7f800000 ? bits<V>(most) : V{});
            if (!any(most >= 0x7f800000)) return;
        }
        for (int l = 0; l < lanes_of<S>; ++l) {
            bad |= ~(v[l] > V{} - infinity<S>);
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

// How far on a row the same place of the next chunk is or, after the last one, of the next strip. There are too many rows
// for the processor to foresee that.
inline int64_t next_chunk(const Strip& strip, int64_t column, int64_t stride, Way way) {
    const int64_t turn = strip_rows * stride - (strip.last + 1 - strip.first);
    if (way == Way::forth) return chunk_steps + (column + chunk_steps > strip.last ? turn : 0);
    return -chunk_steps - (column - chunk_steps < strip.first ? turn : 0);
}

// Vectors of S as they lie in tiles of another precision.
template <class Tile, class S>
using InTile = Part<Tile, lanes_of<S>>;

// Cells outside the region are `outside`. Rows outer, so that few lines of the cache are in use at once.
template <class S, bool Looks, class Tile>
Seen fill_from(const Matrix& matrix, const Strip& strip, int64_t c, Way way, S outside, Tile* __restrict tile) {
    constexpr int V = lanes_of<S>;
    const int64_t count = strip.steps_in(c), stride = matrix.stride;
    Look<S> look;
    for (int64_t r = 0; r < (strip.rows + group - 1) / group * group; r += V) {
        for (int64_t k = 0; k < count; k += V) {
            if (!strip.is_awake(r, c * chunk_steps + k, V)) continue;
            const int64_t column = strip.column(c, k) - r;
            const S* const corner = matrix.at<S>(strip.row + r, column);
            Vec<S> v[V];
            if (strip.covers(r, column + r, V)) {
                const int64_t next = next_chunk(strip, column, stride, way);
                for (int l = 0; l < V; ++l) {
                    v[l] = load<S>(corner + l * (stride - 1));
                    __builtin_prefetch(corner + l * (stride - 1) + next);
                }
            } else {
                for (int l = 0; l < V; ++l) {
                    v[l] = load_between<S>(corner + l * (stride - 1), strip.from[r + l] - (column - l),
                                           strip.to[r + l] - (column - l), outside);
                }
            }
            if constexpr (Looks) look.at(v);
            transpose(v);
            for (int l = 0; l < V; ++l) {
                const auto own = __builtin_convertvector(v[l], InTile<Tile, S>);
                std::memcpy(tile + (k + l) * strip_rows + r, &own, sizeof own);
            }
        }
    }
    return look.seen();
}

template <class S, class Tile>
void drain_to(const Matrix& matrix, const Strip& strip, int64_t c, const Tile* __restrict tile) {
    constexpr int V = lanes_of<S>;
    const int64_t count = strip.steps_in(c), stride = matrix.stride;
    for (int64_t r = 0; r < strip.rows; r += V) {
        for (int64_t k = 0; k < count; k += V) {
            if (!strip.is_awake(r, c * chunk_steps + k, V)) continue;
            const int64_t column = strip.column(c, k) - r;
            S* const corner = matrix.at<S>(strip.row + r, column);
            Vec<S> v[V];
            for (int l = 0; l < V; ++l) {
                v[l] = __builtin_convertvector((load_vector<InTile<Tile, S>>(tile + (k + l) * strip_rows + r)), Vec<S>);
            }
            transpose(v);
            if (strip.covers(r, column + r, V)) {
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

template <bool Looks = false, class Tile>
Seen fill(const Matrix& matrix, const Strip& strip, int64_t c, Way way, double outside, Tile* tile) {
    if constexpr (std::is_same_v<Tile, double>) {
        if (matrix.is_double) return fill_from<double, Looks>(matrix, strip, c, way, outside, tile);
    }
    return fill_from<float, Looks>(matrix, strip, c, way, float(outside), tile);
}

template <class Tile>
void drain(const Matrix& matrix, const Strip& strip, int64_t c, const Tile* tile) {
    if constexpr (std::is_same_v<Tile, double>) {
        if (matrix.is_double) return drain_to<double>(matrix, strip, c, tile);
    }
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

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
