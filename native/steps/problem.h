// A chain given by scores, and what is like its scores: gradients, directions.
#pragma once

#include <cstdint>

#include "../omega/omega.h"

namespace bellmax {

template <class S>
struct Scores {
    S* emissions;    // (batch, steps, states)
    S* transitions;  // (1 or batch, 1 or steps − 1, states, states) [current, previous]; place t − 1 leads to step t
    S *start, *end;  // (1 or batch, states)
};

// Sequence b goes through the steps kept[b * steps + n], n < lengths[b], in order; without `kept`, through n itself.
// A tape is (batch, 2, steps + 1, states).
template <class S>
struct ScoresProblem {
    std::int64_t batch, steps, states;
    const std::int64_t *lengths, *kept;
    std::int64_t transition_batch, transition_step, start_batch, end_batch;  // strides, in numbers; 0: shared
    OmegaParameters omega;
    int threads;
    Scores<const S> scores;
    const S* tape;
};

inline namespace BELLMAX_ARCH {

// A dense chain has transitions alone, and those into the first step, too.
template <class S>
bool is_dense(const ScoresProblem<S>& problem) {
    return !problem.scores.emissions;
}

// The tape of sequence b begins with a mark, in the row before the first step: 0 for values and thresholds, 1 for
// numbers in exp space (exp.h), 2 for such numbers in double, on a tape of floats.
template <class S>
std::int64_t tape_place(const ScoresProblem<S>& problem, std::int64_t b) {
    return b * 2 * (problem.steps + 1) * problem.states;
}
template <class S>
S tape_mark(const ScoresProblem<S>& problem, std::int64_t b) {
    return problem.tape[tape_place(problem, b)];
}

// The step that sequence b visits as its n-th.
template <class S>
std::int64_t visited(const ScoresProblem<S>& problem, std::int64_t b, std::int64_t n) {
    return problem.kept ? problem.kept[b * problem.steps + n] : n;
}

// Zeros at the masked steps of sequence b, whose numbers, `size` of them for each step, begin at `data`. With a shift
// of 1 they belong to the ways from step to step: the first step has none, and the first unmasked one no use for its
// own.
template <class S>
void clear_masked(const ScoresProblem<S>& problem, std::int64_t b, S* data, std::int64_t size, std::int64_t shift = 0) {
    const std::int64_t length = problem.lengths[b];
    if (length == problem.steps) return;
    for (std::int64_t n = shift, t = 0; n <= length || n == shift; ++n) {
        const std::int64_t next = (n < length ? visited(problem, b, n) : problem.steps) - shift;
        for (S* at = data + t * size; at < data + next * size; ++at) *at = S(0);
        t = next + 1;
    }
}

}  // namespace BELLMAX_ARCH

}  // namespace bellmax
