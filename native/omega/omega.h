// The policy class of an Ω at γ = 1, for numbers Real or vectors V of them. list.h lists all of them.
//
// To add one, derive it from General, which has defaults, in a new header and add it to list.h. It has to define solve,
// weigh, slope, at_vertex, log_q and log_slope, and a constructor from OmegaParameters.
//
// unit             scores are x = unit · θ + v, and values are in the same unit
// solve            from a run of scores and its greatest, the threshold τ and max_Ω, both relative to the greatest,
//                  which must be given as 0 where it is −∞
// weigh            from r = x − greatest and τ the probability q of an entry, and s of the Hessian
//                  J y = s∘y − s⟨s, y⟩/Σs
// slope            s from q
// reach            entries so far below the greatest have q = 0
// at_vertex        Ω where all of q is in one entry
// log_q, log_slope log q, and its derivative s/q along the support
// absolute         the threshold for weighing scores x from which the greatest is not taken off
//
// Three traits select engines that exist for one Ω only. An Ω without them runs on the general engines: chains in Real,
// everything else in double.
//
// is_sum           Σ q log q: max_Ω follows from one sum over the scores: term, fits, of_sum, shares
// is_quadratic     Σ q²/2 + constant: solve_after starts from the τ of some of the entries, and `three` is −max_Ω of
//                  minus three numbers, in registers
// by_slot          0, the hard max: no run is solved, the first best entry is found by whoever has the scores, its
// place
//                  is the threshold, and r is 0 there and −∞ elsewhere
// …_of_two         for the first two, max_Ω of a number and 0, and its derivatives, in registers
#pragma once

#include <cstdint>
#include <limits>

#include "../base/math.h"

namespace bellmax {

template <class S>
constexpr S infinity = std::numeric_limits<S>::infinity();

// list.h defines the kinds, and no other file names one.
enum class OmegaKind : int;

struct OmegaParameters {
    static constexpr int most_numbers = 4;

    OmegaKind kind;
    bool is_sum, is_quadratic, by_slot;  // the traits of its policy class
    double numbers[most_numbers];        // the parameters of Kernel in Python
};

inline namespace BELLMAX_ARCH {
namespace omega {

// The defaults of a policy class.
template <class R>
struct General {
    using Real = R;
    static constexpr bool is_sum = false, is_quadratic = false, by_slot = false;
    static constexpr R unit = 1;

    R reach() const { return infinity<R>; }
    template <class V>
    V absolute(V tau, V top) const {
        return tau + top;
    }
};

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
