// The sweeps of a chain under one Ω, which are compiled apart: those that are used most for speed, the others quickly.
#pragma once

#include <cstdint>
#include <vector>

#include "problem.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// The sequences to be solved, the longest first. So many of them as `across` says share the lanes of vectors.
struct Plan {
    std::vector<std::int64_t> sequences;
    std::int64_t across;
};

// The contribution of a thread's sequences to the gradient of scores that the batch shares.
struct Totals {
    std::vector<double> transitions, start, end;
};

template <class S>
struct ChainSweeps {
    using Back = void (*)(const ScoresProblem<S>&, const Plan&, const S* seed, const Scores<const S>& z,
                          const Scores<S>& out, Totals* of_threads);

    bool (*forward)(const ScoresProblem<S>&, const Plan&, S* value, S* tape);  // whether every score was sound
    Back backward, hessian;  // z is for the Hessian product, which is 0 if there is no function for it
};

template <class S, class Omega>
ChainSweeps<S> chain_sweeps();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
