// What an Ω offers, at γ = 1, for numbers Real or vectors V of them.
//
// unit             scores are x = unit · θ + v, and values are in the same unit
// solve            from a run of scores and its greatest, the threshold τ and max_Ω, both relative to the greatest,
//                  which must be given as 0 where it is −∞
// weigh            from r = x − greatest and τ the probability q of an entry, and s of the Hessian
//                  J y = s∘y − s⟨s, y⟩/Σs
// slope            s from q
// reach            entries so far below the greatest have q = 0
// at_vertex        Ω where all of q is in one entry
// log_q, log_slope log q, and its derivative q^(1−α) = s/q along the support
// absolute         the threshold for weighing scores x from which the greatest is not taken off
// is_sum           whether max_Ω follows from one sum over the scores: term, fits, of_sum, shares
// …_of_two         max_Ω of a number and 0, its derivatives, in registers
// three            −max_Ω of minus three numbers, in registers, for α = 2
//
// Hard is `by_slot`: no run is solved, the first best entry is found by whoever has the scores, its place is the
// threshold, and r is 0 there and −∞ elsewhere.
#pragma once

#include <cstdint>
#include <limits>

#include "../base/math.h"

namespace bellmax {

template <class S>
constexpr S infinity = std::numeric_limits<S>::infinity();

struct OmegaParameters {
    double alpha, vertex;  // Tsallis' α (1: negentropy, ∞: hard), and Ω at a vertex of the simplex
};

inline namespace BELLMAX_ARCH {
namespace omega {

// A sum that keeps what rounding takes from it.
template <class V>
struct Sum {
    V total{}, lost{};

    void add(V term) {
        const V mended = term - lost, sum = total + mended;
        lost = (sum - total) - mended;
        total = sum;
    }
};

// Runs of scores. sum: over the entries x of a run what term(x − top, at, sums) adds to K sums, the last of which is no
// sum but a minimum where `least` says so.

// As many runs as V has lanes, side by side: entry k of all of them at x + k * stride.
template <class V, class R>
struct Columns {
    const R* x;
    std::int64_t stride, count;

    // Plain over a stretch, with care over the stretches.
    template <bool least = false, int K, class Term>
    void sum(V top, V at, V (&totals)[K], Term term) const {
        constexpr std::int64_t stretch = 64;
        Sum<V> careful[K];
        V lowest = V{} + infinity<R>;
        for (std::int64_t begin = 0; begin < count; begin += stretch) {
            V sums[K] = {};
            if (least) sums[K - 1] = lowest;
            const std::int64_t end = count - begin < stretch ? count : begin + stretch;
            for (std::int64_t k = begin; k < end; ++k) term(load_vector<V>(x + k * stride) - top, at, sums);
            for (int n = 0; n < K - least; ++n) careful[n].add(sums[n]);
            if (least) lowest = sums[K - 1];
        }
        for (int n = 0; n < K; ++n) totals[n] = least && n == K - 1 ? lowest : careful[n].total;
    }
};

// A single one, of a whole number of vectors; every lane gets its result.
template <class R>
struct Row {
    const R* x;
    std::int64_t count;

    template <bool least = false, int K, class Term>
    void sum(Vec<R> top, Vec<R> at, Vec<R> (&totals)[K], Term term) const {
        Columns<Vec<R>, R>{x, lanes_of<R>, count / lanes_of<R>}.template sum<least>(top, at, totals, term);
        for (int n = 0; n < K; ++n) {
            totals[n] = least && n == K - 1 ? least_lane<R>(totals[n]) : sum_lanes<R>(totals[n]);
        }
    }
};

}  // namespace omega
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
