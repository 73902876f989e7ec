// Steps of several sequences in memory, and their products with a matrix, for the sweeps of exp.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "../base/memory.h"
#include "../base/simd.h"
#include "lanes.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace in_exp_space {

// Σ x[g · apart + k · along] · y[v · apart_y + k · stride], k < count, for each number or vector g and each vector v.
template <class S>
struct ProductTerm {
    const S* x;
    int64_t apart, along;
    const S* y;
    int64_t apart_y, stride, count;
};

// Of G numbers, or vectors X, and V vectors the sum of the terms, which is stored in, or added to, rows that are `row`
// apart.
template <int G, int V, class S, class X = S>
__attribute__((always_inline)) inline void sum_tile(const ProductTerm<S>* terms, int count, S* __restrict to,
                                                    int64_t row, bool adds) {
    // Several sums side by side, since an addition waits for the one before.
    constexpr int lanes = lanes_of<S>, parts = G * V > 6 ? 1 : G * V > 3 ? 2 : 4;
    Vec<S> sum[parts][G][V];
#pragma GCC unroll 4
    for (int k = 0; k < parts; ++k) {
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[k][g][v] = Vec<S>{};
        }
    }
    for (int n = 0; n < count; ++n) {
        const ProductTerm<S> term = terms[n];
        const S *x = term.x, *y = term.y;
        const auto add = [&](Vec<S>(&part)[G][V]) __attribute__((always_inline)) {
            Vec<S> vectors[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) vectors[v] = load<S>(y + v * term.apart_y);
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) {
                const X factor = load_vector<X>(x + g * term.apart);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) part[g][v] += factor * vectors[v];
            }
            x += term.along;
            y += term.stride;
        };
        int64_t left = term.count;
        for (; left >= parts; left -= parts) {
#pragma GCC unroll 4
            for (int k = 0; k < parts; ++k) add(sum[k]);
        }
        for (; left > 0; --left) add(sum[0]);
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
#pragma GCC unroll 4
            for (int k = 1; k < parts; ++k) sum[0][g][v] += sum[k][g][v];
            S* at = to + g * row + v * lanes;
            store<S>(at, adds ? load<S>(at) + sum[0][g][v] : sum[0][g][v]);
        }
    }
}

template <int G, int V, class S>
__attribute__((noinline)) void tile(const ProductTerm<S>* terms, int count, S* __restrict to, int64_t row, bool adds) {
    sum_tile<G, V, S>(terms, count, to, row, adds);
}

template <class S>
using TileProduct = void (*)(const ProductTerm<S>*, int, S*, int64_t, bool);
template <class S>
constexpr TileProduct<S> tiles_of_one[] = {tile<1, 1, S>, tile<1, 2, S>, tile<1, 3, S>, tile<1, 4, S>};
template <class S>
constexpr TileProduct<S> tiles_of_four[] = {tile<4, 1, S>, tile<4, 2, S>, tile<4, 3, S>};

// How the numbers of a group of sequences lie: a step has a row of vectors for each sequence, with its states in the
// lanes; or a row for as many sequences as there are lanes, with a vector for each state ("across"), which wastes no
// lane on a small number of states. Rows do not wait for each other.
template <class S>
struct Layout {
    static constexpr int lanes = lanes_of<S>, most_rows = 4, most_sequences = 2 * lanes;
    static constexpr int64_t apart = 64 / int64_t(sizeof(S));  // rows a power of two apart share places in caches

    int64_t states, padded;  // `padded` to whole vectors
    bool across;
    int rows, sequences;
    int64_t width, gap, row_stride, stride;  // a row is `width` vectors, `gap` apart
    int64_t outer_row;                       // of what add_outer adds to
    int64_t depth, band;                     // steps that are read, swept and written at a time; vectors of a tile
    Vec<S> low;                              // added to the last vector: −∞ past the last state, and 0 at states

    Layout(int64_t count, bool is_across, int number)
        : states(count),
          padded((count + lanes - 1) / lanes * lanes),
          across(is_across),
          rows(number),
          sequences(across ? number * lanes : number),
          width(across ? count : padded / lanes),
          gap(across ? number * lanes : lanes),
          row_stride(across ? lanes : padded + apart),
          stride(across ? count * gap : number * row_stride),
          outer_row(across ? (count + wide - 1) / wide * wide * lanes : padded),
          depth(32 / number),
          band(number == 1 ? even_part(width, 4) : even_part(width, 3)) {
        for (int l = 0; l < lanes; ++l) low[l] = across || padded - lanes + l < states ? S(0) : -infinity<S>;
    }

    // The sum over the lanes of a row, in each lane.
    Vec<S> sum(Vec<S> v) const { return across ? v : sum_lanes<S>(v); }
    Vec<S> greatest(Vec<S> v) const { return across ? v : greatest_lane<S>(v); }

    // The row of sequence l, and its lane there.
    int row_of(int l) const { return across ? l / lanes : l; }
    int lane_of(int l) const { return across ? l % lanes : 0; }
    // The first sequence of row r.
    int first_of(int r) const { return across ? r * lanes : r; }

    // A number of sequence l, in vectors for the rows.
    template <class V, class X>
    void set(V* each, int l, X x) const {
        if (across) {
            each[l / lanes][l % lanes] = x;
        } else {
            each[l] = V{} + x;
        }
    }
    // Where state i of sequence l is in a step.
    int64_t place(int l, int64_t i) const { return across ? i * gap + l : l * row_stride + i; }

    // `count` steps of a row from where each of its sequences has them; `pad` is added to the last vector of states.
    template <class T>
    void gather(const T* const* from, int64_t count, Vec<S> pad, S* to) const {
        if (across) return fetch<S>(from, count * states, to, gap);
        const int64_t last = padded - lanes, rest = states - last;
        const T* row = from[0];
        for (int64_t n = 0; n < count; ++n, row += states, to += stride) {
            for (int64_t at = 0; at < last; at += lanes) store<S>(to + at, load_as<S>(row + at));
            store<S>(to + last, (rest < lanes ? load_some_as<S>(row + last, rest) : load_as<S>(row + last)) + pad);
        }
    }
    // And back, to the first `valid` of them.
    template <class T>
    void scatter(T* const* to, int valid, int64_t count, const S* from) const {
        if (across) return flush<S>(to, valid, count * states, from, gap);
        const int64_t last = padded - lanes, rest = states - last;
        T* row = to[0];
        for (int64_t n = 0; n < count; ++n, row += states, from += stride) {
            for (int64_t at = 0; at < last; at += lanes) store_as<T, S>(row + at, load<S>(from + at));
            store_some<T, S>(row + last, load<S>(from + last), rest);
        }
    }

    // to[i, p] += Σ left[i] right[p] over steps and sequences, in padded rows of numbers, or of vectors whose lanes are
    // still to be added (outer). Padding past the last state is read, too.
    __attribute__((noinline)) void add_outer(const S* left, const S* right, int64_t steps, S* to) const {
        if (across) return add_outer_across(left, right, steps, to);
        const int64_t most = even_part(width, 3);
        for (int64_t v = 0; v < width; v += most) {
            const TileProduct<S> tile = tiles_of_four<S>[std::min(most, width - v) - 1];
            for (int64_t i = 0; i < states; i += 4) {
                const ProductTerm<S> term{left + i, 1, row_stride, right + v * lanes, lanes, row_stride, steps * rows};
                tile(&term, 1, to + i * outer_row + v * lanes, outer_row, true);
            }
        }
    }
    // The numbers that add_outer adds to, and the sum for [i, p].
    int64_t outer_size() const { return (states + tall - 1) / tall * tall * outer_row; }
    S outer(const S* sums, int64_t i, int64_t p) const {
        return across ? sum_lanes<S>(load<S>(sums + i * outer_row + p * lanes))[0] : sums[i * outer_row + p];
    }

private:
    static constexpr int tall = 4, wide = 2;  // the vectors of a tile of an outer product

    // Of `whole` in parts of at most `most`, nearly equal.
    static int64_t even_part(int64_t whole, int64_t most) {
        const int64_t parts = (whole + most - 1) / most;
        return (whole + parts - 1) / parts;
    }

    void add_outer_across(const S* left, const S* right, int64_t steps, S* to) const {
        for (int64_t i = 0; i < states; i += tall) {
            for (int64_t p = 0; p < states; p += wide) {
                ProductTerm<S> terms[most_rows];
                for (int r = 0; r < rows; ++r) {
                    const S *x = left + i * gap + r * lanes, *y = right + p * gap + r * lanes;
                    terms[r] = {x, gap, stride, y, gap, stride, steps};
                }
                sum_tile<tall, wide, S, Vec<S>>(terms, rows, to + i * outer_row + p * lanes, outer_row, true);
            }
        }
    }
};

// A square matrix [current, previous], in padded rows. Where the states are in the lanes, it is also packed for
// products, in bands of vectors: `into` has the current states in the lanes, `out_of` the previous ones.
template <class S>
struct PackedMatrix {
    static constexpr int lanes = lanes_of<S>;
    const Layout<S>& layout;
    Array<S> rows, into, out_of;

    explicit PackedMatrix(const Layout<S>& of) : layout(of), rows(zeros<S>(layout.padded * layout.padded)) {}

    // For products with the matrix, or with its transpose.
    void pack(bool has_into, bool has_out_of) {
        const int64_t states = layout.states, padded = layout.padded;
        if (layout.across) return;
        if (has_into) into = scratch<S>(states * padded);
        if (has_out_of) out_of = scratch<S>(states * padded);
        for (int64_t v = 0; v < layout.width; ++v) {
            const int64_t first = v / layout.band * layout.band, wide = std::min(layout.band, layout.width - first);
            const int64_t at = (first * states + v - first) * lanes;
            const S* from[lanes];
            for (int l = 0; l < lanes; ++l) from[l] = &rows[(v * lanes + l) * padded];
            if (has_into) fetch<S>(from, states, &into[at], wide * lanes);
            for (int64_t i = 0; has_out_of && i < states; ++i) {
                store<S>(&out_of[at + i * wide * lanes], load<S>(&rows[i * padded + v * lanes]));
            }
        }
    }
};

// A matrix, and the step that it multiplies.
template <class S>
struct Factor {
    const PackedMatrix<S>& matrix;
    const S* step;
};

// The sum of the products, with the transposed matrices if `back`: of G states at a time, where V rows of sequences are
// in the lanes.
template <int G, int V, class S>
__attribute__((noinline)) void multiply_across(const Layout<S>& layout, const Factor<S>* factors, int count, bool back,
                                               S* to) {
    constexpr int64_t gap = V * lanes_of<S>;
    const int64_t states = layout.states, apart = back ? 1 : layout.padded, along = back ? layout.padded : 1;
    for (int64_t n = 0; n < states; n += G) {
        const int64_t i = std::min(n, states - G);
        ProductTerm<S> terms[2];
        for (int k = 0; k < count; ++k) {
            terms[k] = {&factors[k].matrix.rows[i * apart], apart, along, factors[k].step, lanes_of<S>, gap, states};
        }
        sum_tile<G, V, S>(terms, count, to + i * gap, gap, false);
    }
}
// By the number of states at a time and of rows.
template <class S>
using ProductAcross = void (*)(const Layout<S>&, const Factor<S>*, int, bool, S*);
template <class S>
constexpr ProductAcross<S> products_across[][2] = {{multiply_across<1, 1, S>, multiply_across<1, 2, S>},
                                                   {multiply_across<2, 1, S>, multiply_across<2, 2, S>},
                                                   {multiply_across<3, 1, S>, multiply_across<3, 2, S>},
                                                   {multiply_across<4, 1, S>, multiply_across<4, 2, S>}};

// The sum of the products, with the transposed matrices if `back`.
template <class S>
__attribute__((noinline)) void multiply(const Layout<S>& layout, std::initializer_list<Factor<S>> factors, bool back,
                                        S* to) {
    constexpr int lanes = lanes_of<S>;
    const int64_t states = layout.states;
    if (layout.across) {
        const auto product = products_across<S>[std::min<int64_t>(states, 4) - 1][layout.rows - 1];
        return product(layout, factors.begin(), int(factors.size()), back, to);
    }
    ProductTerm<S> terms[2];
    const TileProduct<S>* tiles = layout.rows == 1 ? tiles_of_one<S> : tiles_of_four<S>;
    for (int64_t v = 0; v < layout.width; v += layout.band) {
        const int64_t wide = std::min(layout.band, layout.width - v);
        int count = 0;
        for (const Factor<S>& factor : factors) {
            const Array<S>& packed = back ? factor.matrix.out_of : factor.matrix.into;
            const S* y = &packed[v * states * lanes];
            terms[count++] = {factor.step, layout.row_stride, 1, y, lanes, wide * lanes, states};
        }
        tiles[wide - 1](terms, count, to + v * lanes, layout.row_stride, false);
    }
}

}  // namespace in_exp_space
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
