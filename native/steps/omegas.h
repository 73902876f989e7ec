// The sweeps of a chain under one Ω, which are compiled apart: those that are used most for speed, the others quickly.
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

template <class S, class Omega>
struct ChainSweeps {
    // Of the chosen sequences. As in ChainKernels, whether every score was sound.
    static bool forward(const ScoresProblem<S>&, const std::vector<std::int64_t>& chosen, S* value, S* tape);
    static void backward(const ScoresProblem<S>&, const std::vector<std::int64_t>& chosen, const S* seed,
                         const Scores<S>& gradient);
    static void hessian(const ScoresProblem<S>&, const std::vector<std::int64_t>& chosen, const S* seed,
                        const Scores<const S>& z, const Scores<S>& product);
};

template <class S, class Omega>
struct ChainLogs {
    static void log_transitions(const ScoresProblem<S>&, S* log_q);
    static void log_transitions_jvp(const ScoresProblem<S>&, const S* z, S* product);
    static void log_transitions_vjp(const ScoresProblem<S>&, const S* cotangent, S* product);
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
