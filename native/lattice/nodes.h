// The kinds of nodes that a lattice can be swept with, and the choice among them.
#pragma once

#include "cells.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

using Sparse = Parts<omega::SquaredL2<float>>;
using HardFloat = Values<OnlyHard, float>;
using HardDouble = Values<OnlyHard>;
using Precise = Values<AnyOmega>;

// Calls action(P) with the nodes to sweep with, as a null pointer: in float, if there are such nodes for these scores
// and this Ω, or in double. False if there are none.
template <class Action>
bool with_nodes(const OmegaParameters& omega, bool is_double, bool in_float, Action action) {
    if (in_float && (is_double || !(omega.is_sum || omega.is_quadratic))) return false;
    if (in_float && omega.is_sum) {
        action(static_cast<Products*>(nullptr));
    } else if (in_float) {
        action(static_cast<Sparse*>(nullptr));
    } else if (omega.by_slot && is_double) {
        action(static_cast<HardDouble*>(nullptr));
    } else if (omega.by_slot) {
        action(static_cast<HardFloat*>(nullptr));
    } else {
        action(static_cast<Precise*>(nullptr));
    }
    return true;
}

// The nodes for Hessian products: the Hessian of a hard maximum is 0, and callers do not compute it.
template <class P>
using WithTangents = WithDots<std::conditional_t<P::is_hard, Precise, P>>;

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
