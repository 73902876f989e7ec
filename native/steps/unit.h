// A unit of work of a chain: one sequence, with the states in the lanes ("along"), or as many sequences as there are lanes
// ("across"), which wastes none where states are few. A step is read and written in vectors:
//
// - of the nodes, a vector for each group of states: W neighbouring states along, one state of W sequences across;
// - of the edges into a group, a row for each of its states: of the previous states, in whole vectors and a rest along, a
//   vector for each of them across.
#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>

#include "../omega/list.h"
#include "lanes.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

template <class S>
bool is_dense(const ScoresProblem<S>& problem) {
    return problem.scores.emissions == nullptr;
}

template <class S>
Records edge_records(const ScoresProblem<S>& problem) {
    const int64_t square = problem.states * problem.states;
    return {square, problem.transition_step, problem.transition_batch, is_dense(problem) ? 0 : 1};
}

template <class S>
Records node_records(const ScoresProblem<S>& problem) {
    return {problem.states, problem.states, problem.steps * problem.states};
}

// A row of the tape for each unmasked step, and one before the first.
template <class S>
Records tape_records(const ScoresProblem<S>& problem, int64_t more = 1) {
    return {problem.states, problem.states, 2 * (problem.steps + 1) * problem.states, 0, true, more};
}

template <class Real, bool across_>
struct Layout {
    using V = Vec<Real>;
    static constexpr int W = lanes_of<Real>;
    static constexpr bool across = across_;
    int64_t states, groups, whole, cells;  // cells: numbers of the nodes of a step, and of a row of edges
    First<Real> rest;

    explicit Layout(int64_t count)
        : states(count),
          groups(across ? count : (count + W - 1) / W),
          whole(across ? count : count / W),
          cells(groups * W),
          rest(across ? 0 : int(count % W)) {}

    int rows(int64_t g) const { return across ? 1 : int(std::min<int64_t>(W, states - g * W)); }
    int64_t tile() const { return (across ? 1 : W) * cells; }  // numbers of the edges into a group

    // What belongs to the states of a group, as the edges of row l see it.
    static V of_row(V group, int l) { return across ? group : broadcast<Real>(group[l]); }

    // A number for each state of a group from the vectors of its rows.
    static V sum(const V* rows) {
        if constexpr (across) {
            return rows[0];
        } else {
            return sum_rows<Real>(rows);
        }
    }
    // And one for each sequence from the vectors of its groups.
    static V sum_all(V v) { return across ? v : sum_lanes<Real>(v); }
    static V greatest_of_all(V v) { return across ? v : greatest_lane<Real>(v); }
};

// Numbers of the nodes, step by step. What stands for no state is 0, or −∞ where that is said.
template <class T, class Real, bool across>
class Nodes {
    static constexpr int W = lanes_of<Real>;
    const Lanes<W>& lanes;
    Layout<Real, across> layout;
    Records records;
    T* base;
    std::optional<Stream<T, Real>> stream;
    Array<Real> cells;

    T* place(int64_t n) const { return base + (records.compact ? n : lanes.step(0, n)) * records.stride; }

public:
    // Without data, room for one step.
    Nodes(const Lanes<W>& of, T* data, const Records& records, Real pad = 0)
        : lanes(of), layout(records.size), records(records), base(data) {
        if (across && data) {
            stream.emplace(of, data, records);
        } else {
            cells = filled<Real>(layout.cells, pad);
            if (data) base += of.sequence[0] * records.batch;
        }
    }

    const Real* read(int64_t n) {
        if constexpr (across) {
            return stream->read(n);
        } else {
            const T* const from = place(n);
            for (int64_t k = 0; k < layout.whole; ++k) store<Real>(&cells[k * W], load_as<Real>(from + k * W));
            for (int64_t i = layout.whole * W; i < layout.states; ++i) cells[i] = Real(from[i]);
            return cells.get();
        }
    }

    Real* room(int64_t n) { return stream ? stream->room(n) : cells.get(); }

    void finish(int64_t n, bool ascending) {
        if (!base) return;
        if constexpr (across) {
            stream->finish(n, ascending);
        } else {
            T* const to = place(n);
            for (int64_t k = 0; k < layout.whole; ++k) store_as<T, Real>(to + k * W, load<Real>(&cells[k * W]));
            for (int64_t i = layout.whole * W; i < layout.states; ++i) to[i] = T(cells[i]);
        }
    }
};

// A row of numbers of the edges into a group, which is swept in pairs of vectors, and one by one where these end.
template <class T, class Real>
struct Row {
    static constexpr int W = lanes_of<Real>;
    const T* numbers;
    int64_t full;  // numbers in whole vectors
    const First<Real>* rest;

    template <int N>
    __attribute__((always_inline)) void get(int64_t k, Vec<Real>* to) const {
        if constexpr (N == 2) {
            to[0] = load_as<Real>(numbers + k);
            to[1] = load_as<Real>(numbers + k + W);
        } else {
            to[0] = k < full ? load_as<Real>(numbers + k) : rest->load(numbers + k);
        }
    }
};

// The edges into a group.
template <class T, class Real>
struct Group {
    const T* first;
    int64_t stride, full;
    int count;  // of rows
    const First<Real>* rest;

    Row<T, Real> row(int l) const { return {first + l * stride, full, rest}; }
};

// Scores of the edges into a group: unit · row + v.
template <class T, class Real, bool prefetches>
struct Source {
    static constexpr int W = lanes_of<Real>;
    Group<T, Real> group;
    int64_t cells;
    Real unit;
    const Real* v;
    int64_t ahead;  // how far off is what is read some rows later, where the processor does not foresee it

    // visit(place of the previous states, N vectors of scores, N) for the vectors of row l.
    template <class Visit>
    __attribute__((always_inline)) void each(int l, Visit visit) const {
        const Row<T, Real> row = group.row(l);
        const Real* const before = v;
        const Real scale = unit;
        const int64_t end = cells, pairs = row.full / (2 * W) * (2 * W), next = ahead;
        int64_t k = 0;
        Vec<Real> x[2];
        for (; k < pairs; k += 2 * W) {
            if constexpr (prefetches) __builtin_prefetch(row.numbers + k + next);
            row.template get<2>(k, x);
            x[0] = x[0] * scale + load<Real>(before + k);
            x[1] = x[1] * scale + load<Real>(before + k + W);
            visit(k, x, std::integral_constant<int, 2>());
        }
        for (; k < end; k += W) {
            row.template get<1>(k, x);
            x[0] = x[0] * scale + load<Real>(before + k);
            visit(k, x, std::integral_constant<int, 1>());
        }
    }
};

// Numbers of the edges, step by step.
template <class T, class Real, bool across>
class Edges {
    static constexpr int W = lanes_of<Real>;
    using Stored = std::conditional_t<across, Real, T>;
    const Lanes<W>& lanes;
    Layout<Real, across> layout;
    Records records;
    T* base;
    std::optional<Stream<T, Real>> stream;
    int64_t step = -1;  // the one that was asked for last, and its place
    Stored* first = nullptr;

public:
    using In = std::conditional_t<across, Real, std::remove_const_t<T>>;

    Edges(const Lanes<W>& of, T* data, const Records& records, int64_t states)
        : lanes(of), layout(states), records(records), base(data) {
        if (across && data) stream.emplace(of, data, records);
        if (data) base += of.sequence[0] * records.batch;
    }

    // The edges into the first group at step n.
    Stored* at(int64_t n) {
        if (n == step) return first;
        step = n;
        if constexpr (!across) {
            first = base + (records.stride ? (lanes.step(0, n) - records.shift) * records.stride : 0);
        } else if constexpr (std::is_const_v<T>) {
            first = const_cast<Real*>(stream->read(records.stride ? n : records.shift));
        } else {
            first = stream->room(n);
        }
        return first;
    }

    Group<In, Real> group(int64_t n, int64_t g) {
        return {at(n) + g * group_stride(), row_stride(), layout.whole * W, layout.rows(g), &layout.rest};
    }

    int64_t row_stride() const { return across ? layout.cells : layout.states; }
    int64_t group_stride() const { return (across ? 1 : W) * row_stride(); }

    void finish(int64_t n) {
        if constexpr (across) stream->finish(n);
    }
};

// The sequences of a unit, and the smoothed maxima over the edges into their states.
template <class S, class Omega_, bool across_>
struct Unit {
    using Number = S;
    using Omega = Omega_;
    using Real = typename Omega::Real;
    using V = Vec<Real>;
    using Mask = typename Shape<V>::Int;
    static constexpr bool across = across_;
    static constexpr int W = lanes_of<Real>;
    // A number for each state: by lane, or one for all.
    using Entry = std::conditional_t<across, V, Real>;
    // Thresholds up to here keep their digits without taking off the greatest score. The others are NaN on the tape.
    static constexpr Real near = sizeof(Real) == 4 ? 20 : 4096;

    const ScoresProblem<S>& problem;
    Omega omega;
    Lanes<W> lanes;
    Layout<Real, across> layout;
    Edges<const S, Real, across> edges;
    Nodes<const S, Real, across> emissions;
    Array<Real> start, end;  // scores of the first and the last states
    V length, iota, pad;     // iota: 0, 1, 2, …; pad: −∞ in the lanes of the last group that stand for no state
    Array<Real> x, none;     // scores of the edges into a group; 0 for each state, −∞ for what stands for none

    Unit(const ScoresProblem<S>& of, const int64_t* sequences, int64_t count)
        : problem(of),
          omega(of.omega),
          lanes(of, sequences, across ? count : 1),
          layout(of.states),
          edges(lanes, of.scores.transitions, edge_records(of), of.states),
          emissions(lanes, of.scores.emissions, node_records(of)),
          start(ends(of.scores.start, of.start_batch)),
          end(ends(of.scores.end, of.end_batch)),
          x(scratch<Real>(layout.tile())),
          none(zeros<Real>(layout.cells)) {
        for (int l = 0; l < W; ++l) {
            length[l] = Real(across ? lanes.length[l] : lanes.length[0]);
            iota[l] = Real(l);
            pad[l] = layout.rest.count && l >= layout.rest.count ? -infinity<Real> : Real(0);
        }
        if (!across) std::fill(&none[layout.states], &none[layout.cells], -infinity<Real>);
    }

    bool has_emissions() const { return !is_dense(problem); }

    // Lanes whose sequence has a step n.
    Mask active(int64_t n) const { return length > V{} + Real(n); }

    // One number a state of every lane's sequence, from its own place.
    Array<Real> gather(const S* const* lane, Real otherwise = 0) const {
        auto to = filled<Real>(layout.cells + W * W, otherwise);
        if constexpr (across) {
            fetch<Real>(lane, layout.states, to.get());
        } else {
            for (int64_t i = 0; i < layout.states; ++i) to[i] = Real(lane[0][i]);
        }
        return to;
    }

    Array<Real> ends(const S* data, int64_t batch) const {
        if (!data) return zeros<Real>(layout.cells);
        const S* lane[W];
        for (int l = 0; l < W; ++l) lane[l] = data + lanes.sequence[l] * batch;
        return gather(lane);
    }

    static Entry entry(const Real* vector, int64_t p) { return load_vector<Entry>(vector + p * (across ? W : 1)); }
    static void set_entry(Real* vector, int64_t p, Entry value) {
        std::memcpy(vector + p * (across ? W : 1), &value, sizeof value);
    }

    // The edges into group g at step n; `before` are the values that they start from. Going back, the processor does not
    // foresee that a step's end is followed by the beginning of the one before.
    template <bool back>
    auto scores(int64_t n, int64_t g, const Real* before) {
        using T = typename Edges<const S, Real, across>::In;
        constexpr bool prefetches = back && !across;
        constexpr int64_t reach = 512;
        const int64_t square = layout.states * layout.states, place = g * edges.group_stride();
        const int64_t ahead = place + reach < square ? reach : reach - 2 * square;
        return Source<T, Real, prefetches>{edges.group(n, g), layout.cells, Omega::unit, before, ahead};
    }

    // The scores of the first nodes, which have one edge each.
    V first(int64_t g) {
        if (has_emissions()) return load<Real>(&start[g * W]);
        const auto* const rows = edges.at(0) + g * edges.group_stride();
        V found{};
        for (int l = 0; l < layout.rows(g); ++l) {
            if constexpr (across) {
                found = load<Real>(rows);
            } else {
                found[l] = Real(rows[l * edges.row_stride()]);
            }
        }
        return found;
    }

    // max_Ω of the edges into group g, and its threshold, in the lanes that are active `now`; those of `bad` have scores that
    // are NaN or +∞.
    template <class Scores>
    V solve(const Scores& scores, int64_t g, Mask now, V& threshold, Mask& bad) const {
        if constexpr (Omega::is_sum) {
            V sums[W];
            for (int l = 0; l < W; ++l) sums[l] = V{} + Real(1);
            for (int l = 0; l < layout.rows(g); ++l) {
                V total[2] = {};
                scores.each(l, [&](int64_t, const V* score, auto count) __attribute__((always_inline)) {
                    for (int r = 0; r < count; ++r) total[r] += Omega::term(score[r]);
                });
                sums[l] = total[0] + total[1];
            }
            const V sum = now ? layout.sum(sums) : V{} + Real(1);
            if (Omega::fits(sum)) return threshold = Omega::of_sum(sum);
        }
        V top, tau;
        const V best = solve_relative(scores, g, top, tau, &bad);
        if constexpr (Omega::by_slot) {
            threshold = tau;
        } else {
            const V absolute = omega.absolute(tau, top);
            threshold = (absolute < near) & (absolute > -near) ? absolute : V{} + std::numeric_limits<Real>::quiet_NaN();
            threshold = top > -infinity<Real> ? threshold : V{} + infinity<Real>;  // q is 0
        }
        return best;
    }

    // The same with the threshold relative to the greatest score, which is `top`; x holds the scores.
    template <class Scores>
    V solve_relative(const Scores& scores, int64_t g, V& top, V& tau, Mask* bad) const {
        V best[W], slots[W];
        const V never = V{} - infinity<Real>;
        for (int l = 0; l < W; ++l) best[l] = never, slots[l] = V{} - Real(1);
        for (int l = 0; l < layout.rows(g); ++l) scan(scores, l, best[l], slots[l], bad);
        top = across ? best[0] : greatest_of_rows<Real>(best);
        if constexpr (Omega::by_slot) {
            tau = first_best(best, slots, top);
            return top;
        } else {
            const V from = top > never ? top : V{};
            V above;
            if constexpr (across) {
                omega.solve(omega::Columns<V, Real>{x.get(), W, layout.states}, from, tau, above);
            } else {
                const omega::Rows<Real> rows{x.get(), layout.cells, layout.cells, layout.rows(g)};
                transpose(best);
                omega.solve_after(omega::Columns<V, Real>{reinterpret_cast<const Real*>(best), W, W}, rows, from, tau, above);
            }
            tau = top > never ? tau : V{};
            return top + above;
        }
    }

    // Calls action(scores, threshold) for weighing the edges into group g, whose threshold on the tape is given.
    template <bool back, class Action>
    void with_scores(int64_t n, int64_t g, const Real* before, V threshold, Action action) {
        const auto scores = this->template scores<back>(n, g, before);
        if (!any((threshold != threshold) & active(n))) return action(scores, threshold);
        if constexpr (!Omega::by_slot) {
            V top, tau;
            solve_relative(scores, g, top, tau, nullptr);
            const V from = top > -infinity<Real> ? top : V{};
            for (int l = 0; l < layout.rows(g); ++l) {
                const V own = layout.of_row(from, l);
                for (int64_t k = l * layout.cells; k < (l + 1) * layout.cells; k += W) store<Real>(&x[k], load<Real>(&x[k]) - own);
            }
            const Group<Real, Real> group{x.get(), layout.cells, layout.whole * W, layout.rows(g), &layout.rest};
            action(Source<Real, Real, false>{group, layout.cells, Real(1), none.get(), 0}, tau);
        }
    }

    // q and s of the edges from the previous states at place k with scores x.
    void weigh(int64_t k, V score, V threshold, V& q, V& s) const { omega.weigh(relative(k, score, threshold), threshold, q, s); }

    // The scores as the functions of Ω expect them.
    V relative(int64_t k, V score, V threshold) const {
        if constexpr (Omega::by_slot) {
            const V numbers = across ? V{} + Real(k / W) : iota + Real(k);
            return numbers == threshold ? V{} : V{} - infinity<Real>;
        } else {
            return score;
        }
    }

private:
    // The scores of row l, their greatest by lane and, for the hard max, the first place of it.
    template <class Scores>
    void scan(const Scores& scores, int l, V& best, V& slot, Mask* bad) const {
        V most = best, found = slot;
        Mask unsound{};
        Real* const to = &x[l * layout.cells];
        const V numbers = across ? V{} : iota;
        scores.each(l, [&](int64_t k, const V* score, auto count) __attribute__((always_inline)) {
            for (int r = 0; r < count; ++r) {
                const int64_t place = k + r * W;
                if constexpr (Omega::by_slot) found = score[r] > most ? numbers + Real(across ? place / W : place) : found;
                unsound |= ~(score[r] < infinity<Real>);
                most = greater<Real>(score[r], most);
                store<Real>(to + place, score[r]);
            }
        });
        best = most;
        slot = found;
        if (bad) *bad |= unsound;
    }

    // Of the places where the lanes have the greatest score, the first.
    V first_best(V* best, V* slots, V top) const {
        if constexpr (across) return slots[0];
        transpose(best);
        transpose(slots);
        V place = V{} + infinity<Real>;
        for (int k = 0; k < W; ++k) place = lesser<Real>(best[k] == top ? slots[k] : place, place);
        return top > -infinity<Real> ? place : V{} - Real(1);
    }
};

// The end node of a unit's sequences: scores, q and s of the edges into it, by entry, and its value.
template <class U>
struct End {
    using Real = typename U::Real;
    using Entry = typename U::Entry;
    static constexpr int W = U::W;

    const U& unit;
    Array<Real> scores, q, s;
    Entry top, tau, value;

    // From the values v at the last step.
    End(const U& of, const Real* v)
        : unit(of),
          scores(scratch<Real>(of.layout.cells)),
          q(zeros<Real>(of.layout.cells)),
          s(zeros<Real>(of.layout.cells)) {
        const int64_t states = unit.layout.states;
        Entry best = Entry{} - infinity<Real>, slot = Entry{} - Real(1);
        for (int64_t p = 0; p < states; ++p) {
            const Entry score = U::entry(v, p) + U::Omega::unit * U::entry(unit.end.get(), p);
            slot = score > best ? Entry{} + Real(p) : slot;
            best = score > best ? score : best;
            U::set_entry(scores.get(), p, score);
        }
        top = best == Entry{} - infinity<Real> ? Entry{} : best;
        if constexpr (U::Omega::by_slot) {
            tau = slot;
            value = best;
        } else {
            unit.omega.solve(omega::Columns<Entry, Real>{scores.get(), U::across ? W : 1, states}, top, tau, value);
            tau = best > Entry{} - infinity<Real> ? tau : Entry{};
            value += best;
        }
        Entry sum{};
        for (int64_t p = 0; p < states; ++p) {
            Entry edge_q, edge_s;
            unit.omega.weigh(relative(p), tau, edge_q, edge_s);
            sum += edge_q;
            U::set_entry(q.get(), p, edge_q);
            U::set_entry(s.get(), p, edge_s);
        }
        const Entry scale = sum > Entry{} ? 1 / sum : Entry{};
        for (int64_t p = 0; p < states; ++p) U::set_entry(q.get(), p, U::entry(q.get(), p) * scale);
    }

    // The score of an edge as the functions of Ω expect it.
    Entry relative(int64_t p) const {
        if constexpr (U::Omega::by_slot) {
            return tau == Entry{} + Real(p) ? Entry{} : Entry{} - infinity<Real>;
        } else {
            return U::entry(scores.get(), p) - top;
        }
    }
};

// Rows of the tape: values, and the thresholds that belong to them.
template <class U>
struct Tape {
    using S = typename U::Number;
    using Real = typename U::Real;

    U& unit;
    Nodes<const S, Real, U::across> values, thresholds;

    explicit Tape(U& of)
        : unit(of),
          values(of.lanes, of.problem.tape, tape_records(of.problem), -infinity<Real>),
          thresholds(of.lanes, of.problem.tape + (of.problem.steps + 1) * of.problem.states, tape_records(of.problem)) {}

    // Of the last step of each sequence.
    Array<Real> last_values() const {
        const S* lane[U::W];
        const int64_t states = unit.problem.states, batch = 2 * (unit.problem.steps + 1) * states;
        for (int l = 0; l < U::W; ++l) {
            lane[l] = unit.problem.tape + unit.lanes.sequence[l] * batch + unit.lanes.length[l] * states;
        }
        return unit.gather(lane, -infinity<Real>);
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
