// What the sweeps of exp.cpp go over: the weights of the transitions, and groups of sequences.
#pragma once

#include <limits>

#include "../omega/negentropy.h"
#include "exp_layout.h"
#include "problem.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace in_exp_space {

// Where no weight of an edge is less than this, a sum over edges from states that have more is 0 only if there are none.
template <class S>
constexpr S least_weight = sizeof(S) == 4 ? S(1e-9) : S(1e-20);
template <class S>
constexpr S unit = omega::Negentropy<S>::unit;

// W; r_i relative to their greatest and in units of log 2, −∞ past the last state, as a row has them; that greatest.
template <class S>
struct Weights : Matrix<S> {
    bool across;
    Array<S> shift;
    S base = 0;
    bool is_moderate = true;  // no weight of an edge is very small

    Weights(const Layout<S>& layout, bool has_into, bool has_out_of)
        : Matrix<S>(layout, has_into, has_out_of),
          across(layout.across),
          shift(scratch<S>(layout.line.padded * (across ? layout.lanes : 1))) {}

    // Whether all transitions were below +∞ and not NaN.
    bool fill(const S* transitions) {
        const Line<S>& line = this->line;
        const Array<S> greatest = scratch<S>(line.states);
        typename Shape<Vec<S>>::Int bad{}, small{};
        base = -infinity<S>;
        for (int64_t i = 0; i < line.states; ++i) {
            const S* from = transitions + i * line.states;
            Vec<S> top = broadcast(-infinity<S>);
            for (int64_t v = 0; v < line.vectors; ++v) {
                const Vec<S> x = line.get_low(from, v);
                bad |= ~(x < infinity<S>);
                top = greater<S>(top, x);
            }
            const S r = greatest_lane<S>(top)[0], finite = r == -infinity<S> ? S(0) : r;
            for (int64_t v = 0; v < line.vectors; ++v) {
                const Vec<S> x = line.get_low(from, v), weight = exp2_of((x - finite) * unit<S>);
                small |= (x > -infinity<S>) & (weight < least_weight<S>);
                store<S>(&this->rows[i * line.padded + v * line.lanes], weight);
            }
            greatest[i] = r;
            base = r > base ? r : base;
        }
        if (base == -infinity<S>) base = 0;
        for (int64_t i = 0; i < line.padded; ++i) {
            const S relative = i < line.states ? (greatest[i] - base) * unit<S> : -infinity<S>;
            for (int64_t l = 0; l < (across ? line.lanes : 1); ++l) shift[across ? i * line.lanes + l : i] = relative;
        }
        is_moderate = !any(small);
        this->pack();
        return !any(bad);
    }
};

// W ∘ z, where z does not matter unless W is positive.
template <class S>
void tilt(const Matrix<S>& weights, const S* z, Matrix<S>& tilted) {
    const Line<S>& line = weights.line;
    for (int64_t i = 0; i < line.states; ++i) {
        for (int64_t v = 0; v < line.vectors; ++v) {
            const int64_t at = i * line.padded + v * line.lanes;
            const Vec<S> w = load<S>(&weights.rows[at]);
            store<S>(&tilted.rows[at], w > S(0) ? w * line.get(z + i * line.states, v) : Vec<S>{});
        }
    }
    tilted.pack();
}

// Room for one worker: blocks of steps, a step more than go together, and single lines of states.
template <class S>
struct Room {
    int64_t block_size, line_size;
    Array<S> blocks, lines, stage;

    Room(const Layout<S>& layout, int count)
        : block_size((layout.depth + 1) * layout.stride + 4 * lanes_of<S>),
          line_size(layout.line.padded),
          blocks(zeros<S>(count * block_size)),
          lines(zeros<S>(2 * line_size)),
          stage(scratch<S>(layout.sequences * layout.depth * layout.line.states)) {}

    S* block(int k) const { return &blocks[k * block_size]; }
    S* line(int k) const { return &lines[k * line_size]; }
};

// The sequences that a layout takes at once, the longest first. A place without a sequence has length 0.
template <class S>
struct Group {
    using Runs = Run<S>[Layout<S>::most_sequences];
    using ConstRuns = Run<const S>[Layout<S>::most_sequences];

    const ScoresProblem<S>& problem;
    const Layout<S>& layout;
    const Room<S>& room;
    int members;
    int64_t b[Layout<S>::most_sequences], length[Layout<S>::most_sequences];

    Group(const ScoresProblem<S>& of, const Layout<S>& in, const Room<S>& with, const int64_t* order, int64_t count)
        : problem(of), layout(in), room(with), members(int(count)) {
        for (int l = 0; l < layout.sequences; ++l) {
            b[l] = order[l < members ? l : 0];
            length[l] = l < members ? problem.lengths[b[l]] : 0;
        }
    }

    int64_t valid(int l, int64_t n, int64_t steps) const {
        return std::max<int64_t>(0, std::min(length[l] - n, steps));
    }
    int64_t row(int l, int64_t n) const {
        return (b[l] * problem.steps + visited(problem, b[l], n)) * problem.states;
    }

    template <class T>
    void tape_runs(T* tape, int plane, int64_t n, int64_t steps, Run<T>* runs) const {
        for (int l = 0; l < layout.sequences; ++l) {
            runs[l] = {tape + ((b[l] * 2 + plane) * (problem.steps + 1) + n + 1) * problem.states,
                       valid(l, n, steps) * problem.states};
        }
    }

    // a (plane 0) or s (plane 1) of visits n … n + steps − 1.
    void read_tape(int plane, int64_t n, int64_t steps, S* to) const {
        ConstRuns runs;
        tape_runs<const S>(problem.tape, plane, n, steps, runs);
        layout.gather(runs, steps, Vec<S>{}, to);
    }
    void write_tape(const S* from, int plane, int64_t n, int64_t steps, S* tape) const {
        Runs runs;
        tape_runs<S>(tape, plane, n, steps, runs);
        layout.scatter(from, steps, runs);
    }

    // The rows of visits n … n + steps − 1 of something of the emissions' shape.
    void read_visits(const S* emissions, int64_t n, int64_t steps, Vec<S> pad, S* to) const {
        const int64_t states = problem.states;
        ConstRuns runs;
        for (int l = 0; l < layout.sequences; ++l) {
            const int64_t count = valid(l, n, steps);
            S* staged = &room.stage[l * layout.depth * states];
            for (int64_t k = 0; problem.kept && k < count; ++k) {
                std::copy_n(emissions + row(l, n + k), states, staged + k * states);
            }
            runs[l] = {problem.kept || count == 0 ? staged : emissions + row(l, n), count * states};
        }
        layout.gather(runs, steps, pad, to);
    }
    void write_visits(const S* from, int64_t n, int64_t steps, S* emissions) const {
        const int64_t states = problem.states;
        Runs runs;
        for (int l = 0; l < layout.sequences; ++l) {
            const int64_t count = valid(l, n, steps);
            S* staged = &room.stage[l * layout.depth * states];
            runs[l] = {problem.kept || count == 0 ? staged : emissions + row(l, n), count * states};
        }
        layout.scatter(from, steps, runs);
        for (int l = 0; problem.kept && l < members; ++l) {
            for (int64_t k = 0; k < valid(l, n, steps); ++k) {
                std::copy_n(runs[l].from + k * states, states, emissions + row(l, n + k));
            }
        }
    }

    // Scores of the start, or a direction of theirs, as a step.
    void read_start(const S* start, Vec<S> pad, S* to) const {
        ConstRuns runs;
        for (int l = 0; l < layout.sequences; ++l) {
            runs[l] = {start + b[l] * problem.start_batch, valid(l, 0, 1) * problem.states};
        }
        layout.gather(runs, 1, pad, to);
    }
};

}  // namespace in_exp_space
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
