// Every Ω, by its name in Python and by its type here.
#pragma once

#include <cstddef>
#include <cstring>

#include "hard.h"
#include "negentropy.h"
#include "tsallis.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace omega {

// The Ω of a name and its numbers; false if there is none.
inline bool find(const char* name, const double* numbers, std::size_t count, OmegaParameters& parameters) {
    const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
    if (is("negentropy")) parameters = {1, 0};
    else if (is("l2")) parameters = {2, 0.5};
    else if (is("hard")) parameters = {infinity<double>, 0};
    else if (is("tsallis") && count == 1) parameters = {numbers[0], 0};
    else return false;
    return true;
}

// Calls action with the Ω that the parameters name.
template <class R, class Action>
auto with(OmegaParameters parameters, Action action) {
    if (parameters.alpha == 1) return action(Negentropy<R>(parameters));
    if (parameters.alpha == 2) return action(SquaredL2<R>(parameters));
    if constexpr (sizeof(R) == 4) {
        if (parameters.alpha == 1.5) return action(Root(parameters));
    }
    if (parameters.alpha < 2) return action(AnyTsallis(parameters));
    return action(Hard<R>(parameters));
}

}  // namespace omega
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
