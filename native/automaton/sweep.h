// The nodes of a group in log space, under any Ω: the edges into them, and what flows along these edges.
#pragma once

#include "frames.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace automata {

// A number for each state of several frames.
struct FrameNumbers {
    int64_t size;  // of one frame
    Array<double> numbers;

    FrameNumbers(int64_t states, int64_t frames)
        : size(states * lanes), numbers(scratch<double>(states * lanes * frames)) {}
    double* at(int64_t n) const { return numbers.get() + n * size; }
};

template <class S>
class Sweep {
    const AutomatonProblem<S>& problem;
    Pace pace;

public:
    const Members<S>& group;
    const Plan& plan;
    const node::Kernels& omega;

private:
    const bool keeps = keeps_thresholds(problem.omega);
    const int64_t room = std::max(plan.most_edges + 1, plan.states) * lanes;

public:
    const Terms theta = group.read(problem.theta, omega.unit, no_score);
    // Frames of one block, from the row of the tape on: `stride` frames, and the first of the next block.
    const int64_t stride = problem.frames_per_row;
    const FrameNumbers value{plan.states, stride + 1}, threshold{plan.states, stride + 1};
    // Of the edges into the node that was read last: scores, q and s as Ω has them, and room for two more numbers.
    const Array<double> x = scratch<double>(room), q = scratch<double>(room), s = scratch<double>(room),
                        y = scratch<double>(room), e = scratch<double>(room);

    Sweep(const Members<S>& own, const node::Kernels& kernels)
        : problem(own.problem), group(own), plan(own.plan), omega(kernels) {}

    // --- edges

    // to = the terms of each edge and the number of the node that it comes from. `before` and `here` are numbers of the
    // frame before and of this frame.
    node::Matrix gather(int64_t t, int64_t p, const Terms& terms, const double* before, const double* here,
                        double* to) const {
        return plan.copies == 1 ? gather_as<true>(t, p, terms, before, here, to)
                                : gather_as<false>(t, p, terms, before, here, to);
    }
    // Adds what the edges have, times a factor for each lane, to the nodes that they come from, and to the terms unless
    // these are null.
    void spread(int64_t t, int64_t p, const double* from, V factor, double* before, double* here,
                const Terms* sums) const {
        plan.copies == 1 ? spread_as<true>(t, p, from, factor, before, here, sums)
                         : spread_as<false>(t, p, from, factor, before, here, sums);
    }
    // The same for the edges into the end of the members that end at frame t.
    node::Matrix gather_end(int64_t t, const Terms& terms, const double* here, double past, double* to) const {
        for (int64_t state = 0; state < plan.states; ++state) {
            for (int l = 0; l < lanes; ++l) {
                const int64_t place = plan.place_of[std::size_t(plan.copy(state, l))];
                to[state * lanes + l] = group.length[l] == t ? here[place * lanes + l] + terms.final[state * lanes + l]
                                                             : past;
            }
        }
        return {plan.states, lanes};
    }
    void spread_end(const double* from, V factor, double* here, const Terms* sums) const {
        for (int64_t state = 0; state < plan.states; ++state) {
            const V flow = load(from + state * lanes) * factor;
            for (int l = 0; l < lanes; ++l) here[plan.place_of[std::size_t(plan.copy(state, l))] * lanes + l] += flow[l];
            if (sums) store(&sums->final[state * lanes], load(&sums->final[state * lanes]) + flow);
        }
    }

    // --- frames

    void read_frame(int64_t t) { group.read_frame(problem.theta, t - 1, omega.unit, no_score, theta.frame.get()); }

    // Solves the nodes of a frame. False for a score that is not below +∞.
    bool solve_frame(int64_t t, const double* before, double* here, double* thresholds) {
        bool good = true;
        if (t > 0) read_frame(t);
        pace.spend(plan.edges * lanes);
        for (int64_t p = 0; p < plan.states; ++p) {
            node::Matrix of = gather(t, p, theta, before, here, x.get());
            if (omega.reach < infinity<double> && of.edges > 4) good &= keep_support(of);
            if (of.edges > 0) {
                good &= omega.solve(of, x.get(), here + p * lanes, thresholds + p * lanes);
            } else {
                store(here + p * lanes, V{} + no_score);
                store(thresholds + p * lanes, V{});
            }
        }
        return good;
    }

    // Drops edges that cannot have q > 0 in any lane: Newton's method passes over the others several times. False for a
    // score that is not below +∞.
    bool keep_support(node::Matrix& of) const {
        const V highest = V{} + infinity<double>;
        V top = V{} + no_score;
        auto bad = top > top;
        for (int64_t n = 0; n < of.size(); n += lanes) {
            const V own = load(&x[std::size_t(n)]);
            bad |= !(own < highest);
            top = greater<double>(own, top);
        }
        const V bar = top - omega.reach * (1 + 1e-9);
        int64_t kept = 0;
        for (int64_t n = 0; n < of.size(); n += lanes) {
            const V own = load(&x[std::size_t(n)]);
            store(&x[std::size_t(kept * lanes)], own);
            kept += any(own > bar);
        }
        of.edges = kept;
        return !any(bad);
    }

    // body(block, first, last) for the blocks of frames from the last on, or from the first on. Frame first + n has the
    // values of `value.at(n)`.
    template <class Body>
    void down(Body body) {
        for (int64_t block = group.longest / stride; block >= 0; --block) visit(block, body);
    }
    template <class Body>
    void up(Body body) {
        for (int64_t block = 0; block <= group.longest / stride; ++block) visit(block, body);
    }

    // q of the edges into a node, and s.
    node::Matrix weigh(int64_t t, int64_t p, int64_t first, bool with_s) const {
        const int64_t n = t - first;
        const node::Matrix of = gather(t, p, theta, n > 0 ? value.at(n - 1) : nullptr, value.at(n), x.get());
        return weigh(of, threshold.at(n) + p * lanes, with_s);
    }
    node::Matrix weigh_end(int64_t t, int64_t first, bool with_s) const {
        const node::Matrix of = gather_end(t, theta, value.at(t - first), no_score, x.get());
        double solved[lanes], own[lanes];
        omega.solve(of, x.get(), solved, own);
        omega.weigh(of, x.get(), own, q.get(), with_s ? s.get() : nullptr);
        return of;
    }
    int64_t edges_of(int64_t t, int64_t p) const {
        return plan.begin[std::size_t(p) + 1] - (t == 0 ? plan.middle[std::size_t(p)] - 1 : plan.begin[std::size_t(p)]);
    }
    void spend(int64_t work) { pace.spend(work); }

private:
    // The values of a block, and of the first frame of the next, from the tape.
    template <class Body>
    void visit(int64_t block, Body body) {
        const int64_t first = block * stride, last = std::min(first + stride, group.longest);
        load_frame(first, 0);
        for (int64_t t = first + 1; t <= last; ++t) {
            if (stride == 1) load_frame(t, 1);
            else solve_frame(t, value.at(t - first - 1), value.at(t - first), threshold.at(t - first));
        }
        body(first, last);
    }

    void load_frame(int64_t t, int64_t n) {
        group.load_row(t, 0, value.at(n));
        if (keeps) {
            group.load_row(t, 1, threshold.at(n));
            return;
        }
        const V exponent = group.load_scale(0, 1), offset = group.load_scale(t, 0);
        const auto is_log = exponent == V{} + in_log_space;
        for (int64_t p = 0; p < plan.states; ++p) {
            double* const own = value.at(n) + p * lanes;
            const V found = load(own);
            store(own, is_log ? found : log2_of(found) + offset);
        }
    }

    node::Matrix weigh(node::Matrix of, const double* own, bool with_s) const {
        double solved[lanes], found[lanes];
        if (!keeps) omega.solve(of, x.get(), solved, found);
        omega.weigh(of, x.get(), keeps ? own : found, q.get(), with_s ? s.get() : nullptr);
        return of;
    }

    template <bool is_shared>
    node::Matrix gather_as(int64_t t, int64_t p, const Terms& terms, const double* before, const double* here,
                           double* to) const {
        constexpr int copies = is_shared ? 1 : lanes;
        const int64_t begin = plan.begin[std::size_t(p)], middle = plan.middle[std::size_t(p)];
        const int32_t *const source = plan.source.data(), *const label = plan.label.data();
        double* row = to;
        if (t == 0) {
            store(row, load(&terms.start[p * lanes]));
            row += lanes;
        }
        for (int64_t edge = begin; t > 0 && edge < middle; ++edge, row += lanes) {
            const V weight = pick<is_shared>(terms.frame.get(), label + edge * copies) + load(&terms.arcs[edge * lanes]);
            store(row, pick<is_shared>(before, source + edge * copies) + weight);
        }
        for (int64_t edge = middle; edge < plan.begin[std::size_t(p) + 1]; ++edge, row += lanes) {
            store(row, pick<is_shared>(here, source + edge * copies) + load(&terms.arcs[edge * lanes]));
        }
        return {(row - to) / lanes, lanes};
    }

    template <bool is_shared>
    void spread_as(int64_t t, int64_t p, const double* from, V factor, double* before, double* here,
                   const Terms* sums) const {
        constexpr int copies = is_shared ? 1 : lanes;
        const int64_t begin = plan.begin[std::size_t(p)], middle = plan.middle[std::size_t(p)];
        const int32_t *const source = plan.source.data(), *const label = plan.label.data();
        const auto to_arc = [&](int64_t edge, V flow) {
            double* const sum = &sums->arcs[edge * lanes];
            store(sum, load(sum) + flow);
        };
        if (t == 0) {
            if (sums) store(&sums->start[p * lanes], load(&sums->start[p * lanes]) + load(from) * factor);
            from += lanes;
        }
        for (int64_t edge = begin; t > 0 && edge < middle; ++edge, from += lanes) {
            const V flow = load(from) * factor;
            add<is_shared>(before, source + edge * copies, flow);
            if (!sums) continue;
            to_arc(edge, flow);
            add<is_shared>(sums->frame.get(), label + edge * copies, flow);
        }
        for (int64_t edge = middle; edge < plan.begin[std::size_t(p) + 1]; ++edge, from += lanes) {
            const V flow = load(from) * factor;
            add<is_shared>(here, source + edge * copies, flow);
            if (sums) to_arc(edge, flow);
        }
    }
};

}  // namespace automata
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
