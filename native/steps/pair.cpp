// The marginals of chains of two states, with sequences in the lanes.
//
// A step passes on only δ = v(1) − v(0), the difference of the values of the states. With f(u) = max_Ω(u, 0), and a =
// W[1,1] − W[1,0], b = W[0,1] − W[0,0] by transitions W[current, previous],
//
//     δ_t = y_t + W[1,0] − W[0,0] + f(δ_{t−1} + a) − f(δ_{t−1} + b),   y_t = e_t(1) − e_t(0),
//
// and the previous state is 1 with probability f'(δ + a) or f'(δ + b), as the current one is 1 or 0. So neither values
// nor a tape are needed, and a unit of sequences stays in the cache. δ and shared scores are in the unit of Ω.
#include "pair.h"

#include <atomic>
#include <utility>
#include <vector>

#include "../base/threads.h"
#include "lanes.h"
#include "odds.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

// The gradient of Σ ⟨cotangent, marginals⟩ by transitions [current, previous], and by state 1 at the start and the end.
struct alignas(64) PairTotals {
    double transitions[4], start, end;

    void operator+=(const PairTotals& other) {
        for (int k = 0; k < 4; ++k) transitions[k] += other.transitions[k];
        start += other.start;
        end += other.end;
    }
};

// Two vectors of sequences, since a step waits for the one before, and room for their sweeps.
template <class S>
struct PairUnit {
    static constexpr int vectors = 2, places = 6, W = lanes_of<S>;
    static constexpr int64_t gap = places * vectors * W;
    using Ints = typename Shape<Vec<S>>::Int;
    using Int = typename Format<S>::Int;

    const int64_t sharing;
    Lanes<W> lanes[vectors];
    Ints length[vectors];
    int64_t longest;
    S *const room, *const records;  // room: (steps, places, vectors, lanes), records: (steps, 2, lanes)

    // Results are read in whole vectors.
    static int64_t size(int64_t steps) { return (steps + W) * (gap + 2 * W); }

    // The u-th unit, where so many sequences as `sharing` says have their steps in common.
    __attribute__((noinline)) PairUnit(const ScoresProblem<S>& p, int64_t u, int64_t shared_by, S* with)
        : sharing(shared_by), lanes{half(p, 2 * u), half(p, 2 * u + 1)},
          longest(std::max(lanes[0].longest, lanes[1].longest)), room(with), records(with + (p.steps + W) * gap) {
        for (int k = 0; k < vectors; ++k) {
            for (int l = 0; l < W; ++l) length[k][l] = Int(lanes[k].length[l]);
        }
    }

    S* place(int k, int64_t n, int which) const { return room + n * gap + (which * vectors + k) * W; }
    // The lanes whose sequence has a step n.
    Ints has(int k, int64_t n) const { return length[k] > Ints{} + Int(n); }

    // Reads `count` numbers for each step of vector k, into vectors that are `apart`; any, where a sequence has ended.
    __attribute__((noinline)) void read(int k, const S* numbers, int64_t count, S* to, int64_t apart) const {
        for_runs(k, numbers, count, [&](const S* const* from, int64_t n, int64_t run) {
            fetch<S>(from, run * count, to + n * count * apart, apart);
        });
    }
    __attribute__((noinline)) void write(int k, const S* from, int64_t apart, S* numbers, int64_t count) const {
        for_runs(k, numbers, count, [&](S* const* to, int64_t n, int64_t run) {
            flush<S>(to, lanes[k].valid, run * count, from + n * count * apart, apart);
        });
    }
    // A number for each step, to or from a place.
    void read(const S* numbers, int which) const {
        for (int k = 0; k < vectors; ++k) read(k, numbers, 1, place(k, 0, which), gap);
    }
    void write(int which, S* numbers) const {
        for (int k = 0; k < vectors; ++k) write(k, place(k, 0, which), gap, numbers, 1);
    }

private:
    Lanes<W> half(const ScoresProblem<S>& p, int64_t number) const {
        int64_t each[W];
        for (int l = 0; l < W; ++l) each[l] = std::min(number * W + l, p.batch - 1);
        return {p, each, std::max<int64_t>(0, p.batch - number * W), sharing};
    }

    // body(where the numbers of each lane are, from step n on, for so many steps). Backwards: a sequence that has ended
    // is at its last step, which comes later.
    template <class T, class Body>
    void for_runs(int k, T* numbers, int64_t count, Body body) const {
        const int64_t run = lanes[k].has_holes() ? 1 : lanes[k].longest;
        for (int64_t n = lanes[k].longest - run; n >= 0 && run > 0; n -= run) {
            T* at[W];
            for (int l = 0; l < W; ++l) {
                at[l] = numbers + (lanes[k].sequence[l] * lanes[k].steps + lanes[k].step(l, n)) * count;
            }
            body(at, n, run);
        }
    }
};

// A cotangent of the marginals is (g − mean) · part, by sequence, from the numbers g.
template <class S>
struct Centred {
    Vec<S> mean[PairUnit<S>::vectors], part[PairUnit<S>::vectors];
};

// The sweeps of a unit by F. They find their numbers in its room, and leave their results there: places 0 … 3 are for
// q, its rest, r and its rest.
template <class S, class F>
class PairSweep {
    using V = Vec<S>;
    static constexpr int W = lanes_of<S>, K = PairUnit<S>::vectors;

    const PairUnit<S> unit;
    const Shared<S> shared;
    typename PairUnit<S>::Ints is_far{}, bad{};

    S* place(int k, int64_t n, int which) const { return unit.place(k, n, which); }

public:
    PairSweep(const PairUnit<S>& of, const Shared<S>& scores) : unit(of), shared(scores) {}

    // From the score of state 1 less state 0's, at place 4, to the probabilities of states 1 and 0, at places 4 and 5.
    // False if F is not for such scores; `sound` becomes false where there is no answer.
    __attribute__((noinline)) bool marginals(bool& sound) {
        V delta[K] = {}, m[K], m_less[K];
        for (int64_t n = 0; n < unit.longest; ++n) {
            for (int k = 0; k < K; ++k) delta[k] = unit.has(k, n) ? next(k, n, delta[k]) : delta[k];
        }
        if (any(is_far)) return false;
        for (int k = 0; k < K; ++k) {
            m[k] = F::slope(delta[k], shared.last, m_less[k]);
            sound &= !any(m[k] != m[k]);
        }
        sound &= !any(bad);
        for (int64_t n = unit.longest - 1; n >= 0; --n) {
            for (int k = 0; k < K; ++k) {
                const auto on = unit.has(k, n);
                const V correction = on ? 2 - (m[k] + m_less[k]) : V{};  // rounding adds up over the steps
                store<S>(place(k, n, 4), m[k] * correction);
                store<S>(place(k, n, 5), m_less[k] * correction);
                step_back(on, load_before(k, n), m[k], m_less[k]);
            }
        }
        return true;
    }

    // From the same and, at place 5, numbers of a cotangent to the derivative in the scores, at place 4. False as well.
    __attribute__((noinline)) bool vjp(const Centred<S>& cotangent, PairTotals& totals) {
        V delta[K] = {}, dot[K] = {}, m[K], m_less[K], m_dot[K], sums[4] = {};
        for (int64_t n = 0; n < unit.longest; ++n) {
            for (int k = 0; k < K; ++k) push(k, n, cotangent.mean[k], cotangent.part[k], delta[k], dot[k]);
        }
        if (any(is_far)) return false;
        for (int k = 0; k < K; ++k) {
            m[k] = F::slope(delta[k], shared.last, m_less[k]);
            m_dot[k] = unit.has(k, 0) ? F::curvature(delta[k], shared.last, m[k], m_less[k]) * dot[k] : V{};
            add(totals.end, m_dot[k]);
        }
        for (int64_t n = unit.longest - 1; n >= 0; --n) {
            for (int k = 0; k < K; ++k) {
                const V found = unit.has(k, n) ? m_dot[k] * shared.scale : V{};
                if (n > 0) pull(k, n, m[k], m_less[k], m_dot[k], sums);
                store<S>(place(k, n, 4), found);
            }
        }
        for (int k = 0; k < K; ++k) add(totals.start, m_dot[k]);
        for (int k = 0; k < 4; ++k) add(totals.transitions[k], sums[k]);
        return true;
    }

private:
    // δ of step n, which keeps what the step before has. A score that is NaN is bad.
    V next(int k, int64_t n, V delta) {
        const V score = load<S>(place(k, n, 4)) * shared.unit + (n == 0 ? shared.first : shared.change);
        const auto on = unit.has(k, n);
        bad |= on & (score != score);
        is_far |= on & ((score > V{} + F::far) | (score < V{} - F::far));
        Before<V> before{V{}, V{}, V{}, V{}};
        const V first = F::begin(score), found = n == 0 ? first : F::next(delta, first, shared.a, shared.b, before);
        store<S>(place(k, n, 0), before.q);
        store<S>(place(k, n, 1), before.q_less);
        store<S>(place(k, n, 2), before.r);
        store<S>(place(k, n, 3), before.r_less);
        return found;
    }

    Before<V> load_before(int k, int64_t n) const {
        return {load<S>(place(k, n, 0)), load<S>(place(k, n, 1)), load<S>(place(k, n, 2)), load<S>(place(k, n, 3))};
    }

    template <class Mask>
    static void step_back(Mask on, const Before<V>& before, V& m, V& m_less) {
        const V next = m * before.q + m_less * before.r;
        m_less = on ? m * before.q_less + m_less * before.r_less : m_less;
        m = on ? next : m;
    }

    // δ and its derivative along the cotangents so far.
    void push(int k, int64_t n, V mean, V part, V& delta, V& dot) {
        const V cotangent = (load<S>(place(k, n, 5)) - mean) * part, next_delta = next(k, n, delta);
        const Before<V> before = load_before(k, n);
        store<S>(place(k, n, 4), F::curvature(delta, shared.a, before.q, before.q_less) * dot);
        store<S>(place(k, n, 5), F::curvature(delta, shared.b, before.r, before.r_less) * dot);
        const auto on = unit.has(k, n);
        dot = on ? cotangent + (before.q - before.r) * dot : dot;
        delta = on ? next_delta : delta;
    }

    // The masses and their derivatives at step n − 1, and what the transitions to step n gain.
    void pull(int k, int64_t n, V& m, V& m_less, V& m_dot, V (&sums)[4]) const {
        const Before<V> before = load_before(k, n);
        const auto on = unit.has(k, n);
        const V by_one = m_dot * before.q + m * load<S>(place(k, n, 4));
        const V by_zero = m_less * load<S>(place(k, n, 5)) - m_dot * before.r;
        sums[3] += on ? by_one : V{};
        sums[2] += on ? m_dot - by_one : V{};
        sums[1] += on ? by_zero : V{};
        sums[0] += on ? -m_dot - by_zero : V{};
        m_dot = on ? by_one + by_zero : m_dot;
        step_back(on, before, m, m_less);
    }

    static void add(double& total, V v) {
        for (int l = 0; l < W; ++l) total += double(v[l]);
    }
};

// act(F) for the function that is fastest for the shared scores, or for one that takes all scores.
template <class S, class Act>
bool choose(const OmegaParameters& omega, const Shared<S>& shared, bool all, Act act) {
    if (omega.is_quadratic) return act(Difference<S, omega::SquaredL2<S>>{});
    if (!all && shared.is_near(Odds<S>::most_shift)) return act(Odds<S>{});
    return act(Difference<S, omega::Negentropy<S>>{});
}

// body(unit, sums) for all sequences; returns the sums of all threads. `out` has `size` numbers for each step, of which
// the sweeps leave masked ones alone.
template <class S, class Body>
PairTotals for_units(const ScoresProblem<S>& p, int64_t sharing, S* out, int64_t size, Body body) {
    constexpr int64_t sequences = PairUnit<S>::vectors * lanes_of<S>;
    const int64_t units = (p.batch + sequences - 1) / sequences;
    const int64_t threads = std::max<int64_t>(1, std::min<int64_t>(p.threads, units));
    std::vector<PairTotals> each(std::size_t(threads), PairTotals{});
    parallel_for(threads, int(threads), [&](int64_t t, int) {
        const auto room = scratch<S>(PairUnit<S>::size(p.steps));
        Pace pace;
        for (int64_t u = t * units / threads; u < (t + 1) * units / threads; ++u) {
            pace.spend(sequences * p.steps);
            for (int64_t b = u * sequences; b < std::min((u + 1) * sequences, p.batch); ++b) {
                clear_masked(p, b / sharing, out + b * p.steps * size, size);
            }
            body(PairUnit<S>(p, u, sharing, room.get()), each[std::size_t(t)]);
        }
    });
    for (std::size_t t = 1; t < each.size(); ++t) each[0] += each[t];
    return each[0];
}

// The marginals of a unit, whose scores prepare() brings; whether there are any.
template <class S, class Prepare>
bool solve(const ScoresProblem<S>& p, const PairUnit<S>& unit, const Shared<S>& shared, Prepare prepare) {
    bool sound;
    for (bool all : {false, true}) {
        prepare();
        sound = true;
        const auto act = [&](auto by) { return PairSweep<S, decltype(by)>(unit, shared).marginals(sound); };
        if (choose(p.omega, shared, all, act)) break;
    }
    return sound;
}

// Their derivative along a cotangent, which prepare() gives.
template <class S, class Prepare>
void pull_back(const ScoresProblem<S>& p, const PairUnit<S>& unit, const Shared<S>& shared, PairTotals& totals,
               Prepare prepare) {
    for (bool all : {false, true}) {
        const Centred<S> cotangent = prepare();
        const auto act = [&](auto by) { return PairSweep<S, decltype(by)>(unit, shared).vjp(cotangent, totals); };
        if (choose(p.omega, shared, all, act)) break;
    }
}

// --- both states

template <class S>
Shared<S> shared_of(const ScoresProblem<S>& p) {
    const auto& [emissions, transitions, start, end] = p.scores;
    return {transitions, start[1] - start[0], end[1] - end[0], p.omega.is_sum, S(1)};
}

// The difference of the two numbers of each step, to a place.
template <class S>
void read_differences(const PairUnit<S>& unit, const S* numbers, int which) {
    constexpr int W = lanes_of<S>;
    for (int k = 0; k < PairUnit<S>::vectors; ++k) {
        unit.read(k, numbers, 2, unit.records, W);
        for (int64_t n = 0; n < unit.lanes[k].longest; ++n) {
            const S* record = unit.records + 2 * n * W;
            store<S>(unit.place(k, n, which), load<S>(record + W) - load<S>(record));
        }
    }
}

// And back: what get(k, n) gives for state 0 and for state 1.
template <class S, class Get>
void write_both(const PairUnit<S>& unit, S* numbers, Get get) {
    constexpr int W = lanes_of<S>;
    for (int k = 0; k < PairUnit<S>::vectors; ++k) {
        for (int64_t n = 0; n < unit.lanes[k].longest; ++n) {
            const std::pair<Vec<S>, Vec<S>> both = get(k, n);
            store<S>(unit.records + 2 * n * W, both.first);
            store<S>(unit.records + (2 * n + 1) * W, both.second);
        }
        unit.write(k, unit.records, W, numbers, 2);
    }
}

template <class S>
bool marginals(const ScoresProblem<S>& p, S* out) {
    const Shared<S> shared = shared_of(p);
    if (!shared.is_finite()) return false;
    std::atomic<bool> sound{true};
    for_units(p, 1, out, 2, [&](const PairUnit<S>& unit, PairTotals&) {
        if (!solve(p, unit, shared, [&] { read_differences(unit, p.scores.emissions, 4); })) sound = false;
        write_both(unit, out, [&](int k, int64_t n) {
            return std::pair(load<S>(unit.place(k, n, 5)), load<S>(unit.place(k, n, 4)));
        });
    });
    return sound;
}

template <class S>
void marginals_vjp(const ScoresProblem<S>& p, const S* cotangent, const Scores<S>& gradient) {
    const Shared<S> shared = shared_of(p);
    const PairTotals all = for_units(p, 1, gradient.emissions, 2, [&](const PairUnit<S>& unit, PairTotals& totals) {
        pull_back(p, unit, shared, totals, [&] {
            read_differences(unit, p.scores.emissions, 4);
            read_differences(unit, cotangent, 5);
            return Centred<S>{{}, {broadcast(S(1)), broadcast(S(1))}};
        });
        write_both(unit, gradient.emissions, [&](int k, int64_t n) {
            return std::pair(-load<S>(unit.place(k, n, 4)), load<S>(unit.place(k, n, 4)));
        });
    });
    for (int k = 0; k < 4; ++k) gradient.transitions[k] = S(all.transitions[k]);
    for (int state = 0; state < 2; ++state) {
        gradient.start[state] = S(state ? all.start : -all.start);
        gradient.end[state] = S(state ? all.end : -all.end);
    }
}

// --- attention

template <class S>
Shared<S> shared_of(const AttentionProblem<S>& p) {
    const S* transitions = p.chain.scores.transitions;
    return {transitions, transitions[2] - transitions[0], S(0), p.chain.omega.is_sum, p.scale};
}

template <class S>
bool weights(const AttentionProblem<S>& p, S* out, S* totals) {
    using V = Vec<S>;
    const Shared<S> shared = shared_of(p);
    if (!shared.is_finite()) return false;
    std::atomic<bool> sound{true};
    // So that neither 1 / total nor a sum of such overflows.
    const S least = std::numeric_limits<S>::min() / std::numeric_limits<S>::epsilon();
    for_units(p.chain, p.sharing, out, 1, [&](const PairUnit<S>& unit, PairTotals&) {
        if (!solve(p.chain, unit, shared, [&] { unit.read(p.scores, 4); })) sound = false;
        for (int k = 0; k < PairUnit<S>::vectors; ++k) {
            const auto& lanes = unit.lanes[k];
            V total{};
            for (int64_t n = 0; n < lanes.longest; ++n) total += load<S>(unit.place(k, n, 4));
            total = total < V{} + least ? V{} + infinity<S> : total;
            for (int l = 0; l < lanes.valid; ++l) totals[lanes.sequence[l]] = total[l];
            const V part = 1 / total;
            for (int64_t n = 0; n < lanes.longest; ++n) {
                store<S>(unit.place(k, n, 4), load<S>(unit.place(k, n, 4)) * part);
            }
        }
        unit.write(4, out);
    });
    return sound;
}

template <class S>
void weights_vjp(const AttentionProblem<S>& p, const S* weights, const S* totals, const S* cotangent, S* to_scores,
                 S* to_transitions) {
    const Shared<S> shared = shared_of(p);
    const PairTotals all = for_units(p.chain, p.sharing, to_scores, 1, [&](const PairUnit<S>& unit, PairTotals& sums) {
        // Of m / total the derivative along g is (g − ⟨g, weights⟩) / total.
        pull_back(p.chain, unit, shared, sums, [&] {
            Centred<S> centred{};
            unit.read(cotangent, 5);
            unit.read(weights, 4);
            for (int k = 0; k < PairUnit<S>::vectors; ++k) {
                for (int64_t n = 0; n < unit.lanes[k].longest; ++n) {
                    const Vec<S> product = load<S>(unit.place(k, n, 4)) * load<S>(unit.place(k, n, 5));
                    centred.mean[k] += unit.has(k, n) ? product : Vec<S>{};
                }
                for (int l = 0; l < lanes_of<S>; ++l) centred.part[k][l] = 1 / totals[unit.lanes[k].sequence[l]];
            }
            unit.read(p.scores, 4);
            return centred;
        });
        unit.write(4, to_scores);
    });
    const double begin[4] = {-all.start, 0, all.start, 0};
    for (int k = 0; k < 4; ++k) to_transitions[k] = S(all.transitions[k] + begin[k]);
}

}  // namespace

template <class S>
PairKernels<S> pair_kernels() {
    return {marginals<S>, marginals_vjp<S>, weights<S>, weights_vjp<S>};
}
template PairKernels<float> pair_kernels<float>();
template PairKernels<double> pair_kernels<double>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
