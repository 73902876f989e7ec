// The Ω at γ = 1. An Ω computes in its type Real, on r = x − max(x) of a vector.
//
// solve: the threshold τ and max_Ω, both relative to max(x), by lane. The lanes hold W vectors side by side
// (r[k * W + lane], k < d), or, if `shared`, one vector of d * W entries, and then every lane has its answer.
// weigh: from r and τ an entry's probability q, and s of the Hessian J y = s∘y − s⟨s, y⟩/Σs.
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

template <int W, class R>
inline void share(R* sum) {
    R total = 0;
    for (int l = 0; l < W; ++l) total += sum[l];
    for (int l = 0; l < W; ++l) sum[l] = total;
}

// Σ over k of the pair that term(r) gives, by lane. What is summed in single precision is carried to double in time.
template <int W, bool shared, class R, class Term>
inline void sum_terms(const R* r, std::int64_t d, double* first, double* second, Term term) {
    constexpr std::int64_t run = 64;
    for (int l = 0; l < W; ++l) first[l] = second[l] = 0;
    for (std::int64_t begin = 0; begin < d; begin += run) {
        R a[W] = {}, b[W] = {};
        const std::int64_t end = d - begin < run ? d : begin + run;
        for (std::int64_t k = begin; k < end; ++k) {
#pragma omp simd
            for (int l = 0; l < W; ++l) term(l, r[k * W + l], a[l], b[l]);
        }
        for (int l = 0; l < W; ++l) first[l] += double(a[l]), second[l] += double(b[l]);
    }
    if (shared) share<W>(first), share<W>(second);
}

template <class S>
struct Negentropy {
    using Real = S;
    static constexpr bool by_slot = false;

    explicit Negentropy(OmegaParameters) {}

    template <int W, bool shared>
    void solve(const S* r, std::int64_t d, S* tau, S* value) const {
        double sum[W], unused[W];
        sum_terms<W, shared>(r, d, sum, unused, [](int, S x, S& total, S&) { total += exp_nonpositive(x); });
#pragma omp simd
        for (int l = 0; l < W; ++l) tau[l] = value[l] = log_positive(S(sum[l]));
    }

    void weigh(S r, S tau, S& q, S& s) const { q = s = exp_nonpositive(r - tau); }
    S log_q(S r, S tau) const { return r - tau; }
    S log_slope(S r, S) const { return r > -infinity<S> ? S(1) : S(0); }
};

// α = 2 and α = 1.5, whose powers are cheap, and any other α, which loses digits as α → 1 and so is double throughout:
// q = t^p, s = t^(p−1) with t = ((α−1) r − τ)₊ and p = 1/(α−1); τ lies in [−1, 0).
template <class S>
struct PowerOne {
    using Real = S;
    explicit PowerOne(double) {}
    S less_one(S t) const { return t > 0 ? S(1) : S(0); }
    S root(S x) const { return x; }
};

template <class S>
struct PowerTwo {
    using Real = S;
    explicit PowerTwo(double) {}
    S less_one(S t) const { return t; }
    S root(S x) const { return std::sqrt(x); }
};

template <class S>
struct PowerAny {
    using Real = double;
    double exponent;
    explicit PowerAny(double p) : exponent(p) {}
    double less_one(double t) const { return exp_nonpositive((exponent - 1) * log_positive(t)); }
    double root(double x) const { return exp_nonpositive(log_positive(x) / exponent); }
};

template <class S, template <class> class Power>
struct Tsallis {
    using Real = typename Power<S>::Real;
    static constexpr bool by_slot = false;

    Real alpha, slope, vertex;  // slope = α − 1
    Power<S> power;

    explicit Tsallis(OmegaParameters omega)
        : alpha(Real(omega.alpha)),
          slope(Real(omega.alpha - 1)),
          vertex(Real(omega.vertex)),
          power(1 / (omega.alpha - 1)) {}

    Real above(Real r, Real tau) const {
        const Real t = slope * r - tau;
        return t > 0 ? t : Real(0);
    }

    // Newton's method on the p-norm of ((α−1) r − τ)₊, convex in τ and nearly linear: it climbs from τ = −1 to the root.
    template <int W, bool shared>
    void solve(const Real* r, std::int64_t d, Real* tau, Real* value) const {
        const Tsallis omega = *this;
        Real at[W];
        double sum_q[W], sum_s[W];
        for (int l = 0; l < W; ++l) at[l] = -1;
        for (bool moved = true; moved;) {
            sum_terms<W, shared>(r, d, sum_q, sum_s, [&](int l, Real x, Real& total_q, Real& total_s) {
                const Real t = omega.above(x, at[l]), s = omega.power.less_one(t);
                total_q += s * t;
                total_s += s;
            });
            Real climb[W];
#pragma omp simd
            for (int l = 0; l < W; ++l) {
                const Real norm = omega.power.root(Real(sum_q[l])), steepness = norm * Real(sum_s[l]);
                climb[l] = steepness > 0 && norm > 1 ? (norm - 1) * Real(sum_q[l]) / steepness : Real(0);
                at[l] += climb[l];
            }
            moved = false;
            for (int l = 0; l < W; ++l) moved |= climb[l] > 2 * std::numeric_limits<Real>::epsilon();
        }
        // max_Ω = Σ q r − (Σ q^α − 1)/(α(α−1)), where q^α = q t. Below −1/(α−1) r is out of the support, so −∞ may rise.
        const Real scale = 1 / (alpha * slope), floor = -2 / slope;
        sum_terms<W, shared>(r, d, sum_q, sum_s, [&](int l, Real x, Real& total_q, Real& total) {
            const Real raised = x > floor ? x : floor;
            const Real t = omega.above(raised, at[l]), q = omega.power.less_one(t) * t;
            total_q += q;
            total += q * (raised - t * scale);
        });
        for (int l = 0; l < W; ++l) {
            tau[l] = at[l];
            value[l] = Real(sum_s[l] / (sum_q[l] > 0 ? sum_q[l] : 1.0)) + scale - vertex;
        }
    }

    void weigh(Real r, Real tau, Real& q, Real& s) const {
        const Real t = above(r, tau);
        s = power.less_one(t);
        q = s * t;
    }
    Real log_q(Real r, Real tau) const { return log_positive(above(r, tau)) / slope; }
    Real log_slope(Real r, Real tau) const {
        const Real t = above(r, tau);
        return t > 0 ? 1 / t : Real(0);
    }
};

template <class S>
using SquaredL2 = Tsallis<S, PowerOne>;
template <class S>
using Root = Tsallis<S, PowerTwo>;
template <class S>
using AnyTsallis = Tsallis<S, PowerAny>;

// No vector is solved here: r is 0 at the first best entry, which the kernels find, and −∞ elsewhere.
template <class S>
struct Hard {
    using Real = S;
    static constexpr bool by_slot = true;

    explicit Hard(OmegaParameters) {}

    void weigh(S r, S, S& q, S& s) const {
        q = r == 0 ? S(1) : S(0);
        s = 0;
    }
    S log_q(S r, S) const { return r; }
    S log_slope(S, S) const { return 0; }
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
