// A unit of work of a chain: one sequence, with the states in the lanes ("along"), or as many sequences as there are
// lanes ("across"), which wastes none where states are few.
//
// - The nodes of a step are groups, a vector each: of W neighboring states along, of one state of W sequences across.
// - The edges into a state are a row of vectors: of the previous states, in whole vectors and a rest, or a vector for
//   each of them across. So a group has W rows along, and one across.
#pragma once

#include "lanes.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// Where a vector of a row is: in its whole ones, or in the rest.
template <class Real>
struct Whole {
    int64_t k;
    Vec<Real> from(const Real* row) const { return load<Real>(row + k); }
    void to(Real* row, Vec<Real> v) const { store<Real>(row + k, v); }
    void past_caches(Real* row, Vec<Real> v) const { store_past_caches<Real>(row + k, v); }
};
template <class Real>
struct Rest {
    int64_t k;
    First<Real> lanes;
    Vec<Real> from(const Real* row) const { return lanes.load(row + k); }
    void to(Real* row, Vec<Real> v) const { store_some<Real>(row + k, v, lanes.count); }
    void past_caches(Real* row, Vec<Real> v) const { to(row, v); }
};

// Scores of the edges into a group: scale · row + before.
template <class Real>
struct EdgeScores {
    const Real* first;
    int64_t stride;  // of rows
    Real scale;
    const Real* before;
    int64_t ahead = 0;  // how far off is what is read some rows later, where the processor does not foresee it
};

// Of scores S, computed with as Real.
template <class S_, class Real_, bool across_>
struct Unit {
    using S = S_;
    using Real = Real_;
    using V = Vec<Real>;
    using Mask = typename Shape<V>::Int;
    static constexpr bool across = across_;
    static constexpr int W = lanes_of<Real>, height = across ? 1 : W;  // rows of a group
    template <class T>
    using StepNumbers = LaneNumbers<T, Real, across>;

    const ScoresProblem<S>& problem;
    const Lanes<W> lanes;
    const int64_t states, groups, cells, full;  // numbers of the nodes of a step, and of a row; those in whole vectors
    const First<Real> rest;
    StepNumbers<const S> edges, emissions;
    const Array<Real> start, end;  // scores of the first and the last states
    V length, iota{}, pad{};       // iota: 0, 1, 2, …; pad: −∞ in the lanes of the last group that stand for no state
    const Array<Real> x, none;     // scores of the edges into a group; 0 for each state, −∞ for what stands for none

    Unit(const ScoresProblem<S>& of, const int64_t* sequences, int64_t count)
        : problem(of),
          lanes(of, sequences, count),
          states(of.states),
          groups(across ? states : (states + W - 1) / W),
          cells(groups * W),
          full(across ? cells : states / W * W),
          rest(across ? 0 : int(states % W)),
          edges(lanes, of.scores.transitions, edge_records()),
          emissions(lanes, of.scores.emissions, node_records()),
          start(ends(of.scores.start, of.start_batch)),
          end(ends(of.scores.end, of.end_batch)),
          x(scratch<Real>(height * cells)),
          none(zeros<Real>(cells)) {
        for (int l = 0; l < W; ++l) {
            length[l] = Real(lanes.length[across ? l : 0]);
            if (!across) iota[l] = Real(l);
            if (rest.count && l >= rest.count) pad[l] = -infinity<Real>;
        }
        for (int64_t p = states; !across && p < cells; ++p) none[p] = -infinity<Real>;
    }

    Records edge_records() const {
        return {states * states, problem.transition_step, problem.transition_batch, is_dense(problem) ? 0 : 1};
    }
    Records node_records() const { return {states, states, problem.steps * states}; }
    // Of the values after each step, or with them the thresholds.
    Records tape_records() const { return {states, states, 2 * (problem.steps + 1) * states, 0, true}; }
    int64_t values_place() const { return states; }
    int64_t thresholds_place() const { return (problem.steps + 2) * states; }

    // --- nodes

    // Lanes whose sequence has a step n.
    Mask active(int64_t n) const { return length > V{} + Real(n); }
    // What is new in those lanes, and old in the others.
    static V renewed(Mask now, V fresh, V old) { return across ? (now ? fresh : old) : fresh; }

    // Where the number of a state is, of a lane's sequence.
    static int64_t number(int64_t state, int l) { return across ? state * W + l : state; }

    // A number for each state, from where(lane); `otherwise` stands for what there is not.
    template <class Where>
    Array<Real> gather(Where where, Real otherwise) const {
        auto to = filled<Real>(cells, otherwise);
        for (int l = 0; l < lanes.valid; ++l) {
            const S* const from = where(l);
            for (int64_t p = 0; p < states && lanes.length[l]; ++p) to[number(p, l)] = Real(from[p]);
        }
        return to;
    }
    __attribute__((noinline)) Array<Real> ends(const S* data, int64_t batch) const {
        if (!data) return zeros<Real>(cells);
        return gather([&](int l) { return data + lanes.sequence[l] * batch; }, 0);
    }

    // A group of numbers as they lie.
    V node(const Real* of_step, int64_t g) const {
        return g * W < full ? load<Real>(of_step + g * W) : rest.load(of_step + g * W);
    }
    void put_node(Real* of_step, int64_t g, V v) const {
        if (g * W < full) return store<Real>(of_step + g * W, v);
        store_some<Real>(of_step + g * W, v, rest.count);
    }

    static V sum_of_all(V v) { return across ? v : sum_lanes<Real>(v); }
    static V greatest_of_all(V v) { return across ? v : greatest_lane<Real>(v); }

    // --- edges

    int64_t stride() const { return across ? cells : states; }
    int rows(int64_t g) const { return across ? 1 : int(std::min<int64_t>(W, states - g * W)); }
    int64_t row(int64_t g) const { return g * height * stride(); }  // the first of a group

    // What belongs to the states of a group, as the edges of row l see it.
    static V of_row(V group, int l) { return across ? group : broadcast<Real>(group[l]); }
    // A number for each state of a group from the vectors of its rows.
    static V sum(V* rows) {
        if constexpr (across) {
            return rows[0];
        } else {
            return sum_rows<Real>(rows);
        }
    }

    // Of the step whose numbers are given. Going back, the processor does not foresee that a step's end is followed by
    // the beginning of the one before.
    EdgeScores<Real> into(const Real* of_step, int64_t g, Real scale, const Real* before) const {
        constexpr int64_t reach = 512;
        const int64_t square = states * states, ahead = row(g) + reach < square ? reach : reach - 2 * square;
        return {of_step + row(g), stride(), scale, before, across ? 0 : ahead};
    }

    // visit(place, scores) for the vectors of row l.
    template <bool prefetches = false, class Visit>
    __attribute__((always_inline)) void each(const EdgeScores<Real>& edges, int l, Visit visit) const {
        const Real *const row = edges.first + l * edges.stride, *const before = edges.before;
        const Real scale = edges.scale;
        const int64_t end = full, next = edges.ahead;
        const First<Real> others = rest;
#pragma GCC unroll 2
        for (int64_t k = 0; k < end; k += W) {
            if constexpr (prefetches && !across) __builtin_prefetch(row + k + next);
            visit(Whole<Real>{k}, load<Real>(row + k) * scale + load<Real>(before + k));
        }
        if (across || !others.count) return;
        visit(Rest<Real>{end, others}, others.load(row + end) * scale + load<Real>(before + end));
    }

    // visit(entry, which of several in a turn, scores) for what all rows have from one previous state: a lane each,
    // where lanes without a row have that of the first. What the next group has there is asked for.
    template <class Visit>
    __attribute__((always_inline)) void each_entry(const EdgeScores<Real>& edges, int count, Visit visit) const {
        for (int64_t k = 0; k < cells; k += W) {
            V v[height];
#pragma GCC unroll 8
            for (int l = 0; l < height; ++l) {
                const Real* const from = edges.first + (l < count ? l : 0) * edges.stride + k;
                if constexpr (!across) __builtin_prefetch(from + height * edges.stride);
                v[l] = (k < full ? load<Real>(from) : rest.load(from)) * edges.scale + load<Real>(edges.before + k);
            }
            if constexpr (!across) transpose(v);
#pragma GCC unroll 8
            for (int j = 0; j < height; ++j) visit(across ? k / W : k + j, j, v[j]);
        }
    }

    // The scores of the first nodes, which have one edge each, or what is like them.
    __attribute__((noinline)) V first(const Real* of_start, StepNumbers<const S>& like_edges, int64_t g) const {
        if (!is_dense(problem)) return load<Real>(of_start + g * W);
        const Real* const from = like_edges.at(0) + row(g);
        if constexpr (across) return load<Real>(from);
        V found{};
        for (int l = 0; l < rows(g); ++l) found[l] = from[l * states];
        return found;
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
