// Several sequences in memory, step by step, and their products with a matrix: what the sweeps of exp.cpp are made of.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "../base/memory.h"
#include "../base/simd.h"
#include "../omega/omega.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace in_exp_space {

using std::int64_t;

// The states of a step in whole vectors. Entries past the last state are read as 0 or as −∞, and never written.
template <class S>
struct Line {
    static constexpr int lanes = lanes_of<S>;
    int64_t states, whole, rest, vectors, padded;
    Vec<S> low;  // of the last vector: 0 at states, −∞ past them

    explicit Line(int64_t count)
        : states(count),
          whole(count / lanes),
          rest(count % lanes),
          vectors((count + lanes - 1) / lanes),
          padded(vectors * lanes) {
        for (int l = 0; l < lanes; ++l) low[l] = rest == 0 || l < rest ? S(0) : -infinity<S>;
    }

    Vec<S> get(const S* from, int64_t v) const {
        return v < whole ? load<S>(from + v * lanes) : load_some<S>(from + v * lanes, rest);
    }
    Vec<S> get_low(const S* from, int64_t v) const {
        return v < whole ? load<S>(from + v * lanes) : load_some<S>(from + v * lanes, rest) + low;
    }
    void put(S* to, int64_t v, Vec<S> x) const {
        if (v < whole) {
            store<S>(to + v * lanes, x);
        } else {
            store_some<S, S>(to + v * lanes, x, rest);
        }
    }
};

// Σ x[g · apart + k · along] · y[k], k < count, for each g, where y[k] is some vectors at k · stride.
template <class S>
struct Term {
    const S* x;
    int64_t apart, along;
    const S* y;
    int64_t stride, count;
};

// Of G numbers and V vectors the sum of the terms, which is stored in, or added to, rows that are `row` apart.
template <int G, int V, class S>
__attribute__((noinline)) void tile(const Term<S>* terms, int count, S* __restrict to, int64_t row, bool adds) {
    // Several sums side by side, since an addition waits for the one before.
    constexpr int lanes = lanes_of<S>, parts = G * V > 6 ? 1 : G * V > 3 ? 2 : G * V > 1 ? 4 : 8;
    Vec<S> sum[parts][G][V];
#pragma GCC unroll 8
    for (int k = 0; k < parts; ++k) {
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[k][g][v] = Vec<S>{};
        }
    }
    for (int n = 0; n < count; ++n) {
        const Term<S> term = terms[n];
        const S *x = term.x, *y = term.y;
        const auto add = [&](Vec<S>(&part)[G][V]) __attribute__((always_inline)) {
            Vec<S> vectors[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) vectors[v] = load<S>(y + v * lanes);
#pragma GCC unroll 8
            for (int g = 0; g < G; ++g) {
                const S factor = x[g * term.apart];
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) part[g][v] += factor * vectors[v];
            }
            x += term.along;
            y += term.stride;
        };
        int64_t left = term.count;
        for (; left >= parts; left -= parts) {
#pragma GCC unroll 8
            for (int k = 0; k < parts; ++k) add(sum[k]);
        }
        for (; left > 0; --left) add(sum[0]);
    }
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
#pragma GCC unroll 3
            for (int half = parts / 2; half > 0; half /= 2) {
#pragma GCC unroll 4
                for (int k = 0; k < half; ++k) sum[k][g][v] += sum[k + half][g][v];
            }
            S* at = to + g * row + v * lanes;
            store<S>(at, adds ? load<S>(at) + sum[0][g][v] : sum[0][g][v]);
        }
    }
}

template <class S>
using Tile = void (*)(const Term<S>*, int, S*, int64_t, bool);
template <class S>
constexpr Tile<S> tiles_of_one[] = {tile<1, 1, S>, tile<1, 2, S>, tile<1, 3, S>, tile<1, 4, S>};
template <class S>
constexpr Tile<S> tiles_of_four[] = {tile<4, 1, S>, tile<4, 2, S>, tile<4, 3, S>};
template <class S>
constexpr Tile<S> tiles_of_a_vector[] = {tile<1, 1, S>, tile<2, 1, S>, tile<4, 1, S>, tile<8, 1, S>};  // 2^n numbers

// Σ x[g] ∘ y[v] over steps, of vectors that are side by side at each step.
template <int G, int V, class S>
__attribute__((noinline)) void pair_up(const S* x, const S* y, int64_t steps, int64_t stride, Vec<S> (&sums)[G][V]) {
    constexpr int lanes = lanes_of<S>;
    Vec<S> sum[G][V];
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sum[g][v] = Vec<S>{};
    }
    for (; steps > 0; --steps, x += stride, y += stride) {
        Vec<S> vectors[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) vectors[v] = load<S>(y + v * lanes);
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
            const Vec<S> factor = load<S>(x + g * lanes);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[g][v] += factor * vectors[v];
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; ++g) {
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) sums[g][v] = sum[g][v];
    }
}

// Vectors in bands of nearly equal width.
struct Bands {
    int64_t count, width, wider;  // the first ones, as many as `wider` says, have a vector more

    Bands(int64_t vectors, int64_t widest)
        : count((vectors + widest - 1) / widest), width(vectors / count), wider(vectors % count) {}

    // body(width, first vector) for each.
    template <class Body>
    void for_each(Body body) const {
        for (int64_t n = 0, first = 0; n < count; ++n) {
            const int64_t wide = width + (n < wider);
            body(wide, first);
            first += wide;
        }
    }
};

// Rows of states, one after another, into padded rows; `pad` is added to the last vector of each.
template <class S>
void spread_rows(const S* __restrict from, int64_t rows, const Line<S>& line, Vec<S> pad, S* __restrict to,
                 int64_t stride) {
    constexpr int lanes = lanes_of<S>;
    const int64_t states = line.states, last = line.vectors - 1, rest = line.rest;
    for (int64_t n = 0; n < rows; ++n, from += states, to += stride) {
        for (int64_t v = 0; v < last; ++v) store<S>(to + v * lanes, load<S>(from + v * lanes));
        const S* end = from + last * lanes;
        store<S>(to + last * lanes, (rest ? load_some<S>(end, rest) : load<S>(end)) + pad);
    }
}

// And back.
template <class S>
void join_rows(const S* __restrict from, int64_t stride, int64_t rows, const Line<S>& line, S* __restrict to) {
    constexpr int lanes = lanes_of<S>;
    const int64_t states = line.states, whole = line.whole, rest = line.rest;
    for (int64_t n = 0; n < rows; ++n, from += stride, to += states) {
        for (int64_t v = 0; v < whole; ++v) store<S>(to + v * lanes, load<S>(from + v * lanes));
        if (rest) store_some<S, S>(to + whole * lanes, load<S>(from + whole * lanes), rest);
    }
}

// The numbers of one sequence that lie side by side from here on.
template <class T>
struct Run {
    T* from;
    int64_t size;
};

// How the numbers of a group of sequences lie: a step has a row of vectors for each sequence, with its states in the
// lanes; or a row for as many sequences as there are lanes, with a vector for each state ("across"), which wastes no lane
// on a small number of states. Rows do not wait for each other.
template <class S>
struct Layout {
    static constexpr int lanes = lanes_of<S>, most_rows = 4, most_sequences = most_rows * lanes;
    static constexpr int64_t gap = 64 / int64_t(sizeof(S));  // rows a power of two apart would share a place in the cache

    Line<S> line;
    bool across;
    int sequences;
    int64_t rows, width, row_stride, stride;  // a row is `width` vectors
    int64_t depth;                            // steps that are read, swept and written at a time
    Bands bands, outer;                       // of packed matrices, and of sums of products of states

    Layout(const Line<S>& of, bool is_across, int64_t count)
        : line(of),
          across(is_across),
          sequences(int(across ? count * lanes : count)),
          rows(count),
          width(across ? of.states : of.vectors),
          row_stride(width * lanes + gap),
          stride(rows * row_stride),
          depth(32 / rows),
          bands(of.vectors, across ? 1 : rows == 1 ? 4 : 3),
          outer(of.vectors, 3) {}

    // What the lanes of a row have together, in each of them.
    Vec<S> sum(Vec<S> v) const { return across ? v : sum_lanes<S>(v); }
    Vec<S> greatest(Vec<S> v) const { return across ? v : greatest_lane<S>(v); }
    // A number for each sequence, as a row has it.
    Vec<S> by_sequence(const S* numbers, int64_t r) const {
        return across ? load<S>(numbers + r * lanes) : broadcast<S>(numbers[r]);
    }
    // Where sequence l is: its row, and its lane or that of its first state.
    int64_t row_of(int l) const { return across ? l / lanes : l; }
    int lane_of(int l) const { return across ? l % lanes : 0; }

    void get_states(const S* step, int l, S* states) const {
        const S* from = step + row_of(l) * row_stride + lane_of(l);
        for (int64_t i = 0; i < line.states; ++i) states[i] = from[across ? i * lanes : i];
    }
    void set_states(S* step, int l, const S* states) const {
        S* to = step + row_of(l) * row_stride + lane_of(l);
        for (int64_t i = 0; i < line.states; ++i) to[across ? i * lanes : i] = states[i];
    }

    // A sequence whose run has ended gets 0. `pad` is added to the last vector of a row of states.
    void gather(const Run<const S>* runs, int64_t steps, Vec<S> pad, S* to) const {
        for (int64_t r = 0; r < rows; ++r) {
            S* first = to + r * row_stride;
            if (across) {
                gather_across(runs + r * lanes, steps * width, first);
                continue;
            }
            const int64_t valid = std::min(steps, runs[r].size / line.states);
            spread_rows(runs[r].from, valid, line, pad, first, stride);
            for (int64_t n = valid; n < steps; ++n) std::fill_n(first + n * stride, line.padded, S(0));
        }
    }

    void scatter(const S* from, int64_t steps, const Run<S>* runs) const {
        for (int64_t r = 0; r < rows; ++r) {
            const S* first = from + r * row_stride;
            if (across) {
                scatter_across(first, steps * width, runs + r * lanes);
            } else {
                join_rows(first, stride, std::min(steps, runs[r].size / line.states), line, runs[r].from);
            }
        }
    }

    // A packed matrix, and the step that it multiplies.
    struct Factor {
        const Array<S>& matrix;
        const S* step;
    };

    // The sum of the products.
    void multiply(std::initializer_list<Factor> factors, S* to) const {
        Term<S> terms[2];
        if (across) return multiply_across(factors, terms, to);
        const Tile<S>* tiles = rows == 1 ? tiles_of_one<S> : tiles_of_four<S>;
        bands.for_each([&](int64_t wide, int64_t first) {
            int count = 0;
            for (const Factor& factor : factors) {
                const S* band = &factor.matrix[first * lanes * line.states];
                terms[count++] = {factor.step, row_stride, 1, band, wide * lanes, line.states};
            }
            tiles[wide - 1](terms, count, to + first * lanes, row_stride, false);
        });
    }

    // to[i, p] += Σ left[i] right[p] over steps and sequences, in padded rows.
    void add_outer(const S* left, const S* right, int64_t steps, S* to) const {
        if (across && line.states <= 2) return add_outer_across<2, 2>(left, right, steps, to);
        if (across) return add_outer_across<4, 3>(left, right, steps, to);
        outer.for_each([&](int64_t wide, int64_t first) {
            for (int64_t i = 0; i < line.states; i += 4) {
                const Term<S> term{left + i, 1, row_stride, right + first * lanes, row_stride, steps * rows};
                tiles_of_four<S>[wide - 1](&term, 1, to + i * line.padded + first * lanes, line.padded, true);
            }
        });
    }

private:
    void gather_across(const Run<const S>* runs, int64_t size, S* to) const {
        for (int64_t at = 0, state = 0; at < size; at += lanes) {
            Vec<S> block[lanes];
            for (int l = 0; l < lanes; ++l) {
                const S* from = runs[l].from + at;
                const int64_t left = runs[l].size - at;
                block[l] = left >= lanes ? load<S>(from) : left > 0 ? load_some<S>(from, left) : Vec<S>{};
            }
            transpose(block);
            for (int64_t k = 0; k < lanes && at + k < size; ++k) {
                store<S>(to + state * lanes, block[k]);
                if (++state == width) state = 0, to += stride;
            }
        }
    }

    void scatter_across(const S* from, int64_t size, const Run<S>* runs) const {
        for (int64_t at = 0, state = 0; at < size; at += lanes) {
            Vec<S> block[lanes];
            for (int64_t k = 0; k < lanes; ++k) {
                block[k] = load<S>(from + state * lanes);  // past the last state of the last step, of any numbers
                if (at + k + 1 < size && ++state == width) state = 0, from += stride;
            }
            transpose(block);
            for (int l = 0; l < lanes; ++l) {
                const int64_t left = runs[l].size - at;
                if (left >= lanes) {
                    store<S>(runs[l].from + at, block[l]);
                } else if (left > 0) {
                    store_some<S, S>(runs[l].from + at, block[l], left);
                }
            }
        }
    }

    void multiply_across(std::initializer_list<Factor> factors, Term<S>* terms, S* to) const {
        for (int64_t i = 0; i < line.states;) {
            int power = lanes == 8 ? 3 : 2;
            while (i % lanes + (1 << power) > lanes || i + (1 << power) > line.states) --power;
            for (int64_t r = 0; r < rows; ++r) {
                int count = 0;
                for (const Factor& factor : factors) {
                    const S* column = &factor.matrix[i / lanes * lanes * line.states + i % lanes];
                    terms[count++] = {column, 1, lanes, factor.step + r * row_stride, lanes, line.states};
                }
                tiles_of_a_vector<S>[power](terms, count, to + r * row_stride + i * lanes, lanes, false);
            }
            i += int64_t(1) << power;
        }
    }

    // Entries past the last state are read too.
    template <int G, int V>
    void add_outer_across(const S* left, const S* right, int64_t steps, S* to) const {
        for (int64_t i = 0; i < line.states; i += G) {
            for (int64_t p = 0; p < line.states; p += V) {
                Vec<S> sums[G][V];
                pair_up(left + i * lanes, right + p * lanes, steps * rows, row_stride, sums);
                for (int64_t g = 0; g < std::min<int64_t>(G, line.states - i); ++g) {
                    for (int64_t v = 0; v < std::min<int64_t>(V, line.states - p); ++v) {
                        to[(i + g) * line.padded + p + v] += sum_lanes<S>(sums[g][v])[0];
                    }
                }
            }
        }
    }
};

// A square matrix [current, previous] in padded rows, and packed in bands for products from the left: `into` has the
// current states in the lanes, `out_of` the previous ones.
template <class S>
struct Matrix {
    static constexpr int lanes = lanes_of<S>;
    Line<S> line;
    Bands bands;
    Array<S> rows, into, out_of;

    Matrix(const Layout<S>& layout, bool has_into, bool has_out_of)
        : line(layout.line), bands(layout.bands), rows(zeros<S>(line.padded * line.padded)) {
        if (has_into) into = scratch<S>(line.states * line.padded);
        if (has_out_of) out_of = scratch<S>(line.states * line.padded);
    }

    void pack() {
        bands.for_each([&](int64_t width, int64_t first) {
            const int64_t band = first * lanes * line.states;
            if (into) pack_into(width, first, &into[band]);
            for (int64_t i = 0; out_of && i < line.states; ++i) {
                std::copy_n(&rows[i * line.padded + first * lanes], width * lanes, &out_of[band + i * width * lanes]);
            }
        });
    }

private:
    void pack_into(int64_t width, int64_t first, S* to) const {
        for (int64_t v = 0; v < width; ++v) {
            for (int64_t p = 0; p < line.states; p += lanes) {
                Vec<S> block[lanes];
                for (int l = 0; l < lanes; ++l) block[l] = load<S>(&rows[((first + v) * lanes + l) * line.padded + p]);
                transpose(block);
                for (int64_t k = 0; k < lanes && p + k < line.states; ++k) {
                    store<S>(to + ((p + k) * width + v) * lanes, block[k]);
                }
            }
        }
    }
};

}  // namespace in_exp_space
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
