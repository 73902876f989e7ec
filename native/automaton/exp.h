// Negentropy in scaled exp space.
#pragma once

#include <vector>

#include "automaton.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace automata {

// Fills values and tapes, but not of the members that it returns, whose numbers do not fit. Sets `good` to false if a
// score is NaN or +∞.
template <class S>
std::vector<std::int64_t> forward_in_exp_space(const AutomatonProblem<S>& problem, S* value, bool& good);

// For members whose tape is in exp space.
template <class S>
void backward_in_exp_space(const AutomatonProblem<S>& problem, const std::vector<std::int64_t>& members, const S* seed,
                           const AutomatonArrays<S>& gradients);
template <class S>
void hessian_in_exp_space(const AutomatonProblem<S>& problem, const std::vector<std::int64_t>& members, const S* seed,
                          const AutomatonArrays<const S>& z, const AutomatonArrays<S>& products);

}  // namespace automata
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
