// Every Ω: its name in Python, its OmegaKind and its policy class.
#pragma once

#include <cstddef>
#include <cstring>

#include "hard.h"
#include "negentropy.h"
#include "tsallis.h"

// OMEGA(name, count, Policy): the name in Python and in OmegaKind, the count of its numbers in Python, and the policy
// class as a template over the type of scores. steps/ compiles chains with the usual Ω for speed, and with other Ω
// for a short build.
#define BELLMAX_USUAL_OMEGAS(OMEGA)  \
    OMEGA(negentropy, 0, Negentropy) \
    OMEGA(l2, 0, SquaredL2)          \
    OMEGA(hard, 0, Hard)
#define BELLMAX_OTHER_OMEGAS(OMEGA) \
    OMEGA(tsallis, 1, AnyTsallis)

#define BELLMAX_OMEGAS(OMEGA) BELLMAX_USUAL_OMEGAS(OMEGA) BELLMAX_OTHER_OMEGAS(OMEGA)

namespace bellmax {

#define OMEGA_KIND(name, count, Policy) name,
enum class OmegaKind : int { BELLMAX_OMEGAS(OMEGA_KIND) };
#undef OMEGA_KIND

inline namespace BELLMAX_ARCH {
namespace omega {

// Calls action with the policy of the parameters for scores of type R.
template <class R, class Action>
auto with(const OmegaParameters& parameters, Action action) {
    if constexpr (sizeof(R) == 4) {
        if (parameters.kind == OmegaKind::tsallis && parameters.numbers[0] == 1.5) return action(Root(parameters));
    }
    switch (parameters.kind) {
#define OMEGA_CASE(name, count, Policy) \
    case OmegaKind::name: return action(Policy<R>(parameters));
        BELLMAX_OMEGAS(OMEGA_CASE)
#undef OMEGA_CASE
    }
    __builtin_unreachable();
}

// The parameters of a kernel of Python; false if there is none of that name with so many numbers.
inline bool find(const char* name, const double* numbers, std::size_t count, OmegaParameters& parameters) {
    bool is_found = false;
#define OMEGA_MATCH(own, own_count, Policy)                    \
    static_assert(own_count <= OmegaParameters::most_numbers); \
    if (std::strcmp(name, #own) == 0 && count == own_count) is_found = true, parameters.kind = OmegaKind::own;
    BELLMAX_OMEGAS(OMEGA_MATCH)
#undef OMEGA_MATCH
    if (!is_found) return false;
    for (std::size_t n = 0; n < count; ++n) parameters.numbers[n] = numbers[n];
    if (parameters.kind == OmegaKind::tsallis && numbers[0] == 2) {  // l2 less ½
        parameters.kind = OmegaKind::l2;
        parameters.numbers[0] = 0.5;
    }
    with<double>(parameters, [&](auto omega) {
        parameters.is_sum = omega.is_sum;
        parameters.is_quadratic = omega.is_quadratic;
        parameters.by_slot = omega.by_slot;
    });
    return true;
}

}  // namespace omega
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
