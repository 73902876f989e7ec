// A chain as products of matrices and vectors. With W[i, p] = exp(transitions[i, p] − r_i), r_i the greatest of row i,
// the forward sweep keeps a_n ∝ exp(v_n) and s_n = W a_{n−1} of every step. Backward, the marginals m_n give
// u_n = m_n / s_n and m_{n−1} = a_{n−1} ∘ Wᵀu_n without another exp, and the transitions get W ∘ Σ_n u_n a_{n−1}ᵀ.
#include "exp.h"

#include <atomic>
#include <vector>

#include "../base/threads.h"
#include "../omega/negentropy.h"
#include "exp_layout.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace in_exp_space {
namespace {

template <class S>
constexpr S unit = omega::Negentropy<S>::unit;
// A state that is reached and has less than this, where the greatest is about 1, may lose what leads through it.
template <class S>
constexpr S least = sizeof(S) == 4 ? S(1e-28) : S(1e-280);
// Where no weight of an edge is less than this, a sum over edges from states that have more is 0 only if there are none.
template <class S>
constexpr S least_weight = sizeof(S) == 4 ? S(1e-9) : S(1e-20);

template <class S>
using Ints = typename Shape<Vec<S>>::Int;

// Sequences that are swept together, the longest first. A place without a sequence has length 0.
template <class S>
struct Group {
    static constexpr int lanes = lanes_of<S>, most = Layout<S>::most_sequences;
    using Int = typename Format<S>::Int;

    const ScoresProblem<S>& problem;
    const Layout<S>& layout;
    int members;
    int64_t longest, b[most], length[most];
    Ints<S> lengths[Layout<S>::most_rows];  // by row

    Group(const ScoresProblem<S>& of, const Layout<S>& in, const int64_t* order, int64_t count)
        : problem(of), layout(in), members(int(count)), longest(of.lengths[order[0]]) {
        for (int l = 0; l < layout.sequences; ++l) {
            b[l] = order[l < members ? l : 0];
            length[l] = l < members ? problem.lengths[b[l]] : 0;
            if (layout.across) {
                lengths[l / lanes][l % lanes] = Int(length[l]);
            } else {
                lengths[l] = Ints<S>{} + Int(length[l]);
            }
        }
    }

    // Where the rows of sequence l are, of visit n of something of the emissions' shape, and of the tape.
    int64_t row(int l, int64_t n) const {
        const int64_t visit = problem.kept ? std::max<int64_t>(0, std::min(n, length[l] - 1)) : n;
        return (b[l] * problem.steps + visited(problem, b[l], visit)) * problem.states;
    }
    int64_t tape_row(int l, int plane, int64_t n) const {
        return ((b[l] * 2 + plane) * (problem.steps + 1) + n + 1) * problem.states;
    }

    // Reads visits n … n + steps − 1, which place(l, n) leads to; 0 where a sequence has ended.
    template <class Place>
    void read(Place place, bool is_dense, int64_t n, int64_t steps, Vec<S> pad, S* to) const {
        for (int64_t k = 0, run = is_dense ? steps : 1; k < steps; k += run) {
            for (int r = 0; r < layout.rows; ++r) {
                const S* from[lanes];
                for (int l = 0; l < (layout.across ? lanes : 1); ++l) from[l] = place(layout.first_of(r) + l, n + k);
                layout.gather(from, run, pad, to + k * layout.stride + r * layout.row_stride);
            }
        }
        for (int64_t k = std::max<int64_t>(0, length[layout.sequences - 1] - n); k < steps; ++k) {
            for (int r = 0; r < layout.rows; ++r) {
                S* at = to + k * layout.stride + r * layout.row_stride;
                const auto on = lengths[r] > Ints<S>{} + Int(n + k);
                for (int64_t v = 0; v < layout.width; ++v, at += layout.gap) store<S>(at, on ? load<S>(at) : Vec<S>{});
            }
        }
    }
    void read_visits(const S* rows, int64_t n, int64_t steps, Vec<S> pad, S* to) const {
        read([&](int l, int64_t at) { return rows + row(l, at); }, !problem.kept, n, steps, pad, to);
    }
    // a (plane 0) or s (plane 1).
    void read_tape(int plane, int64_t n, int64_t steps, S* to) const {
        read([&](int l, int64_t at) { return problem.tape + tape_row(l, plane, at); }, true, n, steps, Vec<S>{}, to);
    }
    // What there is once for each sequence, or for all, as a step.
    void read_once(const S* numbers, int64_t batch, Vec<S> pad, S* to) const {
        read([&](int l, int64_t) { return numbers + b[l] * batch; }, true, 0, 1, pad, to);
    }

    // Writes visits n … n + steps − 1; where a sequence has ended, nothing or what stands there.
    template <class Place>
    void write(Place place, bool is_dense, int64_t n, int64_t steps, const S* from) const {
        int alive = members;
        for (int64_t k = 0, run = is_dense ? steps : 1; k < steps; k += run) {
            while (alive > 0 && length[alive - 1] <= n + k) --alive;
            for (int r = 0; r < layout.rows && layout.first_of(r) < alive; ++r) {
                const int first = layout.first_of(r), valid = layout.across ? std::min(lanes, alive - first) : 1;
                S* to[lanes];
                for (int l = 0; l < valid; ++l) to[l] = place(first + l, n + k);
                layout.scatter(to, valid, run, from + k * layout.stride + r * layout.row_stride);
            }
        }
    }
    void write_visits(const S* from, int64_t n, int64_t steps, S* rows) const {
        write([&](int l, int64_t at) { return rows + row(l, at); }, !problem.kept, n, steps, from);
    }
    void write_tape(const S* from, int plane, int64_t n, int64_t steps, S* tape) const {
        write([&](int l, int64_t at) { return tape + tape_row(l, plane, at); }, true, n, steps, from);
    }
};

// W; r_i relative to their greatest and in units of log 2, −∞ past the last state, as a step; that greatest.
template <class S>
struct Weights : Matrix<S> {
    Array<S> shift;
    S base = 0;
    bool is_moderate = true;  // no weight of an edge is very small

    explicit Weights(const Layout<S>& of) : Matrix<S>(of), shift(filled<S>(of.stride, -infinity<S>)) {}

    // Whether all transitions were below +∞ and not NaN.
    bool fill(const S* transitions) {
        constexpr int lanes = lanes_of<S>;
        const Layout<S>& layout = this->layout;
        const int64_t states = layout.states, padded = layout.padded;
        const Layout<S> line(states, false, 1);
        const Array<S> greatest = scratch<S>(states);
        Ints<S> bad{}, small{};
        base = -infinity<S>;
        for (int64_t i = 0; i < states; ++i) {
            const S* from = transitions + i * states;
            Vec<S> top = broadcast(-infinity<S>);
            for (int64_t v = 0; v < line.width; ++v) {
                const Vec<S> x = line.get(from, v, line.low);
                bad |= ~(x < infinity<S>);
                top = greater<S>(top, x);
            }
            const S r = greatest_lane<S>(top)[0], finite = r == -infinity<S> ? S(0) : r;
            for (int64_t v = 0; v < line.width; ++v) {
                const Vec<S> x = line.get(from, v, line.low), weight = exp2_of((x - finite) * unit<S>);
                small |= (x > -infinity<S>) & (weight < least_weight<S>);
                store<S>(&this->rows[i * padded + v * lanes], weight);
            }
            greatest[i] = r;
            base = std::max(r, base);
        }
        if (base == -infinity<S>) base = 0;
        for (int64_t i = 0; i < states; ++i) {
            for (int l = 0; l < layout.sequences; ++l) {
                const int64_t at = layout.across ? i * layout.gap + l : l * layout.row_stride + i;
                shift[at] = (greatest[i] - base) * unit<S>;
            }
        }
        is_moderate = !any(small);
        return !any(bad);
    }
};

// W ∘ z, where z does not matter unless W is positive.
template <class S>
void tilt(const Matrix<S>& weights, const S* z, Matrix<S>& tilted) {
    const int64_t states = weights.layout.states, padded = weights.layout.padded;
    for (int64_t i = 0; i < states; ++i) {
        for (int64_t p = 0; p < states; ++p) {
            const S w = weights.rows[i * padded + p];
            tilted.rows[i * padded + p] = w > 0 ? w * z[i * states + p] : S(0);
        }
    }
    tilted.pack(true, true);
}

// --- forward

// In place of the scores of a row exp(x − greatest + shift), 0 for −∞ alone; without a shift, (x − greatest) · unit. Returns
// the greatest, a finite number. A score that is +∞ or NaN is `bad`.
template <class S>
Vec<S> exponentiate(const Layout<S>& layout, S* __restrict row, const S* __restrict shift, Ints<S>& bad) {
    const int64_t end = layout.width * layout.gap, gap = layout.gap;
    Vec<S> top = broadcast(std::numeric_limits<S>::lowest());
    Ints<S> wrong{};
    for (int64_t at = 0; at < end; at += gap) {
        const Vec<S> x = load<S>(row + at);
        wrong |= ~(x < infinity<S>);
        top = greater<S>(top, x);
    }
    bad |= wrong;
    top = layout.greatest(top);
    const Vec<S> tiny = broadcast(std::numeric_limits<S>::min());
    for (int64_t at = 0; at < end; at += gap) {
        const Vec<S> relative = (load<S>(row + at) - top) * unit<S>, x = shift ? relative + load<S>(shift + at) : relative;
        store<S>(row + at, !shift ? x : x > -infinity<S> ? greater<S>(exp2_of(x), tiny) : Vec<S>{});
    }
    return top;
}

// after = factors ∘ sums · scale of a row, and the greatest of them. Returns the least, padding aside.
template <class S>
Vec<S> scale_row(const Layout<S>& layout, const S* __restrict factors, const S* __restrict sums, Vec<S> scale, Vec<S> padding,
                 S* __restrict after, Vec<S>& greatest) {
    const int64_t gap = layout.gap, last = (layout.width - 1) * gap;
    Vec<S> top{}, lowest = broadcast(S(1));
    for (int64_t at = 0; at <= last; at += gap) {
        const Vec<S> result = (load<S>(factors + at) * scale) * load<S>(sums + at);
        store<S>(after + at, result);
        top = greater<S>(top, result);
        lowest = lesser<S>(at < last ? result : result + padding, lowest);
    }
    greatest = top;
    return lowest;
}

// The sum of the probabilities of the last states but for a factor, a ∘ ends of a row.
template <class S>
Vec<S> sum_ends(const Layout<S>& layout, const S* __restrict a, const S* __restrict ends) {
    Vec<S> total{};
    for (int64_t v = 0; v < layout.width; ++v) total += load<S>(a + v * layout.gap) * load<S>(ends + v * layout.gap);
    return layout.sum(total);
}

// The forward sweep of a group. A sequence that has ended goes on along emissions of 0 and leaves no trace.
template <class S>
class Forward {
    static constexpr int lanes = lanes_of<S>, most_rows = Layout<S>::most_rows;
    using F = Format<S>;
    using Int = typename F::Int;
    using Bits = typename Shape<Vec<S>>::Bits;

    const Group<S>& group;
    const Weights<S>& weights;
    S *value, *tape;
    std::uint8_t* underflowed;

    const ScoresProblem<S>& problem = group.problem;
    const Layout<S>& layout = group.layout;
    const int64_t stride = layout.stride, row = layout.row_stride;
    S *factors, *a, *s, *ends;
    omega::Sum<Vec<S>> offset[most_rows];  // v_n = log a_n + offset + n · weights.base + exponent · log 2
    Bits exponent[most_rows] = {};
    Vec<S> end_top[most_rows], scale[most_rows];  // scale: the power of two that brings the greatest of the last a to 1
    Ints<S> lost[most_rows] = {}, bad = {};
    Vec<S> padding = layout.low < S(0) ? broadcast(S(1)) : Vec<S>{};

public:
    template <class Room>
    Forward(const Group<S>& of, const Weights<S>& with, const Room& room, S* to_value, S* to_tape, std::uint8_t* to_lost)
        : group(of), weights(with), value(to_value), tape(to_tape), underflowed(to_lost), factors(room.block(0)),
          a(room.block(1)), s(room.block(2)), ends(room.block(3)) {}

    // Whether all scores of the group were below +∞ and not NaN.
    bool run() {
        begin();
        for (int64_t n = 0; n < group.longest; n += layout.depth) {
            const int64_t steps = std::min(layout.depth, group.longest - n);
            group.read_visits(problem.scores.emissions, n, steps, layout.low, factors);
            for (int64_t k = 0; k < steps; ++k) weigh(k, n + k == 0 ? a : weights.shift.get());
            for (int64_t k = 0; k < steps; ++k) step(n + k, k);
            if (tape) {
                group.write_tape(a + stride, 0, n, steps, tape);
                group.write_tape(s, 1, n, steps, tape);
            }
            std::copy_n(a + steps * stride, stride, a);
        }
        return !any(bad);
    }

private:
    // The scores of the start are the shift of the first step.
    void begin() {
        for (int l = 0; l < group.members; ++l) {
            if (group.length[l] == 0) set(l, S(0), false);
        }
        group.read_once(problem.scores.start, problem.start_batch, layout.low, a);
        group.read_once(problem.scores.end, problem.end_batch, layout.low, ends);
        std::fill_n(factors, stride, S(0));
        for (int r = 0; r < layout.rows; ++r) {
            offset[r].add(exponentiate<S>(layout, a + r * row, nullptr, bad));
            end_top[r] = exponentiate<S>(layout, ends + r * row, factors + r * row, bad);
            scale[r] = broadcast(S(1));
        }
    }

    void weigh(int64_t k, const S* shift) {
        for (int r = 0; r < layout.rows; ++r) {
            offset[r].add(exponentiate<S>(layout, factors + k * stride + r * row, shift + r * row, bad));
        }
    }

    void step(int64_t n, int64_t k) {
        const S* given = factors + k * stride;
        S *after = a + (k + 1) * stride, *through = s + k * stride;
        if (n == 0) {
            std::fill_n(through, stride, S(1));
        } else {
            multiply<S>(layout, {{weights, a + k * stride}}, false, through);
        }
        for (int r = 0; r < layout.rows; ++r) {
            const int64_t at = r * row;
            Vec<S> greatest;
            const Vec<S> lowest = scale_row(layout, given + at, through + at, scale[r], padding, after + at, greatest);
            if (any(lowest < least<S>)) check(r, given + at, through + at, after + at);
            const Ints<S> ends_here = group.lengths[r] == Ints<S>{} + Int(n + 1);
            if (any(ends_here)) finish(n, r, after + at);
            const Bits power = bits<Bits>(layout.greatest(greatest)) >> F::mantissa;
            scale[r] = bits<Vec<S>>((Int(2 * F::bias) - power) << F::mantissa);
            exponent[r] += power - Int(F::bias);
        }
    }

    // Looks for states that may be reached, but have so little that what leads through them may be lost.
    void check(int r, const S* given, const S* through, const S* after) {
        Ints<S> low{};
        for (int64_t at = 0; at < layout.width * layout.gap; at += layout.gap) {
            const Ints<S> reached = weights.is_moderate ? load<S>(through + at) > S(0) : ~Ints<S>{};
            low |= (load<S>(after + at) < least<S>) & (load<S>(given + at) > S(0)) & reached;
        }
        lost[r] |= layout.across ? low : Ints<S>{} - any(low);
    }

    // The values of the sequences of a row that end at visit n.
    void finish(int64_t n, int r, const S* last) {
        const Vec<S> total = sum_ends<S>(layout, last, ends + r * row), log = log2_of(total);
        Ints<S> reached{};
        for (int64_t at = 0; at < layout.width * layout.gap; at += layout.gap) {
            reached |= (load<S>(last + at) > S(0)) & (load<S>(ends + r * row + at) > S(0));
        }
        if (!layout.across) reached = Ints<S>{} - any(reached);
        const Ints<S> is_lost = lost[r] | ((total < least<S>) & reached);
        for (int l = layout.first_of(r); l < group.members && layout.row_of(l) == r; ++l) {
            if (group.length[l] != n + 1) continue;
            const int lane = layout.lane_of(l);
            const double powers = (double(Int(exponent[r][lane])) + double(log[lane])) * omega::Negentropy<double>::ln2;
            const double tops = double(offset[r].total[lane]) - double(offset[r].lost[lane]) + double(end_top[r][lane]);
            set(l, total[lane] > 0 ? S(tops + double(n) * double(weights.base) + powers) : -infinity<S>, is_lost[lane]);
        }
    }

    void set(int l, S found, bool is_lost) {
        value[group.b[l]] = found;
        underflowed[group.b[l]] = is_lost;
        if (tape) tape[group.tape_row(l, 1, -1)] = is_lost ? S(0) : S(1);
    }
};

// --- tangent forward

// A direction z, W ∘ z, and what the tangent forward sweep finds along it: v̇_n and μ_n of every visit.
template <class S>
struct Direction {
    Scores<const S> z;
    const Matrix<S>& tilted;
    S *tangents, *means;
};

// The mean of a row from s times it, v̇ = z + mean − base where the state has mass, and a ∘ v̇. Returns ⟨a, v̇⟩ / Σ a.
template <class S>
Vec<S> push_row(const Layout<S>& layout, const S* __restrict a, const S* __restrict z, const S* __restrict s, Vec<S> base,
                S* __restrict mean, S* __restrict tangent, S* __restrict a_dot) {
    Vec<S> sum{}, sum_dot{};
    for (int64_t v = 0, at = 0; v < layout.width; ++v, at += layout.gap) {
        const Vec<S> mass = load<S>(a + at), through = load<S>(s + at);
        const Vec<S> centre = through > S(0) ? load<S>(mean + at) / through : Vec<S>{};
        const Vec<S> moved = mass > S(0) ? (load<S>(z + at) + centre) - base : Vec<S>{};
        store<S>(mean + at, centre);
        store<S>(tangent + at, moved);
        store<S>(a_dot + at, mass * moved);
        sum += mass;
        sum_dot += mass * moved;
    }
    const Vec<S> total = layout.sum(sum);
    return total > S(0) ? layout.sum(sum_dot) / total : Vec<S>{};
}

// v̇_n and μ_n = (W (a ∘ v̇)_{n−1} + (W ∘ z) a_{n−1}) / s_n of every visit. v̇_n is relative to a separate base, which keeps
// its precision, and μ_n to that of v̇_{n−1}.
template <class S, class Room>
void sweep_tangent(const Group<S>& group, const Weights<S>& weights, const Direction<S>& along, const Room& room) {
    const Layout<S>& layout = group.layout;
    const int64_t stride = layout.stride;
    S *a = room.block(0), *s = room.block(1), *z = room.block(2), *a_dot = room.block(3);
    Vec<S> base[Layout<S>::most_rows] = {};
    for (int64_t n = 0; n < group.longest; n += layout.depth) {
        const int64_t steps = std::min(layout.depth, group.longest - n), first = n == 0;
        group.read_tape(0, n - 1 + first, steps + 1 - first, a + first * stride);
        group.read_tape(1, n, steps, s);
        group.read_visits(along.z.emissions, n, steps, Vec<S>{}, z);
        for (int64_t k = 0; k < steps; ++k) {
            const int64_t here = k * stride;
            S *mean = along.means + (n + k) * stride, *tangent = along.tangents + (n + k) * stride;
            if (n + k == 0) {
                group.read_once(along.z.start, group.problem.start_batch, Vec<S>{}, mean);  // s is 1
            } else {
                multiply<S>(layout, {{weights, a_dot + here}, {along.tilted, a + here}}, false, mean);
            }
            for (int r = 0; r < layout.rows; ++r) {
                const int64_t row = r * layout.row_stride, at = here + row;
                base[r] = push_row(layout, a + at + stride, z + at, s + at, base[r], mean + row, tangent + row,
                                   a_dot + at + stride);
            }
        }
        std::copy_n(a_dot + steps * stride, stride, a_dot);
    }
}

// --- backward

// u = m / s of a row; returns Σ m.
template <class S>
Vec<S> divide_row(const Layout<S>& layout, const S* __restrict m, const S* __restrict s, S* __restrict u) {
    Vec<S> total{};
    for (int64_t v = 0, at = 0; v < layout.width; ++v, at += layout.gap) {
        const Vec<S> x = load<S>(m + at), through = load<S>(s + at);
        total += x;
        store<S>(u + at, through > S(0) ? x / through : Vec<S>{});
    }
    return layout.sum(total);
}

// m = a ∘ Wᵀu · correction of a row, in place of Wᵀu.
template <class S>
void settle_row(const Layout<S>& layout, const S* __restrict a, Vec<S> correction, S* __restrict m) {
    for (int64_t v = 0, at = 0; v < layout.width; ++v, at += layout.gap) {
        store<S>(m + at, load<S>(a + at) * load<S>(m + at) * correction);
    }
}

// w = u̇ − u ∘ μ = (ṁ − m ∘ μ) / s and ȧ = a ∘ v̇ of a row; returns Σ ṁ.
template <class S>
Vec<S> divide_tangent_row(const Layout<S>& layout, const S* __restrict m, const S* __restrict m_dot,
                          const S* __restrict mean, const S* __restrict s, const S* __restrict a,
                          const S* __restrict tangent, S* __restrict w, S* __restrict a_dot) {
    Vec<S> total{};
    for (int64_t v = 0, at = 0; v < layout.width; ++v, at += layout.gap) {
        const Vec<S> x_dot = load<S>(m_dot + at), through = load<S>(s + at);
        total += x_dot;
        store<S>(w + at, through > S(0) ? (x_dot - load<S>(m + at) * load<S>(mean + at)) / through : Vec<S>{});
        store<S>(a_dot + at, load<S>(a + at) * load<S>(tangent + at));
    }
    return layout.sum(total);
}

// ṁ of a row from m and, in its place, the derivative of Wᵀu but for that of a.
template <class S>
void settle_tangent_row(const Layout<S>& layout, const S* __restrict a, const S* __restrict tangent,
                        const S* __restrict m, Vec<S> correction, Vec<S> excess, S* __restrict m_dot) {
    for (int64_t v = 0, at = 0; v < layout.width; ++v, at += layout.gap) {
        const Vec<S> pushed = load<S>(a + at) * load<S>(m_dot + at) * correction;
        store<S>(m_dot + at, pushed + load<S>(m + at) * (load<S>(tangent + at) - excess));
    }
}

// The backward sweep of a group, times the seeds, for the gradient; with a direction, that of its derivative along it,
// the product with the Hessian. A sequence that has not begun has no mass. Where place k of a block of s and u belongs to
// visit n, that of a and m belongs to visit n − 1.
template <class S>
class Backward {
    using Int = typename Format<S>::Int;
    const Group<S>& group;
    const Weights<S>& weights;
    const Direction<S>* along;

    const ScoresProblem<S>& problem = group.problem;
    const Layout<S>& layout = group.layout;
    const int64_t stride = layout.stride, row = layout.row_stride;
    S *a, *s, *m, *u, *ends, *m_dot, *w, *a_dot, *ends_dot;
    Vec<S> seed[Layout<S>::most_rows] = {};

public:
    template <class Room>
    Backward(const Group<S>& of, const Weights<S>& with, const Room& room, const S* seeds, const Direction<S>* direction)
        : group(of), weights(with), along(direction), a(room.block(0)), s(room.block(1)), m(room.block(2)),
          u(room.block(3)), ends(room.block(4)), m_dot(room.block(5)), w(room.block(6)), a_dot(room.block(7)),
          ends_dot(room.block(8)) {
        for (int l = 0; l < group.members; ++l) {
            if (layout.across) {
                seed[layout.row_of(l)][layout.lane_of(l)] = seeds[group.b[l]];
            } else {
                seed[l] = broadcast(seeds[group.b[l]]);
            }
        }
        Ints<S> unused{};
        std::fill_n(m, stride, S(0));
        group.read_once(problem.scores.end, problem.end_batch, layout.low, ends);
        for (int r = 0; r < layout.rows; ++r) exponentiate<S>(layout, ends + r * row, m, unused);
        if (!along) return;
        std::fill_n(m_dot, stride, S(0));
        group.read_once(along->z.end, problem.end_batch, Vec<S>{}, ends_dot);
    }

    void run(S* emissions, S* plain, S* rest) {
        const int64_t longest = group.longest, depth = layout.depth;
        for (int64_t n = (longest - 1) / depth * depth; n >= 0 && longest > 0; n -= depth) {
            const int64_t steps = std::min(depth, longest - n), first = n == 0;
            group.read_tape(0, n - 1 + first, steps + 1 - first, a + first * stride);
            group.read_tape(1, n, steps, s);
            std::copy_n(m, stride, m + steps * stride);
            if (along) std::copy_n(m_dot, stride, m_dot + steps * stride);
            for (int64_t k = steps - 1; k >= 0; --k) {
                begin(n + k, (k + 1) * stride);
                if (n + k == 0) continue;
                step(k * stride);
                if (along) step_tangent(n + k, k * stride);
            }
            group.write_visits((along ? m_dot : m) + stride, n, steps, emissions);
            layout.add_outer(u + first * stride, a + first * stride, steps - first, plain);
            if (!along) continue;
            layout.add_outer(u + first * stride, a_dot + first * stride, steps - first, rest);
            layout.add_outer(w + first * stride, a + first * stride, steps - first, rest);
        }
    }

private:
    // The masses of the last states of the sequences that end at visit n.
    void begin(int64_t n, int64_t here) {
        for (int r = 0; r < layout.rows; ++r) {
            const Ints<S> on = group.lengths[r] == Ints<S>{} + Int(n + 1);
            if (!any(on)) continue;
            const int64_t at = here + r * row;
            const Vec<S> total = sum_ends<S>(layout, a + at, ends + r * row);
            const Vec<S> factor = on & (total > S(0)) ? 1 / total : Vec<S>{};
            Vec<S> centre{};
            for (int64_t v = 0; v < layout.width; ++v) {
                const int64_t k = at + v * layout.gap, end = r * row + v * layout.gap;
                const Vec<S> q = load<S>(a + k) * load<S>(ends + end) * factor;
                store<S>(m + k, on ? q * seed[r] : load<S>(m + k));
                if (!along) continue;
                const Vec<S> moved = load<S>(along->tangents + n * stride + end) + load<S>(ends_dot + end);
                centre += q > S(0) ? q * moved : Vec<S>{};
            }
            if (along) begin_tangent(n, at, r, on, layout.sum(centre));
        }
    }
    void begin_tangent(int64_t n, int64_t at, int r, Ints<S> on, Vec<S> centre) {
        for (int64_t v = 0; v < layout.width; ++v) {
            const int64_t k = at + v * layout.gap, end = r * row + v * layout.gap;
            const Vec<S> moved = load<S>(along->tangents + n * stride + end) + load<S>(ends_dot + end);
            const Vec<S> mass = load<S>(m + k), found = mass != S(0) ? mass * (moved - centre) : Vec<S>{};
            store<S>(m_dot + k, on ? found : load<S>(m_dot + k));
        }
    }

    // From m_n to m_{n−1}. The sums of m_n and ṁ_n, which but for rounding are the seed and 0, are set right on the way.
    Vec<S> correction[Layout<S>::most_rows], part[Layout<S>::most_rows];  // part: of the sum of m_n

    void step(int64_t at) {
        for (int r = 0; r < layout.rows; ++r) {
            const int64_t here = at + r * row;
            const Vec<S> total = divide_row(layout, m + here + stride, s + here, u + here);
            part[r] = total != S(0) ? 1 / total : Vec<S>{};
            correction[r] = seed[r] * part[r];
        }
        multiply<S>(layout, {{weights, u + at}}, true, m + at);
        for (int r = 0; r < layout.rows; ++r) settle_row(layout, a + at + r * row, correction[r], m + at + r * row);
    }

    void step_tangent(int64_t n, int64_t at) {
        const S *mean = along->means + n * stride, *tangent = along->tangents + (n - 1) * stride;
        Vec<S> excess[Layout<S>::most_rows];
        for (int r = 0; r < layout.rows; ++r) {
            const int64_t here = at + r * row, next = here + stride;
            excess[r] = part[r] * divide_tangent_row(layout, m + next, m_dot + next, mean + r * row, s + here, a + here,
                                                     tangent + r * row, w + here, a_dot + here);
        }
        multiply<S>(layout, {{weights, w + at}, {along->tilted, u + at}}, true, m_dot + at);
        for (int r = 0; r < layout.rows; ++r) {
            const int64_t here = at + r * row;
            settle_tangent_row(layout, a + here, tangent + r * row, m + here, correction[r], excess[r], m_dot + here);
        }
    }
};

// --- all sequences

// The layout, and the sequences in exp space, the longest first, in groups that are dealt out to the workers in turn.
template <class S>
struct Plan {
    const ScoresProblem<S>& problem;
    std::vector<int64_t> order;
    bool is_shared;  // the transitions are those of all sequences
    Layout<S> layout;
    int64_t groups;
    int workers;

    Plan(const ScoresProblem<S>& of, const S* tape)
        : problem(of),
          order(longest_first(tape)),
          is_shared(problem.transition_batch == 0),
          layout(choose()),
          groups((int64_t(order.size()) + layout.sequences - 1) / layout.sequences),
          workers(int(std::min<int64_t>(std::max(problem.threads, 1), groups))) {}

    // body(group, worker) for each group.
    template <class Body>
    void for_groups(Body body) const {
        parallel_for(groups, workers, [&](int64_t n, int worker) {
            const int64_t at = n * layout.sequences, left = int64_t(order.size()) - at;
            body(Group<S>(problem, layout, &order[std::size_t(at)], std::min<int64_t>(layout.sequences, left)), worker);
        });
    }

private:
    std::vector<int64_t> longest_first(const S* tape) const {
        const int64_t plane = (problem.steps + 1) * problem.states;
        std::vector<int64_t> all;
        for (int64_t b = 0; b < problem.batch; ++b) {
            if (!tape || tape[(2 * b + 1) * plane] == 1) all.push_back(b);
        }
        const auto is_longer = [&](int64_t a, int64_t b) { return problem.lengths[a] > problem.lengths[b]; };
        if (!std::is_sorted(all.begin(), all.end(), is_longer)) std::stable_sort(all.begin(), all.end(), is_longer);
        return all;
    }

    Layout<S> choose() const {
        constexpr int lanes = lanes_of<S>;
        const int64_t count = int64_t(order.size()), threads = std::max(problem.threads, 1);
        if (!is_shared) return {problem.states, false, 1};
        if (count >= lanes && problem.states < 3 * lanes) return {problem.states, true, count > lanes * threads ? 2 : 1};
        return {problem.states, false, count > 2 * threads ? 4 : 1};
    }
};

// What a worker has for itself: blocks of steps, a step more than go together, and the sums over its sequences: the starts,
// the ends, and but for their weights the transitions, Σ u aᵀ and what the Hessian has besides, in padded rows.
template <class S>
struct Worker {
    int64_t size, square;
    Array<S> blocks, history, start, end, plain, rest;

    Worker(const Layout<S>& layout, int count, int64_t tangents)
        : size((layout.depth + 1) * layout.stride + lanes_of<S> * layout.gap),
          square(layout.padded * layout.padded),
          blocks(zeros<S>(count * size)),
          history(scratch<S>(2 * tangents * layout.stride)),
          start(zeros<S>(layout.states)),
          end(zeros<S>(layout.states)),
          plain(zeros<S>(square)),
          rest(zeros<S>(tangents ? square : 0)) {}

    S* block(int k) const { return blocks.get() + k * size; }

    // What the first and the last step of each sequence have, the starts and the ends have too.
    void add_ends(const Group<S>& group, const Scores<S>& out) const {
        const ScoresProblem<S>& problem = group.problem;
        for (int l = 0; l < group.members && group.length[l] > 0; ++l) {
            S* to_start = problem.start_batch ? out.start + group.b[l] * problem.start_batch : start.get();
            S* to_end = problem.end_batch ? out.end + group.b[l] * problem.end_batch : end.get();
            const S *first = out.emissions + group.row(l, 0), *last = out.emissions + group.row(l, group.length[l] - 1);
            for (int64_t i = 0; i < problem.states; ++i) to_start[i] += first[i], to_end[i] += last[i];
        }
    }
    void deliver_ends(const ScoresProblem<S>& problem, const Scores<S>& out) const {
        for (int64_t i = 0; i < problem.states; ++i) {
            if (!problem.start_batch) out.start[i] += start[i];
            if (!problem.end_batch) out.end[i] += end[i];
        }
    }

    // transitions += W ∘ (rest + z ∘ plain); without z, W ∘ plain. z does not matter where W is 0.
    void deliver_transitions(const Weights<S>& weights, const S* z, S* transitions) {
        const int64_t states = weights.layout.states, padded = weights.layout.padded;
        for (int64_t i = 0; i < states; ++i) {
            for (int64_t p = 0; p < states; ++p) {
                const int64_t at = i * padded + p, k = i * states + p;
                const S part = z ? rest[at] + z[k] * plain[at] : plain[at];
                transitions[k] += weights.rows[at] > 0 ? weights.rows[at] * part : S(0);
            }
        }
        std::fill_n(plain.get(), square, S(0));
        if (z) std::fill_n(rest.get(), square, S(0));
    }
};

template <class S>
bool forward(const ScoresProblem<S>& problem, S* value, S* tape, std::uint8_t* underflowed) {
    const FlushDenormals guard;
    const Plan<S> plan(problem, nullptr);
    std::vector<Weights<S>> weights;
    std::vector<Worker<S>> workers;
    std::atomic<bool> good{true};
    const auto fill = [&](Weights<S>& to, int64_t b) {
        if (problem.lengths[b] > 1 && !to.fill(problem.scores.transitions + b * problem.transition_batch)) good = false;
        to.pack(true, false);
    };
    for (int k = 0; k < plan.workers; ++k) {
        if (k == 0 || !plan.is_shared) weights.emplace_back(plan.layout);
        workers.emplace_back(plan.layout, 4, 0);
    }
    if (plan.is_shared && plan.groups) fill(weights[0], plan.order[0]);
    plan.for_groups([&](const Group<S>& group, int worker) {
        Weights<S>& mine = weights[std::size_t(plan.is_shared ? 0 : worker)];
        if (!plan.is_shared) fill(mine, group.b[0]);
        if (!Forward<S>(group, mine, workers[std::size_t(worker)], value, tape, underflowed).run()) good = false;
    });
    return good;
}

// The gradient, or with z the product of the Hessian with it.
template <class S>
void sweep_back(const ScoresProblem<S>& problem, const S* seed, const Scores<const S>* z, const Scores<S>& out) {
    const FlushDenormals guard;
    const Plan<S> plan(problem, problem.tape);
    if (!plan.groups) return;
    const int64_t history = z ? problem.lengths[plan.order[0]] : 0;
    std::vector<Weights<S>> weights;
    std::vector<Matrix<S>> tilts;
    std::vector<Worker<S>> workers;
    for (int k = 0; k < plan.workers; ++k) {
        workers.emplace_back(plan.layout, z ? 9 : 5, history);
        if (k > 0 && plan.is_shared) continue;
        weights.emplace_back(plan.layout);
        tilts.emplace_back(plan.layout);
    }
    const auto prepare = [&](std::size_t k, int64_t matrix) {
        weights[k].fill(problem.scores.transitions + matrix);
        weights[k].pack(z != nullptr, true);
        if (z) tilt<S>(weights[k], z->transitions + matrix, tilts[k]);
    };
    const auto deliver = [&](std::size_t worker, int64_t matrix) {
        const S* along = z ? z->transitions + matrix : nullptr;
        workers[worker].deliver_transitions(weights[plan.is_shared ? 0 : worker], along, out.transitions + matrix);
    };
    if (plan.is_shared) prepare(0, 0);
    plan.for_groups([&](const Group<S>& group, int slot) {
        const std::size_t worker = std::size_t(slot), k = plan.is_shared ? 0 : worker;
        const int64_t matrix = group.b[0] * problem.transition_batch;
        const Worker<S>& mine = workers[worker];
        if (!plan.is_shared) prepare(k, matrix);
        for (int l = 0; l < group.members; ++l) {
            S* sequence = out.emissions + group.b[l] * problem.steps * problem.states;
            clear_masked(problem, group.b[l], sequence, problem.states);
        }
        const Direction<S> along{z ? *z : Scores<const S>{}, tilts[k], mine.history.get(),
                                 mine.history.get() + history * plan.layout.stride};
        if (z) sweep_tangent(group, weights[k], along, mine);
        Backward<S>(group, weights[k], mine, seed, z ? &along : nullptr)
            .run(out.emissions, mine.plain.get(), mine.rest.get());
        mine.add_ends(group, out);
        if (!plan.is_shared) deliver(worker, matrix);
    });
    for (std::size_t worker = 0; worker < workers.size(); ++worker) {
        workers[worker].deliver_ends(problem, out);
        if (plan.is_shared) deliver(worker, 0);
    }
}

template <class S>
void backward(const ScoresProblem<S>& problem, const S* seed, const Scores<S>& gradient) {
    sweep_back<S>(problem, seed, nullptr, gradient);
}

template <class S>
void hessian(const ScoresProblem<S>& problem, const S* seed, const Scores<const S>& z, const Scores<S>& product) {
    sweep_back<S>(problem, seed, &z, product);
}

}  // namespace
}  // namespace in_exp_space

template <class S>
ProductKernels<S> product_kernels() {
    return {in_exp_space::forward<S>, in_exp_space::backward<S>, in_exp_space::hessian<S>};
}
template ProductKernels<float> product_kernels<float>();
template ProductKernels<double> product_kernels<double>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
