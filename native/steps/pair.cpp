// The marginals of chains of two states, with sequences in the lanes.
//
// All that a step passes on is δ, the value of state 1 less that of state 0. With f(u) = max_Ω(u, 0), and a = W[1,1] −
// W[1,0], b = W[0,1] − W[0,0] by transitions W[current, previous],
//
//     δ_t = y_t + W[1,0] − W[0,0] + f(δ_{t−1} + a) − f(δ_{t−1} + b),   y_t = e_t(1) − e_t(0),
//
// and the previous state is 1 with probability f'(δ + a) or f'(δ + b), as the current one is 1 or 0. So neither values
// nor a tape are needed, and a unit of sequences stays in the cache. δ and shared scores are in the unit of Ω.
#include "pair.h"

#include <atomic>
#include <vector>

#include "../base/threads.h"
#include "lanes.h"
#include "odds.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

template <class S>
S unit_of(const OmegaParameters& omega) {
    return omega.alpha == 1 ? omega::Negentropy<S>::unit : omega::SquaredL2<S>::unit;
}

template <class S>
Shared<S> shared_of(const ScoresProblem<S>& p) {
    const auto& [emissions, transitions, start, end] = p.scores;
    return {transitions, start[1] - start[0], end[1] - end[0], unit_of<S>(p.omega)};
}

template <class S>
Shared<S> shared_of(const AttentionProblem<S>& p) {
    const S* transitions = p.chain.scores.transitions;
    return {transitions, transitions[2] - transitions[0], S(0), unit_of<S>(p.chain.omega)};
}

// The gradient of Σ ⟨cotangent, marginals⟩ by transitions [current, previous], and by state 1 at the start and at the end.
struct alignas(64) Totals {
    double transitions[4], start, end;

    void operator+=(const Totals& other) {
        for (int k = 0; k < 4; ++k) transitions[k] += other.transitions[k];
        start += other.start;
        end += other.end;
    }
};

// Two vectors of sequences, since a step waits for the one before, and room for their sweeps.
template <class S>
struct Unit {
    static constexpr int vectors = 2, places = 6, W = lanes_of<S>;
    using Ints = typename Shape<Vec<S>>::Int;
    using Int = typename Format<S>::Int;

    const ScoresProblem<S>& problem;
    Lanes<W> lanes[vectors];
    Ints length[vectors];
    int64_t longest;
    S* const room;  // (steps, places, vectors, lanes): q, its rest, r, its rest, and two of what else there is

    // The u-th unit, where so many sequences as `sharing` says have their steps in common.
    Unit(const ScoresProblem<S>& of, int64_t u, int64_t sharing, S* with)
        : problem(of), lanes{lanes_of_half(2 * u, sharing), lanes_of_half(2 * u + 1, sharing)},
          longest(std::max(lanes[0].longest, lanes[1].longest)), room(with) {
        for (int k = 0; k < vectors; ++k) {
            for (int l = 0; l < W; ++l) length[k][l] = Int(lanes[k].length[l]);
        }
    }

    S* place(int k, int64_t n, int which) const { return room + ((places * n + which) * vectors + k) * W; }
    // The lanes whose sequence has a step n.
    Ints has(int k, int64_t n) const { return length[k] > Ints{} + Int(n); }

    // Calls put(k, n, numbers of step n) for every step of both vectors, where numbers have `size` for each.
    template <class Put>
    void read(const S* numbers, int64_t size, Put put) const {
        for (int k = 0; k < vectors; ++k) {
            Stream<const S, S> from(lanes[k], numbers, {size, size, problem.steps * size});
            for (int64_t n = 0; n < lanes[k].longest; ++n) put(k, n, from.read(n));
        }
    }
    // Calls get(k, n, room for the numbers of step n), and writes these.
    template <class Get>
    void write(S* numbers, int64_t size, Get get) const {
        for (int k = 0; k < vectors; ++k) {
            Stream<S, S> to(lanes[k], numbers, {size, size, problem.steps * size});
            for (int64_t n = lanes[k].longest - 1; n >= 0; --n) {
                get(k, n, to.room(n));
                to.finish(n);
            }
        }
    }

private:
    Lanes<W> lanes_of_half(int64_t half, int64_t sharing) const {
        int64_t each[W];
        for (int l = 0; l < W; ++l) each[l] = std::min(half * W + l, problem.batch - 1);
        return {problem, each, std::max<int64_t>(0, problem.batch - half * W), sharing};
    }
};

// The sweeps of a unit. They find their numbers in its room, and leave their results there.
template <class S, class F>
class Sweep {
    using V = Vec<S>;
    static constexpr int W = lanes_of<S>, K = Unit<S>::vectors;

    const Unit<S>& unit;
    const Shared<S> shared;
    const int64_t longest = unit.longest;

    S* place(int k, int64_t n, int which) const { return unit.place(k, n, which); }

public:
    Sweep(const Unit<S>& of, const Shared<S>& scores) : unit(of), shared(scores) {}

    // From the score of state 1 less state 0's, at place 4, to the probabilities of states 1 and 0, at places 4 and 5. False
    // if F is not for such scores; `sound` becomes false where there is no answer.
    bool marginals(bool& sound) const {
        if (!begin(sound)) return false;
        V delta[K] = {V{}, V{}}, m[K], m_less[K];
        for (int64_t n = 0; n < longest; ++n) {
            for (int k = 0; k < K; ++k) delta[k] = unit.has(k, n) ? next(k, n, delta[k]) : delta[k];
        }
        for (int k = 0; k < K; ++k) {
            m[k] = F::slope(delta[k], shared.last, m_less[k]);
            sound &= !any(m[k] != m[k]);
        }
        for (int64_t n = longest - 1; n >= 0; --n) {
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

    // From the same and, at place 5, a cotangent of the marginals to the derivative in the scores, at place 4. False as above.
    bool vjp(Totals& totals) const {
        bool unused = true;
        if (!begin(unused)) return false;
        V delta[K] = {V{}, V{}}, dot[K] = {V{}, V{}}, m[K], m_less[K], m_dot[K], sums[4] = {V{}, V{}, V{}, V{}};
        for (int64_t n = 0; n < longest; ++n) {
            for (int k = 0; k < K; ++k) push(k, n, delta[k], dot[k]);
        }
        for (int k = 0; k < K; ++k) {
            m[k] = F::slope(delta[k], shared.last, m_less[k]);
            m_dot[k] = unit.has(k, 0) ? F::curvature(delta[k], shared.last, m[k], m_less[k]) * dot[k] : V{};
            add(totals.end, m_dot[k]);
        }
        for (int64_t n = longest - 1; n >= 0; --n) {
            for (int k = 0; k < K; ++k) {
                const V found = unit.has(k, n) ? m_dot[k] : V{};
                if (n > 0) pull(k, n, m[k], m_less[k], m_dot[k], sums);
                store<S>(place(k, n, 4), found);
            }
        }
        for (int k = 0; k < K; ++k) add(totals.start, m_dot[k]);
        for (int k = 0; k < 4; ++k) add(totals.transitions[k], sums[k]);
        return true;
    }

private:
    // What does not wait for the step before; not `sound` where a score is NaN. False if F is not for them.
    bool begin(bool& sound) const {
        auto is_far = V{} != V{}, bad = is_far;
        for (int64_t n = 0; n < longest; ++n) {
            for (int k = 0; k < K; ++k) {
                const V score = load<S>(place(k, n, 4)) * shared.unit + (n == 0 ? shared.first : shared.change);
                const auto on = unit.has(k, n);
                bad |= on & (score != score);
                is_far |= on & ((score > V{} + F::far) | (score < V{} - F::far));
                store<S>(place(k, n, 4), F::begin(score));
            }
        }
        sound &= !any(bad);
        return !any(is_far);
    }

    // δ of step n, which keeps what the step before has.
    V next(int k, int64_t n, V delta) const {
        const V first = load<S>(place(k, n, 4));
        Before<V> before{V{}, V{}, V{}, V{}};
        const V found = n == 0 ? first : F::next(delta, first, shared.a, shared.b, before);
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
    void push(int k, int64_t n, V& delta, V& dot) const {
        const V cotangent = load<S>(place(k, n, 5)), next_delta = next(k, n, delta);
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
    if (omega.alpha != 1) return act(Difference<S, omega::SquaredL2<S>>{});
    if (!all && shared.is_near(Odds<S>::most_shift)) return act(Odds<S>{});
    return act(Difference<S, omega::Negentropy<S>>{});
}

// Runs prepare(unit), the sweep by F, act(F, unit, thread), and finish(unit) for all sequences. `out` has `size` numbers for
// each step, of which the sweeps leave masked ones alone.
template <class S, class Prepare, class Act, class Finish>
void for_units(const ScoresProblem<S>& p, const Shared<S>& shared, int64_t sharing, S* out, int64_t size, Prepare prepare,
               Act act, Finish finish) {
    constexpr int64_t sequences = Unit<S>::vectors * lanes_of<S>;
    const int64_t units = (p.batch + sequences - 1) / sequences;
    const int64_t threads = std::max<int64_t>(1, std::min<int64_t>(p.threads, units));
    parallel_for(threads, int(threads), [&](int64_t t, int) {
        const auto room = scratch<S>(Unit<S>::places * p.steps * sequences);
        for (int64_t u = t * units / threads; u < (t + 1) * units / threads; ++u) {
            const Unit<S> unit(p, u, sharing, room.get());
            for (int64_t b = u * sequences; b < std::min((u + 1) * sequences, p.batch); ++b) {
                clear_masked(p, b / sharing, out + b * p.steps * size, size);
            }
            for (bool all : {false, true}) {
                prepare(unit);
                if (choose(p.omega, shared, all, [&](auto by) { return act(by, unit, t); })) break;
            }
            finish(unit);
        }
    });
}

// --- both states

// The difference of the two numbers of each step, to a place.
template <class S>
void read_differences(const Unit<S>& unit, const S* numbers, int which) {
    unit.read(numbers, 2, [&](int k, int64_t n, const S* record) {
        store<S>(unit.place(k, n, which), load<S>(record + lanes_of<S>) - load<S>(record));
    });
}

// Finds the probabilities of the states; false where there is no answer.
template <class S, class Prepare, class Finish>
bool find_marginals(const ScoresProblem<S>& p, const Shared<S>& shared, int64_t sharing, S* out, int64_t size,
                    Prepare prepare, Finish finish) {
    if (!shared.is_finite()) return false;
    std::atomic<bool> sound{true};
    const auto act = [&](auto by, const Unit<S>& unit, int64_t) {
        bool is_sound = true;
        const bool is_done = Sweep<S, decltype(by)>(unit, shared).marginals(is_sound);
        if (is_done && !is_sound) sound = false;
        return is_done;
    };
    for_units(p, shared, sharing, out, size, prepare, act, finish);
    return sound;
}

// The derivative along cotangents of the probabilities; sums over the sequences.
template <class S, class Prepare, class Finish>
Totals pull_back(const ScoresProblem<S>& p, const Shared<S>& shared, int64_t sharing, S* out, int64_t size,
                 Prepare prepare, Finish finish) {
    std::vector<Totals> each(std::size_t(std::max(1, p.threads)), Totals{});
    const auto act = [&](auto by, const Unit<S>& unit, int64_t t) {
        return Sweep<S, decltype(by)>(unit, shared).vjp(each[std::size_t(t)]);
    };
    for_units(p, shared, sharing, out, size, prepare, act, finish);
    for (std::size_t t = 1; t < each.size(); ++t) each[0] += each[t];
    return each[0];
}

template <class S>
bool marginals(const ScoresProblem<S>& p, S* out) {
    return find_marginals<S>(
        p, shared_of(p), 1, out, 2, [&](const Unit<S>& unit) { read_differences(unit, p.scores.emissions, 4); },
        [&](const Unit<S>& unit) {
            unit.write(out, 2, [&](int k, int64_t n, S* record) {
                store<S>(record, load<S>(unit.place(k, n, 5)));
                store<S>(record + lanes_of<S>, load<S>(unit.place(k, n, 4)));
            });
        });
}

template <class S>
void marginals_vjp(const ScoresProblem<S>& p, const S* cotangent, const Scores<S>& gradient) {
    const auto prepare = [&](const Unit<S>& unit) {
        read_differences(unit, p.scores.emissions, 4);
        read_differences(unit, cotangent, 5);
    };
    const auto finish = [&](const Unit<S>& unit) {
        unit.write(gradient.emissions, 2, [&](int k, int64_t n, S* record) {
            const Vec<S> g = load<S>(unit.place(k, n, 4));
            store<S>(record, -g);
            store<S>(record + lanes_of<S>, g);
        });
    };
    const Totals all = pull_back<S>(p, shared_of(p), 1, gradient.emissions, 2, prepare, finish);
    for (int k = 0; k < 4; ++k) gradient.transitions[k] = S(all.transitions[k]);
    for (int state = 0; state < 2; ++state) {
        gradient.start[state] = S(state ? all.start : -all.start);
        gradient.end[state] = S(state ? all.end : -all.end);
    }
}

// --- attention

template <class S>
void read_scores(const AttentionProblem<S>& p, const Unit<S>& unit) {
    unit.read(p.scores, 1, [&](int k, int64_t n, const S* score) {
        store<S>(unit.place(k, n, 4), p.scale * load<S>(score));
    });
}

template <class S>
bool weights(const AttentionProblem<S>& p, S* out, S* totals) {
    using V = Vec<S>;
    // So that neither 1 / total nor a sum of such overflows.
    const S least = std::numeric_limits<S>::min() / std::numeric_limits<S>::epsilon();
    const auto finish = [&](const Unit<S>& unit) {
        V part[2];
        for (int k = 0; k < 2; ++k) {
            const auto& lanes = unit.lanes[k];
            V total{};
            for (int64_t n = 0; n < lanes.longest; ++n) total += load<S>(unit.place(k, n, 4));
            total = total < V{} + least ? V{} + infinity<S> : total;
            for (int l = 0; l < lanes.valid; ++l) totals[lanes.sequence[l]] = total[l];
            part[k] = 1 / total;
        }
        unit.write(out, 1, [&](int k, int64_t n, S* to) { store<S>(to, load<S>(unit.place(k, n, 4)) * part[k]); });
    };
    const auto prepare = [&](const Unit<S>& unit) { read_scores(p, unit); };
    return find_marginals<S>(p.chain, shared_of(p), p.sharing, out, 1, prepare, finish);
}

template <class S>
void weights_vjp(const AttentionProblem<S>& p, const S* weights, const S* totals, const S* cotangent, S* to_scores,
                 S* to_transitions) {
    using V = Vec<S>;
    const auto prepare = [&](const Unit<S>& unit) {
        // Of m / total the derivative along g is (g − ⟨g, weights⟩) / total.
        V mean[2] = {V{}, V{}};
        unit.read(cotangent, 1, [&](int k, int64_t n, const S* g) { store<S>(unit.place(k, n, 5), load<S>(g)); });
        unit.read(weights, 1, [&](int k, int64_t n, const S* weight) {
            mean[k] += unit.has(k, n) ? load<S>(weight) * load<S>(unit.place(k, n, 5)) : V{};
        });
        for (int k = 0; k < 2; ++k) {
            V part;
            for (int l = 0; l < lanes_of<S>; ++l) part[l] = 1 / totals[unit.lanes[k].sequence[l]];
            for (int64_t n = 0; n < unit.lanes[k].longest; ++n) {
                S* at = unit.place(k, n, 5);
                store<S>(at, (load<S>(at) - mean[k]) * part);
            }
        }
        read_scores(p, unit);
    };
    const auto finish = [&](const Unit<S>& unit) {
        const auto get = [&](int k, int64_t n, S* to) { store<S>(to, p.scale * load<S>(unit.place(k, n, 4))); };
        unit.write(to_scores, 1, get);
    };
    const Totals all = pull_back<S>(p.chain, shared_of(p), p.sharing, to_scores, 1, prepare, finish);
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
