// The sweeps of a chain (Algorithms 3 and 4 of the paper, corrected) over a unit of work, step by step.
#pragma once

#include "maxima.h"
#include "omegas.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// The end node of a unit's sequences: its value, and q and s of the edges into it.
template <class M>
struct End {
    using U = typename M::Unit;
    using Real = typename U::Real;
    using V = typename U::V;
    static constexpr int W = U::W;

    const U& unit;
    Array<Real> q, s;
    V value;
    typename U::Mask bad{};

    // From the values v at the last step. The edges are a row, which a lane has in common with the others or alone.
    __attribute__((noinline)) End(const M& maxima, const Real* v)
        : unit(maxima.unit), q(scratch<Real>(unit.cells)), s(scratch<Real>(unit.cells)) {
        const EdgeScores<Real> edges{unit.end.get(), 0, M::Omega::unit, v};
        const auto weigh = maxima.weigh();
        V top, tau, sum{};
        value = maxima.solve_relative(edges, 1, top, tau, bad);
        top = top > -infinity<Real> ? top : V{};
        unit.each(edges, 0, [&](auto at, V score) {
            V edge_q, edge_s;
            weigh(at.k, score - top, tau, edge_q, edge_s);
            store<Real>(&q[at.k], edge_q);
            store<Real>(&s[at.k], edge_s);
            sum += edge_q;
        });
        sum = U::sum_of_all(sum);
        const V scale = sum > V{} ? 1 / sum : V{};
        for (int64_t k = 0; k < unit.cells; k += W) store<Real>(&q[k], load<Real>(&q[k]) * scale);
    }

    // q̇, along a direction y.
    __attribute__((noinline)) Array<Real> change(const Real* y) const {
        V sum_s{}, sum_sy{};
        for (int64_t k = 0; k < unit.cells; k += W) {
            const V own = load<Real>(&s[k]);
            sum_s += own;
            sum_sy += own > V{} ? own * load<Real>(y + k) : V{};
        }
        sum_s = U::sum_of_all(sum_s);
        const V mean = sum_s > V{} ? U::sum_of_all(sum_sy) / sum_s : V{};
        auto q_dot = scratch<Real>(unit.cells);
        for (int64_t k = 0; k < unit.cells; k += W) {
            const V own = load<Real>(&s[k]);
            store<Real>(&q_dot[k], own > V{} ? own * (load<Real>(y + k) - mean) : V{});
        }
        return q_dot;
    }
};

// Values, and thresholds for the other sweeps.
template <class M>
class Forward {
    using U = typename M::Unit;
    using S = typename U::S;
    using Real = typename U::Real;
    using V = typename U::V;
    using Mask = typename U::Mask;
    static constexpr int W = U::W;
    static constexpr Real per_score = M::Omega::unit;

    const M& maxima;
    U& unit;
    typename U::template StepNumbers<S> values, thresholds;
    Array<Real> v, next;
    double offset[W] = {};
    Mask bad{};

public:
    // Without a tape, for the value alone.
    Forward(const M& by, S* tape)
        : maxima(by),
          unit(by.unit),
          values(unit.lanes, tape ? tape + unit.values_place() : nullptr, unit.tape_records()),
          thresholds(unit.lanes, tape ? tape + unit.thresholds_place() : nullptr, unit.tape_records()),
          v(scratch<Real>(unit.cells)),
          next(scratch<Real>(unit.cells)) {
        std::copy_n(unit.none.get(), unit.cells, v.get());
    }

    void step(int64_t n) {
        const Real* const bonus = unit.emissions ? unit.emissions.at(n) : nullptr;
        const Real* const edges = n > 0 ? unit.edges.at(n) : nullptr;
        Real* const to_threshold = thresholds ? thresholds.at(n) : nullptr;
        V top = V{} - infinity<Real>;
        for (int64_t g = 0; g < unit.groups; ++g) {
            V threshold{}, best;
            if (n == 0) {
                best = unit.first(unit.start.get(), unit.edges, g);
                bad |= ~(best < infinity<Real>);
                best = best * per_score - maxima.omega.at_vertex();
            } else {
                best = maxima.solve(unit.into(edges, g, per_score, v.get()), g, threshold, bad);
            }
            if (bonus) {
                const V own = unit.node(bonus, g);
                bad |= ~(own < infinity<Real>);
                best += own * per_score;
            }
            if (g + 1 == unit.groups) best += unit.pad;
            if (to_threshold) unit.put_node(to_threshold, g, threshold);
            store<Real>(&next[g * W], best);
            top = greater<Real>(best, top);
        }
        rebase(n, unit.active(n), unit.greatest_of_all(top));
    }

    // Writes the values, and whether they and all scores were below +∞ and not NaN.
    __attribute__((noinline)) bool finish(S* value, S* tape) {
        const End<M> end(maxima, v.get());
        bool fits = true;
        for (int l = 0; l < unit.lanes.valid; ++l) {
            const int64_t b = unit.lanes.sequence[l];
            if (tape) tape[tape_place(unit.problem, b)] = 0;
            value[b] = unit.lanes.length[l] ? S((offset[l] + double(end.value[l])) / double(per_score)) : S(0);
            fits &= value[b] < infinity<S>;
        }
        return fits && !any(bad | end.bad);
    }

private:
    // Values are kept relative to the greatest of their step.
    void rebase(int64_t n, Mask now, V top) {
        const V base = ((top > -infinity<Real>) & now) ? top : V{};
        Real* const to_value = values ? values.at(n) : nullptr;
        for (int64_t g = 0; g < unit.groups; ++g) {
            const V after = U::renewed(now, load<Real>(&next[g * W]) - base, load<Real>(&v[g * W]));
            store<Real>(&v[g * W], after);
            if (to_value) unit.put_node(to_value, g, after);
        }
        for (int l = 0; l < unit.lanes.valid; ++l) offset[l] += double(base[l]);
        values.finish(n, true);
        thresholds.finish(n, true);
    }
};

// The results of the forward sweep.
template <class U>
class Tape {
    using S = typename U::S;
    using Real = typename U::Real;

    const U& unit;
    const S* tape;
    typename U::template StepNumbers<const S> values, thresholds;
    Array<Real> padded;

public:
    __attribute__((noinline)) explicit Tape(const U& of)
        : unit(of),
          tape(of.problem.tape),
          values(of.lanes, tape + of.values_place(), of.tape_records()),
          thresholds(of.lanes, tape + of.thresholds_place(), of.tape_records()),
          padded(scratch<Real>(of.cells)) {}

    // The values after step n, −∞ in the padding.
    const Real* after(int64_t n) {
        const Real* const from = values.at(n);
        if (U::across) return from;
        for (int64_t g = 0; g < unit.groups; ++g) {
            const auto group = unit.node(from, g);
            store<Real>(&padded[g * U::W], g + 1 < unit.groups ? group : group + unit.pad);
        }
        return padded.get();
    }
    const Real* into(int64_t n) { return thresholds.at(n); }

    // After the last step of each sequence.
    __attribute__((noinline)) Array<Real> last() const {
        const auto records = unit.tape_records();
        const auto& lanes = unit.lanes;
        const auto place = [&](int l) {
            return tape + lanes.sequence[l] * records.batch + lanes.length[l] * records.stride;
        };
        return unit.gather(place, -infinity<Real>);
    }
};

// The tangent forward sweep: v̇ before each step, relative to the best state, and for J y = s∘(y − mean) the mean
// ⟨s, y⟩/Σs of the edges into each state.
template <class M>
class Tangent {
    using U = typename M::Unit;
    using S = typename U::S;
    using Real = typename U::Real;
    using V = typename U::V;
    static constexpr int W = U::W;

    const M& maxima;
    U& unit;
    Tape<U>& tape;
    typename U::template StepNumbers<const S> edges, emissions;
    Array<Real> start, end, values, means;  // values and means: (steps + 1, cells)

public:
    __attribute__((noinline)) Tangent(const M& by, Tape<U>& from, const Scores<const S>& z)
        : maxima(by),
          unit(by.unit),
          tape(from),
          edges(unit.lanes, z.transitions, unit.edge_records()),
          emissions(unit.lanes, z.emissions, unit.node_records()),
          start(unit.ends(z.start, unit.problem.start_batch)),
          end(unit.ends(z.end, unit.problem.end_batch)),
          values(zeros<Real>((unit.lanes.longest + 1) * unit.cells)),
          means(scratch<Real>((unit.lanes.longest + 1) * unit.cells)) {}

    // y = z + v̇ along the edges into a state: row l of group g has z at the first, and v̇ at the second.
    const Real* z(int64_t n) { return edges.at(n); }
    const Real* before(int64_t n) const { return &values[n * unit.cells]; }
    V mean(int64_t n, int64_t g) const { return load<Real>(&means[n * unit.cells + g * W]); }

    // The direction along the edges into the end.
    Array<Real> last() const {
        auto y = scratch<Real>(unit.cells);
        for (int64_t k = 0; k < unit.cells; ++k) y[k] = before(unit.lanes.longest)[k] + end[k];
        return y;
    }

    void step(int64_t n) {
        const auto now = unit.active(n);
        Real* const to = &values[(n + 1) * unit.cells];
        const Real* const own = emissions ? emissions.at(n) : nullptr;
        const Real* const v = n > 0 ? tape.after(n - 1) : nullptr;
        const Real* const scores = n > 0 ? unit.edges.at(n) : nullptr;
        for (int64_t g = 0; g < unit.groups; ++g) {
            V v_dot{}, centre{};
            if (n == 0) {
                const V reached = unit.first(unit.start.get(), unit.edges, g);
                v_dot = reached > -infinity<Real> ? unit.first(start.get(), edges, g) : V{};
            } else {
                V threshold = unit.node(tape.into(n), g);
                const auto into = maxima.weighable(unit.into(scores, g, M::Omega::unit, v), g, threshold);
                v_dot = average(into, z(n) + unit.row(g), before(n), g, threshold, centre);
            }
            if (own) v_dot += unit.node(own, g);
            store<Real>(to + g * W, U::renewed(now, v_dot, load<Real>(before(n) + g * W)));
            store<Real>(&means[n * unit.cells + g * W], centre);
        }
        rebase(to, tape.after(n), now);
    }

private:
    // Σ q y/Σ q of the edges into each state, and their mean.
    V average(const EdgeScores<Real>& edges, const Real* z, const Real* before, int64_t g, V threshold,
              V& centre) const {
        V sums[4][U::height] = {};
        const auto weigh = maxima.weigh();
        for (int l = 0; l < unit.rows(g); ++l) {
            const V tau = U::of_row(threshold, l);
            const Real* const along = z + l * unit.stride();
            V sum_q{}, sum_qy{}, sum_s{}, sum_sy{};
            unit.each(edges, l, [&](auto at, V score) __attribute__((always_inline)) {
                V q, s;
                weigh(at.k, score, tau, q, s);
                const V y = s > V{} ? at.from(along) + load<Real>(before + at.k) : V{};
                sum_q += q, sum_qy += q * y;
                if constexpr (!M::Omega::is_sum) sum_s += s, sum_sy += s * y;
            });
            sums[0][l] = sum_q, sums[1][l] = sum_qy, sums[2][l] = sum_s, sums[3][l] = sum_sy;
        }
        const auto ratio = [](V* part, V* whole) {
            const V total = U::sum(whole);
            return total > V{} ? U::sum(part) / total : V{};
        };
        const V v_dot = ratio(sums[1], sums[0]);
        centre = M::Omega::is_sum ? v_dot : ratio(sums[3], sums[2]);  // there s = q
        return v_dot;
    }

    void rebase(Real* v_dot, const Real* v, typename U::Mask now) const {
        V most = V{} - infinity<Real>;
        for (int64_t g = 0; g < unit.groups; ++g) {
            most = greater<Real>(load<Real>(v + g * W) == V{} ? load<Real>(v_dot + g * W) : most, most);
        }
        most = U::greatest_of_all(most);
        const V off = ((most > -infinity<Real>) & now) ? most : V{};
        for (int64_t g = 0; g < unit.groups; ++g) store<Real>(v_dot + g * W, load<Real>(v_dot + g * W) - off);
    }
};

// Where a unit's results go: edges and nodes at every step, and the two ends.
template <class U>
class Sink {
    using S = typename U::S;
    using Real = typename U::Real;
    using V = typename U::V;
    static constexpr int W = U::W;

    const U& unit;
    const Scores<S>& out;
    Totals& totals;
    const bool by_step;
    bool past_caches;
    typename U::template StepNumbers<S> edges, nodes;
    Array<Real> sums;  // over the steps that share the transitions

public:
    __attribute__((noinline)) Sink(const U& of, const Scores<S>& to, Totals& all)
        : unit(of),
          out(to),
          totals(all),
          by_step(of.problem.transition_step != 0),
          edges(of.lanes, by_step ? to.transitions : nullptr, of.edge_records()),
          nodes(of.lanes, to.emissions, of.node_records()) {
        const auto& p = unit.problem;
        constexpr int64_t cache = 16 << 20;
        const bool is_large = p.batch * p.steps * p.transition_step * int64_t(sizeof(S)) >= cache;
        past_caches = is_large && edges.in_place && unit.states % W == 0 &&
                      reinterpret_cast<std::uintptr_t>(to.transitions) % sizeof(V) == 0;
        if (!by_step) sums = zeros<Real>(unit.states * unit.cells);
        for (int l = 0; l < unit.lanes.valid; ++l) {
            const int64_t b = unit.lanes.sequence[l], shift = unit.edge_records().shift;
            if (nodes) clear_masked(p, b, out.emissions + b * p.steps * p.states, p.states);
            if (by_step) clear_masked(p, b, out.transitions + b * p.transition_batch, p.transition_step, shift);
        }
    }

    // The rows of edges into group g at step n, to be written, or added to.
    struct EdgeRows {
        Real* first;
        int64_t stride;
        bool add, past_caches;

        template <class Place>
        __attribute__((always_inline)) void put(Place at, int l, V v) const {
            Real* const row = first + l * stride;
            if (add) {
                at.to(row, at.from(row) + v);
            } else if (past_caches) {
                at.past_caches(row, v);
            } else {
                at.to(row, v);
            }
        }
    };
    EdgeRows rows(int64_t n, int64_t g) {
        if (by_step) return {edges.at(n) + unit.row(g), unit.stride(), false, past_caches};
        return {&sums[g * U::height * unit.cells], unit.cells, true, false};
    }

    void put_zeros(int64_t n, int64_t g) {
        if (by_step) std::fill_n(edges.at(n) + unit.row(g), unit.rows(g) * unit.stride(), Real(0));
    }

    // The edges into the first nodes, one each; there are no others.
    __attribute__((noinline)) void put_first(int64_t g, V edge) {
        if (!is_dense(unit.problem)) return;
        Real* const first = edges.at(0) + unit.row(g);
        put_zeros(0, g);
        for (int l = 0; l < W; ++l) {
            if (U::across || l < unit.rows(g)) first[U::across ? l : l * unit.states] = edge[l];
        }
    }

    void put_node(int64_t n, int64_t g, V mass) {
        if (nodes) unit.put_node(nodes.at(n), g, mass);
    }

    void finish_step(int64_t n) {
        if (by_step && n >= unit.edge_records().shift) edges.finish(n, false);
        if (nodes) nodes.finish(n, false);
    }

    void put_start(const Real* mass) {
        if (nodes) add(mass, out.start, unit.problem.start_batch, totals.start.data());
    }
    void put_end(const Real* mass) {
        if (nodes) add(mass, out.end, unit.problem.end_batch, totals.end.data());
    }
    void finish() {
        finish_writes();
        for (int64_t i = 0; i < unit.states && !by_step; ++i) {
            const int64_t row = i * unit.states, batch = unit.problem.transition_batch;
            add(&sums[i * unit.cells], out.transitions + row, batch, totals.transitions.data() + row);
        }
    }

private:
    // A number for each state, added to those of a sequence or to those of all.
    __attribute__((noinline)) void add(const Real* numbers, S* to, int64_t batch, double* total) const {
        for (int l = 0; l < unit.lanes.valid; ++l) {
            for (int64_t p = 0; p < unit.states; ++p) {
                const Real own = numbers[U::number(p, l)];
                batch ? to[unit.lanes.sequence[l] * batch + p] += S(own) : total[p] += double(own);
            }
        }
    }
};

// The backward sweep: the expected path, times the seed, which the mass of the states carries; or, along a direction,
// the change of that.
template <class M, bool along>
class Backward {
    using U = typename M::Unit;
    using Real = typename U::Real;
    using V = typename U::V;
    static constexpr int W = U::W;

    // By state, at this step and at the one before.
    struct Masses {
        Array<Real> here, before;

        Masses(const U& unit, const Real* shares, V seed)
            : here(scratch<Real>(unit.cells)), before(scratch<Real>(unit.cells)) {
            for (int64_t k = 0; k < unit.cells; ++k) here[k] = shares[k] * seed[k % W];
        }
        V get(int64_t g) const { return load<Real>(&here[g * W]); }
        void pass(const U& unit, typename U::Mask now) {
            if (!U::across) return std::swap(here, before);
            for (int64_t g = 0; g < unit.groups; ++g) {
                store<Real>(&here[g * W], now ? load<Real>(&before[g * W]) : get(g));
            }
        }
    };

    const M& maxima;
    U& unit;
    Tape<U>& tape;
    Tangent<M>* tangent;
    Sink<U>& sink;
    V seed;
    Masses mass, change;  // `change` along a direction

    // The total mass is the seed, but for rounding.
    void normalise() {
        V total{};
        for (int64_t g = 0; g < unit.groups; ++g) total += mass.get(g);
        total = U::sum_of_all(total);
        const V scale = total != Real(0) ? seed / total : V{};
        for (int64_t g = 0; g < unit.groups; ++g) store<Real>(&mass.here[g * W], mass.get(g) * scale);
    }

    void spread(int64_t n, int64_t g, const EdgeScores<Real>& edges, V threshold, V held, V held_change) {
        const auto rows = sink.rows(n, g);
        const auto weigh = maxima.weigh();
        Real *const to = mass.before.get(), *const to_change = change.before.get();
        const Real* const z = along ? tangent->z(n) + unit.row(g) : nullptr;
        const Real* const v_dot = along ? tangent->before(n) : nullptr;
        const V means = along ? tangent->mean(n, g) : V{};
        for (int l = 0; l < unit.rows(g); ++l) {
            const V at_mass = U::of_row(held, l), at_change = U::of_row(held_change, l);
            const V tau = U::of_row(threshold, l), mean = U::of_row(means, l);
            const Real* const z_row = along ? z + l * unit.stride() : nullptr;
            unit.template each<true>(edges, l, [&](auto at, V score) __attribute__((always_inline)) {
                V q, s;
                weigh(at.k, score, tau, q, s);
                V part = q * at_mass;
                store<Real>(to + at.k, load<Real>(to + at.k) + part);
                if constexpr (along) {
                    const V y = s > V{} ? at.from(z_row) + load<Real>(v_dot + at.k) - mean : V{};
                    part = s * at_mass * y + q * at_change;
                    store<Real>(to_change + at.k, load<Real>(to_change + at.k) + part);
                }
                rows.put(at, l, part);
            });
        }
    }

public:
    // From q of the edges into the end, and along a direction its change.
    Backward(const M& by, Tape<U>& from, Tangent<M>* direction, Sink<U>& to, const Real* q, const Real* q_dot, V given)
        : maxima(by),
          unit(by.unit),
          tape(from),
          tangent(direction),
          sink(to),
          seed(given),
          mass(unit, q, given),
          change(unit, q_dot, given) {
        sink.put_end((along ? change : mass).here.get());
    }

    void step(int64_t n) {
        const auto now = unit.active(n);
        const Real* const v = n > 0 ? tape.after(n - 1) : nullptr;
        const Real* const scores = n > 0 ? unit.edges.at(n) : nullptr;
        normalise();
        std::fill_n(mass.before.get(), unit.cells, Real(0));
        if (along) std::fill_n(change.before.get(), unit.cells, Real(0));
        for (int64_t g = 0; g < unit.groups; ++g) {
            const V held = U::renewed(now, mass.get(g), V{});
            const V held_change = along ? U::renewed(now, change.get(g), V{}) : V{};
            const V result = along ? held_change : held;
            sink.put_node(n, g, result);
            if (n == 0) {
                sink.put_first(g, result);
            } else if (!any((held != V{}) | (held_change != V{}))) {
                sink.put_zeros(n, g);
            } else {
                V threshold = unit.node(tape.into(n), g);
                const auto edges = maxima.weighable(unit.into(scores, g, M::Omega::unit, v), g, threshold);
                spread(n, g, edges, threshold, held, held_change);
            }
        }
        if (n == 0) sink.put_start((along ? change : mass).here.get());
        sink.finish_step(n);
        mass.pass(unit, now);
        if (along) change.pass(unit, now);
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
