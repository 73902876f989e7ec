// The best path through each entry of a score, by the hard maximum.
#pragma once

#include "lattice.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// As in LatticeKernels.
bool max_marginals(const LatticeProblem& p, const TermTensor& out);

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
