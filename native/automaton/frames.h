// Common parts of the sweeps over automata: groups of members, numbers of scores in lanes, and rows of the tape.
//
// A row of the tape has a number for each state, by place, of all of `planes`, and then two more numbers. In log space
// the planes are values and thresholds (node.h), under negentropy values alone. In exp space (exp.cpp) a value is
// log2 of its number, plus the first of the two; the second is the exponent by which the numbers were scaled.
#pragma once

#include <algorithm>
#include <memory>

#include "../base/threads.h"
#include "../node.h"
#include "plan.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace automata {

constexpr double in_log_space = 1e300;  // instead of the exponent, in the first row of a member
constexpr double no_score = -infinity<double>;

inline bool keeps_thresholds(const OmegaParameters& omega) { return !omega.is_sum; }

template <class S>
double& scale_of(const AutomatonProblem<S>& problem, double* row, int n) {
    return row[problem.width - 2 + n];
}

// Numbers of scores in lanes.
struct Terms {
    Array<double> frame;         // (labels): of one frame
    Array<double> arcs;          // (edges)
    Array<double> start, final;  // (states): start by place, final by state
};

template <class S>
struct Members : Group {
    const AutomatonProblem<S>& problem;
    const Plan& plan;

    Members(const AutomatonProblem<S>& of, const Plan& own, const int64_t* which, int64_t count)
        : Group{int(count), {}, {}, -1}, problem(of), plan(own) {
        for (int l = 0; l < lanes; ++l) {
            b[l] = which[l < members ? l : 0];
            length[l] = l < members ? problem.lengths[b[l]] : -1;
            longest = std::max(longest, length[l]);
        }
    }

    bool ends_at(int64_t t) const {
        return length[0] == t || length[1] == t || length[2] == t || length[3] == t;
    }

    // `past` stands where there is nothing.
    template <class T>
    void read_frame(const AutomatonArrays<T>& from, int64_t frame, double unit, double past, double* to) const {
        for (int l = 0; l < lanes; ++l) {
            const bool exists = frame < length[l];
            const T* const row = from.log_probs.of(b[l]) + (exists ? frame * problem.labels : 0);
            for (int64_t k = 0; k < plan.labels; ++k) {
                const int32_t label = plan.used[std::size_t(plan.copy(k, l))];
                to[k * lanes + l] = exists && label >= 0 ? unit * double(row[label]) : past;
            }
        }
    }

    template <class T>
    Terms read(const AutomatonArrays<T>& from, double unit, double past) const {
        Terms terms{scratch<double>(plan.labels * lanes), scratch<double>(plan.edges * lanes),
                    scratch<double>(plan.states * lanes), scratch<double>(plan.states * lanes)};
        for (int l = 0; l < lanes; ++l) {
            const bool exists = length[l] >= 0;
            const T *const arcs = from.arcs.of(b[l]), *const start = from.start.of(b[l]),
                    *const final = from.final.of(b[l]);
            for (int64_t e = 0; e < plan.edges; ++e) {
                const int32_t arc = plan.arc[std::size_t(plan.copy(e, l))];
                terms.arcs[std::size_t(e * lanes + l)] = exists && arc >= 0 ? unit * double(arcs[arc]) : past;
            }
            for (int64_t s = 0; s < plan.states; ++s) {
                const int32_t state = plan.state_at[std::size_t(plan.copy(s, l))];
                terms.start[std::size_t(s * lanes + l)] = exists ? unit * double(start[state]) : past;
                terms.final[std::size_t(s * lanes + l)] = exists ? unit * double(final[s]) : past;
            }
        }
        return terms;
    }

    Terms zero_terms() const {
        return {zeros<double>(plan.labels * lanes), zeros<double>(plan.edges * lanes),
                zeros<double>(plan.states * lanes), zeros<double>(plan.states * lanes)};
    }

    // The sums of a frame, times a factor for each lane.
    void write_frame(const double* sums, int64_t frame, V factor, const AutomatonArrays<S>& to) const {
        for (int l = 0; l < members; ++l) {
            S* const row = to.log_probs.of(b[l]) + frame * problem.labels;
            std::fill_n(row, problem.labels, S(0));
            for (int64_t k = 0; k < plan.labels && frame < length[l]; ++k) {
                const int32_t label = plan.used[std::size_t(plan.copy(k, l))];
                if (label >= 0) row[label] = S(sums[k * lanes + l] * factor[l]);
            }
        }
    }
    void write(const Terms& sums, V factor, const AutomatonArrays<S>& to) const {
        for (int l = 0; l < members; ++l) {
            for (int64_t t = longest; t < problem.steps; ++t) {
                std::fill_n(to.log_probs.of(b[l]) + t * problem.labels, problem.labels, S(0));
            }
            S *const arcs = to.arcs.of(b[l]), *const start = to.start.of(b[l]), *const final = to.final.of(b[l]);
            std::fill_n(arcs, problem.arcs, S(0));
            for (int64_t e = 0; e < plan.edges; ++e) {
                const int32_t arc = plan.arc[std::size_t(plan.copy(e, l))];
                if (arc >= 0) arcs[arc] = S(sums.arcs[std::size_t(e * lanes + l)] * factor[l]);
            }
            for (int64_t s = 0; s < plan.states; ++s) {
                start[plan.state_at[std::size_t(plan.copy(s, l))]] =
                    S(sums.start[std::size_t(s * lanes + l)] * factor[l]);
                final[s] = S(sums.final[std::size_t(s * lanes + l)] * factor[l]);
            }
        }
    }

    // --- the tape

    // Numbers of states from lanes to rows of the tape, and back. A lane without a row gets 0.
    void store_row(int64_t frame, int64_t plane, const double* numbers) const {
        double* to[lanes];
        for (int l = 0; l < lanes; ++l) {
            to[l] = frame <= length[l] ? problem.row(b[l], frame) + plane * plan.states : nullptr;
        }
        int64_t p = 0;
        for (; p + lanes <= plan.states; p += lanes) {
            V v[lanes];
            for (int k = 0; k < lanes; ++k) v[k] = load(numbers + (p + k) * lanes);
            transpose(v);
            for (int l = 0; l < lanes; ++l) {
                if (to[l]) store(to[l] + p, v[l]);
            }
        }
        for (; p < plan.states; ++p) {
            for (int l = 0; l < lanes; ++l) {
                if (to[l]) to[l][p] = numbers[p * lanes + l];
            }
        }
    }
    void load_row(int64_t frame, int64_t plane, double* numbers) const {
        const double* from[lanes];
        for (int l = 0; l < lanes; ++l) {
            from[l] = frame <= length[l] ? problem.row(b[l], frame) + plane * plan.states : nullptr;
        }
        int64_t p = 0;
        for (; p + lanes <= plan.states; p += lanes) {
            V v[lanes];
            for (int l = 0; l < lanes; ++l) v[l] = from[l] ? load(from[l] + p) : V{};
            transpose(v);
            for (int k = 0; k < lanes; ++k) store(numbers + (p + k) * lanes, v[k]);
        }
        for (; p < plan.states; ++p) {
            for (int l = 0; l < lanes; ++l) numbers[p * lanes + l] = from[l] ? from[l][p] : 0;
        }
    }
    void store_scale(int64_t frame, int n, V numbers) const {
        for (int l = 0; l < lanes; ++l) {
            if (frame <= length[l]) scale_of(problem, problem.row(b[l], frame), n) = numbers[l];
        }
    }
    V load_scale(int64_t frame, int n) const {
        V numbers{};
        for (int l = 0; l < lanes; ++l) {
            if (frame <= length[l]) numbers[l] = scale_of(problem, problem.row(b[l], frame), n);
        }
        return numbers;
    }
};

// body(group) for groups of these members, over the threads.
template <class S, class Body>
void for_groups(const AutomatonProblem<S>& problem, const std::vector<int64_t>& members, bool by_label, Body body) {
    const int64_t count = int64_t(members.size());
    const int64_t groups = (count + lanes - 1) / lanes;
    const auto plan = [&](const int64_t* which, int64_t size) {
        const int32_t* automata[lanes];
        for (int l = 0; l < lanes; ++l) automata[l] = problem.automaton(which[l < size ? l : 0]);
        return plan_of(automata, problem.is_shared ? 1 : lanes, problem.arcs, problem.states, problem.labels, by_label);
    };
    const Plan shared = problem.is_shared && count ? plan(members.data(), 1) : Plan{};
    parallel_for(groups, problem.threads, [&](int64_t n, int) {
        const int64_t* const which = members.data() + n * lanes;
        const int64_t size = std::min<int64_t>(count - n * lanes, lanes);
        if (problem.is_shared) {
            body(Members<S>(problem, shared, which, size));
        } else {
            const Plan own = plan(which, size);
            body(Members<S>(problem, own, which, size));
        }
    });
}

template <class S>
std::vector<int64_t> all_members(const AutomatonProblem<S>& problem) {
    std::vector<int64_t> all;
    for (int64_t b = 0; b < problem.batch; ++b) all.push_back(b);
    return all;
}

}  // namespace automata
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
