// A chain as products of matrices and vectors. With W[i, p] = exp(transitions[i, p] − r_i), r_i the greatest of row i,
// the forward sweep keeps a_n ∝ exp(v_n) and s_n = W a_{n−1} of every step. Backward, the marginals m_n give
// u_n = m_n / s_n and m_{n−1} = a_{n−1} ∘ Wᵀu_n without another exp, and the transitions get W ∘ Σ_n u_n a_{n−1}ᵀ.
// The sweeps are written once, for two layouts: states in the lanes, or sequences in the lanes, which reads W once for
// all of them and wastes no lane on a small number of states.
#include "products.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "parallel.h"
#include "base/math.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

using std::int64_t;

constexpr int64_t depth = 32;  // steps that are read, swept and written at a time

// A state that is reached and has less than this, where the greatest is about 1, may lose what leads through it.
template <class S>
constexpr S least = sizeof(S) == 4 ? S(1e-28) : S(1e-280);

// Numbers too small for their format become 0 while this lives: they are slow, and their digits are lost anyhow.
struct NoDenormals {
#if defined(__SSE2__)
    unsigned before = _mm_getcsr();
    NoDenormals() { _mm_setcsr(before | 0x8040); }
    ~NoDenormals() { _mm_setcsr(before); }
#else
    NoDenormals() {}
#endif
    NoDenormals(const NoDenormals&) = delete;
};

// Combines the lanes; every lane gets the result.
template <class R, class Combine>
inline Vec<R> across(Vec<R> v, Combine combine) {
    using Pick = typename Shape<Vec<R>>::Int;
    if constexpr (lanes_of<R> == 8) {
        v = combine(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
        v = combine(v, __builtin_shuffle(v, Pick{2, 3, 0, 1, 6, 7, 4, 5}));
        return combine(v, __builtin_shuffle(v, Pick{1, 0, 3, 2, 5, 4, 7, 6}));
    } else {
        v = combine(v, __builtin_shuffle(v, Pick{2, 3, 0, 1}));
        return combine(v, __builtin_shuffle(v, Pick{1, 0, 3, 2}));
    }
}

template <class R>
inline Vec<R> greatest_across(Vec<R> v) {
    return across<R>(v, [](Vec<R> a, Vec<R> b) { return a > b ? a : b; });
}

template <class R>
inline Vec<R> sum_across(Vec<R> v) {
    return across<R>(v, [](Vec<R> a, Vec<R> b) { return a + b; });
}

// Zeros that begin where a line of the cache does, so that no vector lies across two.
template <class S>
struct Numbers {
    static constexpr std::size_t line = 64;
    std::unique_ptr<S[]> owned;
    S* first = nullptr;

    Numbers() = default;
    explicit Numbers(int64_t size) : owned(zeros<S>(size + int64_t(line / sizeof(S)))) {
        first = owned.get() + (line - reinterpret_cast<std::uintptr_t>(owned.get()) % line) / sizeof(S);
    }

    S* get() const { return first; }
    S& operator[](int64_t n) const { return first[n]; }
    explicit operator bool() const { return first != nullptr; }
};

// The states of a step in whole vectors. Entries past the last state are read as 0 or as −∞, and never written.
template <class S>
struct Line {
    static constexpr int lanes = lanes_of<S>;
    int64_t states, whole, rest, vectors, padded;
    Vec<S> low, high;  // of the vector that is not whole: 0 at states, −∞ or 1 past them

    explicit Line(int64_t count)
        : states(count),
          whole(count / lanes),
          rest(count % lanes),
          vectors((count + lanes - 1) / lanes),
          padded(vectors * lanes) {
        for (int l = 0; l < lanes; ++l) low[l] = l < rest ? S(0) : -infinity<S>, high[l] = l < rest ? S(0) : S(1);
    }

    Vec<S> get(const S* from, int64_t v) const {
        return v < whole ? load<S>(from + v * lanes) : load_some<S>(from + v * lanes, rest);
    }

    Vec<S> get_low(const S* from, int64_t v) const {
        return v < whole ? load<S>(from + v * lanes) : load_some<S>(from + v * lanes, rest) + low;
    }

    void put(S* to, int64_t v, Vec<S> x) const {
        to += v * lanes;
        if (v < whole) {
            store<S>(to, x);
            return;
        }
        S from[lanes];
        store<S>(from, x);
        int64_t done = 0;
        if (lanes == 8 && (rest & 4)) std::memcpy(to, from, 4 * sizeof(S)), done = 4;
        if (rest & 2) std::memcpy(to + done, from + done, 2 * sizeof(S)), done += 2;
        if (rest & 1) to[done] = from[done];
    }
};

// Calls body(number of vectors, first vector) for bands of at most three vectors, the number a constant.
template <class Body>
inline void for_bands(int64_t vectors, Body body) {
    for (int64_t first = 0; first < vectors;) {
        const int64_t left = vectors - first;
        if (left == 3 || left > 4) {
            body(std::integral_constant<int, 3>(), first);
            first += 3;
        } else if (left == 1) {
            body(std::integral_constant<int, 1>(), first);
            first += 1;
        } else {
            body(std::integral_constant<int, 2>(), first);
            first += 2;
        }
    }
}

// sum[g] += Σ_k x[g · apart + k · along] y[k], k < count, y[k] being V vectors at k · stride.
template <int G, int V, class S>
__attribute__((always_inline)) inline void accumulate(Vec<S> (&sum)[G][V], int64_t count, const S* x, int64_t apart,
                                                      int64_t along, const S* y, int64_t stride) {
    // Several sums side by side, since an addition waits for the one before.
    constexpr int parts = G * V > 6 ? 1 : G * V > 3 ? 2 : G * V > 1 ? 4 : 8;
    Vec<S> part[parts][G][V];
#pragma GCC unroll 8
    for (int k = 0; k < parts; ++k) {
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) {
#pragma GCC unroll 3
            for (int v = 0; v < V; ++v) part[k][g][v] = k == 0 ? sum[g][v] : Vec<S>{};
        }
    }
    const auto add = [&](Vec<S>(&to)[G][V]) __attribute__((always_inline)) {
        Vec<S> row[V];
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) row[v] = load<S>(y + v * lanes_of<S>);
#pragma GCC unroll 8
        for (int g = 0; g < G; ++g) {
            const S factor = x[g * apart];
#pragma GCC unroll 3
            for (int v = 0; v < V; ++v) to[g][v] += factor * row[v];
        }
        x += along;
        y += stride;
    };
    for (; count >= parts; count -= parts) {
#pragma GCC unroll 8
        for (int k = 0; k < parts; ++k) add(part[k]);
    }
    for (; count > 0; --count) add(part[0]);
#pragma GCC unroll 8
    for (int g = 0; g < G; ++g) {
#pragma GCC unroll 3
        for (int v = 0; v < V; ++v) {
#pragma GCC unroll 3
            for (int width = parts / 2; width > 0; width /= 2) {
#pragma GCC unroll 8
                for (int k = 0; k < width; ++k) part[k][g][v] += part[k + width][g][v];
            }
            sum[g][v] = part[0][g][v];
        }
    }
}

// A square matrix [current, previous] in padded rows, and packed in bands for products from the left: `into` has the
// current states in the lanes, `out_of` the previous ones.
template <class S>
struct Matrix {
    static constexpr int lanes = lanes_of<S>;
    Line<S> line;
    Numbers<S> rows, into, out_of;

    Matrix(const Line<S>& of, bool has_into, bool has_out_of)
        : line(of),
          rows(of.padded * of.padded),
          into(has_into ? Numbers<S>(of.states * of.padded) : Numbers<S>()),
          out_of(has_out_of ? Numbers<S>(of.states * of.padded) : Numbers<S>()) {}

    void pack() {
        if (into) pack_into();
        if (out_of) pack_out_of();
    }

    void pack_into() {
        for_bands(line.vectors, [&](auto width, int64_t first) {
            for (int64_t v = first; v < first + width; ++v) {
                for (int64_t p = 0; p < line.states; p += lanes) {
                    Vec<S> block[lanes];
                    for (int l = 0; l < lanes; ++l) block[l] = load<S>(&rows[(v * lanes + l) * line.padded + p]);
                    transpose(block);
                    for (int64_t k = 0; k < lanes && p + k < line.states; ++k) {
                        store<S>(&into[first * lanes * line.states + ((p + k) * width + v - first) * lanes], block[k]);
                    }
                }
            }
        });
    }

    void pack_out_of() {
        for_bands(line.vectors, [&](auto width, int64_t first) {
            S* to = &out_of[first * lanes * line.states];
            for (int64_t i = 0; i < line.states; ++i) {
                for (int64_t v = first; v < first + width; ++v, to += lanes) {
                    store<S>(to, load<S>(&rows[i * line.padded + v * lanes]));
                }
            }
        });
    }
};

// W, and the rest of exp(transitions): r_i relative to their greatest, −∞ past the last state, and that greatest.
template <class S>
struct Weights : Matrix<S> {
    Numbers<S> shift;
    S base = 0;

    Weights(const Line<S>& of, bool has_into, bool has_out_of)
        : Matrix<S>(of, has_into, has_out_of), shift(of.padded) {}

    // Whether all transitions were below +∞ and not NaN.
    bool fill(const S* transitions) {
        const Line<S>& line = this->line;
        typename Shape<Vec<S>>::Int bad{};
        base = -infinity<S>;
        for (int64_t i = 0; i < line.states; ++i) {
            const S* from = transitions + i * line.states;
            Vec<S> top = Vec<S>{} - infinity<S>;
            for (int64_t v = 0; v < line.vectors; ++v) {
                const Vec<S> x = line.get_low(from, v);
                bad |= ~(x < infinity<S>);
                top = greater<S>(top, x);
            }
            const S r = greatest_across<S>(top)[0], finite = r == -infinity<S> ? S(0) : r;
            for (int64_t v = 0; v < line.vectors; ++v) {
                S* to = &this->rows[i * line.padded + v * line.lanes];
                store<S>(to, exp_nonpositive(line.get_low(from, v) - finite));
            }
            shift[i] = r;
            base = r > base ? r : base;
        }
        if (base == -infinity<S>) base = 0;
        for (int64_t i = 0; i < line.padded; ++i) shift[i] = i < line.states ? shift[i] - base : -infinity<S>;
        this->pack();
        return !any(bad);
    }
};

// W ∘ z, where z does not matter unless W is positive.
template <class S>
void tilt(const Matrix<S>& weights, const S* z, Matrix<S>& tilted) {
    const Line<S>& line = weights.line;
    for (int64_t i = 0; i < line.states; ++i) {
        for (int64_t v = 0; v < line.vectors; ++v) {
            const int64_t at = i * line.padded + v * line.lanes;
            const Vec<S> w = load<S>(&weights.rows[at]);
            store<S>(&tilted.rows[at], w > S(0) ? w * line.get(z + i * line.states, v) : Vec<S>{});
        }
    }
    tilted.pack();
}

// The numbers of one sequence that lie side by side from here on.
template <class T>
struct Run {
    T* from;
    int64_t size;
};

// A packed matrix, and the step that it multiplies.
template <class S>
struct Term {
    const Numbers<S>& matrix;
    const S* step;
};

// One sequence, with its states in the lanes. A step is `cells` vectors; the next begins `stride` numbers further on.
template <class S>
struct Single {
    static constexpr int lanes = lanes_of<S>, sequences = 1;
    Line<S> line;
    int64_t cells, stride;  // steps a power of two apart would share a place in the cache

    explicit Single(const Line<S>& of) : line(of), cells(of.vectors), stride(of.padded + 64 / int64_t(sizeof(S))) {}

    static Vec<S> sum(Vec<S> v) { return sum_across<S>(v); }
    static Vec<S> greatest(Vec<S> v) { return greatest_across<S>(v); }
    static Vec<S> by_sequence(const S* numbers) { return Vec<S>{} + numbers[0]; }
    Vec<S> by_state(const S* numbers, int64_t v) const { return load<S>(numbers + v * lanes); }
    Vec<S> raise_pads(int64_t v, Vec<S> x) const { return v < line.whole ? x : x + line.high; }

    void get_states(const S* step, int, S* states) const { std::copy(step, step + line.padded, states); }
    void set_states(S* step, int, const S* states) const { std::copy(states, states + line.padded, step); }

    // Past the last state `pad` is written.
    void gather(const Run<const S>* runs, int64_t steps, Vec<S> pad, S* to) const {
        const S* from = runs[0].from;
        for (int64_t n = 0; n < steps; ++n, from += line.states, to += stride) {
            for (int64_t v = 0; v < cells; ++v) {
                const Vec<S> x = line.get(from, v);
                store<S>(to + v * lanes, v < line.whole ? x : x + pad);
            }
        }
    }

    void scatter(const S* from, int64_t steps, const Run<S>* runs) const {
        S* to = runs[0].from;
        for (int64_t n = 0; n < steps; ++n, from += stride, to += line.states) {
            for (int64_t v = 0; v < cells; ++v) line.put(to, v, load<S>(from + v * lanes));
        }
    }

    // each(v, vector v of the sum of the terms)
    template <int N, class Each>
    __attribute__((always_inline)) void multiply(const Term<S> (&terms)[N], Each each) const {
        for_bands(line.vectors, [&](auto width, int64_t first) __attribute__((always_inline)) {
            constexpr int V = width;
            Vec<S> sum[1][V] = {};
            for (const Term<S>& term : terms) {
                const S* band = &term.matrix[first * lanes * line.states];
                accumulate<1, V, S>(sum, line.states, term.step, 0, 1, band, V * lanes);
            }
#pragma GCC unroll 3
            for (int v = 0; v < V; ++v) each(first + v, sum[0][v]);
        });
    }

    // to[i, p] += Σ left[i] right[p] over steps, in padded rows.
    void add_outer(const S* left, const S* right, int64_t steps, S* to) const {
        for_bands(line.vectors, [&](auto width, int64_t first) {
            constexpr int V = width, G = 4;
            for (int64_t i = 0; i < line.states; i += G) {
                Vec<S> tile[G][V] = {};
                accumulate<G, V, S>(tile, steps, left + i, 1, stride, right + first * lanes, stride);
#pragma GCC unroll 4
                for (int g = 0; g < G; ++g) {
#pragma GCC unroll 3
                    for (int v = 0; v < V; ++v) {
                        S* at = to + (i + g) * line.padded + (first + v) * lanes;
                        store<S>(at, load<S>(at) + tile[g][v]);
                    }
                }
            }
        });
    }
};

// As many sequences as there are lanes, each in a separate lane: a step is one vector for each state.
template <class S>
struct Bundle {
    static constexpr int lanes = lanes_of<S>, sequences = lanes;
    Line<S> line;
    int64_t cells, stride;

    explicit Bundle(const Line<S>& of)
        : line(of), cells(of.states), stride(of.states * lanes + 64 / int64_t(sizeof(S))) {}

    static Vec<S> sum(Vec<S> v) { return v; }
    static Vec<S> greatest(Vec<S> v) { return v; }
    static Vec<S> by_sequence(const S* numbers) { return load<S>(numbers); }
    Vec<S> by_state(const S* numbers, int64_t v) const { return Vec<S>{} + numbers[v]; }
    Vec<S> raise_pads(int64_t, Vec<S> x) const { return x; }

    void get_states(const S* step, int lane, S* states) const {
        for (int64_t i = 0; i < cells; ++i) states[i] = step[i * lanes + lane];
    }
    void set_states(S* step, int lane, const S* states) const {
        for (int64_t i = 0; i < cells; ++i) step[i * lanes + lane] = states[i];
    }

    // A sequence whose run has ended gets 0.
    void gather(const Run<const S>* runs, int64_t steps, Vec<S>, S* to) const {
        const int64_t size = steps * cells;
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
                if (++state == cells) state = 0, to += stride;
            }
        }
    }

    void scatter(const S* from, int64_t steps, const Run<S>* runs) const {
        const int64_t size = steps * cells;
        for (int64_t at = 0, state = 0; at < size; at += lanes) {
            Vec<S> block[lanes] = {};
            for (int64_t k = 0; k < lanes && at + k < size; ++k) {
                block[k] = load<S>(from + state * lanes);
                if (++state == cells) state = 0, from += stride;
            }
            transpose(block);
            for (int l = 0; l < lanes; ++l) {
                S* to = runs[l].from + at;
                const int64_t left = runs[l].size - at;
                if (left >= lanes) {
                    store<S>(to, block[l]);
                } else {
                    store_some<S, S>(to, block[l], left);
                }
            }
        }
    }

    template <int N, class Each>
    __attribute__((always_inline)) void multiply(const Term<S> (&terms)[N], Each each) const {
        for_bands(line.vectors, [&](auto width, int64_t first) __attribute__((always_inline)) {
            for (int64_t v = first; v < first + width; ++v) {
                const auto rows = [&](auto count) __attribute__((always_inline)) {
                    constexpr int G = count;
                    Vec<S> sum[G][1] = {};
                    for (const Term<S>& term : terms) {
                        const S* column = &term.matrix[first * lanes * line.states + (v - first) * lanes];
                        add_rows(sum, column, width * lanes, term.step);
                    }
#pragma GCC unroll 8
                    for (int g = 0; g < G; ++g) {
                        if (v * lanes + g < cells) each(v * lanes + g, sum[g][0]);
                    }
                };
                if (cells - v * lanes > lanes / 2) {
                    rows(std::integral_constant<int, lanes>());
                } else {
                    rows(std::integral_constant<int, lanes / 2>());
                }
            }
        });
    }

    // Not inlined: otherwise the compiler runs out of registers.
    template <int G>
    __attribute__((noinline)) void add_rows(Vec<S> (&sum)[G][1], const S* column, int64_t along, const S* step) const {
        accumulate<G, 1, S>(sum, cells, column, 1, along, step, lanes);
    }

    void add_outer(const S* left, const S* right, int64_t steps, S* to) const {
        constexpr int G = 4, V = 3;
        for (int64_t i = 0; i < cells; i += G) {
            for (int64_t p = 0; p < cells; p += V) {
                Vec<S> tile[G][V];
                pair(tile, left + i * lanes, right + p * lanes, steps);
                for (int64_t g = 0; g < std::min<int64_t>(G, cells - i); ++g) {
                    for (int64_t v = 0; v < std::min<int64_t>(V, cells - p); ++v) {
                        to[(i + g) * line.padded + p + v] += sum_across<S>(tile[g][v])[0];
                    }
                }
            }
        }
    }

    // tile[g][v] = Σ left[g] right[v] over steps; entries past the last state are read too.
    template <int G, int V>
    __attribute__((noinline)) void pair(Vec<S> (&tile)[G][V], const S* left, const S* right, int64_t steps) const {
        Vec<S> sum[G][V] = {};
        for (; steps > 0; --steps, left += stride, right += stride) {
            Vec<S> row[V];
#pragma GCC unroll 3
            for (int v = 0; v < V; ++v) row[v] = load<S>(right + v * lanes);
#pragma GCC unroll 4
            for (int g = 0; g < G; ++g) {
                const Vec<S> factor = load<S>(left + g * lanes);
#pragma GCC unroll 3
                for (int v = 0; v < V; ++v) sum[g][v] += factor * row[v];
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; ++g) {
#pragma GCC unroll 3
            for (int v = 0; v < V; ++v) tile[g][v] = sum[g][v];
        }
    }
};

// Room for one worker: blocks of steps, a step more than go together, and single rows of padded states.
template <class S>
struct Room {
    int64_t block_size, row_size;
    Numbers<S> blocks, rows, stage;

    Room(const Line<S>& line, int64_t stride, int sequences, int count)
        : block_size((depth + 1) * stride + 4 * lanes_of<S>),
          row_size(line.padded),
          blocks(count * block_size),
          rows(2 * row_size),
          stage(sequences * depth * line.states) {}

    S* block(int k) const { return &blocks[k * block_size]; }
    S* row(int k) const { return &rows[k * row_size]; }
};

// The sequences that a layout takes at once, the longest first. A lane without a sequence has length 0.
template <class Layout, class S>
struct Group {
    static constexpr int sequences = Layout::sequences;
    using Runs = Run<S>[sequences];
    using ConstRuns = Run<const S>[sequences];

    const ScoresProblem<S>& problem;
    const Layout& layout;
    const Room<S>& room;
    int members;
    int64_t b[sequences], length[sequences];

    Group(const ScoresProblem<S>& of, const Layout& in, const Room<S>& with, const int64_t* order, int64_t count)
        : problem(of), layout(in), room(with), members(int(count)) {
        for (int l = 0; l < sequences; ++l) {
            b[l] = order[l < members ? l : 0];
            length[l] = l < members ? problem.lengths[b[l]] : 0;
        }
    }

    int64_t valid(int l, int64_t n, int64_t steps) const {
        return std::max<int64_t>(0, std::min(length[l] - n, steps));
    }

    int64_t row(int l, int64_t n) const {
        const int64_t t = problem.kept ? problem.kept[b[l] * problem.steps + n] : n;
        return (b[l] * problem.steps + t) * problem.states;
    }

    template <class T>
    void tape_runs(T* tape, int plane, int64_t n, int64_t steps, Run<T>* runs) const {
        for (int l = 0; l < sequences; ++l) {
            runs[l] = {tape + ((b[l] * 2 + plane) * (problem.steps + 1) + n + 1) * problem.states,
                       valid(l, n, steps) * problem.states};
        }
    }

    // a (plane 0) or s (plane 1) of visits n … n + steps − 1.
    void read_tape(int plane, int64_t n, int64_t steps, S* to) const {
        ConstRuns runs;
        tape_runs<const S>(problem.tape, plane, n, steps, runs);
        layout.gather(runs, steps, Vec<S>{}, to);
    }

    void write_tape(const S* from, int plane, int64_t n, int64_t steps, S* tape) const {
        Runs runs;
        tape_runs<S>(tape, plane, n, steps, runs);
        layout.scatter(from, steps, runs);
    }

    // The rows of visits n … n + steps − 1 of something of the emissions' shape.
    void read_visits(const S* emissions, int64_t n, int64_t steps, Vec<S> pad, S* to) const {
        const int64_t states = problem.states;
        ConstRuns runs;
        for (int l = 0; l < sequences; ++l) {
            const int64_t count = valid(l, n, steps);
            S* staged = &room.stage[l * depth * states];
            for (int64_t k = 0; problem.kept && k < count; ++k) {
                std::copy_n(emissions + row(l, n + k), states, staged + k * states);
            }
            runs[l] = {problem.kept || count == 0 ? staged : emissions + row(l, n), count * states};
        }
        layout.gather(runs, steps, pad, to);
    }

    void write_visits(const S* from, int64_t n, int64_t steps, S* emissions) const {
        const int64_t states = problem.states;
        Runs runs;
        for (int l = 0; l < sequences; ++l) {
            const int64_t count = valid(l, n, steps);
            S* staged = &room.stage[l * depth * states];
            runs[l] = {problem.kept || count == 0 ? staged : emissions + row(l, n), count * states};
        }
        layout.scatter(from, steps, runs);
        for (int l = 0; problem.kept && l < members; ++l) {
            for (int64_t k = 0; k < valid(l, n, steps); ++k) {
                std::copy_n(runs[l].from + k * states, states, emissions + row(l, n + k));
            }
        }
    }

    // Scores of the start, or a direction of theirs, as a step.
    void read_start(const S* start, Vec<S> pad, S* to) const {
        ConstRuns runs;
        for (int l = 0; l < sequences; ++l) {
            runs[l] = {start + b[l] * problem.start_batch, valid(l, 0, 1) * problem.states};
        }
        layout.gather(runs, 1, pad, to);
    }

    void clear_unkept(S* emissions) const {
        for (int l = 0; l < members; ++l) {
            S* rows = emissions + b[l] * problem.steps * problem.states;
            int64_t t = 0;
            for (int64_t n = 0; n <= length[l]; ++n) {
                const int64_t next = n == length[l] ? problem.steps : row(l, n) / problem.states - b[l] * problem.steps;
                std::fill(rows + t * problem.states, rows + next * problem.states, S(0));
                t = next + 1;
            }
        }
    }
};

// The probabilities of the last states but for their sum, a ∘ exp(end − top), in padded rows; the sum.
template <class S>
S weigh_end(const Line<S>& line, const S* a, const S* end, S& top, S* weights) {
    Vec<S> greatest = Vec<S>{} + std::numeric_limits<S>::lowest(), total{};
    for (int64_t v = 0; v < line.vectors; ++v) greatest = greater<S>(greatest, line.get_low(end, v));
    top = greatest_across<S>(greatest)[0];
    for (int64_t v = 0; v < line.vectors; ++v) {
        const Vec<S> weight = line.get(a, v) * exp_nonpositive(line.get_low(end, v) - top);
        store<S>(weights + v * line.lanes, weight);
        total += weight;
    }
    return sum_across<S>(total)[0];
}

// Whether a state that has next to nothing after visit n, coming from `before`, can be reached all the same.
template <class S>
bool loses(const ScoresProblem<S>& problem, int64_t b, int64_t emission_row, bool first, const S* before,
           const S* after) {
    const int64_t states = problem.states;
    const S* emissions = problem.scores.emissions + emission_row;
    const S* start = problem.scores.start + b * problem.start_batch;
    const S* transitions = problem.scores.transitions + b * problem.transition_batch;
    for (int64_t i = 0; i < states; ++i) {
        if (after[i] >= least<S> || emissions[i] == -infinity<S>) continue;
        if (first && start[i] > -infinity<S>) return true;
        for (int64_t p = 0; !first && p < states; ++p) {
            if (before[p] > 0 && transitions[i * states + p] > -infinity<S>) return true;
        }
    }
    return false;
}

// The forward sweep of a group. A sequence that has ended goes on along emissions of 0 and leaves no trace.
template <class Layout, class S>
struct Forward {
    static constexpr int lanes = lanes_of<S>, sequences = Layout::sequences;
    using F = Format<S>;
    using Int = typename F::Int;
    using Ints = typename Shape<Vec<S>>::Int;
    using Bits = typename Shape<Vec<S>>::Bits;

    const Group<Layout, S>& group;
    const Weights<S>& weights;
    S *value, *tape;
    std::uint8_t* underflowed;

    const ScoresProblem<S>& problem = group.problem;
    const Layout& layout = group.layout;
    const Line<S>& line = layout.line;
    S *emissions = group.room.block(0), *a = group.room.block(1), *s = group.room.block(2);
    int64_t alive = group.members;
    double offset[sequences] = {};  // v_n = log a_n + offset + n · weights.base + exponent · log 2
    Bits exponent = {};
    Vec<S> scale = Vec<S>{} + S(1);  // the power of two that brings the greatest of the last a to 1
    bool lost[sequences] = {};
    Ints bad = {};

    // Whether all scores of the group were below +∞ and not NaN.
    bool run() {
        const int64_t plane = (problem.steps + 1) * problem.states, stride = layout.stride;
        for (int l = 0; l < group.members; ++l) {
            tape[(2 * group.b[l] + 1) * plane] = 1;
            underflowed[group.b[l]] = 0;
        }
        for (; alive > 0 && group.length[alive - 1] == 0; --alive) value[group.b[alive - 1]] = 0;
        for (int64_t n = 0; n < group.length[0]; n += depth) {
            const int64_t steps = std::min(depth, group.length[0] - n);
            group.read_visits(problem.scores.emissions, n, steps, line.low, emissions);
            if (n == 0) start();
            for (int64_t k = 0; k < steps; ++k) step(n + k, k);
            group.write_tape(a + stride, 0, n, steps, tape);
            group.write_tape(s, 1, n, steps, tape);
            std::copy_n(a + steps * stride, stride, a);
        }
        for (int l = 0; l < group.members; ++l) {
            if (lost[l]) tape[(2 * group.b[l] + 1) * plane] = 0;
        }
        return !any(bad);
    }

    // The greatest number of a step, by sequence; a finite number.
    Vec<S> greatest_of(const S* of) {
        Vec<S> top = Vec<S>{} + std::numeric_limits<S>::lowest();
        for (int64_t v = 0; v < layout.cells; ++v) {
            const Vec<S> x = load<S>(of + v * lanes);
            bad |= ~(x < infinity<S>);
            top = greater<S>(top, x);
        }
        return layout.greatest(top);
    }

    void add_offset(Vec<S> top) {
        for (int l = 0; l < sequences; ++l) offset[l] += double(top[l]);
    }

    // Adds the start to the first emissions. Differences come first: they are exact where it matters.
    void start() {
        group.read_start(problem.scores.start, line.low, a);
        const Vec<S> top = greatest_of(a), top_emission = greatest_of(emissions);
        add_offset(top);
        add_offset(top_emission);
        for (int64_t v = 0; v < layout.cells; ++v) {
            S* at = emissions + v * lanes;
            store<S>(at, (load<S>(at) - top_emission) + (load<S>(a + v * lanes) - top));
        }
    }

    void step(int64_t n, int64_t k) {
        const int64_t stride = layout.stride;
        const S *given = emissions + k * stride, *before = a + k * stride;
        S *after = a + (k + 1) * stride, *through = s + k * stride;
        const Vec<S> top_emission = greatest_of(given), last_scale = scale;
        Vec<S> top{}, lowest = Vec<S>{} + S(1);
        const auto settle = [&](int64_t v, Vec<S> sum, Vec<S> shift) __attribute__((always_inline)) {
            const Vec<S> factor = exp_nonpositive((load<S>(given + v * lanes) - top_emission) + shift);
            const Vec<S> result = (factor * last_scale) * sum, real = layout.raise_pads(v, result);
            store<S>(through + v * lanes, sum);
            store<S>(after + v * lanes, result);
            top = greater<S>(top, result);
            lowest = real < lowest ? real : lowest;
        };
        add_offset(top_emission);
        if (n == 0) {
            for (int64_t v = 0; v < layout.cells; ++v) settle(v, Vec<S>{} + S(1), Vec<S>{});
        } else {
            layout.multiply({{weights.into, before}}, [&](int64_t v, Vec<S> sum) __attribute__((always_inline)) {
                settle(v, sum, layout.by_state(weights.shift.get(), v));
            });
        }
        const Ints low = lowest < least<S>;
        if (any(low)) check(n, low, before, after);
        for (; alive > 0 && group.length[alive - 1] == n + 1; --alive) finish(int(alive - 1), after);
        const Bits power = bits<Bits>(layout.greatest(top)) >> F::mantissa;
        scale = bits<Vec<S>>((Int(2 * F::bias) - power) << F::mantissa);
        exponent += power - Int(F::bias);
    }

    void check(int64_t n, Ints low, const S* before, const S* after) {
        S *from = group.room.row(0), *to = group.room.row(1);
        for (int l = 0; l < alive; ++l) {
            if (lost[l] || (sequences > 1 && !low[l])) continue;
            layout.get_states(before, l, from);
            layout.get_states(after, l, to);
            lost[l] = loses<S>(problem, group.b[l], group.row(l, n), n == 0, from, to);
        }
    }

    void finish(int l, const S* last) {
        const int64_t b = group.b[l];
        const S* end = problem.scores.end + b * problem.end_batch;
        S *states = group.room.row(0), top;
        layout.get_states(last, l, states);
        const S total = weigh_end<S>(line, states, end, top, group.room.row(1));
        for (int64_t i = 0; i < line.states; ++i) {
            if (!(end[i] < infinity<S>)) bad = ~Ints{};
            lost[l] |= total < least<S> && states[i] > 0 && end[i] > -infinity<S>;
        }
        const double more = double(Int(exponent[l])) * 0.69314718055994530942 + double(top) + std::log(double(total));
        const double bases = double(group.length[l] - 1) * double(weights.base);
        value[b] = total > 0 ? S(offset[l] + bases + more) : -infinity<S>;
        underflowed[b] = lost[l];
    }
};

// The sums of a worker over the batch, except transitions.
template <class S>
struct Ends {
    Numbers<S> start, end;

    explicit Ends(const Line<S>& line) : start(line.padded), end(line.padded) {}

    void add_start(const ScoresProblem<S>& problem, int64_t b, const S* row, const Scores<S>& to) const {
        S* at = problem.start_batch == 0 ? start.get() : to.start + b * problem.start_batch;
        for (int64_t i = 0; i < problem.states; ++i) at[i] += row[i];
    }
    void add_end(const ScoresProblem<S>& problem, int64_t b, const S* row, const Scores<S>& to) const {
        S* at = problem.end_batch == 0 ? end.get() : to.end + b * problem.end_batch;
        for (int64_t i = 0; i < problem.states; ++i) at[i] += row[i];
    }

    void deliver(const ScoresProblem<S>& problem, const Scores<S>& to) const {
        for (int64_t i = 0; i < problem.states; ++i) {
            if (problem.start_batch == 0) to.start[i] += start[i];
            if (problem.end_batch == 0) to.end[i] += end[i];
        }
    }
};

// The backward sweep of a group, times the seeds. A sequence that has not begun has no mass. Where place k of a block
// of s and u belongs to visit n, that of a and m belongs to visit n − 1.
template <class Layout, class S>
void sweep_back(const Group<Layout, S>& group, const Weights<S>& weights, const S* seed, const Ends<S>& ends,
                S* transitions, const Scores<S>& gradient) {
    constexpr int lanes = lanes_of<S>;
    const ScoresProblem<S>& problem = group.problem;
    const Layout& layout = group.layout;
    const int64_t stride = layout.stride;
    S *a = group.room.block(0), *s = group.room.block(1), *m = group.room.block(2), *u = group.room.block(3);
    S *states = group.room.row(0), each_seed[Layout::sequences] = {};
    for (int l = 0; l < group.members; ++l) each_seed[l] = seed[group.b[l]];
    const Vec<S> seeds = layout.by_sequence(each_seed);
    int begun = 0;
    std::fill_n(m, stride, S(0));
    group.clear_unkept(gradient.emissions);
    for (int64_t n = (group.length[0] - 1) / depth * depth; n >= 0 && group.length[0] > 0; n -= depth) {
        const int64_t steps = std::min(depth, group.length[0] - n), first = n == 0;
        group.read_tape(0, n - 1 + first, steps + 1 - first, a + first * stride);
        group.read_tape(1, n, steps, s);
        std::copy_n(m, stride, m + steps * stride);
        for (int64_t k = steps - 1; k >= 0; --k) {
            S* mass = m + (k + 1) * stride;
            for (; begun < group.members && group.length[begun] == n + k + 1; ++begun) {
                const int64_t b = group.b[begun];
                const S* end = problem.scores.end + b * problem.end_batch;
                S top;
                layout.get_states(a + (k + 1) * stride, begun, states);
                const S total = weigh_end<S>(layout.line, states, end, top, states);
                const S factor = total > 0 ? seed[b] / total : S(0);
                for (int64_t i = 0; i < problem.states; ++i) states[i] *= factor;
                layout.set_states(mass, begun, states);
                ends.add_end(problem, b, states, gradient);
            }
            if (n + k == 0) break;
            Vec<S> total{};
            for (int64_t v = 0; v < layout.cells; ++v) {
                const int64_t at = k * stride + v * lanes;
                const Vec<S> x = load<S>(mass + v * lanes), through = load<S>(s + at);
                total += x;
                store<S>(u + at, through > S(0) ? x / through : Vec<S>{});
            }
            // The sum of m_n, which but for rounding is the seed, is set right in m_{n−1}.
            total = layout.sum(total);
            const Vec<S> correction = total != S(0) ? seeds / total : Vec<S>{};
            const S* ratios = u + k * stride;
            layout.multiply({{weights.out_of, ratios}}, [&](int64_t v, Vec<S> sum) __attribute__((always_inline)) {
                const int64_t at = k * stride + v * lanes;
                store<S>(m + at, load<S>(a + at) * sum * correction);
            });
        }
        group.write_visits(m + stride, n, steps, gradient.emissions);
        layout.add_outer(u + first * stride, a + first * stride, steps - first, transitions);
    }
    for (int l = 0; l < begun; ++l) {
        layout.get_states(m + stride, l, states);
        ends.add_start(problem, group.b[l], states, gradient);
    }
}

// The tangent forward sweep: v̇_n and μ_n = (W (a ∘ v̇)_{n−1} + (W ∘ z) a_{n−1}) / s_n of every visit. v̇_n is relative
// to a separate base, which keeps its precision, and μ_n to that of v̇_{n−1}.
template <class Layout, class S>
void sweep_tangent(const Group<Layout, S>& group, const Weights<S>& weights, const Matrix<S>& tilted,
                   const Scores<const S>& z, S* tangents, S* means) {
    constexpr int lanes = lanes_of<S>;
    const Layout& layout = group.layout;
    const int64_t stride = layout.stride;
    S *a = group.room.block(0), *s = group.room.block(1), *along = group.room.block(2), *a_dot = group.room.block(3);
    Vec<S> base{};
    for (int64_t n = 0; n < group.length[0]; n += depth) {
        const int64_t steps = std::min(depth, group.length[0] - n), first = n == 0;
        group.read_tape(0, n - 1 + first, steps + 1 - first, a + first * stride);
        group.read_tape(1, n, steps, s);
        group.read_visits(z.emissions, n, steps, Vec<S>{}, along);
        if (n == 0) group.read_start(z.start, Vec<S>{}, a_dot);
        for (int64_t k = 0; k < steps; ++k) {
            const int64_t place = (n + k) * stride;
            Vec<S> total{}, total_dot{};
            const auto settle = [&](int64_t v, Vec<S> mean) __attribute__((always_inline)) {
                const int64_t at = k * stride + v * lanes;
                const Vec<S> mass = load<S>(a + at + stride);
                const Vec<S> tangent = mass > S(0) ? (load<S>(along + at) + mean) - base : Vec<S>{};
                store<S>(means + place + v * lanes, mean);
                store<S>(tangents + place + v * lanes, tangent);
                store<S>(a_dot + at + stride, mass * tangent);
                total += mass;
                total_dot += mass * tangent;
            };
            if (n + k == 0) {
                for (int64_t v = 0; v < layout.cells; ++v) settle(v, load<S>(a_dot + v * lanes));
            } else {
                const S *before = a + k * stride, *before_dot = a_dot + k * stride;
                layout.multiply({{weights.into, before_dot}, {tilted.into, before}},
                                [&](int64_t v, Vec<S> sum) __attribute__((always_inline)) {
                                    const Vec<S> through = load<S>(s + k * stride + v * lanes);
                                    settle(v, through > S(0) ? sum / through : Vec<S>{});
                                });
            }
            total = layout.sum(total);
            base = total > S(0) ? layout.sum(total_dot) / total : Vec<S>{};
        }
        std::copy_n(a_dot + steps * stride, stride, a_dot);
    }
}

// Σ u aᵀ, and the rest of what the transitions get but for their weights, in padded rows.
template <class S>
struct Sums {
    int64_t size;
    Numbers<S> plain, rest;

    explicit Sums(const Line<S>& line) : size(line.padded * line.padded), plain(size), rest(size) {}

    void clear() {
        std::fill_n(plain.get(), size, S(0));
        std::fill_n(rest.get(), size, S(0));
    }
};

// The tangent backward sweep, along z, times the seeds, which the masses carry.
template <class Layout, class S>
void sweep_tangent_back(const Group<Layout, S>& group, const Weights<S>& weights, const Matrix<S>& tilted,
                        const S* seed, const Scores<const S>& z, const S* tangents, const S* means, const Ends<S>& ends,
                        Sums<S>& sums, const Scores<S>& product) {
    constexpr int lanes = lanes_of<S>;
    const ScoresProblem<S>& problem = group.problem;
    const Layout& layout = group.layout;
    const Room<S>& room = group.room;
    const int64_t stride = layout.stride;
    S *a = room.block(0), *s = room.block(1), *m = room.block(2), *m_dot = room.block(3);
    S *u = room.block(4), *w = room.block(5), *a_dot = room.block(6), *pull = room.block(7);  // w = u̇ − u ∘ μ, Wᵀu
    S *states = room.row(0), *states_dot = room.row(1), each_seed[Layout::sequences] = {};
    for (int l = 0; l < group.members; ++l) each_seed[l] = seed[group.b[l]];
    const Vec<S> seeds = layout.by_sequence(each_seed);
    int begun = 0;
    std::fill_n(m, stride, S(0));
    std::fill_n(m_dot, stride, S(0));
    group.clear_unkept(product.emissions);
    for (int64_t n = (group.length[0] - 1) / depth * depth; n >= 0 && group.length[0] > 0; n -= depth) {
        const int64_t steps = std::min(depth, group.length[0] - n), first = n == 0;
        group.read_tape(0, n - 1 + first, steps + 1 - first, a + first * stride);
        group.read_tape(1, n, steps, s);
        std::copy_n(m, stride, m + steps * stride);
        std::copy_n(m_dot, stride, m_dot + steps * stride);
        for (int64_t k = steps - 1; k >= 0; --k) {
            S *mass = m + (k + 1) * stride, *mass_dot = m_dot + (k + 1) * stride;
            const S* mean = means + (n + k) * stride;
            for (; begun < group.members && group.length[begun] == n + k + 1; ++begun) {
                const int64_t b = group.b[begun];
                const S *end = problem.scores.end + b * problem.end_batch, *end_dot = z.end + b * problem.end_batch;
                S top, centre = 0;
                layout.get_states(a + (k + 1) * stride, begun, states);
                const S total = weigh_end<S>(layout.line, states, end, top, states);
                layout.get_states(tangents + (n + k) * stride, begun, states_dot);
                for (int64_t i = 0; i < problem.states; ++i) {
                    states_dot[i] = states[i] > 0 ? states_dot[i] + end_dot[i] : S(0);
                    states[i] = states[i] > 0 ? states[i] / total : S(0);
                    centre += states[i] * states_dot[i];
                }
                for (int64_t i = 0; i < problem.states; ++i) {
                    states[i] *= seed[b];
                    states_dot[i] = states[i] * (states_dot[i] - centre);
                }
                layout.set_states(mass, begun, states);
                layout.set_states(mass_dot, begun, states_dot);
                ends.add_end(problem, b, states_dot, product);
            }
            if (n + k == 0) break;
            Vec<S> total{}, total_dot{};
            for (int64_t v = 0; v < layout.cells; ++v) {
                const int64_t at = k * stride + v * lanes;
                const Vec<S> x = load<S>(mass + v * lanes), x_dot = load<S>(mass_dot + v * lanes);
                const Vec<S> through = load<S>(s + at), inverse = through > S(0) ? S(1) / through : Vec<S>{};
                total += x;
                total_dot += x_dot;
                store<S>(u + at, x * inverse);
                store<S>(w + at, (x_dot - x * load<S>(mean + v * lanes)) * inverse);
                store<S>(a_dot + at, load<S>(a + at) * load<S>(tangents + (n + k - 1) * stride + v * lanes));
            }
            // The sums of m_n and ṁ_n, which but for rounding are the seed and 0, are set right in m_{n−1} and ṁ_{n−1}.
            total = layout.sum(total);
            const Vec<S> correction = total != S(0) ? seeds / total : Vec<S>{};
            const Vec<S> excess = total != S(0) ? layout.sum(total_dot) / total : Vec<S>{};
            const S *ratios = u + k * stride, *ratios_dot = w + k * stride;
            layout.multiply({{weights.out_of, ratios}}, [&](int64_t v, Vec<S> sum) __attribute__((always_inline)) {
                store<S>(pull + v * lanes, sum);
            });
            layout.multiply({{weights.out_of, ratios_dot}, {tilted.out_of, ratios}},
                            [&](int64_t v, Vec<S> sum) __attribute__((always_inline)) {
                                const int64_t at = k * stride + v * lanes;
                                const Vec<S> force = load<S>(pull + v * lanes), x = load<S>(a + at) * force;
                                const Vec<S> x_dot = load<S>(a + at) * sum + load<S>(a_dot + at) * force;
                                store<S>(m + at, x * correction);
                                store<S>(m_dot + at, (x_dot - x * excess) * correction);
                            });
        }
        group.write_visits(m_dot + stride, n, steps, product.emissions);
        const int64_t from = first * stride;
        layout.add_outer(u + from, a + from, steps - first, sums.plain.get());
        layout.add_outer(u + from, a_dot + from, steps - first, sums.rest.get());
        layout.add_outer(w + from, a + from, steps - first, sums.rest.get());
    }
    for (int l = 0; l < begun; ++l) {
        layout.get_states(m_dot + stride, l, states);
        ends.add_start(problem, group.b[l], states, product);
    }
}

// Runs body(worker, layout, the numbers of a group's sequences, how many) over the threads. The sequences, the longest
// first, are dealt out to the workers in turn, so that each has the same ones in every run.
template <class S>
struct Plan {
    Line<S> line;
    std::unique_ptr<int64_t[]> order;
    int64_t count = 0;
    bool bundled = false;
    int workers = 1;

    Plan(const ScoresProblem<S>& problem, const S* tape)
        : line(problem.states), order(scratch<int64_t>(problem.batch)) {
        const int64_t plane = (problem.steps + 1) * problem.states, threads = std::max(problem.threads, 1);
        for (int64_t b = 0; b < problem.batch; ++b) {
            if (!tape || tape[(2 * b + 1) * plane] == 1) order[count++] = b;
        }
        std::sort(order.get(), order.get() + count, [&](int64_t a, int64_t b) {
            const int64_t more = problem.lengths[a] - problem.lengths[b];
            return more > 0 || (more == 0 && a < b);
        });
        const int64_t lanes = lanes_of<S>;
        bundled = problem.transition_batch == 0 && count >= lanes * (problem.states > 2 * lanes ? threads : 1);
        workers = int(std::max<int64_t>(1, std::min(threads, (count + size() - 1) / size())));
    }

    int64_t size() const { return bundled ? lanes_of<S> : 1; }
    int64_t stride() const { return bundled ? Bundle<S>(line).stride : Single<S>(line).stride; }

    std::vector<Room<S>> rooms(int blocks) const {
        std::vector<Room<S>> result;
        for (int k = 0; k < workers; ++k) result.emplace_back(line, stride(), int(size()), blocks);
        return result;
    }

    template <class Body>
    void run(Body body) const {
        const Single<S> single(line);
        const Bundle<S> bundle(line);
#pragma omp parallel for schedule(static, 1) num_threads(workers) if (workers > 1)
        for (int worker = 0; worker < workers; ++worker) {
            const NoDenormals flush;
            for (int64_t at = worker * size(); at < count; at += workers * size()) {
                if (bundled) {
                    body(worker, bundle, &order[at], std::min(size(), count - at));
                } else {
                    body(worker, single, &order[at], int64_t(1));
                }
            }
        }
    }
};

template <class S>
bool forward(const ScoresProblem<S>& problem, S* value, S* tape, std::uint8_t* underflowed) {
    const Plan<S> plan(problem, nullptr);
    if (plan.count == 0) return true;
    const bool shared = problem.transition_batch == 0;
    std::vector<Weights<S>> weights;
    for (int k = 0; k < (shared ? 1 : plan.workers); ++k) weights.emplace_back(plan.line, true, false);
    const auto rooms = plan.rooms(3);
    bool good = true;
    if (shared && problem.lengths[plan.order[0]] > 1) good = weights[0].fill(problem.scores.transitions);
    plan.run([&](int worker, const auto& layout, const int64_t* order, int64_t count) {
        using Layout = std::decay_t<decltype(layout)>;
        Weights<S>& mine = weights[shared ? 0 : worker];
        bool fine = true;
        if (!shared && problem.lengths[order[0]] > 1) {
            fine = mine.fill(problem.scores.transitions + order[0] * problem.transition_batch);
        }
        const Group<Layout, S> group(problem, layout, rooms[worker], order, count);
        fine &= Forward<Layout, S>{group, mine, value, tape, underflowed}.run();
        if (!fine) {
#pragma omp atomic write
            good = false;
        }
    });
    return good;
}

// transitions += W ∘ (rest + z ∘ plain); without z, W ∘ plain. z does not matter where W is 0.
template <class S>
void deliver(const Weights<S>& weights, const S* z, const Sums<S>& sums, S* transitions) {
    const int64_t states = weights.line.states, padded = weights.line.padded;
    for (int64_t i = 0; i < states; ++i) {
        for (int64_t p = 0; p < states; ++p) {
            const int64_t at = i * padded + p, to = i * states + p;
            if (weights.rows[at] > 0) {
                transitions[to] += weights.rows[at] * (z ? sums.rest[at] + z[to] * sums.plain[at] : sums.plain[at]);
            }
        }
    }
}

template <class S>
void backward(const ScoresProblem<S>& problem, const S* seed, const Scores<S>& gradient) {
    const Plan<S> plan(problem, problem.tape);
    if (plan.count == 0) return;
    const bool shared = problem.transition_batch == 0;
    std::vector<Weights<S>> weights;
    std::vector<Sums<S>> sums;
    std::vector<Ends<S>> ends;
    for (int k = 0; k < plan.workers; ++k) {
        if (k == 0 || !shared) weights.emplace_back(plan.line, false, true);
        sums.emplace_back(plan.line);
        ends.emplace_back(plan.line);
    }
    const auto rooms = plan.rooms(4);
    if (shared) weights[0].fill(problem.scores.transitions);
    plan.run([&](int worker, const auto& layout, const int64_t* order, int64_t count) {
        using Layout = std::decay_t<decltype(layout)>;
        Weights<S>& mine = weights[shared ? 0 : worker];
        const int64_t matrix = order[0] * problem.transition_batch;
        if (!shared) mine.fill(problem.scores.transitions + matrix);
        const Group<Layout, S> group(problem, layout, rooms[worker], order, count);
        sweep_back(group, mine, seed, ends[worker], sums[worker].plain.get(), gradient);
        if (!shared) {
            deliver<S>(mine, nullptr, sums[worker], gradient.transitions + matrix);
            sums[worker].clear();
        }
    });
    for (int k = 0; k < plan.workers; ++k) {
        ends[k].deliver(problem, gradient);
        if (shared) deliver<S>(weights[0], nullptr, sums[k], gradient.transitions);
    }
}

template <class S>
void hessian(const ScoresProblem<S>& problem, const S* seed, const Scores<const S>& z, const Scores<S>& product) {
    const Plan<S> plan(problem, problem.tape);
    if (plan.count == 0) return;
    const bool shared = problem.transition_batch == 0;
    const int64_t history = problem.lengths[plan.order[0]] * plan.stride();
    std::vector<Weights<S>> weights;
    std::vector<Matrix<S>> tilts;
    std::vector<Sums<S>> sums;
    std::vector<Ends<S>> ends;
    std::vector<Numbers<S>> histories;
    for (int k = 0; k < plan.workers; ++k) {
        if (k == 0 || !shared) {
            weights.emplace_back(plan.line, true, true);
            tilts.emplace_back(plan.line, true, true);
        }
        sums.emplace_back(plan.line);
        ends.emplace_back(plan.line);
        histories.emplace_back(2 * history);
    }
    const auto rooms = plan.rooms(8);
    const auto prepare = [&](int k, int64_t matrix) {
        weights[k].fill(problem.scores.transitions + matrix);
        tilt<S>(weights[k], z.transitions + matrix, tilts[k]);
    };
    if (shared) prepare(0, 0);
    plan.run([&](int worker, const auto& layout, const int64_t* order, int64_t count) {
        using Layout = std::decay_t<decltype(layout)>;
        const int k = shared ? 0 : worker;
        const int64_t matrix = order[0] * problem.transition_batch;
        if (!shared) prepare(k, matrix);
        S *tangents = histories[worker].get(), *means = tangents + history;
        const Group<Layout, S> group(problem, layout, rooms[worker], order, count);
        sweep_tangent(group, weights[k], tilts[k], z, tangents, means);
        sweep_tangent_back(group, weights[k], tilts[k], seed, z, tangents, means, ends[worker], sums[worker],
                           product);
        if (!shared) {
            deliver<S>(weights[k], z.transitions + matrix, sums[worker], product.transitions + matrix);
            sums[worker].clear();
        }
    });
    for (int k = 0; k < plan.workers; ++k) {
        ends[k].deliver(problem, product);
        if (shared) deliver<S>(weights[0], z.transitions, sums[k], product.transitions);
    }
}

}  // namespace

template <class S>
ProductKernels<S> product_kernels() {
    return {forward<S>, backward<S>, hessian<S>};
}

template ProductKernels<float> product_kernels<float>();
template ProductKernels<double> product_kernels<double>();

}  // namespace bellmax::BELLMAX_ARCH
