// log q of the edges of a dense sequence, and its derivatives. What belongs to the edge from a state to the end counts with
// the edges into that state at the last step.
#pragma once

#include "sweeps.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// Writes value(n, g, row, place, score, threshold) for every edge; those into the first nodes have `first`, and the places of
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
                        const auto edge = at(l);
                        const auto put = target.row(l);
                        scores.each(l, [&](int64_t k, V score) {
                            put(k, edge(k, unit.relative(k, score, tau), tau) + own);
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
            return [&](int) { return [&](int64_t, V r, V tau) { return unit.omega.log_q(r, tau); }; };
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
            return [&unit, direction, mean](int l) {
                return [&unit, along = direction.row(l), centre = unit.layout.of_row(mean, l)](int64_t k, V r, V tau) {
                    const V slope = unit.omega.log_slope(r, tau);
                    return slope > V{} ? slope * (along(k) - centre) : V{};
                };
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
        const S* const rows = cotangent.at(n) + g * cotangent.group_stride();
        for (int l = 0; l < unit.layout.rows(g); ++l) {
            const V tau = unit.layout.of_row(threshold, l), at = unit.layout.of_row(mass.get(g), l);
            const S* const row = rows + l * cotangent.row_stride();
            const auto pulled = [&](int64_t k, V r) {
                const V slope = unit.omega.log_slope(r, tau);
                const int64_t left = unit.layout.states - k;
                return slope > V{} ? slope * (left < W ? load_some<Real>(row + k, left) : load_as<Real>(row + k)) : V{};
            };
            V sum_c{}, sum_s{}, q, s;
            scores.each(l, [&](int64_t k, V score) {
                unit.weigh(k, score, tau, q, s);
                sum_c += pulled(k, unit.relative(k, score, tau));
                sum_s += s;
            });
            sum_c = sum_lanes<Real>(sum_c);
            sum_s = sum_lanes<Real>(sum_s);
            const V mean = sum_s > V{} ? sum_c / sum_s : V{};
            const auto put = target.row(l);
            scores.each(l, [&](int64_t k, V score) {
                unit.weigh(k, score, tau, q, s);
                const V part = pulled(k, unit.relative(k, score, tau)) - s * mean + q * at;
                store<Real>(&mass.before[k], load<Real>(&mass.before[k]) + part);
                put(k, part);
            });
        }
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
