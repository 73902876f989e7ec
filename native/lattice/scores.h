// Arrays of scores as tiles of a chunk, and tiles of masses as gradients of arrays.
#pragma once

#include "../base/memory.h"
#include "moves.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// The number of row r at step k is at (k, r). An array that is shared along rows or columns needs no whole tile: a line
// of its numbers, by row or backwards by column, is read at every step.
template <class Real>
struct ScoreTile {
    Real* data = nullptr;
    int64_t step = 0, plane = 0;

    Real* at(int64_t k, int64_t r) const { return data + k * step + r; }
    Kind kind() const { return !data ? Kind::none : step == strip_rows ? Kind::cell : Kind::line; }
    // A mass for the gradient.
    void land(int64_t k, int64_t r, Vec<Real> mass) const {
        store<Real>(at(k, r), step == strip_rows ? mass : load<Real>(at(k, r)) + mass);
    }
};

// By what the entries of an array differ.
enum class By { nothing, row, column, cell, none };

inline By by_of(bool by_row, bool by_column) {
    if (by_row && by_column) return By::cell;
    return by_row ? By::row : by_column ? By::column : By::nothing;
}

constexpr int64_t line_size = strip_rows + chunk_steps + group;

// One array of one lattice: (rows, columns), or fewer numbers that are shared. The masses that land in a shared one are
// summed in doubles, by row, or in each strip for itself (strips, columns or 1).
struct SlotArray {
    By by = By::none;
    WindowMatrix matrix{};

    double number(int64_t n) const {
        if (matrix.is_double) return static_cast<const double*>(matrix.numbers)[n];
        return double(static_cast<const float*>(matrix.numbers)[n]);
    }
    // Where the number of a cell is.
    int64_t place(int64_t i, int64_t j) const {
        if (by == By::cell) return (i - matrix.window.row) * matrix.stride + j - matrix.window.column;
        return by == By::row ? i : by == By::column ? j : 0;
    }
    double score(int64_t i, int64_t j) const {
        if (by == By::none) return 0;
        return by == By::cell && !matrix.has(i, j) ? matrix.missing : number(place(i, j));
    }
    void set(int64_t i, int64_t j, double number) const {
        const int64_t n = place(i, j);
        if (matrix.is_double) static_cast<double*>(matrix.numbers)[n] = number;
        else static_cast<float*>(matrix.numbers)[n] = float(number);
    }
    // A mass that lands at a cell.
    void add(const Strip& strip, int64_t i, int64_t j, double mass) const {
        if (by == By::none || (by == By::cell && !matrix.has(i, j))) return;
        const int64_t n = place(i, j), own = strip.row / strip_rows;
        if (by == By::cell && !matrix.is_double) {
            static_cast<float*>(matrix.numbers)[n] += float(mass);
        } else {
            const int64_t shift = by == By::column ? own * matrix.window.columns : by == By::nothing ? own : 0;
            static_cast<double*>(matrix.numbers)[n + shift] += mass;
        }
    }

    template <class Real>
    ScoreTile<Real> tile(Real*& room, int line_planes) const {
        if (by == By::none) return {};
        const int64_t size = by == By::cell ? tile_size : line_size;
        Real* const data = by == By::column ? room + chunk_steps - 1 : room;
        room += by == By::cell ? size : line_planes * size;
        return {data, size == tile_size ? strip_rows : by == By::column ? -1 : 0, size};
    }

    // The numbers of chunk c: of every cell as they are, of a line as `cells` want them.
    template <class P, class Real = typename P::Number>
    __attribute__((noinline)) Seen read(const P& cells, const Strip& strip, int64_t c, Way way, double scale,
                                        bool looks, const ScoreTile<Real>& tile) const {
        if (by == By::none) return {};
        if (by == By::cell) return fill(matrix, strip, c, way, scale, looks, tile.data);
        Seen seen;
        const auto take = [&](int64_t i, int64_t j) {
            const double x = score(i, j);
            if (!(x * scale < infinity<double>)) seen.bad = true;
            if (std::abs(x) < infinity<double>) seen.greatest = std::max(seen.greatest, std::abs(x));
            return Real(x);
        };
        Real* const line = by == By::column ? tile.data - (chunk_steps - 1) : tile.data;
        std::fill(line, line + tile.plane, Real(0));
        if (by == By::column) {
            const int64_t last = strip.first + (c + 1) * chunk_steps - 1;  // the column of the line's first number
            for (int64_t n = 0; n < strip_rows + chunk_steps; ++n) {
                if (last - n >= strip.first && last - n <= strip.last) line[n] = take(0, last - n);
            }
        } else {
            const int64_t count = by == By::row ? strip.rows : strip_rows;
            for (int64_t r = 0; r < count; ++r) line[r] = take(strip.row + r, 0);
        }
        for (int64_t n = 0; n < tile.plane; n += lanes_of<Real>) cells.prepare(line + n, tile.plane);
        return seen;
    }

    // Before the masses of a chunk, which are added to what a line has, or land in few cells.
    template <class Real>
    void clear(const ScoreTile<Real>& tile, bool in_few) const {
        if (by == By::none || (tile.step == strip_rows && !in_few)) return;
        Real* const line = by == By::column ? tile.data - (chunk_steps - 1) : tile.data;
        std::fill(line, line + tile.plane, Real(0));
    }
    template <class Real>
    __attribute__((noinline)) void write(const Strip& strip, int64_t c, const ScoreTile<Real>& tile) const {
        if (by == By::cell) return drain(matrix, strip, c, tile.data);
        if (by == By::column) {
            const int64_t last = strip.first + (c + 1) * chunk_steps - 1;
            for (int64_t n = 0; n < strip_rows + chunk_steps; ++n) {
                if (last - n >= strip.first && last - n <= strip.last) {
                    add(strip, 0, last - n, double(tile.data[n - (chunk_steps - 1)]));
                }
            }
        } else if (by != By::none) {
            for (int64_t r = 0; r < strip.rows; ++r) add(strip, strip.row + r, 0, double(tile.data[r]));
        }
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
