// Ω(q) = Σ q log q: the maximum is log Σ exp. Scores are in units of log 2.
#pragma once

#include "omega.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace omega {

template <class R>
struct Negentropy : General<R> {
    static constexpr bool is_sum = true;
    static constexpr R unit = R(1.44269504088896340735992468), ln2 = R(0.693147180559945309417232);

    explicit Negentropy(const OmegaParameters&) {}
    R at_vertex() const { return 0; }

    template <class Scores, class V>
    void solve(const Scores& scores, V top, V& tau, V& value) const {
        V sums[1];
        scores.sum(top, V{}, sums, [](V r, V, V* total) { total[0] += exp2_of(r); });
        tau = value = log2_of(sums[0]);
    }

    // The same from scores as they are, where these are not large: most need no maximum taken off. A score that is NaN
    // or too large makes a sum that does not fit.
    template <class V>
    static V term(V x) {
        return exp2_of(lesser<R>(x, V{} + (sizeof(R) == 4 ? R(100) : R(900))));
    }
    template <class V>
    static bool fits(V sum) {
        constexpr R most = sizeof(R) == 4 ? R(1 << 20) : R(1e100);
        return !any(!((sum > 1 / most) & (sum < most)));
    }
    template <class V>
    static V of_sum(V sum) {
        return log2_of(sum);
    }

    // The probabilities from the terms of a sum; 0 if that is 0.
    template <class V>
    static void shares(const V* terms, int count, V sum, V* q) {
        const V inverse = 1 / (sum > V{} ? sum : V{} + R(1));
        for (int n = 0; n < count; ++n) q[n] = terms[n] * inverse;
    }

    template <class V>
    void weigh(V r, V tau, V& q, V& s) const {
        q = s = exp2_of(r - tau);
    }
    template <class V>
    V slope(V q) const {
        return q;
    }
    template <class V>
    V log_q(V r, V tau) const {
        return (r - tau) * ln2;
    }
    template <class V>
    V log_slope(V r, V) const {
        return r > V{} - infinity<R> ? V{} + R(1) : V{};
    }

    // f(u) − f(w) for f(u) = max_Ω(u, 0), f', and f'' by θ from f' of u and of −u.
    template <class V>
    static V difference_of_two(V u, V w) {
        const V ratio = (1 + exp2_of(-size(u))) / (1 + exp2_of(-size(w)));
        return (u > V{} ? u : V{}) - (w > V{} ? w : V{}) + log2_of(ratio);
    }
    template <class V>
    static V slope_of_two(V u) {
        const V e = exp2_of(-size(u));
        return (u > V{} ? V{} + R(1) : e) / (1 + e);
    }
    template <class V>
    static V curvature_of_two(V, V q, V q_less) {
        return q * q_less;
    }

private:
    template <class V>
    static V size(V u) {
        return u > V{} ? u : -u;
    }
};

}  // namespace omega
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
