// Chains given by scores of states and of transitions.
#pragma once

#include <cstdint>

#include "regularizers.h"

namespace bellmax {

// The scores of a chain, or a gradient or a direction of that shape. An array that the batch shares has stride 0 along
// it; transitions that all steps share have stride 0 along the steps.
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

}  // namespace bellmax
