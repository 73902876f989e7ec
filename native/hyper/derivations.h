// Single derivations: drawn, and the best.
#pragma once

#include "hyper.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// As in HyperKernels.
template <class S>
bool sample(const HyperProblem<S>&, std::int64_t draws, std::int64_t choices, const double* uniforms, S* counts);
template <class S>
bool topk(const HyperProblem<S>&, std::int64_t k, S* scores, S* counts);

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
