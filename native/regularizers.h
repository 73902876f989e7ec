// The Ω at γ = 1, on the vectors of W lanes at once.
//
// solve: from r = x − max(x) of d parents (r[k * W + lane]) the threshold τ and max_Ω, both relative to max(x).
// weigh: from x − τ the edge's probability q, and s of the Hessian J y = s∘y − s⟨s, y⟩/Σs.
// log_q, log_slope: log q, and its derivative q^(1−α) = s/q along the support.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "scalar_math.h"

namespace bellmax {

template <class S>
constexpr S infinity = std::numeric_limits<S>::infinity();

struct OmegaParameters {
    double alpha, vertex;  // Tsallis' α (1: negentropy, ∞: hard), and Ω at a vertex of the simplex
};

template <class S>
struct Negentropy {
    static constexpr bool by_slot = false;
    static constexpr bool threshold_is_value = true;

    explicit Negentropy(OmegaParameters) {}

    template <int W>
    void solve(const S* r, std::int64_t d, S* tau, S* value) const {
        S sum[W] = {};
        for (std::int64_t k = 0; k < d; ++k) {
#pragma omp simd
            for (int l = 0; l < W; ++l) sum[l] += exp_nonpositive(r[k * W + l]);
        }
#pragma omp simd
        for (int l = 0; l < W; ++l) tau[l] = value[l] = log_positive(sum[l]);
    }

    void weigh(S x, S& q, S& s) const { q = s = exp_nonpositive(x); }
    S log_q(S x) const { return x; }
    S log_slope(S x) const { return x > -infinity<S> ? S(1) : S(0); }
};

// α = 2 and α = 1.5, whose powers are cheap, and any other α: q = t^p, s = t^(p−1) with t = ((α−1)(x − τ))₊, p = 1/(α−1).
template <class S>
struct PowerOne {
    explicit PowerOne(double) {}
    S less_one(S t) const { return t > 0 ? S(1) : S(0); }
    S root(S x) const { return x; }
};

template <class S>
struct PowerTwo {
    explicit PowerTwo(double) {}
    S less_one(S t) const { return t; }
    S root(S x) const { return std::sqrt(x); }
};

template <class S>
struct PowerAny {
    S exponent;
    explicit PowerAny(double p) : exponent(S(p)) {}
    S less_one(S t) const { return exp_nonpositive((exponent - 1) * log_positive(t)); }
    S root(S x) const { return exp_nonpositive(log_positive(x) / exponent); }
};

template <class S, template <class> class Power>
struct Tsallis {
    static constexpr bool by_slot = false;
    static constexpr bool threshold_is_value = false;

    S alpha, slope, vertex;  // slope = α − 1
    Power<S> power;

    explicit Tsallis(OmegaParameters omega)
        : alpha(S(omega.alpha)), slope(S(omega.alpha - 1)), vertex(S(omega.vertex)), power(1 / (omega.alpha - 1)) {}

    S above(S x) const {
        const S t = slope * x;
        return t > 0 ? t : S(0);
    }

    // Newton's method on the p-norm of (r − τ)₊, convex in τ and nearly linear: it climbs from τ = −1/(α−1) to the root.
    template <int W>
    void solve(const S* r, std::int64_t d, S* tau, S* value) const {
        const Tsallis omega = *this;
        const S least = 2 * std::numeric_limits<S>::epsilon() / slope;
        S at[W];
        for (int l = 0; l < W; ++l) at[l] = -1 / slope;
        for (bool moved = true; moved;) {
            S sum_q[W] = {}, sum_s[W] = {};
            for (std::int64_t k = 0; k < d; ++k) {
#pragma omp simd
                for (int l = 0; l < W; ++l) {
                    const S t = omega.above(r[k * W + l] - at[l]);
                    const S s = omega.power.less_one(t);
                    sum_s[l] += s;
                    sum_q[l] += s * t;
                }
            }
            S climb[W];
#pragma omp simd
            for (int l = 0; l < W; ++l) {
                const S norm = omega.power.root(sum_q[l]);
                const S steepness = norm * sum_s[l] * omega.slope;
                climb[l] = steepness > 0 && norm > 1 ? (norm - 1) * sum_q[l] / steepness : S(0);
                at[l] += climb[l];
            }
            moved = false;
            for (int l = 0; l < W; ++l) moved |= climb[l] > least;
        }
        // max_Ω = Σ q r − (Σ q^α − 1)/(α(α−1)), where q^α = q t.
        const S scale = 1 / (alpha * slope), floor = -2 / slope;  // below −1/(α−1) is out of the support, so −∞ may rise
        S total[W];
        for (int l = 0; l < W; ++l) total[l] = scale - omega.vertex;
        for (std::int64_t k = 0; k < d; ++k) {
#pragma omp simd
            for (int l = 0; l < W; ++l) {
                const S x = r[k * W + l] > floor ? r[k * W + l] : floor;
                const S t = omega.above(x - at[l]);
                total[l] += omega.power.less_one(t) * t * (x - t * scale);
            }
        }
        for (int l = 0; l < W; ++l) tau[l] = at[l], value[l] = total[l];
    }

    void weigh(S x, S& q, S& s) const {
        const S t = above(x);
        s = power.less_one(t);
        q = s * t;
    }
    S log_q(S x) const { return log_positive(above(x)) / slope; }
    S log_slope(S x) const {
        const S t = above(x);
        return t > 0 ? 1 / t : S(0);
    }
};

template <class S>
using SquaredL2 = Tsallis<S, PowerOne>;
template <class S>
using Root = Tsallis<S, PowerTwo>;
template <class S>
using AnyTsallis = Tsallis<S, PowerAny>;

// No vector is solved here: the threshold of a node is the slot of its first best parent.
template <class S>
struct Hard {
    static constexpr bool by_slot = true;
    static constexpr bool threshold_is_value = false;

    explicit Hard(OmegaParameters) {}

    void weigh(S is_chosen, S& q, S& s) const {
        q = is_chosen;
        s = 0;
    }
    S log_q(S is_chosen) const { return is_chosen > 0 ? S(0) : -infinity<S>; }
    S log_slope(S) const { return 0; }
};

// Calls action with the Ω that the parameters name.
template <class S, class Action>
auto with_omega(OmegaParameters omega, Action action) {
    if (omega.alpha == 1) return action(Negentropy<S>(omega));
    if (omega.alpha == 2) return action(SquaredL2<S>(omega));
    if (omega.alpha == 1.5) return action(Root<S>(omega));
    if (omega.alpha < 2) return action(AnyTsallis<S>(omega));
    return action(Hard<S>(omega));
}

}  // namespace bellmax
