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

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "lanes.h"
#include "regularizers.h"
#include "parallel.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

// The contribution of a transition to δ, and its exponential.
template <class S>
struct Shift {
    S sum, factor;
};

template <class V>
inline V positive(V x) {
    return x > V{} ? x : V{};
}

// The probability of state 1 at the step before, if the current state is 1 (q) or 0 (r), and that of state 0: not as 1 − q,
// which would lose the digits of small probabilities.
template <class V>
struct Before {
    V q, q_less, r, r_less;
};

template <class S, class F>
struct Difference;
template <class S>
struct Softplus;

// What δ is kept as, and how it goes on: `begin` of a first step's, `next` of a further one's, given what a first step
// with its score would have. `Wide` is used where a score is farther from 0 than `far`.

// Negentropy by the odds exp(δ), where no shift is far from 0: what each step waits for is a division alone. No product
// overflows, since (1 + odds·e^a) / (1 + odds·e^b) lies between 1 and e^(a − b).
template <class S>
struct Odds {
    using V = Vec<S>;
    using Wide = Difference<S, Softplus<S>>;
    static constexpr S far = std::is_same_v<S, float> ? S(73) : S(600), most_shift = S(4);

    static V begin(V y) { return exp_nonpositive(y); }
    static V next(V odds, V first, Shift<S> a, Shift<S> b, Before<V>& before) {
        before.q = slope(odds, a, before.q_less);
        before.r = slope(odds, b, before.r_less);
        return first * ((1 + odds * a.factor) * before.r_less);
    }
    static V slope(V odds, Shift<S> shift, V& less) {
        const V shifted = odds * shift.factor;
        less = 1 / (1 + shifted);
        return shifted * less;
    }
    static V curvature(V, Shift<S>, V q, V less) { return q * less; }
};

// By δ itself. Since f(u) = u + f(−u), nothing is large in a difference of f where δ is.
template <class S, class F>
struct Difference {
    using V = Vec<S>;
    using Wide = Difference;
    static constexpr S far = infinity<S>;

    static V begin(V y) { return y; }
    static V next(V delta, V first, Shift<S> a, Shift<S> b, Before<V>& before) {
        before.q = slope(delta, a, before.q_less);
        before.r = slope(delta, b, before.r_less);
        const V sign = delta > V{} ? V{} - S(1) : V{} + S(1);
        return first + (delta > V{} ? V{} + (a.sum - b.sum) : V{}) +
               F::less(sign * (delta + a.sum), sign * (delta + b.sum));
    }
    static V slope(V delta, Shift<S> shift, V& less) {
        less = F::slope(-(delta + shift.sum));
        return F::slope(delta + shift.sum);
    }
    static V curvature(V delta, Shift<S> shift, V q, V less) { return F::curvature(delta + shift.sum, q, less); }
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
    static V curvature(V, V q, V less) { return q * less; }

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
    static V curvature(V u, V, V) { return (u > V{} - S(1)) & (u < V{} + S(1)) ? V{} + S(0.5) : V{}; }

private:
    static V value(V u) {
        const V t = positive(u + 1);
        return u < V{} + S(1) ? S(0.25) * t * t : u;
    }
};

// The scores that sequences share, as differences of state 1 to state 0.
template <class S>
struct Shared {
    Shift<S> a, b, last;
    S change, first;

    Shared(const S* transitions, S first, S last)
        : a(shift(transitions[3] - transitions[2])),
          b(shift(transitions[1] - transitions[0])),
          last(shift(last)),
          change(transitions[2] - transitions[0]),
          first(first) {}

    bool is_finite() const { return size(a.sum) + size(b.sum) + size(last.sum) + size(change) + size(first) < infinity<S>; }
    bool is_near(S most) const { return size(a.sum) <= most && size(b.sum) <= most && size(last.sum) <= most; }

private:
    static S size(S x) { return std::abs(x); }
    static Shift<S> shift(S sum) { return {sum, exp_nonpositive(sum)}; }
};

template <class S>
Shared<S> shared_of(const ScoresProblem<S>& p) {
    const auto& [emissions, transitions, start, end] = p.scores;
    return {transitions, start[1] - start[0], end[1] - end[0]};
}

template <class S>
Shared<S> shared_of(const AttentionProblem<S>& p) {
    const S* transitions = p.chain.scores.transitions;
    return {transitions, transitions[2] - transitions[0], S(0)};
}

// The gradient of Σ ⟨cotangent, marginals⟩ by transitions [current, previous], and by state 1 at the start and at the end.
struct Totals {
    double transitions[4], start, end;
};

// The sweeps of W sequences; what they read and write is the caller's. y(n) is the score of state 1 less state 0's.
template <class S, class F>
class Unit {
    using V = Vec<S>;
    static constexpr int W = lanes_of<S>;

    const Shared<S> shared;
    const V length;
    S* const room;  // (steps, 6, W): q, its rest, r, its rest, and what else a sweep keeps

    static V lengths_of(const Lanes<W>& lanes) {
        V v{};
        for (int l = 0; l < W; ++l) v[l] = S(lanes.length[l]);
        return v;
    }

public:
    const Lanes<W> lanes;

    Unit(const Lanes<W>& lanes, const Shared<S>& shared, S* room)
        : shared(shared), length(lengths_of(lanes)), room(room), lanes(lanes) {}

    auto is_on(int64_t n) const { return length > V{} + S(n); }
    S* place(int64_t n, int which) const { return room + (6 * n + which) * W; }

    // write(n, m, m_less) takes the probabilities of states 1 and 0 at each step, the last one first. False, before
    // anything is written, if F is not for such scores; `sound` becomes false where there is no answer.
    template <class Y, class Write>
    __attribute__((flatten)) bool marginals(Y y, Write write, bool& sound) const {
        auto bad = V{} != V{};
        if (!begin(y, bad)) return false;
        V delta{}, m_less;
        for (int64_t n = 0; n < lanes.longest; ++n) delta = is_on(n) ? next(n, delta) : delta;
        V m = F::slope(delta, shared.last, m_less);
        sound &= !any(bad | (m != m));
        for (int64_t n = lanes.longest - 1; n >= 0; --n) {
            const Before<V> before = load_before(n);
            const auto on = is_on(n);
            write(n, on ? m : V{}, on ? m_less : V{});
            const V next = m * before.q + m_less * before.r;
            m_less = on ? m * before.q_less + m_less * before.r_less : m_less;
            m = on ? next : m;
        }
        return true;
    }

    // write(n, g) takes the derivative of Σ cotangent(n) · marginals(n) in y, the last step's first. False as above.
    template <class Y, class C, class Write>
    __attribute__((flatten)) bool vjp(Y y, C cotangent, Write write, Totals& totals) const {
        auto unused = V{} != V{};
        if (!begin(y, unused)) return false;
        V delta{}, dot{}, m_less;
        for (int64_t n = 0; n < lanes.longest; ++n) {
            const V next_delta = next(n, delta);
            const Before<V> before = load_before(n);
            store<S>(place(n, 4), F::curvature(delta, shared.a, before.q, before.q_less) * dot);
            store<S>(place(n, 5), F::curvature(delta, shared.b, before.r, before.r_less) * dot);
            const auto on = is_on(n);
            dot = on ? cotangent(n) + (before.q - before.r) * dot : dot;
            delta = on ? next_delta : delta;
        }
        V m = F::slope(delta, shared.last, m_less);
        V m_dot = is_on(0) ? F::curvature(delta, shared.last, m, m_less) * dot : V{};
        V sums[4] = {};
        add(totals.end, m_dot);
        for (int64_t n = lanes.longest - 1; n >= 0; --n) {
            const auto on = is_on(n);
            write(n, on ? m_dot : V{});
            if (n == 0) break;
            const Before<V> before = load_before(n);
            const V by_one = m_dot * before.q + m * load<S>(place(n, 4));
            const V by_zero = m_less * load<S>(place(n, 5)) - m_dot * before.r;
            sums[3] += on ? by_one : V{};
            sums[2] += on ? m_dot - by_one : V{};
            sums[1] += on ? by_zero : V{};
            sums[0] += on ? -m_dot - by_zero : V{};
            m_dot = on ? by_one + by_zero : m_dot;
            const V next = m * before.q + m_less * before.r;
            m_less = on ? m * before.q_less + m_less * before.r_less : m_less;
            m = on ? next : m;
        }
        add(totals.start, m_dot);
        for (int k = 0; k < 4; ++k) add(totals.transitions[k], sums[k]);
        return true;
    }

private:
    // What does not wait for the step before; `bad` are the lanes where a score is NaN. False if F is not for them.
    template <class Y, class Mask>
    bool begin(Y y, Mask& bad) const {
        auto is_far = V{} != V{};
        for (int64_t n = 0; n < lanes.longest; ++n) {
            const V score = y(n) + (n == 0 ? shared.first : shared.change);
            const auto on = is_on(n);
            bad |= on & (score != score);
            is_far |= on & ((score > V{} + F::far) | (score < V{} - F::far));
            store<S>(place(n, 4), F::begin(score));
        }
        return !any(is_far);
    }

    // δ of step n, which keeps what the step before has.
    V next(int64_t n, V delta) const {
        const V first = load<S>(place(n, 4));
        Before<V> before{};
        const V found = n == 0 ? first : F::next(delta, first, shared.a, shared.b, before);
        store<S>(place(n, 0), before.q);
        store<S>(place(n, 1), before.q_less);
        store<S>(place(n, 2), before.r);
        store<S>(place(n, 3), before.r_less);
        return found;
    }

    Before<V> load_before(int64_t n) const {
        return {load<S>(place(n, 0)), load<S>(place(n, 1)), load<S>(place(n, 2)), load<S>(place(n, 3))};
    }

    void add(double& total, V v) const {
        for (int l = 0; l < lanes.valid; ++l) total += double(v[l]);
    }
};

// body(unit, thread) for all sequences, W of which share a unit; once more, where it is false.
template <class F, class S, class Body>
void for_units(const ScoresProblem<S>& p, const Shared<S>& shared, int64_t sharing, Body body) {
    constexpr int W = lanes_of<S>;
    const int64_t units = (p.batch + W - 1) / W, threads = std::max<int64_t>(1, std::min<int64_t>(p.threads, units));
    parallel_for(threads, p.threads, [&](int64_t t) {
        const auto room = scratch<S>(6 * (p.steps + 1) * W);
        for (int64_t u = t * units / threads; u < (t + 1) * units / threads; ++u) {
            int64_t sequences[W];
            for (int l = 0; l < W; ++l) sequences[l] = u * W + l;
            const Lanes<W> lanes(p, sequences, p.batch - u * W, sharing);
            if (body(Unit<S, F>(lanes, shared, room.get()), t)) continue;
            body(Unit<S, typename F::Wide>(lanes, shared, room.get()), t);
        }
    });
}

template <class S, class Action>
void with_function(const OmegaParameters& omega, const Shared<S>& shared, Action action) {
    if (omega.alpha == 2) return action(Difference<S, Quadratic<S>>());
    if (shared.is_near(Odds<S>::most_shift)) return action(Odds<S>());
    action(Difference<S, Softplus<S>>());
}

// No sweep writes to masked steps.
template <class S>
void clear(const ScoresProblem<S>& p, int64_t sharing, S* out, int64_t size) {
    const int64_t rows = p.batch / sharing;
    if (!std::all_of(p.lengths, p.lengths + rows, [&](int64_t length) { return length == p.steps; })) {
        std::memset(out, 0, std::size_t(p.batch * p.steps * size) * sizeof(S));
    }
}

Totals sum(const Totals* each, int count) {
    Totals all{};
    for (int t = 0; t < count; ++t) {
        for (int k = 0; k < 4; ++k) all.transitions[k] += each[t].transitions[k];
        all.start += each[t].start;
        all.end += each[t].end;
    }
    return all;
}

// --- both states

template <class S>
Records both_states(const ScoresProblem<S>& p) {
    return {2, 2, p.steps * 2};
}

// The difference of the two numbers of each step.
template <class S, class T>
auto differences(Stream<T, S>& stream) {
    return [&stream](int64_t n) {
        const S* record = stream.read(n);
        return load<S>(record + lanes_of<S>) - load<S>(record);
    };
}

template <class S>
bool marginals(const ScoresProblem<S>& p, S* out) {
    const auto shared = shared_of(p);
    if (!shared.is_finite()) return false;
    clear(p, 1, out, 2);
    std::atomic<bool> sound{true};
    with_function(p.omega, shared, [&](auto function) {
        for_units<decltype(function)>(p, shared, 1, [&](const auto& unit, int64_t) {
            Stream<const S, S> in(unit.lanes, p.scores.emissions, both_states(p));
            Stream<S, S> to(unit.lanes, out, both_states(p));
            bool is_sound = true;
            const auto write = [&](int64_t n, Vec<S> m, Vec<S> m_less) {
                S* record = to.room(n);
                store<S>(record, m_less);
                store<S>(record + lanes_of<S>, m);
                to.finish(n);
            };
            const bool served = unit.marginals(differences<S>(in), write, is_sound);
            if (!is_sound) sound = false;
            return served;
        });
    });
    return sound;
}

template <class S>
void marginals_vjp(const ScoresProblem<S>& p, const S* cotangent, const Scores<S>& gradient) {
    const auto shared = shared_of(p);
    const auto totals = zeros<Totals>(std::max(1, p.threads));
    clear(p, 1, gradient.emissions, 2);
    with_function(p.omega, shared, [&](auto function) {
        for_units<decltype(function)>(p, shared, 1, [&](const auto& unit, int64_t t) {
            Stream<const S, S> in(unit.lanes, p.scores.emissions, both_states(p)),
                along(unit.lanes, cotangent, both_states(p));
            Stream<S, S> to(unit.lanes, gradient.emissions, both_states(p));
            const auto write = [&](int64_t n, Vec<S> g) {
                S* record = to.room(n);
                store<S>(record, -g);
                store<S>(record + lanes_of<S>, g);
                to.finish(n);
            };
            return unit.vjp(differences<S>(in), differences<S>(along), write, totals[std::size_t(t)]);
        });
    });
    const Totals all = sum(totals.get(), std::max(1, p.threads));
    for (int k = 0; k < 4; ++k) gradient.transitions[k] = S(all.transitions[k]);
    for (int state = 0; state < 2; ++state) {
        gradient.start[state] = S(state ? all.start : -all.start);
        gradient.end[state] = S(state ? all.end : -all.end);
    }
}

// --- attention

template <class S>
Records one_number(const ScoresProblem<S>& p) {
    return {1, 1, p.steps};
}

template <class S>
bool weights(const AttentionProblem<S>& p, S* out, S* totals) {
    using V = Vec<S>;
    const auto shared = shared_of(p);
    if (!shared.is_finite()) return false;
    clear(p.chain, p.sharing, out, 1);
    std::atomic<bool> sound{true};
    // So that neither 1 / total nor a sum of such overflows.
    const S least = std::numeric_limits<S>::min() / std::numeric_limits<S>::epsilon();
    with_function(p.chain.omega, shared, [&](auto function) {
        for_units<decltype(function)>(p.chain, shared, p.sharing, [&](const auto& unit, int64_t) {
            Stream<const S, S> in(unit.lanes, p.scores, one_number(p.chain));
            Stream<S, S> to(unit.lanes, out, one_number(p.chain));
            V total{};
            bool is_sound = true;
            const auto keep = [&](int64_t n, V m, V) {
                store<S>(unit.place(n, 4), m);
                total += m;
            };
            if (!unit.marginals([&](int64_t n) { return p.scale * load<S>(in.read(n)); }, keep, is_sound)) return false;
            if (!is_sound) sound = false;
            total = total < V{} + least ? V{} + infinity<S> : total;
            for (int l = 0; l < unit.lanes.valid; ++l) totals[unit.lanes.sequence[l]] = total[l];
            const V part = 1 / total;
            for (int64_t n = unit.lanes.longest - 1; n >= 0; --n) {
                store<S>(to.room(n), load<S>(unit.place(n, 4)) * part);
                to.finish(n);
            }
            return true;
        });
    });
    return sound;
}

template <class S>
void weights_vjp(const AttentionProblem<S>& p, const S* weights, const S* totals, const S* cotangent, S* to_scores,
                 S* to_transitions) {
    using V = Vec<S>;
    const auto shared = shared_of(p);
    const auto gained = zeros<Totals>(std::max(1, p.chain.threads));
    const Records layout = one_number(p.chain);
    clear(p.chain, p.sharing, to_scores, 1);
    with_function(p.chain.omega, shared, [&](auto function) {
        for_units<decltype(function)>(p.chain, shared, p.sharing, [&](const auto& unit, int64_t t) {
            // Of m / total the derivative along g is (g − ⟨g, weights⟩) / total.
            V mean{}, part;
            for (int l = 0; l < lanes_of<S>; ++l) part[l] = 1 / totals[unit.lanes.sequence[l]];
            Stream<const S, S> of(unit.lanes, weights, layout), once(unit.lanes, cotangent, layout);
            for (int64_t n = 0; n < unit.lanes.longest; ++n) {
                mean += unit.is_on(n) ? load<S>(of.read(n)) * load<S>(once.read(n)) : V{};
            }
            Stream<const S, S> in(unit.lanes, p.scores, layout), along(unit.lanes, cotangent, layout);
            Stream<S, S> to(unit.lanes, to_scores, layout);
            const auto write = [&](int64_t n, V g) {
                store<S>(to.room(n), p.scale * g);
                to.finish(n);
            };
            return unit.vjp([&](int64_t n) { return p.scale * load<S>(in.read(n)); },
                            [&](int64_t n) { return (load<S>(along.read(n)) - mean) * part; }, write,
                            gained[std::size_t(t)]);
        });
    });
    const Totals all = sum(gained.get(), std::max(1, p.chain.threads));
    const double begin[4] = {-all.start, 0, all.start, 0};
    for (int k = 0; k < 4; ++k) to_transitions[k] = S(all.transitions[k] + begin[k]);
}

}  // namespace

template <class S>
BinaryKernels<S> binary_kernels() {
    return {marginals<S>, marginals_vjp<S>, weights<S>, weights_vjp<S>};
}
template BinaryKernels<float> binary_kernels<float>();
template BinaryKernels<double> binary_kernels<double>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
