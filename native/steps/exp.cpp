// A chain as products of matrices and vectors. With W[i, p] = exp(transitions[i, p] − r_i), r_i the greatest of row i,
// the forward sweep keeps a_n ∝ exp(v_n) and s_n = W a_{n−1} of every step. Backward, the marginals m_n give
// u_n = m_n / s_n and m_{n−1} = a_{n−1} ∘ Wᵀu_n without another exp, and the transitions get W ∘ Σ_n u_n a_{n−1}ᵀ.
#include "exp.h"

#include <atomic>
#include <cmath>
#include <vector>

#include "../base/threads.h"
#include "exp_group.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace in_exp_space {
namespace {

// A state that is reached and has less than this, where the greatest is about 1, may lose what leads through it.
template <class S>
constexpr S least = sizeof(S) == 4 ? S(1e-28) : S(1e-280);

// The probabilities of the last states but for their sum, a ∘ exp(end − top), in padded rows; the sum.
template <class S>
S weigh_end(const Line<S>& line, const S* a, const S* end, S& top, S* weights) {
    Vec<S> greatest = broadcast(std::numeric_limits<S>::lowest()), total{};
    for (int64_t v = 0; v < line.vectors; ++v) greatest = greater<S>(greatest, line.get_low(end, v));
    top = greatest_lane<S>(greatest)[0];
    for (int64_t v = 0; v < line.vectors; ++v) {
        const Vec<S> weight = line.get(a, v) * exp2_of((line.get_low(end, v) - top) * unit<S>);
        store<S>(weights + v * line.lanes, weight);
        total += weight;
    }
    return sum_lanes<S>(total)[0];
}

// --- forward

// exp(x − greatest + shift), 0 for −∞ alone, in place of the scores x of a row. Returns their greatest, a finite number.
template <class S, class Mask>
Vec<S> exponentiate(const Layout<S>& layout, S* __restrict row, const S* __restrict shift, Mask& bad) {
    constexpr int lanes = lanes_of<S>;
    const int64_t width = layout.width;
    Vec<S> top = broadcast(std::numeric_limits<S>::lowest());
    Mask wrong{};
    for (int64_t v = 0; v < width; ++v) {
        const Vec<S> x = load<S>(row + v * lanes);
        wrong |= ~(x < infinity<S>);
        top = greater<S>(top, x);
    }
    bad |= wrong;
    top = layout.greatest(top);
    const Vec<S> tiny = broadcast(std::numeric_limits<S>::min());
    for (int64_t v = 0; v < width; ++v) {
        const Vec<S> x = (load<S>(row + v * lanes) - top) * unit<S> + load<S>(shift + v * lanes);
        store<S>(row + v * lanes, x > -infinity<S> ? greater<S>(exp2_of(x), tiny) : Vec<S>{});
    }
    return top;
}

// after = factors ∘ sums · scale of a row, and the greatest of them. Returns the least, padding aside.
template <class S>
Vec<S> scale_row(const S* __restrict factors, const S* __restrict sums, Vec<S> scale, Vec<S> padding, int64_t width,
                 S* __restrict after, Vec<S>& greatest) {
    constexpr int lanes = lanes_of<S>;
    Vec<S> top{}, lowest = broadcast(S(1));
    for (int64_t v = 0; v < width; ++v) {
        const Vec<S> result = (load<S>(factors + v * lanes) * scale) * load<S>(sums + v * lanes);
        store<S>(after + v * lanes, result);
        top = greater<S>(top, result);
        lowest = lesser<S>(v + 1 < width ? result : result + padding, lowest);
    }
    greatest = top;
    return lowest;
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
template <class S>
class Forward {
    static constexpr int lanes = lanes_of<S>, most_rows = Layout<S>::most_rows;
    using F = Format<S>;
    using Int = typename F::Int;
    using Ints = typename Shape<Vec<S>>::Int;
    using Bits = typename Shape<Vec<S>>::Bits;

    const Group<S>& group;
    const Weights<S>& weights;
    S *value, *tape;
    std::uint8_t* underflowed;

    const ScoresProblem<S>& problem = group.problem;
    const Layout<S>& layout = group.layout;
    S *factors = group.room.block(0), *a = group.room.block(1), *s = group.room.block(2);
    int64_t alive = group.members;
    double offset[Layout<S>::most_sequences] = {};  // v_n = log a_n + offset + n · weights.base + exponent · log 2
    Bits exponent[most_rows] = {};
    Vec<S> scale[most_rows];  // the power of two that brings the greatest of the last a to 1
    bool lost[Layout<S>::most_sequences] = {};
    Ints bad = {};
    Vec<S> padding{};  // 1 past the last state

public:
    Forward(const Group<S>& of, const Weights<S>& with, S* to_value, S* to_tape, std::uint8_t* to_underflowed)
        : group(of), weights(with), value(to_value), tape(to_tape), underflowed(to_underflowed) {
        for (Vec<S>& one : scale) one = broadcast(S(1));
        if (!layout.across) padding = layout.line.low < S(0) ? broadcast(S(1)) : Vec<S>{};
    }

    // Whether all scores of the group were below +∞ and not NaN.
    bool run() {
        const int64_t stride = layout.stride, longest = group.length[0];
        for (int l = 0; l < group.members; ++l) underflowed[group.b[l]] = 0;
        for (; alive > 0 && group.length[alive - 1] == 0; --alive) value[group.b[alive - 1]] = 0;
        for (int64_t n = 0; n < longest; n += layout.depth) {
            const int64_t steps = std::min(layout.depth, longest - n);
            group.read_visits(problem.scores.emissions, n, steps, layout.line.low, factors);
            if (n == 0) start();
            for (int64_t k = n == 0; k < steps; ++k) weigh(k, weights.shift.get());
            for (int64_t k = 0; k < steps; ++k) step(n + k, k);
            if (tape) {
                group.write_tape(a + stride, 0, n, steps, tape);
                group.write_tape(s, 1, n, steps, tape);
            }
            std::copy_n(a + steps * stride, stride, a);
        }
        const int64_t plane = (problem.steps + 1) * problem.states;
        for (int l = 0; tape && l < group.members; ++l) tape[(2 * group.b[l] + 1) * plane] = lost[l] ? S(0) : S(1);
        return !any(bad);
    }

private:
    void add_offset(int64_t r, Vec<S> top) {
        if (!layout.across) {
            offset[r] += double(top[0]);
            return;
        }
        for (int l = 0; l < lanes; ++l) offset[r * lanes + l] += double(top[l]);
    }

    void weigh(int64_t k, const S* shift) {
        for (int64_t r = 0; r < layout.rows; ++r) {
            add_offset(r, exponentiate(layout, factors + k * layout.stride + r * layout.row_stride, shift, bad));
        }
    }

    // The first step has the scores of the start for a shift; relative to the greatest, which is exact where it matters.
    void start() {
        group.read_start(problem.scores.start, layout.line.low, a);
        const Array<S> shift = scratch<S>(layout.width * lanes);
        for (int64_t r = 0; r < layout.rows; ++r) {
            const S* row = a + r * layout.row_stride;
            Vec<S> top = broadcast(std::numeric_limits<S>::lowest());
            for (int64_t v = 0; v < layout.width; ++v) {
                bad |= ~(load<S>(row + v * lanes) < infinity<S>);
                top = greater<S>(top, load<S>(row + v * lanes));
            }
            top = layout.greatest(top);
            for (int64_t v = 0; v < layout.width; ++v) {
                store<S>(&shift[v * lanes], (load<S>(row + v * lanes) - top) * unit<S>);
            }
            add_offset(r, top);
            add_offset(r, exponentiate(layout, factors + r * layout.row_stride, shift.get(), bad));
        }
    }

    void step(int64_t n, int64_t k) {
        const int64_t stride = layout.stride;
        const S *given = factors + k * stride, *before = a + k * stride;
        S *after = a + (k + 1) * stride, *through = s + k * stride;
        if (n == 0) {
            std::fill_n(through, stride, S(1));
        } else {
            layout.multiply({{weights.into, before}}, through);
        }
        Vec<S> greatest[most_rows];
        for (int64_t r = 0; r < layout.rows; ++r) {
            const int64_t at = r * layout.row_stride;
            const Vec<S> lowest =
                scale_row(given + at, through + at, scale[r], padding, layout.width, after + at, greatest[r]);
            if (any(lowest < least<S>)) check(n, r, given + at, through + at, before, after);
        }
        for (; alive > 0 && group.length[alive - 1] == n + 1; --alive) finish(int(alive - 1), after);
        for (int64_t r = 0; r < layout.rows; ++r) {
            const Bits power = bits<Bits>(layout.greatest(greatest[r])) >> F::mantissa;
            scale[r] = bits<Vec<S>>((Int(2 * F::bias) - power) << F::mantissa);
            exponent[r] += power - Int(F::bias);
        }
    }

    // Looks for states that are reached, but have so little that what leads through them may be lost.
    void check(int64_t n, int64_t r, const S* given, const S* through, const S* before, const S* after) {
        Ints low{};
        for (int64_t v = 0; v < layout.width; ++v) {
            const Vec<S> result = load<S>(after + r * layout.row_stride + v * lanes);
            const Ints reached = weights.is_moderate ? load<S>(through + v * lanes) > S(0) : ~Ints{};
            low |= (result < least<S>) & (load<S>(given + v * lanes) > S(0)) & reached;
        }
        for (int l = 0; l < alive; ++l) {
            if (lost[l] || layout.row_of(l) != r || !(layout.across ? low[layout.lane_of(l)] != 0 : any(low))) continue;
            lost[l] = weights.is_moderate || leads_on(n, l, before, after);
        }
    }

    // Whether sequence l loses a state where weights are so small that their sums do not tell.
    bool leads_on(int64_t n, int l, const S* before, const S* after) const {
        S *from = group.room.line(0), *to = group.room.line(1);
        layout.get_states(before, l, from);
        layout.get_states(after, l, to);
        return loses<S>(problem, group.b[l], group.row(l, n), n == 0, from, to);
    }

    void finish(int l, const S* last) {
        const int64_t b = group.b[l];
        const Line<S>& line = layout.line;
        const S* end = problem.scores.end + b * problem.end_batch;
        S *states = group.room.line(0), top;
        layout.get_states(last, l, states);
        const S total = weigh_end<S>(line, states, end, top, group.room.line(1));
        for (int64_t i = 0; i < line.states; ++i) {
            if (!(end[i] < infinity<S>)) bad = ~Ints{};
            lost[l] |= total < least<S> && states[i] > 0 && end[i] > -infinity<S>;
        }
        const Int power = Int(exponent[layout.row_of(l)][layout.lane_of(l)]);
        const double more = double(power) * 0.69314718055994530942 + double(top) + std::log(double(total));
        const double bases = double(group.length[l] - 1) * double(weights.base);
        value[b] = total > 0 ? S(offset[l] + bases + more) : -infinity<S>;
        underflowed[b] = lost[l];
    }
};

// --- backward

// What a worker adds up over its sequences: the starts, the ends, and but for their weights the transitions, Σ u aᵀ and
// what the Hessian has besides, in padded rows.
template <class S>
struct Totals {
    int64_t size;
    Array<S> start, end, plain, rest;

    Totals(const Line<S>& line, bool has_rest)
        : size(line.padded * line.padded),
          start(zeros<S>(line.padded)),
          end(zeros<S>(line.padded)),
          plain(zeros<S>(size)) {
        if (has_rest) rest = zeros<S>(size);
    }

    void add_start(const ScoresProblem<S>& problem, int64_t b, const S* row, const Scores<S>& to) const {
        S* at = problem.start_batch == 0 ? start.get() : to.start + b * problem.start_batch;
        for (int64_t i = 0; i < problem.states; ++i) at[i] += row[i];
    }
    void add_end(const ScoresProblem<S>& problem, int64_t b, const S* row, const Scores<S>& to) const {
        S* at = problem.end_batch == 0 ? end.get() : to.end + b * problem.end_batch;
        for (int64_t i = 0; i < problem.states; ++i) at[i] += row[i];
    }
    void deliver_ends(const ScoresProblem<S>& problem, const Scores<S>& to) const {
        for (int64_t i = 0; i < problem.states; ++i) {
            if (problem.start_batch == 0) to.start[i] += start[i];
            if (problem.end_batch == 0) to.end[i] += end[i];
        }
    }

    // transitions += W ∘ (rest + z ∘ plain); without z, W ∘ plain. z does not matter where W is 0.
    void deliver_transitions(const Weights<S>& weights, const S* z, S* transitions) const {
        const Line<S>& line = weights.line;
        for (int64_t i = 0; i < line.states; ++i) {
            S* to = transitions + i * line.states;
            for (int64_t v = 0; v < line.vectors; ++v) {
                const int64_t at = i * line.padded + v * line.lanes;
                const Vec<S> weight = load<S>(&weights.rows[at]), sum = load<S>(&plain[at]);
                const Vec<S> part = z ? load<S>(&rest[at]) + line.get(z + i * line.states, v) * sum : sum;
                line.put(to, v, line.get(to, v) + (weight > S(0) ? weight * part : Vec<S>{}));
            }
        }
    }
    void clear_transitions() {
        std::fill_n(plain.get(), size, S(0));
        if (rest) std::fill_n(rest.get(), size, S(0));
    }
};

// u = m / s of a row; returns Σ m.
template <class S>
Vec<S> divide_row(const S* __restrict m, const S* __restrict s, int64_t width, S* __restrict u) {
    constexpr int lanes = lanes_of<S>;
    Vec<S> total{};
    for (int64_t v = 0; v < width; ++v) {
        const Vec<S> x = load<S>(m + v * lanes), through = load<S>(s + v * lanes);
        total += x;
        store<S>(u + v * lanes, through > S(0) ? x / through : Vec<S>{});
    }
    return total;
}

// w = (ṁ − m ∘ μ) / s and ȧ = a ∘ v̇ of a row; returns Σ ṁ.
template <class S>
Vec<S> divide_tangent_row(const S* __restrict m, const S* __restrict m_dot, const S* __restrict mean,
                          const S* __restrict s, const S* __restrict a, const S* __restrict tangent, int64_t width,
                          S* __restrict w, S* __restrict a_dot) {
    constexpr int lanes = lanes_of<S>;
    Vec<S> total{};
    for (int64_t v = 0; v < width; ++v) {
        const int64_t at = v * lanes;
        const Vec<S> x_dot = load<S>(m_dot + at), through = load<S>(s + at);
        total += x_dot;
        store<S>(w + at, through > S(0) ? (x_dot - load<S>(m + at) * load<S>(mean + at)) / through : Vec<S>{});
        store<S>(a_dot + at, load<S>(a + at) * load<S>(tangent + at));
    }
    return total;
}

// m = a ∘ Wᵀu · correction of a row, in place of Wᵀu.
template <class S>
void settle_row(const S* __restrict a, Vec<S> correction, int64_t width, S* __restrict m) {
    constexpr int lanes = lanes_of<S>;
    for (int64_t v = 0; v < width; ++v) {
        store<S>(m + v * lanes, load<S>(a + v * lanes) * load<S>(m + v * lanes) * correction);
    }
}

// The same, and ṁ in place of the derivative of Wᵀu.
template <class S>
void settle_tangent_row(const S* __restrict a, const S* __restrict a_dot, Vec<S> correction, Vec<S> excess,
                        int64_t width, S* __restrict m, S* __restrict m_dot) {
    constexpr int lanes = lanes_of<S>;
    for (int64_t v = 0; v < width; ++v) {
        const int64_t at = v * lanes;
        const Vec<S> force = load<S>(m + at), x = load<S>(a + at) * force;
        const Vec<S> x_dot = load<S>(a + at) * load<S>(m_dot + at) + load<S>(a_dot + at) * force;
        store<S>(m + at, x * correction);
        store<S>(m_dot + at, (x_dot - x * excess) * correction);
    }
}

// A direction z, and what the tangent forward sweep found along it: v̇_n and μ_n of every visit.
template <class S>
struct Direction {
    const Scores<const S>& z;
    const Matrix<S>& tilted;  // W ∘ z
    S *tangents, *means;
};

// The backward sweep of a group, times the seeds, for the gradient; with a direction, that of its derivative along it,
// the product with the Hessian. A sequence that has not begun has no mass. Where place k of a block of s and u belongs to
// visit n, that of a and m belongs to visit n − 1.
template <class S>
class Backward {
    static constexpr int lanes = lanes_of<S>;
    const Group<S>& group;
    const Weights<S>& weights;
    const S* seed;
    const Direction<S>* along;
    Totals<S>& totals;
    const Scores<S>& out;

    const ScoresProblem<S>& problem = group.problem;
    const Layout<S>& layout = group.layout;
    const int64_t stride = layout.stride;
    S *a = group.room.block(0), *s = group.room.block(1), *m = group.room.block(2), *u = group.room.block(3);
    S *m_dot = along ? group.room.block(4) : nullptr, *w = along ? group.room.block(5) : nullptr;  // w = u̇ − u ∘ μ
    S* a_dot = along ? group.room.block(6) : nullptr;
    S each_seed[Layout<S>::most_sequences] = {};
    int begun = 0;

public:
    Backward(const Group<S>& of, const Weights<S>& with, const S* seeds, const Direction<S>* direction, Totals<S>& own,
             const Scores<S>& to)
        : group(of), weights(with), seed(seeds), along(direction), totals(own), out(to) {
        for (int l = 0; l < group.members; ++l) each_seed[l] = seed[group.b[l]];
    }

    void run() {
        const int64_t longest = group.length[0], depth = layout.depth;
        for (int l = 0; l < group.members; ++l) {
            S* sequence = out.emissions + group.b[l] * problem.steps * problem.states;
            clear_masked(problem, group.b[l], sequence, problem.states);
        }
        std::fill_n(m, stride, S(0));
        if (along) std::fill_n(m_dot, stride, S(0));
        for (int64_t n = (longest - 1) / depth * depth; n >= 0 && longest > 0; n -= depth) {
            const int64_t steps = std::min(depth, longest - n), first = n == 0;
            group.read_tape(0, n - 1 + first, steps + 1 - first, a + first * stride);
            group.read_tape(1, n, steps, s);
            std::copy_n(m, stride, m + steps * stride);
            if (along) std::copy_n(m_dot, stride, m_dot + steps * stride);
            for (int64_t k = steps - 1; k >= 0; --k) {
                for (; begun < group.members && group.length[begun] == n + k + 1; ++begun) begin(n + k, k);
                if (n + k > 0) step(n + k, k);
            }
            group.write_visits((along ? m_dot : m) + stride, n, steps, out.emissions);
            add_transitions(first * stride, steps - first);
        }
        S* states = group.room.line(0);
        for (int l = 0; l < begun; ++l) {
            layout.get_states((along ? m_dot : m) + stride, l, states);
            totals.add_start(problem, group.b[l], states, out);
        }
    }

private:
    // The masses of the last states of the next sequence, at visit n.
    void begin(int64_t n, int64_t k) {
        const int64_t b = group.b[begun];
        S *states = group.room.line(0), *states_dot = group.room.line(1), top, centre = 0;
        layout.get_states(a + (k + 1) * stride, begun, states);
        const S total = weigh_end<S>(layout.line, states, problem.scores.end + b * problem.end_batch, top, states);
        const S factor = total > 0 ? 1 / total : S(0);
        if (along) {
            const S* end_dot = along->z.end + b * problem.end_batch;
            layout.get_states(along->tangents + n * stride, begun, states_dot);
            for (int64_t i = 0; i < problem.states; ++i) {
                states_dot[i] = states[i] > 0 ? states_dot[i] + end_dot[i] : S(0);
                centre += states[i] * factor * states_dot[i];
            }
        }
        for (int64_t i = 0; i < problem.states; ++i) states[i] *= factor * seed[b];
        layout.set_states(m + (k + 1) * stride, begun, states);
        if (along) {
            for (int64_t i = 0; i < problem.states; ++i) states_dot[i] = states[i] * (states_dot[i] - centre);
            layout.set_states(m_dot + (k + 1) * stride, begun, states_dot);
        }
        totals.add_end(problem, b, along ? states_dot : states, out);
    }

    // From m_n to m_{n−1}. The sums of m_n and ṁ_n, which but for rounding are the seed and 0, are set right on the way.
    void step(int64_t n, int64_t k) {
        const int64_t at = k * stride, row = layout.row_stride, width = layout.width;
        Vec<S> correction[Layout<S>::most_rows], excess[Layout<S>::most_rows];
        for (int64_t r = 0; r < layout.rows; ++r) {
            const int64_t here = at + r * row, next = here + stride;
            const Vec<S> total = layout.sum(divide_row(m + next, s + here, width, u + here));
            correction[r] = total != S(0) ? layout.by_sequence(each_seed, r) / total : Vec<S>{};
            if (!along) continue;
            const S* mean = along->means + n * stride + r * row;
            const S* tangent = along->tangents + (n - 1) * stride + r * row;
            const Vec<S> total_dot = divide_tangent_row(m + next, m_dot + next, mean, s + here, a + here, tangent, width,
                                                        w + here, a_dot + here);
            excess[r] = total != S(0) ? layout.sum(total_dot) / total : Vec<S>{};
        }
        layout.multiply({{weights.out_of, u + at}}, m + at);
        if (along) layout.multiply({{weights.out_of, w + at}, {along->tilted.out_of, u + at}}, m_dot + at);
        for (int64_t r = 0; r < layout.rows; ++r) {
            const int64_t here = at + r * row;
            if (along) {
                settle_tangent_row(a + here, a_dot + here, correction[r], excess[r], width, m + here, m_dot + here);
            } else {
                settle_row(a + here, correction[r], width, m + here);
            }
        }
    }

    void add_transitions(int64_t from, int64_t steps) {
        layout.add_outer(u + from, a + from, steps, totals.plain.get());
        if (!along) return;
        layout.add_outer(u + from, a_dot + from, steps, totals.rest.get());
        layout.add_outer(w + from, a + from, steps, totals.rest.get());
    }
};

// --- tangent forward

// The mean of a row from s times it, v̇ = z + mean − base where the state has mass, and a ∘ v̇; the sums of a and a ∘ v̇ go
// into `total` and `total_dot`.
template <class S>
void push_row(const S* __restrict a, const S* __restrict z, const S* __restrict s, Vec<S> base, int64_t width,
              S* __restrict mean, S* __restrict tangent, S* __restrict a_dot, Vec<S>& total, Vec<S>& total_dot) {
    constexpr int lanes = lanes_of<S>;
    Vec<S> sum{}, sum_dot{};
    for (int64_t v = 0; v < width; ++v) {
        const int64_t at = v * lanes;
        const Vec<S> mass = load<S>(a + at), through = load<S>(s + at);
        const Vec<S> centre = through > S(0) ? load<S>(mean + at) / through : Vec<S>{};
        const Vec<S> moved = mass > S(0) ? (load<S>(z + at) + centre) - base : Vec<S>{};
        store<S>(mean + at, centre);
        store<S>(tangent + at, moved);
        store<S>(a_dot + at, mass * moved);
        sum += mass;
        sum_dot += mass * moved;
    }
    total = sum;
    total_dot = sum_dot;
}

// The tangent forward sweep: v̇_n and μ_n = (W (a ∘ v̇)_{n−1} + (W ∘ z) a_{n−1}) / s_n of every visit. v̇_n is relative
// to a separate base, which keeps its precision, and μ_n to that of v̇_{n−1}.
template <class S>
void sweep_tangent(const Group<S>& group, const Weights<S>& weights, const Direction<S>& along) {
    const Layout<S>& layout = group.layout;
    const int64_t stride = layout.stride, longest = group.length[0];
    S *a = group.room.block(0), *s = group.room.block(1), *z = group.room.block(2), *a_dot = group.room.block(3);
    Vec<S> base[Layout<S>::most_rows] = {};
    for (int64_t n = 0; n < longest; n += layout.depth) {
        const int64_t steps = std::min(layout.depth, longest - n), first = n == 0;
        group.read_tape(0, n - 1 + first, steps + 1 - first, a + first * stride);
        group.read_tape(1, n, steps, s);
        group.read_visits(along.z.emissions, n, steps, Vec<S>{}, z);
        for (int64_t k = 0; k < steps; ++k) {
            const int64_t here = k * stride;
            S *mean = along.means + (n + k) * stride, *tangent = along.tangents + (n + k) * stride;
            if (n + k == 0) {
                group.read_start(along.z.start, Vec<S>{}, mean);  // s is 1
            } else {
                layout.multiply({{weights.into, a_dot + here}, {along.tilted.into, a + here}}, mean);
            }
            for (int64_t r = 0; r < layout.rows; ++r) {
                const int64_t row = r * layout.row_stride, at = here + row;
                Vec<S> total, total_dot;
                push_row(a + at + stride, z + at, s + at, base[r], layout.width, mean + row, tangent + row,
                         a_dot + at + stride, total, total_dot);
                total = layout.sum(total);
                base[r] = total > S(0) ? layout.sum(total_dot) / total : Vec<S>{};
            }
        }
        std::copy_n(a_dot + steps * stride, stride, a_dot);
    }
}

// --- all sequences

// The layout, and the sequences in exp space, the longest first. They are dealt out to the workers in turn, so that each
// has the same ones in every run.
template <class S>
struct Plan {
    const ScoresProblem<S>& problem;
    int64_t count = 0;
    Array<int64_t> order;
    Layout<S> layout;
    int workers;

    Plan(const ScoresProblem<S>& of, const S* tape)
        : problem(of), order(sorted(tape)), layout(choose()), workers(int(std::min<int64_t>(threads(), groups()))) {}

    int64_t threads() const { return std::max(problem.threads, 1); }
    int64_t groups() const { return std::max<int64_t>(1, (count + layout.sequences - 1) / layout.sequences); }
    bool shares_transitions() const { return problem.transition_batch == 0; }

    // body(worker, order, how many) for each group.
    template <class Body>
    void for_groups(Body body) const {
        if (count == 0) return;
        parallel_for(groups(), workers, [&](int64_t n, int worker) {
            const int64_t at = n * layout.sequences;
            body(worker, &order[at], std::min<int64_t>(layout.sequences, count - at));
        });
    }

private:
    Array<int64_t> sorted(const S* tape) {
        const int64_t plane = (problem.steps + 1) * problem.states;
        Array<int64_t> all = scratch<int64_t>(problem.batch);
        for (int64_t b = 0; b < problem.batch; ++b) {
            if (!tape || tape[(2 * b + 1) * plane] == 1) all[count++] = b;
        }
        std::sort(all.get(), all.get() + count, [&](int64_t a, int64_t b) {
            const int64_t more = problem.lengths[a] - problem.lengths[b];
            return more > 0 || (more == 0 && a < b);
        });
        return all;
    }

    Layout<S> choose() const {
        constexpr int lanes = lanes_of<S>;
        const Line<S> line(problem.states);
        if (!shares_transitions()) return {line, false, 1};
        if (count >= lanes && problem.states < 2 * lanes) return {line, true, count > 4 * lanes * threads() ? 4 : 1};
        return {line, false, count > 2 * threads() ? 4 : 1};
    }
};

// What a worker has for itself. Where the batch shares the transitions, so do all workers their weights.
template <class S>
struct Worker {
    Room<S> room;
    Totals<S> totals;
    Array<S> history;

    Worker(const Layout<S>& layout, bool has_tangents, int64_t steps)
        : room(layout, has_tangents ? 7 : 4), totals(layout.line, has_tangents) {
        if (has_tangents) history = zeros<S>(2 * steps * layout.stride);
    }
};

template <class S>
bool forward(const ScoresProblem<S>& problem, S* value, S* tape, std::uint8_t* underflowed) {
    const FlushDenormals guard;
    const Plan<S> plan(problem, nullptr);
    const bool shared = plan.shares_transitions();
    std::vector<Weights<S>> weights;
    std::vector<Room<S>> rooms;
    for (int k = 0; k < plan.workers; ++k) {
        if (k == 0 || !shared) weights.emplace_back(plan.layout, true, false);
        rooms.emplace_back(plan.layout, 3);
    }
    const auto fill = [&](Weights<S>& to, const int64_t* order) {
        const int64_t matrix = order[0] * problem.transition_batch;
        return problem.lengths[order[0]] < 2 || to.fill(problem.scores.transitions + matrix);
    };
    std::atomic<bool> good{plan.count == 0 || !shared || fill(weights[0], plan.order.get())};
    plan.for_groups([&](int worker, const int64_t* order, int64_t count) {
        Weights<S>& mine = weights[shared ? 0 : worker];
        const bool is_filled = shared || fill(mine, order);
        const Group<S> group(problem, plan.layout, rooms[worker], order, count);
        if (!Forward<S>(group, mine, value, tape, underflowed).run() || !is_filled) good = false;
    });
    return good;
}

// The gradient, or with z the product of the Hessian with it.
template <class S>
void sweep_back(const ScoresProblem<S>& problem, const S* seed, const Scores<const S>* z, const Scores<S>& out) {
    const FlushDenormals guard;
    const Plan<S> plan(problem, problem.tape);
    if (plan.count == 0) return;
    const bool shared = plan.shares_transitions(), tangent = z != nullptr;
    const int64_t longest = problem.lengths[plan.order[0]], history = longest * plan.layout.stride;
    std::vector<Weights<S>> weights;
    std::vector<Matrix<S>> tilts;
    std::vector<Worker<S>> workers;
    for (int k = 0; k < plan.workers; ++k) {
        workers.emplace_back(plan.layout, tangent, longest);
        if (k > 0 && shared) continue;
        weights.emplace_back(plan.layout, tangent, true);
        if (tangent) tilts.emplace_back(plan.layout, true, true);
    }
    const auto prepare = [&](int k, int64_t matrix) {
        weights[k].fill(problem.scores.transitions + matrix);
        if (tangent) tilt<S>(weights[k], z->transitions + matrix, tilts[k]);
    };
    const auto deliver = [&](int worker, int64_t matrix) {
        const S* along = tangent ? z->transitions + matrix : nullptr;
        workers[worker].totals.deliver_transitions(weights[shared ? 0 : worker], along, out.transitions + matrix);
    };
    if (shared) prepare(0, 0);
    plan.for_groups([&](int worker, const int64_t* order, int64_t count) {
        Worker<S>& mine = workers[worker];
        const int k = shared ? 0 : worker;
        const int64_t matrix = order[0] * problem.transition_batch;
        if (!shared) prepare(k, matrix);
        const Group<S> group(problem, plan.layout, mine.room, order, count);
        if (tangent) {
            const Direction<S> along{*z, tilts[k], mine.history.get(), mine.history.get() + history};
            sweep_tangent(group, weights[k], along);
            Backward<S>(group, weights[k], seed, &along, mine.totals, out).run();
        } else {
            Backward<S>(group, weights[k], seed, nullptr, mine.totals, out).run();
        }
        if (!shared) {
            deliver(worker, matrix);
            mine.totals.clear_transitions();
        }
    });
    for (int worker = 0; worker < plan.workers; ++worker) {
        workers[worker].totals.deliver_ends(problem, out);
        if (shared) deliver(worker, 0);
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
