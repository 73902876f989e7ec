// One sequence as a graph: its nodes, the edges into them, and what flows along these edges.
//
// The node "before step t" of label k comes before a segment of this label, and the node "after step t" follows one.
// Their edges are listed as node.h has them: a row for each edge, a column for each of `lanes` labels.
#pragma once

#include <algorithm>

#include "../base/memory.h"
#include "../base/threads.h"
#include "../node.h"
#include "segments.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace segments {

using std::int64_t;
using V = Vec<double>;
constexpr int64_t lanes = lanes_of<double>;
static_assert(lanes == label_lanes);

// Where edges lead: to the nodes of `lanes` labels, from `label` on, before or after a step; or to the end.
enum class Side { before, after, end };
struct NodeBlock {
    Side side;
    int64_t step, label;
};

// A number for each node but the end.
struct NodeArrays {
    double *before, *after;

    double* of(Side side) const { return side == Side::before ? before : after; }
};

// The scores of a sequence, a direction or gradients in double.
struct SegmentTerms {
    Array<double> emissions, durations, last_durations;  // the last is null if durations also score the last segment
    Array<double> transitions;                           // a row for each previous label
    Array<double> start, end;

    const Array<double>& at(bool is_last) const { return is_last && last_durations ? last_durations : durations; }
};

inline void add(double* to, V v) { store(to, load(to) + v); }

// Numbers of labels have a layout (blocks, rows, lanes), with a row for each step, duration or previous label: sweeps
// run over the rows of one block, which are contiguous.
inline int64_t offset(int64_t rows, int64_t row, int64_t label) {
    return (label / lanes * rows + row) * lanes + label % lanes;
}

template <class S>
class SegmentedSequence {
    const SegmentProblem<S>& problem;
    const int64_t member, labels = problem.labels, width = problem.width;
    Pace pace;

public:
    const node::Kernels& omega;
    const int64_t length = problem.lengths[member], longest = std::min(problem.longest, length);

private:
    const int64_t room = std::max(longest, labels) * lanes, nodes = problem.steps * width;
    const SegmentTerms theta = read(problem.theta, omega.unit, -infinity<double>);

public:
    const NodeArrays value{problem.tape + 4 * nodes * member, problem.tape + (4 * member + 2) * nodes};
    const NodeArrays threshold{value.before + nodes, value.after + nodes};
    // Of the edges into the nodes that were read last: scores, q and s as Ω has them, and room for two more numbers.
    const Array<double> x = scratch<double>(room), q = scratch<double>(room), s = scratch<double>(room),
                        y = scratch<double>(room), e = scratch<double>(room);
    double end_threshold[lanes];

    SegmentedSequence(const SegmentProblem<S>& of, const node::Kernels& own, int64_t which)
        : problem(of), member(which), omega(own) {}

    // --- terms

    // `past` fills the columns without a label.
    SegmentTerms read(const SegmentArrays<const S>& from, double unit, double past) const {
        SegmentTerms terms = empty(from.last_durations.data != nullptr);
        const auto copy = [&](const auto& array, int64_t rows, const Array<double>& to) {
            const S* const source = array.of(member);
            for (int64_t r = 0; r < rows; ++r) {
                for (int64_t k = 0; k < width; ++k) {
                    to[offset(rows, r, k)] = k < labels ? unit * source[r * labels + k] : past;
                }
            }
        };
        copy(from.emissions, length, terms.emissions);
        copy(from.durations, longest, terms.durations);
        if (terms.last_durations) copy(from.last_durations, longest, terms.last_durations);
        copy(from.start, 1, terms.start);
        copy(from.end, 1, terms.end);
        const S* const transitions = from.transitions.of(member);
        for (int64_t j = 0; j < labels; ++j) {
            for (int64_t k = 0; k < width; ++k) {
                terms.transitions[offset(labels, j, k)] = k < labels ? unit * transitions[k * labels + j] : past;
            }
        }
        return terms;
    }

    SegmentTerms zero_terms() const {
        SegmentTerms terms = empty(bool(theta.last_durations));
        for (double* array : {terms.durations.get(), terms.last_durations.get()}) {
            if (array) std::fill_n(array, longest * width, 0.0);
        }
        std::fill_n(terms.emissions.get(), length * width, 0.0);
        std::fill_n(terms.transitions.get(), labels * width, 0.0);
        std::fill_n(terms.start.get(), width, 0.0);
        std::fill_n(terms.end.get(), width, 0.0);
        return terms;
    }

    // Rows past the length of the sequence are 0.
    void write(const SegmentTerms& terms, const SegmentArrays<S>& to) const {
        const auto copy = [&](const Array<double>& from, int64_t rows, const auto& array) {
            S* const target = array.of(member);
            for (int64_t r = 0; r < rows; ++r) {
                for (int64_t k = 0; k < labels; ++k) target[r * labels + k] = S(from[offset(rows, r, k)]);
            }
            std::fill(target + rows * labels, target + array.size, S(0));
        };
        copy(terms.emissions, length, to.emissions);
        copy(terms.durations, longest, to.durations);
        if (terms.last_durations) copy(terms.last_durations, longest, to.last_durations);
        copy(terms.start, 1, to.start);
        copy(terms.end, 1, to.end);
        S* const transitions = to.transitions.of(member);
        for (int64_t k = 0; k < labels; ++k) {
            for (int64_t j = 0; j < labels; ++j)
                transitions[k * labels + j] = S(terms.transitions[offset(labels, j, k)]);
        }
    }

    // --- nodes

    int64_t place(const NodeBlock& at) const { return offset(length, at.step, at.label); }
    double* threshold_of(const NodeBlock& at) {
        return at.side == Side::end ? end_threshold : threshold.of(at.side) + place(at);
    }

    // body(nodes) in topological order, or in the reverse order; without the end.
    template <class Body>
    void up(Body body) {
        for (int64_t t = 0; t < length; ++t) {
            for (const Side side : {Side::before, Side::after}) {
                for (int64_t c = 0; c < width; c += lanes) body(paced({side, t, c}));
            }
        }
    }
    template <class Body>
    void down(Body body) {
        for (int64_t t = length - 1; t >= 0; --t) {
            for (const Side side : {Side::after, Side::before}) {
                for (int64_t c = 0; c < width; c += lanes) body(paced({side, t, c}));
            }
        }
    }
    NodeBlock end() const { return {Side::end, length - 1, 0}; }

    // --- edges

    node::Matrix matrix(const NodeBlock& at) const {
        if (at.side == Side::after) return {std::min(longest, at.step + 1), lanes};
        return {at.side == Side::before && at.step == 0 ? 1 : labels, lanes};
    }

    // to = the terms of each edge and the number of the node that it comes from. Column 0 stands for the end.
    void gather(const NodeBlock& at, const SegmentTerms& terms, const NodeArrays& numbers, double past,
                double* to) const {
        const int64_t edges = matrix(at).edges, last = place(at);
        if (at.side == Side::after) {
            const double* const durations = &terms.at(at.step == length - 1)[offset(longest, 0, at.label)];
            const double *const emissions = terms.emissions.get() + last, *const before = numbers.before + last;
            V sum{};
            for (int64_t d = 0; d < edges; ++d) {
                sum += load(emissions - d * lanes);
                store(to + d * lanes, load(before - d * lanes) + (sum + load(durations + d * lanes)));
            }
        } else if (at.side == Side::end) {
            for (int64_t k = 0; k < edges; ++k) {
                std::fill_n(to + k * lanes, lanes, past);
                to[k * lanes] = numbers.after[offset(length, at.step, k)] + terms.end[k];
            }
        } else if (at.step == 0) {
            store(to, load(&terms.start[at.label]));
        } else {
            const double* const transitions = &terms.transitions[offset(labels, 0, at.label)];
            for (int64_t j = 0; j < edges; ++j) {
                store(to + j * lanes, load(transitions + j * lanes) + numbers.after[offset(length, at.step - 1, j)]);
            }
        }
    }

    node::Matrix score(const NodeBlock& at) const {
        gather(at, theta, value, -infinity<double>, x.get());
        return matrix(at);
    }
    node::Matrix weigh(const NodeBlock& at, bool with_s) {
        const node::Matrix of = score(at);
        omega.weigh(of, x.get(), threshold_of(at), q.get(), with_s ? s.get() : nullptr);
        return of;
    }
    bool solve(const NodeBlock& at, double* to) { return omega.solve(score(at), x.get(), to, threshold_of(at)); }

    // Adds what the edges have, times a factor for each column, to the nodes that they come from, and to the terms
    // unless these are null. An emission has the sum over the segments that contain its step.
    void spread(const NodeBlock& at, const double* from, V factor, const NodeArrays& numbers,
                const SegmentTerms* terms) const {
        const int64_t edges = matrix(at).edges;
        if (at.side == Side::after) {
            terms ? spread_segments<true>(at, from, factor, numbers, terms)
                  : spread_segments<false>(at, from, factor, numbers, terms);
        } else if (at.side == Side::end) {
            for (int64_t k = 0; k < edges; ++k) {
                const double flow = from[k * lanes] * factor[0];
                numbers.after[offset(length, at.step, k)] += flow;
                if (terms) terms->end[k] += flow;
            }
        } else if (at.step == 0) {
            if (terms) add(&terms->start[at.label], load(from) * factor);
        } else {
            for (int64_t j = 0; j < edges; ++j) {
                const V flow = load(from + j * lanes) * factor;
                numbers.after[offset(length, at.step - 1, j)] += sum_lanes<double>(flow)[0];
                if (terms) add(&terms->transitions[offset(labels, j, at.label)], flow);
            }
        }
    }

private:
    const NodeBlock& paced(const NodeBlock& at) {
        pace.spend(matrix(at).size());
        return at;
    }

    SegmentTerms empty(bool has_last) const {
        const auto rows = [&](int64_t count) { return scratch<double>(count * width); };
        return {rows(length),
                rows(longest),
                has_last ? rows(longest) : nullptr,
                rows(labels),
                rows(1),
                rows(1)};
    }

    template <bool has_terms>
    void spread_segments(const NodeBlock& at, const double* from, V factor, const NodeArrays& numbers,
                         const SegmentTerms* terms) const {
        const int64_t last = place(at);
        double* const before = numbers.before + last;
        double *durations = nullptr, *emissions = nullptr;
        if (has_terms) {
            durations = &terms->at(at.step == length - 1)[offset(longest, 0, at.label)];
            emissions = terms->emissions.get() + last;
        }
        V longer{};  // the flow of the segments of this duration or more, which contain the step
        for (int64_t d = matrix(at).edges - 1; d >= 0; --d) {
            const V flow = load(from + d * lanes) * factor;
            add(before - d * lanes, flow);
            if constexpr (has_terms) {
                longer += flow;
                add(durations + d * lanes, flow);
                add(emissions - d * lanes, longer);
            }
        }
    }
};

}  // namespace segments
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
