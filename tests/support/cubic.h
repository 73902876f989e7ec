// Ω(q) = Σ q²/2 + c q³/3: q + c q² = t with t = (r − τ)₊, so that q = 2t/(1 + √(1 + 4ct)), and s = 1/(1 + 2cq).
#pragma once

#include "omega.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace omega {

template <class>
struct Cubic : General<double> {
    const double c;

    explicit Cubic(const OmegaParameters& parameters) : c(parameters.numbers[0]) {}
    double at_vertex() const { return 0.5 + c / 3; }
    double reach() const { return 1 + c; }

    // Bisection, since τ lies between −1 − c and 0. Then Σ q r − Ω(q) = τ + Σ q²/2 + 2c q³/3.
    template <class Scores, class V>
    void solve(const Scores& scores, V top, V& tau, V& value) const {
        V low = V{} - (1 + c), high{}, sums[1];
        for (int n = 0; n < 60; ++n) {
            const V middle = (low + high) / 2;
            scores.sum(top, middle, sums, [this](V r, V own, V* total) { total[0] += probability(r, own); });
            low = sums[0] > V{} + 1.0 ? middle : low;
            high = sums[0] > V{} + 1.0 ? high : middle;
        }
        tau = low;
        scores.sum(top, tau, sums, [this](V r, V own, V* total) {
            const V q = probability(r, own);
            total[0] += q * q * (0.5 + 2 * c / 3 * q);
        });
        value = tau + sums[0];
    }

    template <class V>
    void weigh(V r, V tau, V& q, V& s) const {
        q = probability(r, tau);
        s = slope(q);
    }
    template <class V>
    V slope(V q) const {
        return q > V{} ? 1 / (1 + 2 * c * q) : V{};
    }
    template <class V>
    V log_q(V r, V tau) const {
        return log2_of(probability(r, tau)) * 0.693147180559945309417232;
    }
    template <class V>
    V log_slope(V r, V tau) const {
        const V q = probability(r, tau);
        return q > V{} ? slope(q) / q : V{};
    }

private:
    template <class V>
    V probability(V r, V tau) const {
        const V t = r > tau ? r - tau : V{};
        return 2 * t / (1 + square_root(1 + 4 * c * t));
    }
};

}  // namespace omega
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
