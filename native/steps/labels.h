// The score of given states, and its gradient.
#pragma once

#include <cstdint>

#include "problem.h"

namespace bellmax {

// ⟨Y, θ⟩ of the sequences Y that labels (batch, steps) name at the steps kept. False if a label is out of range, or is
// `ignored`, or if a score is infinite.
template <class S>
bool score_labels(const ScoresProblem<S>& p, const std::int64_t* labels, std::int64_t ignored, S* scores);

// gradient −= seed Y.
template <class S>
void subtract_labels(const ScoresProblem<S>& p, const std::int64_t* labels, const S* seed, const Scores<S>& gradient);

}  // namespace bellmax
