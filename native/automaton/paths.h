// Single paths: samples, and the best ones.
#pragma once

#include "sweep.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace automata {

// Draws the paths of a group from the end to the start. The n-th choice of a path uses its n-th uniform number. All
// paths that reach a node choose among the same edges, so these are weighed once.
template <class S>
void draw_paths(Sweep<S>& sweep, int64_t draws, int64_t choices, const double* uniforms, int64_t longest,
                int64_t* paths);

template <class S>
bool best_paths(const AutomatonProblem<S>& problem, int64_t k, S* scores, int64_t longest, int64_t* paths);

}  // namespace automata
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
