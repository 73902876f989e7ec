// log q of the edges of a dense sequence, and its derivatives. What belongs to the edge from a state to the end counts with
// the edges into that state at the last step.
#pragma once

#include "omegas.h"
#include "sweeps.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// Writes what value(n, g)(row, place, scores, threshold, to, N) makes of N vectors of edges; those into the first nodes have `first`, and the places of
// those that there are not `none`, both by group. `last` of each state is added at the last step.
template <class U, class Value, class First>
void map_edges(U& unit, Tape<U>& tape, Sink<U>& sink, const typename U::Real* last, Value value, First first) {
    using Real = typename U::Real;
    using V = typename U::V;
    for (int64_t n = 0; n < unit.lanes.longest; ++n) {
        const Real* const before = n > 0 ? tape.values.read(n) : nullptr;
        const Real* const thresholds = n > 0 ? tape.thresholds.read(n + 1) : nullptr;
        for (int64_t g = 0; g < unit.layout.groups; ++g) {
            const V more = n + 1 == unit.lanes.longest ? load<Real>(last + g * U::W) : V{};
            if (n == 0) {
                V none;
                const V edge = first(g, none);
                sink.put_first(g, edge + more, none + more);
                continue;
            }
            unit.template with_scores<false>(n, g, before, load<Real>(thresholds + g * U::W), [&](const auto& scores, V threshold) {
                const auto at = value(n, g);
                sink.put_edges(n, g, [&](const auto& target) {
                    for (int l = 0; l < unit.layout.rows(g); ++l) {
                        const V tau = unit.layout.of_row(threshold, l), own = unit.layout.of_row(more, l);
                        const auto out = target.row(l);
                        scores.each(l, [&](int64_t k, const V* score, auto count) {
                            V edges[2];
                            at(l, k, score, tau, edges, count);
                            for (int r = 0; r < count; ++r) edges[r] += own;
                            out.template put<count()>(k, edges);
                        });
                    }
                });
            });
        }
    }
    sink.finish();
}

template <class U>
void log_transitions_of(U& unit, Sink<U>& sink) {
    using Real = typename U::Real;
    using V = typename U::V;
    Tape<U> tape(unit);
    const End<U> end(unit, tape.last_values().get());
    const auto last = zeros<Real>(unit.layout.cells);
    for (int64_t p = 0; p < unit.layout.states; ++p) last[p] = unit.omega.log_q(end.relative(p), end.tau);
    map_edges(
        unit, tape, sink, last.get(),
        [&](int64_t, int64_t) {
            return [&](int, int64_t k, const V* score, V tau, V* to, auto count) {
                for (int r = 0; r < count; ++r) to[r] = unit.omega.log_q(unit.relative(k + r * U::W, score[r], tau), tau);
            };
        },
        [&](int64_t g, V& none) {
            none = V{} - infinity<Real>;
            return unit.first(g) > -infinity<Real> ? V{} : none;
        });
}

template <class U>
void log_transitions_jvp_of(U& unit, const typename U::Number* z, Sink<U>& sink) {
    using Real = typename U::Real;
    using V = typename U::V;
    Tangent<U> tangent(unit, {nullptr, z, nullptr, nullptr});
    for (int64_t n = 0; n < unit.lanes.longest; ++n) tangent.step(n);
    const End<U> end(unit, tangent.tape.last_values().get());
    tangent.finish(end);
    const auto last = zeros<Real>(unit.layout.cells);
    for (int64_t p = 0; p < unit.layout.states; ++p) {
        const Real slope = unit.omega.log_slope(end.relative(p), end.tau);
        last[p] = slope > 0 ? slope * (tangent.end_y[p] - tangent.end_mean) : Real(0);
    }
    map_edges(
        unit, tangent.tape, sink, last.get(),
        [&](int64_t n, int64_t g) {
            const auto direction = tangent.direction(n, g);
            const V mean = load<Real>(&tangent.mean[n * unit.layout.cells + g * U::W]);
            return [&unit, direction, mean](int l, int64_t k, const V* score, V tau, V* to, auto count) {
                V y[2];
                direction.row(l).template get<count()>(k, y);
                for (int r = 0; r < count; ++r) {
                    const V slope = unit.omega.log_slope(unit.relative(k + r * U::W, score[r], tau), tau);
                    to[r] = slope > V{} ? slope * (y[r] - unit.layout.of_row(mean, l)) : V{};
                }
            };
        },
        [](int64_t, V& none) { return none = V{}; });
}

// The rule of the backward sweep for the transposed derivative: a = c/q^(α−1) − s Σ(c/q^(α−1))/Σs along the support is added
// to what the mass brings.
template <class U>
struct Pull {
    using S = typename U::Number;
    using Real = typename U::Real;
    using V = typename U::V;
    static constexpr int W = U::W;

    U& unit;
    Tape<U> tape;
    Edges<const S, Real, false> cotangent;
    Masses<U> mass;

    Pull(U& of, const S* given)
        : unit(of),
          tape(of),
          cotangent(of.lanes, given, edge_records(of.problem), of.layout.states),
          mass(of, zeros<Real>(of.layout.cells)) {
        const End<U> end(unit, tape.last_values().get());
        const int64_t states = unit.layout.states, length = unit.lanes.longest;
        const S* const into = cotangent.at(length - 1);
        Real sum_c = 0, sum_s = 0;
        for (int64_t p = 0; p < states; ++p) {
            Real total = 0;
            for (int64_t from = 0; from < (length == 1 ? 1 : states); ++from) total += Real(into[p * states + from]);
            const Real slope = unit.omega.log_slope(end.relative(p), end.tau);
            mass.here[p] = slope > 0 ? slope * total : Real(0);
            sum_c += mass.here[p];
            sum_s += end.s[p];
        }
        for (int64_t p = 0; p < states; ++p) mass.here[p] -= sum_s > 0 ? end.s[p] * sum_c / sum_s : Real(0);
    }

    const Real* result() const { return mass.here.get(); }
    void begin() { mass.clear(); }
    V hold(int64_t g, typename U::Mask) const { return mass.get(g); }
    bool is_idle(int64_t) const { return false; }
    void pass(typename U::Mask now) { mass.pass(now); }

    template <class Scores, class Rows>
    void spread(int64_t n, int64_t g, const Scores& scores, V threshold, const Rows& target) {
        const auto given = cotangent.group(n, g);
        for (int l = 0; l < unit.layout.rows(g); ++l) {
            const V tau = unit.layout.of_row(threshold, l), at = unit.layout.of_row(mass.get(g), l);
            // c/q^(α−1), q and s of N vectors of edges.
            const auto weigh = [&](int64_t k, const V* score, V* pulled, V* q, V* s, auto count) {
                given.row(l).template get<count()>(k, pulled);
                for (int r = 0; r < count; ++r) {
                    const V relative = unit.relative(k + r * W, score[r], tau), slope = unit.omega.log_slope(relative, tau);
                    unit.omega.weigh(relative, tau, q[r], s[r]);
                    pulled[r] = slope > V{} ? slope * pulled[r] : V{};
                }
            };
            V sum_c{}, sum_s{}, pulled[2], q[2], s[2];
            scores.each(l, [&](int64_t k, const V* score, auto count) {
                weigh(k, score, pulled, q, s, count);
                for (int r = 0; r < count; ++r) sum_c += pulled[r], sum_s += s[r];
            });
            sum_c = sum_lanes<Real>(sum_c);
            sum_s = sum_lanes<Real>(sum_s);
            const V mean = sum_s > V{} ? sum_c / sum_s : V{};
            const auto out = target.row(l);
            scores.each(l, [&](int64_t k, const V* score, auto count) {
                weigh(k, score, pulled, q, s, count);
                for (int r = 0; r < count; ++r) {
                    Real* const to = &mass.before[k + r * W];
                    pulled[r] += q[r] * at - s[r] * mean;
                    store<Real>(to, load<Real>(to) + pulled[r]);
                }
                out.template put<count()>(k, pulled);
            });
        }
    }
};

// Zeros for a sequence, for what does not change with the scores.
template <class U>
void clear_of(const U& unit, typename U::Number* out) {
    const int64_t size = unit.problem.steps * unit.problem.transition_step;
    std::fill_n(out + unit.lanes.sequence[0] * size, size, 0);
}

// Runs body(dense sequence, where its results go) over the threads.
template <class Omega, class S, class Body>
void for_sequences(const ScoresProblem<S>& problem, S* out, Body body) {
    parallel_for(problem.batch, problem.threads, [&](int64_t b, int) {
        using U = Unit<S, Omega, false>;
        U unit(problem, &b, 1);
        const Scores<S> scores{nullptr, out, nullptr, nullptr};
        Totals unused;
        Sink<U> sink(unit, scores, unused);
        if (unit.lanes.longest) body(unit, sink);
    });
}

template <class S, class Omega>
void ChainLogs<S, Omega>::log_transitions(const ScoresProblem<S>& problem, S* log_q) {
    for_sequences<Omega>(problem, log_q, [](auto& unit, auto& sink) { log_transitions_of(unit, sink); });
}

template <class S, class Omega>
void ChainLogs<S, Omega>::log_transitions_jvp(const ScoresProblem<S>& problem, const S* z, S* product) {
    for_sequences<Omega>(problem, product, [&](auto& unit, auto& sink) {
        if constexpr (Omega::by_slot) {
            clear_of(unit, product);
        } else {
            log_transitions_jvp_of(unit, z, sink);
        }
    });
}

template <class S, class Omega>
void ChainLogs<S, Omega>::log_transitions_vjp(const ScoresProblem<S>& problem, const S* cotangent, S* product) {
    for_sequences<Omega>(problem, product, [&](auto& unit, auto& sink) {
        if constexpr (Omega::by_slot) {
            clear_of(unit, product);
        } else {
            Pull<std::decay_t<decltype(unit)>> pull(unit, cotangent);
            sweep_back(unit, sink, pull);
        }
    });
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
