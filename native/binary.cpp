// The marginals of chains of two states, W sequences side by side.
//
// All that a step passes on is δ, the value of state 1 less that of state 0. With f(u) = max_Ω(u, 0), and a = W[1,1] −
// W[1,0], b = W[0,1] − W[0,0] by transitions W[current, previous],
//
//     δ_t = y_t + W[1,0] − W[0,0] + f(δ_{t−1} + a) − f(δ_{t−1} + b),   y_t = e_t(1) − e_t(0),
//
// and the previous state is 1 with probability f'(δ + a) or f'(δ + b), as the current one is 1 or 0. So neither values
// nor a tape are needed, and a unit of sequences stays in the cache.
#include "binary.h"

#include <atomic>
#include <cmath>
#include <cstring>

#include "lanes.h"
#include "parallel.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

// What a transition adds to δ, and its exponential.
template <class S>
struct Shift {
    S sum, factor;
};

template <class V>
inline V positive(V x) {
    return x > V{} ? x : V{};
}

// Negentropy by the odds exp(δ), where neither shift is far from 0: what each step waits for is a division alone. Beyond
// the bounds of δ probabilities do not change any more.
template <class S>
struct Odds {
    using V = Vec<S>;
    static constexpr S far = S(80), most_shift = S(8);

    static V begin(V y) { return exp_nonpositive(lesser<S>(greater<S>(y, V{} - far), V{} + far)); }
    static V next(V odds, V y, Shift<S> a, Shift<S> b) {
        const V moved = begin(y) * ((1 + odds * a.factor) / (1 + odds * b.factor));
        return lesser<S>(greater<S>(moved, V{} + S(1e-30)), V{} + S(1e30));
    }
    static V slope(V odds, Shift<S> shift) {
        const V shifted = odds * shift.factor;
        return shifted / (1 + shifted);
    }
    static V curvature(V, Shift<S>, V q) { return q * (1 - q); }
};

// By δ itself. Since f(u) = u + f(−u), nothing is large in a difference of f where δ is.
template <class S, class F>
struct Difference {
    using V = Vec<S>;

    static V begin(V y) { return y; }
    static V next(V delta, V y, Shift<S> a, Shift<S> b) {
        const V sign = delta > V{} ? V{} - S(1) : V{} + S(1);
        return y + (delta > V{} ? V{} + (a.sum - b.sum) : V{}) + F::less(sign * (delta + a.sum), sign * (delta + b.sum));
    }
    static V slope(V delta, Shift<S> shift) { return F::slope(delta + shift.sum); }
    static V curvature(V delta, Shift<S> shift, V q) { return F::curvature(delta + shift.sum, q); }
};

template <class S>
struct Softplus {
    using V = Vec<S>;

    static V less(V u, V w) {
        const V ratio = (1 + exp_nonpositive(-size(u))) / (1 + exp_nonpositive(-size(w)));
        return positive(u) - positive(w) + log_positive(ratio);
    }
    static V slope(V u) {
        const V e = exp_nonpositive(-size(u));
        return (u > V{} ? V{} + S(1) : e) / (1 + e);
    }
    static V curvature(V, V q) { return q * (1 - q); }

private:
    static V size(V u) { return u > V{} ? u : -u; }
};

template <class S>
struct Quadratic {
    using V = Vec<S>;

    static V less(V u, V w) { return value(u) - value(w); }
    static V slope(V u) {
        const V q = S(0.5) * (u + 1);
        return q > V{} ? (q < V{} + S(1) ? q : V{} + S(1)) : V{};
    }
    static V curvature(V u, V) { return (u > V{} - S(1)) & (u < V{} + S(1)) ? V{} + S(0.5) : V{}; }

private:
    static V value(V u) {
        const V t = positive(u + 1);
        return u < V{} + S(1) ? S(0.25) * t * t : u;
    }
};

template <class S, class F>
class Unit {
    using V = Vec<S>;
    static constexpr int W = lanes_of<S>;

    const ScoresProblem<S>& problem;
    const Lanes<W> lanes;
    const Shift<S> a, b, last;
    const S change, first;
    const V length;
    S* const room;  // (steps, 4, W)

    static V lengths_of(const Lanes<W>& lanes) {
        V v{};
        for (int l = 0; l < W; ++l) v[l] = S(lanes.length[l]);
        return v;
    }
    Records records() const { return {2, 2, problem.steps * 2}; }
    static V other_less(const S* record) { return load<S>(record + W) - load<S>(record); }
    static Shift<S> shift(S sum) { return {sum, exp_nonpositive(sum)}; }

    auto is_on(int64_t n) const { return length > V{} + S(n); }

public:
    Unit(const ScoresProblem<S>& p, const int64_t* sequences, int64_t count, S* room)
        : problem(p),
          lanes(p, sequences, count),
          a(shift(p.scores.transitions[3] - p.scores.transitions[2])),
          b(shift(p.scores.transitions[1] - p.scores.transitions[0])),
          last(shift(p.scores.end[1] - p.scores.end[0])),
          change(p.scores.transitions[2] - p.scores.transitions[0]),
          first(p.scores.start[1] - p.scores.start[0]),
          length(lengths_of(lanes)),
          room(room) {}

    // Whether it could.
    bool marginals(S* out) const {
        Stream<const S, S> in(lanes, problem.scores.emissions, records());
        V delta{};
        auto bad = delta != delta;
        for (int64_t n = 0; n < lanes.longest; ++n) {
            const V y = other_less(in.read(n)) + (n == 0 ? first : change);
            V next;
            if (n == 0) {
                next = F::begin(y);
            } else {
                store<S>(room + (2 * n) * W, F::slope(delta, a));
                store<S>(room + (2 * n + 1) * W, F::slope(delta, b));
                next = F::next(delta, y, a, b);
            }
            const auto on = is_on(n);
            bad |= on & (y != y);
            delta = on ? next : delta;
        }
        Stream<S, S> to(lanes, out, records());
        V m = F::slope(delta, last);
        bad |= m != m;
        for (int64_t n = lanes.longest - 1; n >= 0; --n) {
            S* record = to.room(n);
            const auto on = is_on(n);
            store<S>(record, on ? 1 - m : V{});
            store<S>(record + W, on ? m : V{});
            to.finish(n);
            if (n == 0) break;
            const V q = load<S>(room + (2 * n) * W), r = load<S>(room + (2 * n + 1) * W);
            m = on ? m * q + (1 - m) * r : m;
        }
        return !any(bad);
    }

    // Adds to totals: transitions by [current, previous], start and end by state 1.
    void vjp(const S* cotangent, S* out, double* totals) const {
        Stream<const S, S> in(lanes, problem.scores.emissions, records()), along(lanes, cotangent, records());
        V delta{}, dot{};
        for (int64_t n = 0; n < lanes.longest; ++n) {
            const V y = other_less(in.read(n)) + (n == 0 ? first : change), y_dot = other_less(along.read(n));
            V next, next_dot;
            if (n == 0) {
                next = F::begin(y);
                next_dot = y_dot;
            } else {
                const V q = F::slope(delta, a), r = F::slope(delta, b);
                S* at = room + 4 * n * W;
                store<S>(at, q);
                store<S>(at + W, r);
                store<S>(at + 2 * W, F::curvature(delta, a, q) * dot);
                store<S>(at + 3 * W, F::curvature(delta, b, r) * dot);
                next = F::next(delta, y, a, b);
                next_dot = y_dot + (q - r) * dot;
            }
            const auto on = is_on(n);
            delta = on ? next : delta;
            dot = on ? next_dot : dot;
        }
        Stream<S, S> to(lanes, out, records());
        V m = F::slope(delta, last), m_dot = is_on(0) ? F::curvature(delta, last, m) * dot : V{};
        V sums[4] = {};
        add(totals[5], m_dot);
        for (int64_t n = lanes.longest - 1; n >= 0; --n) {
            S* record = to.room(n);
            const auto on = is_on(n);
            store<S>(record, on ? -m_dot : V{});
            store<S>(record + W, on ? m_dot : V{});
            to.finish(n);
            if (n == 0) break;
            const S* at = room + 4 * n * W;
            const V q = load<S>(at), r = load<S>(at + W), q_dot = load<S>(at + 2 * W), r_dot = load<S>(at + 3 * W);
            const V both = m_dot * q + m * q_dot, from_one = (1 - m) * r_dot - m_dot * r;
            sums[3] += on ? both : V{};
            sums[2] += on ? m_dot - both : V{};
            sums[1] += on ? from_one : V{};
            sums[0] += on ? -m_dot - from_one : V{};
            m_dot = on ? both + from_one : m_dot;
            m = on ? m * q + (1 - m) * r : m;
        }
        add(totals[4], m_dot);
        for (int k = 0; k < 4; ++k) add(totals[k], sums[k]);
    }

private:
    void add(double& total, V v) const {
        for (int l = 0; l < lanes.valid; ++l) total += double(v[l]);
    }
};

// body(unit, thread) for all sequences, some of which share a unit; `numbers` of room for each of a unit's steps.
template <class S, class F, class Body>
void for_units(const ScoresProblem<S>& p, int numbers, Body body) {
    constexpr int W = lanes_of<S>;
    const int64_t units = (p.batch + W - 1) / W, threads = std::max<int64_t>(1, std::min<int64_t>(p.threads, units));
    const auto order = scratch<int64_t>(p.batch);
    for (int64_t n = 0; n < p.batch; ++n) order[std::size_t(n)] = n;
    parallel_for(threads, p.threads, [&](int64_t t) {
        const auto room = scratch<S>(numbers * p.steps * W);
        for (int64_t u = t * units / threads; u < (t + 1) * units / threads; ++u) {
            body(Unit<S, F>(p, &order[std::size_t(u * W)], std::min<int64_t>(W, p.batch - u * W), room.get()), t);
        }
    });
}

template <class S, class Action>
void with_function(const ScoresProblem<S>& p, Action action) {
    if (p.omega.alpha == 2) return action(Difference<S, Quadratic<S>>());
    const S* w = p.scores.transitions;
    for (S shift : {w[3] - w[2], w[1] - w[0], p.scores.end[1] - p.scores.end[0]}) {
        if (!(std::abs(shift) <= Odds<S>::most_shift)) return action(Difference<S, Softplus<S>>());
    }
    action(Odds<S>());
}

template <class S>
bool marginals(const ScoresProblem<S>& p, S* out) {
    const S *w = p.scores.transitions, *start = p.scores.start, *end = p.scores.end;
    for (S shared : {w[0], w[1], w[2], w[3], start[0], start[1], end[0], end[1]}) {
        if (!(std::abs(shared) < infinity<S>)) return false;
    }
    std::memset(out, 0, std::size_t(p.batch * p.steps * 2) * sizeof(S));
    std::atomic<bool> sound{true};
    with_function(p, [&](auto function) {
        for_units<S, decltype(function)>(p, 2, [&](const auto& unit, int64_t) {
            if (!unit.marginals(out)) sound = false;
        });
    });
    return sound;
}

template <class S>
void marginals_vjp(const ScoresProblem<S>& p, const S* cotangent, const Scores<S>& gradient) {
    std::memset(gradient.emissions, 0, std::size_t(p.batch * p.steps * 2) * sizeof(S));
    const auto totals = zeros<double>(8 * std::max(1, p.threads));
    with_function(p, [&](auto function) {
        for_units<S, decltype(function)>(p, 4, [&](const auto& unit, int64_t t) {
            unit.vjp(cotangent, gradient.emissions, &totals[std::size_t(8 * t)]);
        });
    });
    for (int t = 1; t < p.threads; ++t) {
        for (int k = 0; k < 6; ++k) totals[std::size_t(k)] += totals[std::size_t(8 * t + k)];
    }
    for (int k = 0; k < 4; ++k) gradient.transitions[k] = S(totals[std::size_t(k)]);
    for (int state = 0; state < 2; ++state) {
        const double sign = state ? 1 : -1;
        gradient.start[state] = S(sign * totals[4]);
        gradient.end[state] = S(sign * totals[5]);
    }
}

}  // namespace

template <class S>
BinaryKernels<S> binary_kernels() {
    return {marginals<S>, marginals_vjp<S>};
}
template BinaryKernels<float> binary_kernels<float>();
template BinaryKernels<double> binary_kernels<double>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
