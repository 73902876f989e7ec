// The sweeps of a chain (Algorithms 3 and 4 of the paper, mended) over a unit of work, step by step.
#pragma once

#include <vector>

#include "../base/threads.h"
#include "unit.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// Values, and thresholds for the other sweeps.
template <class U>
class Forward {
    using S = typename U::Number;
    using Real = typename U::Real;
    using V = typename U::V;
    static constexpr int W = U::W;

    U& unit;
    Nodes<S, Real, U::across> values, thresholds;
    Array<Real> v, next;
    double offset[W] = {};
    typename U::Mask bad{};

public:
    // Without a tape, for the value alone.
    Forward(U& of, S* tape)
        : unit(of),
          values(of.lanes, tape ? tape + of.problem.states : nullptr, tape_records(of.problem, 0), -infinity<Real>),
          thresholds(of.lanes, tape ? tape + (of.problem.steps + 2) * of.problem.states : nullptr,
                     tape_records(of.problem, 0)),
          v(filled<Real>(of.layout.cells, -infinity<Real>)),
          next(scratch<Real>(of.layout.cells)) {}

    void step(int64_t n) {
        const auto now = unit.active(n);
        const int64_t groups = unit.layout.groups;
        const Real* const bonus = unit.has_emissions() ? unit.emissions.read(n) : nullptr;
        Real* const to_threshold = thresholds.room(n);
        V top = V{} - infinity<Real>;
        for (int64_t g = 0; g < groups; ++g) {
            V threshold{}, best;
            typename U::Mask unsound{};
            if (n == 0) {
                best = unit.first(g);
                unsound = ~(best < infinity<Real>);
                best = best * U::Omega::unit - unit.omega.at_vertex();
            } else {
                best = unit.solve(unit.template scores<false>(n, g, v.get()), g, now, threshold, unsound);
            }
            if (bonus) {
                const V own = load<Real>(bonus + g * W);
                unsound |= ~(own < infinity<Real>);
                best += own * U::Omega::unit;
            }
            if (g + 1 == groups) best += unit.pad;
            bad |= unsound & now;
            store<Real>(to_threshold + g * W, threshold);
            store<Real>(&next[g * W], best);
            top = greater<Real>(best, top);
        }
        rebase(n, now, unit.layout.greatest_of_all(top));
    }

    // Writes the values, and whether all scores were below +∞ and not NaN.
    bool finish(S* value, S* tape) {
        const End<U> end(unit, v.get());
        const auto& lanes = unit.lanes;
        bool sound = !any(bad);
        for (int l = 0; l < lanes.valid; ++l) {
            const int64_t b = lanes.sequence[l];
            if (tape) tape[(2 * b + 1) * (unit.problem.steps + 1) * unit.layout.states] = 0;  // not in exp space
            for (int64_t p = 0; p < unit.layout.states && lanes.length[l] > 0; ++p) {
                sound &= unit.end[U::across ? p * W + l : p] < infinity<Real>;
            }
            const double total = (offset[l] + double((V{} + end.value)[l])) / double(U::Omega::unit);
            value[b] = lanes.length[l] ? S(total) : S(0);
        }
        return sound;
    }

private:
    // Values are kept relative to the greatest of their step.
    void rebase(int64_t n, typename U::Mask now, V top) {
        const V base = (top > -infinity<Real>) & now ? top : V{};
        Real* const to_value = values.room(n);
        for (int64_t g = 0; g < unit.layout.groups; ++g) {
            V after = load<Real>(&next[g * W]) - base;
            if constexpr (U::across) after = now ? after : load<Real>(&v[g * W]);
            store<Real>(&v[g * W], after);
            store<Real>(to_value + g * W, after);
        }
        for (int l = 0; l < unit.lanes.valid; ++l) offset[l] += double(base[l]);
        values.finish(n, true);
        thresholds.finish(n, true);
    }
};

// The contribution of a thread's sequences to the gradient of scores that the batch shares.
struct Totals {
    std::vector<double> transitions, start, end;
};

// Rows of edges into a group to be written.
template <class T, class Real>
struct Target {
    static constexpr int W = lanes_of<Real>;
    T* first;
    int64_t stride, full;
    int exact, rest;  // from row `exact` on nothing may be written past a row's end
    bool past_caches;

    struct Line {
        T* numbers;
        int64_t full;
        int rest;
        bool is_exact, past_caches;

        // What is written past the end of a row is 0, and belongs to the next row.
        template <int N>
        __attribute__((always_inline)) void put(int64_t k, const Vec<Real>* v) const {
            if (N == 1 && k >= full) {
                is_exact ? store_some<T, Real>(numbers + k, v[0], rest) : store_as<T, Real>(numbers + k, v[0]);
            } else if (past_caches) {
                for (int r = 0; r < N; ++r) store_past_caches<T, Real>(numbers + k + r * W, v[r]);
            } else {
                for (int r = 0; r < N; ++r) store_as<T, Real>(numbers + k + r * W, v[r]);
            }
        }
    };
    Line row(int l) const { return {first + l * stride, full, rest, l >= exact, past_caches}; }
};

// Where a unit's results go: edges and nodes at every step, and the two ends.
template <class U>
class Sink {
    using S = typename U::Number;
    using Real = typename U::Real;
    using V = typename U::V;
    static constexpr int W = U::W;

    U& unit;
    const Scores<S>& out;
    Totals& totals;
    bool by_step, is_large;
    Edges<S, Real, U::across> edges;
    std::optional<Nodes<S, Real, U::across>> nodes;
    Array<Real> part, sums;  // of edges into a group, and of all edges, where steps share them

public:
    Sink(U& of, const Scores<S>& to, Totals& all)
        : unit(of),
          out(to),
          totals(all),
          by_step(of.problem.transition_step != 0),
          edges(of.lanes, by_step ? to.transitions : nullptr, edge_records(of.problem), of.layout.states) {
        const auto& p = unit.problem;
        constexpr int64_t cache = 16 << 20;
        is_large = by_step && p.batch * p.steps * p.transition_step * int64_t(sizeof(S)) >= cache &&
                   unit.layout.states % W == 0 && reinterpret_cast<std::uintptr_t>(to.transitions) % sizeof(V) == 0;
        if (!by_step) {
            part = zeros<Real>(unit.layout.tile());
            sums = zeros<Real>(unit.layout.groups * unit.layout.tile());
        }
        if (unit.has_emissions()) nodes.emplace(unit.lanes, out.emissions, node_records(p));
        if (unit.has_emissions()) clear_skipped(out.emissions, node_records(p));
        if (by_step) clear_skipped(out.transitions, edge_records(p));
    }

    // body(target) writes the rows of edges into group g at step n.
    template <class Body>
    void put_edges(int64_t n, int64_t g, Body body) {
        const auto& layout = unit.layout;
        if (by_step) {
            auto* const first = edges.at(n) + g * edges.group_stride();
            // A partial vector may spill into the next row, but not out of the step.
            const int64_t room = (layout.states - g * W) * layout.states - layout.cells;
            const int exact = U::across || room < 0 ? 0 : int(std::min<int64_t>(W, room / layout.states + 1));
            using T = std::remove_pointer_t<decltype(first)>;
            const bool streams = is_large && !U::across;
            body(Target<T, Real>{first, edges.row_stride(), layout.whole * W, exact, layout.rest.count, streams});
        } else {
            body(Target<Real, Real>{part.get(), layout.cells, layout.cells, W, 0, false});
            Real* const to = &sums[g * layout.tile()];
            const int64_t count = layout.rows(g) * layout.cells;
            for (int64_t k = 0; k < count; k += W) store<Real>(to + k, load<Real>(to + k) + load<Real>(&part[k]));
        }
    }

    void put_zeros(int64_t n, int64_t g) {
        if (!by_step) return;
        auto* const rows = edges.at(n) + g * edges.group_stride();
        std::fill_n(rows, unit.layout.rows(g) * edges.row_stride(), 0);
    }

    // The edges into the first nodes, one each, and the places of those that there are not.
    void put_first(int64_t g, V edge, V none = V{}) {
        if (unit.has_emissions()) return;
        auto* const rows = edges.at(0) + g * edges.group_stride();
        if constexpr (U::across) {
            for (int64_t k = 0; k < unit.layout.cells; k += W) store<Real>(rows + k, k == 0 ? edge : none);
        } else {
            for (int l = 0; l < unit.layout.rows(g); ++l) {
                S* const row = rows + l * edges.row_stride();
                std::fill_n(row, unit.layout.states, S(none[l]));
                row[0] = S(edge[l]);
            }
        }
    }

    void put_node(int64_t n, int64_t g, V mass) {
        if (nodes) store<Real>(nodes->room(n) + g * W, mass);
    }

    void finish_step(int64_t n) {
        if (by_step && (n > 0 || !unit.has_emissions())) edges.finish(n);
        if (nodes) nodes->finish(n, false);
    }

    void put_start(const Real* mass) {
        if (unit.has_emissions()) add(mass, out.start, unit.problem.start_batch, totals.start);
    }
    void put_end(const Real* mass) {
        if (unit.has_emissions()) add(mass, out.end, unit.problem.end_batch, totals.end);
    }

    void finish() {
        finish_writes();
        if (by_step) return;
        const auto& layout = unit.layout;
        const int64_t states = layout.states, batch = unit.problem.transition_batch;
        for (int64_t i = 0; i < states; ++i) {
            for (int64_t p = 0; p < states; ++p) {
                const Real* from = U::across ? &sums[(i * states + p) * W] : &sums[i * layout.cells + p];
                for (int l = 0; l < unit.lanes.valid; ++l) {
                    const int64_t at = i * states + p;
                    if (batch) {
                        out.transitions[unit.lanes.sequence[l] * batch + at] += S(from[l]);
                    } else {
                        totals.transitions[at] += double(from[l]);
                    }
                }
            }
        }
    }

private:
    // A number for each state, added to those of a sequence or to those of all.
    void add(const Real* mass, S* data, int64_t batch, std::vector<double>& total) const {
        for (int l = 0; l < unit.lanes.valid; ++l) {
            for (int64_t p = 0; p < unit.layout.states; ++p) {
                const Real part = mass[U::across ? p * W + l : p];
                if (batch) {
                    data[unit.lanes.sequence[l] * batch + p] += S(part);
                } else {
                    total[p] += double(part);
                }
            }
        }
    }

    // Zeros at masked steps, and at the first of those that have no record for it.
    void clear_skipped(S* data, const Records& records) const {
        const auto& lanes = unit.lanes;
        for (int l = 0; l < lanes.valid; ++l) {
            if (lanes.length[l] == lanes.steps) continue;
            S* const sequence = data + lanes.sequence[l] * records.batch;
            int64_t next = 0;
            for (int64_t n = records.shift; n <= std::max(lanes.length[l], records.shift); ++n) {
                const int64_t place = (n < lanes.length[l] ? lanes.step(l, n) : lanes.steps) - records.shift;
                std::fill(sequence + next * records.stride, sequence + place * records.stride, S(0));
                next = place + 1;
            }
        }
    }
};

// The tangent forward sweep: v̇ before each step, relative to that of a best state, and for J y = s∘(y − mean) the mean
// ⟨s, y⟩/Σs of the edges into each state.
template <class U>
struct Tangent {
    using S = typename U::Number;
    using Real = typename U::Real;
    using V = typename U::V;
    using Entry = typename U::Entry;
    static constexpr int W = U::W;

    U& unit;
    Tape<U> tape;
    Edges<const S, Real, U::across> edges;
    Nodes<const S, Real, U::across> emissions;
    Array<Real> start, end;
    Array<Real> value, mean;  // (steps + 1, cells)
    Array<Real> end_y;
    Entry end_mean{};

    Tangent(U& of, const Scores<const S>& z)
        : unit(of),
          tape(of),
          edges(of.lanes, z.transitions, edge_records(of.problem), of.layout.states),
          emissions(of.lanes, z.emissions, node_records(of.problem)),
          start(of.ends(z.start, of.problem.start_batch)),
          end(of.ends(z.end, of.problem.end_batch)),
          value(zeros<Real>((of.lanes.longest + 1) * of.layout.cells)),
          mean(scratch<Real>((of.lanes.longest + 1) * of.layout.cells)),
          end_y(zeros<Real>(of.layout.cells)) {}

    // The direction along the edges into group g.
    auto direction(int64_t n, int64_t g) {
        using T = typename Edges<const S, Real, U::across>::In;
        return Along<T>{edges.group(n, g), &value[n * unit.layout.cells]};
    }

    void step(int64_t n) {
        const auto now = unit.active(n);
        const int64_t cells = unit.layout.cells;
        const Real* const own = unit.has_emissions() ? emissions.read(n) : nullptr;
        const Real* const before = n > 0 ? tape.values.read(n) : nullptr;
        const Real* const thresholds = n > 0 ? tape.thresholds.read(n + 1) : nullptr;
        for (int64_t g = 0; g < unit.layout.groups; ++g) {
            V v_dot{}, centre{};
            if (n == 0) {
                v_dot = unit.first(g) > -infinity<Real> ? first(g) : V{};
            } else {
                unit.template with_scores<false>(n, g, before, load<Real>(thresholds + g * W),
                                                 [&](const auto& scores, V threshold) {
                                                     v_dot = average(scores, direction(n, g), g, threshold, centre);
                                                 });
            }
            if (own) v_dot += load<Real>(own + g * W);
            if constexpr (U::across) v_dot = now ? v_dot : load<Real>(&value[n * cells + g * W]);
            store<Real>(&value[(n + 1) * cells + g * W], v_dot);
            store<Real>(&mean[n * cells + g * W], centre);
        }
        rebase(n, now);
    }

    // The direction along the edges into the first nodes.
    V first(int64_t g) {
        if (unit.has_emissions()) return load<Real>(&start[g * W]);
        const auto* const rows = edges.at(0) + g * edges.group_stride();
        if constexpr (U::across) return load<Real>(rows);
        V found{};
        for (int l = 0; l < unit.layout.rows(g); ++l) found[l] = Real(rows[l * edges.row_stride()]);
        return found;
    }

    // Returns q̇ of the edges into the end.
    Array<Real> finish(const End<U>& node) {
        const Real* const last = &value[unit.lanes.longest * unit.layout.cells];
        Entry sum_sy{}, sum_s{};
        for (int64_t p = 0; p < unit.layout.states; ++p) {
            const Entry y = U::entry(last, p) + U::entry(end.get(), p), s = U::entry(node.s.get(), p);
            U::set_entry(end_y.get(), p, y);
            sum_sy += s > Entry{} ? s * y : Entry{};
            sum_s += s;
        }
        end_mean = sum_s > Entry{} ? sum_sy / sum_s : Entry{};
        auto tilt = zeros<Real>(unit.layout.cells);
        for (int64_t p = 0; p < unit.layout.states; ++p) {
            const Entry y = U::entry(end_y.get(), p), s = U::entry(node.s.get(), p);
            U::set_entry(tilt.get(), p, s > Entry{} ? s * (y - end_mean) : Entry{});
        }
        return tilt;
    }

private:
    // y = z + v̇ along the edges into a group.
    template <class T>
    struct Along {
        Group<T, Real> group;
        const Real* value;

        struct Line {
            Row<T, Real> row;
            const Real* value;

            template <int N>
            __attribute__((always_inline)) void get(int64_t k, V* y) const {
                row.template get<N>(k, y);
                for (int r = 0; r < N; ++r) y[r] += load<Real>(value + k + r * W);
            }
        };
        Line row(int l) const { return {group.row(l), value}; }
    };

    // Σ q y/Σ q of the edges into each state, and their mean.
    template <class Scores, class Direction>
    V average(const Scores& scores, const Direction& direction, int64_t g, V threshold, V& centre) const {
        V sums[4][W] = {};
        const U& own = unit;
        for (int l = 0; l < unit.layout.rows(g); ++l) {
            const V tau = unit.layout.of_row(threshold, l);
            const auto along = direction.row(l);
            V total[4] = {};
            scores.each(l, [&](int64_t k, const V* score, auto count) __attribute__((always_inline)) {
                V y[2];
                along.template get<count()>(k, y);
                for (int r = 0; r < count; ++r) {
                    V q, s;
                    own.weigh(k + r * W, score[r], tau, q, s);
                    const V visible = s > V{} ? y[r] : V{};
                    total[0] += q;
                    total[1] += q * visible;
                    if constexpr (!U::Omega::is_sum) total[2] += s, total[3] += s * visible;
                }
            });
            for (int n = 0; n < 4; ++n) sums[n][l] = total[n];
        }
        const auto ratio = [&](const V* part, const V* whole) {
            const V total = unit.layout.sum(whole);
            return total > V{} ? unit.layout.sum(part) / total : V{};
        };
        const V v_dot = ratio(sums[1], sums[0]);
        centre = U::Omega::is_sum ? v_dot : ratio(sums[3], sums[2]);  // there s = q
        return v_dot;
    }

    void rebase(int64_t n, typename U::Mask now) {
        const Real* const from = tape.values.read(n + 1);
        Real* const v_dot = &value[(n + 1) * unit.layout.cells];
        Entry base{};
        for (int64_t p = 0; p < unit.layout.states; ++p) {
            base = U::entry(from, p) == Entry{} ? U::entry(v_dot, p) : base;
        }
        const V off = now ? V{} + base : V{};
        for (int64_t g = 0; g < unit.layout.groups; ++g) store<Real>(v_dot + g * W, load<Real>(v_dot + g * W) - off);
    }
};

// The backward sweeps: e = source + q · mass for the edges into a state, which the states that they come from add up. A
// rule holds the masses and knows the sources.
template <class U, class Rule>
class Back {
    using Real = typename U::Real;
    using V = typename U::V;
    static constexpr int W = U::W;

    U& unit;
    Sink<U>& sink;
    Rule& rule;

public:
    Back(U& of, Sink<U>& to, Rule& by) : unit(of), sink(to), rule(by) { sink.put_end(rule.result()); }

    void step(int64_t n) {
        const auto now = unit.active(n);
        const Real* const before = n > 0 ? rule.tape.values.read(n) : nullptr;
        const Real* const thresholds = n > 0 ? rule.tape.thresholds.read(n + 1) : nullptr;
        rule.begin();
        for (int64_t g = 0; g < unit.layout.groups; ++g) {
            const V mass = rule.hold(g, now);
            sink.put_node(n, g, mass);
            if (n == 0) {
                sink.put_first(g, mass);
            } else if (rule.is_idle(g)) {
                sink.put_zeros(n, g);
            } else {
                unit.template with_scores<true>(n, g, before, load<Real>(thresholds + g * W),
                                                [&](const auto& scores, V threshold) {
                                                    sink.put_edges(n, g, [&](const auto& target) {
                                                        rule.spread(n, g, scores, threshold, target);
                                                    });
                                                });
            }
        }
        if (n == 0) sink.put_start(rule.result());
        sink.finish_step(n);
        if (n > 0) rule.pass(now);
    }
};

template <class U, class Rule>
void sweep_back(U& unit, Sink<U>& sink, Rule& rule) {
    Back<U, Rule> sweep(unit, sink, rule);
    for (int64_t n = unit.lanes.longest - 1; n >= 0; --n) sweep.step(n);
    sink.finish();
}

// Masses by state, and what they become at the step before.
template <class U>
struct Masses {
    using Real = typename U::Real;
    using V = typename U::V;
    static constexpr int W = U::W;

    const U& unit;
    Array<Real> here, before;

    Masses(const U& of, Array<Real> first) : unit(of), here(std::move(first)), before(scratch<Real>(of.layout.cells)) {}

    void clear() { std::fill_n(before.get(), unit.layout.cells, Real(0)); }
    V get(int64_t g) const { return load<Real>(&here[g * W]); }
    void set(int64_t g, V mass) { store<Real>(&here[g * W], mass); }
    void pass(typename U::Mask now) {
        if constexpr (U::across) {
            for (int64_t g = 0; g < unit.layout.groups; ++g) set(g, now ? load<Real>(&before[g * W]) : get(g));
        } else {
            std::swap(here, before);
        }
    }
    // `whole` by their total, which it is but for rounding.
    V correction(V whole) const {
        V total{};
        for (int64_t g = 0; g < unit.layout.groups; ++g) total += get(g);
        total = unit.layout.sum_all(total);
        return total != Real(0) ? whole / total : V{};
    }
};

template <class U>
typename U::V seeds_of(const U& unit, const typename U::Number* seeds) {
    typename U::V seed{};
    for (int l = 0; l < U::W; ++l) {
        const bool counts = U::across ? l < unit.lanes.valid && unit.lanes.length[l] : unit.lanes.length[0] > 0;
        if (counts) seed[l] = typename U::Real(seeds[unit.lanes.sequence[U::across ? l : 0]]);
    }
    return seed;
}

// The expected path, times the seed, which the mass carries.
template <class U>
struct Visits {
    using Real = typename U::Real;
    using V = typename U::V;

    U& unit;
    Tape<U> tape;
    V seed, scale{};
    Masses<U> mass;

    Visits(U& of, const typename U::Number* seeds)
        : unit(of), tape(of), seed(seeds_of(of, seeds)), mass(of, std::move(End<U>(of, tape.last_values().get()).q)) {
        for (int64_t g = 0; g < unit.layout.groups; ++g) mass.set(g, mass.get(g) * seed);
    }

    const Real* result() const { return mass.here.get(); }
    void begin() {
        scale = mass.correction(seed);
        mass.clear();
    }
    V hold(int64_t g, typename U::Mask now) {
        const V held = mass.get(g) * scale;
        mass.set(g, now ? held : mass.get(g));
        return now ? held : V{};
    }
    bool is_idle(int64_t g) const { return !any(mass.get(g) != V{}); }

    template <class Scores, class Rows>
    void spread(int64_t n, int64_t g, const Scores& scores, V threshold, const Rows& target) {
        const auto now = unit.active(n);
        const V held = now ? mass.get(g) : V{};
        Real* const to = mass.before.get();
        const U& own = unit;
        for (int l = 0; l < unit.layout.rows(g); ++l) {
            const V at = unit.layout.of_row(held, l), tau = unit.layout.of_row(threshold, l);
            const auto out = target.row(l);
            scores.each(l, [&](int64_t k, const V* score, auto count) __attribute__((always_inline)) {
                V part[2];
                for (int r = 0; r < count; ++r) {
                    Real* const place = to + k + r * U::W;
                    V q, s;
                    own.weigh(k + r * U::W, score[r], tau, q, s);
                    part[r] = q * at;
                    if constexpr (U::across) part[r] = now ? part[r] : V{};
                    store<Real>(place, load<Real>(place) + part[r]);
                }
                out.template put<count()>(k, part);
            });
        }
    }
    void pass(typename U::Mask now) { mass.pass(now); }
};

// The Hessian product, times the seed.
template <class U>
struct Flow {
    using Real = typename U::Real;
    using V = typename U::V;
    static constexpr int W = U::W;

    U& unit;
    Tangent<U>& tangent;
    Tape<U>& tape;
    V seed, scale{};
    Masses<U> mass, mass_dot;

    Flow(U& of, Tangent<U>& along, End<U>& end, const typename U::Number* seeds)
        : unit(of),
          tangent(along),
          tape(along.tape),
          seed(seeds_of(of, seeds)),
          mass(of, std::move(end.q)),
          mass_dot(of, along.finish(end)) {
        for (int64_t g = 0; g < unit.layout.groups; ++g) {
            mass.set(g, mass.get(g) * seed);
            mass_dot.set(g, mass_dot.get(g) * seed);
        }
    }

    const Real* result() const { return mass_dot.here.get(); }
    void begin() {
        scale = mass.correction(seed);
        mass.clear();
        mass_dot.clear();
    }
    V hold(int64_t g, typename U::Mask now) {
        mass.set(g, now ? mass.get(g) * scale : mass.get(g));
        return now ? mass_dot.get(g) : V{};
    }
    bool is_idle(int64_t g) const { return !any((mass.get(g) != V{}) | (mass_dot.get(g) != V{})); }

    template <class Scores, class Rows>
    void spread(int64_t n, int64_t g, const Scores& scores, V threshold, const Rows& target) {
        const auto now = unit.active(n);
        const V held = now ? mass.get(g) : V{}, held_dot = now ? mass_dot.get(g) : V{};
        const V mean = load<Real>(&tangent.mean[n * unit.layout.cells + g * W]);
        const auto direction = tangent.direction(n, g);
        Real *const to = mass.before.get(), *const to_dot = mass_dot.before.get();
        const U& own = unit;
        for (int l = 0; l < unit.layout.rows(g); ++l) {
            const V at = unit.layout.of_row(held, l), at_dot = unit.layout.of_row(held_dot, l);
            const V tau = unit.layout.of_row(threshold, l), centre = unit.layout.of_row(mean, l);
            const auto along = direction.row(l);
            const auto out = target.row(l);
            scores.each(l, [&](int64_t k, const V* score, auto count) __attribute__((always_inline)) {
                V y[2], part[2];
                along.template get<count()>(k, y);
                for (int r = 0; r < count; ++r) {
                    const int64_t place = k + r * W;
                    V q, s;
                    own.weigh(place, score[r], tau, q, s);
                    const V visible = s > V{} ? y[r] - centre : V{};
                    V visits = q * at;
                    part[r] = s * at * visible + q * at_dot;
                    if constexpr (U::across) visits = now ? visits : V{}, part[r] = now ? part[r] : V{};
                    store<Real>(to + place, load<Real>(to + place) + visits);
                    store<Real>(to_dot + place, load<Real>(to_dot + place) + part[r]);
                }
                out.template put<count()>(k, part);
            });
        }
    }
    void pass(typename U::Mask now) {
        mass.pass(now);
        mass_dot.pass(now);
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
