// The Ω at γ = 1. An Ω computes in its type Real, or in vectors V of it, on r = x − max(x).
//
// solve: the threshold τ and max_Ω, both relative to max(x) = top, of as many vectors as V has lanes. Where top is −∞ it
// must be given as 0.
// weigh: from r and τ an entry's probability q, and s of the Hessian J y = s∘y − s⟨s, y⟩/Σs.
// log_q, log_slope: log q, and its derivative q^(1−α) = s/q along the support.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "base/math.h"
#include "omega/omega.h"

namespace bellmax {

inline namespace BELLMAX_ARCH {

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

// As many vectors of scores x as V has lanes, side by side: entry k of all of them at x + k * stride.
template <class V, class R>
struct Columns {
    const R* x;
    std::int64_t stride, count;

    // Σ over k of the pair that term(x − top, at) gives: plain over a run, with care over the runs.
    template <class Term>
    void sum(V top, V at, V& first, V& second, Term term) const {
        constexpr std::int64_t run = 64;
        Sum<V> firsts, seconds;
        for (std::int64_t begin = 0; begin < count; begin += run) {
            V a{}, b{};
            const std::int64_t end = count - begin < run ? count : begin + run;
            for (std::int64_t k = begin; k < end; ++k) term(load_vector<V>(x + k * stride) - top, at, a, b);
            firsts.add(a);
            seconds.add(b);
        }
        first = firsts.total;
        second = seconds.total;
    }
};

// The same, one after the other: `rows` of them, each with `count` entries, a whole number of vectors.
template <class R>
struct Rows {
    const R* x;
    std::int64_t stride, count;
    int rows;

    template <class Term>
    void sum(Vec<R> top, Vec<R> at, Vec<R>& first, Vec<R>& second, Term term) const {
        constexpr int W = lanes_of<R>;
        Vec<R> a[W] = {}, b[W] = {};
        for (int l = 0; l < rows; ++l) {
            const Vec<R> own_top = broadcast<R>(top[l]), own = broadcast<R>(at[l]);
            for (std::int64_t k = 0; k < count; k += W) term(load<R>(x + l * stride + k) - own_top, own, a[l], b[l]);
        }
        first = sum_each(a);
        second = sum_each(b);
    }

    static Vec<R> sum_each(Vec<R>* v) {
        transpose(v);
        Vec<R> total = v[0];
        for (int k = 1; k < lanes_of<R>; ++k) total += v[k];
        return total;
    }
};

template <class S>
struct Negentropy {
    using Real = S;
    static constexpr bool by_slot = false;

    explicit Negentropy(OmegaParameters) {}

    template <class Scores, class V>
    void solve(const Scores& scores, V top, V& tau, V& value) const {
        V sum, unused;
        scores.sum(top, V{}, sum, unused, [](V r, V, V& total, V&) { total += exp_nonpositive(r); });
        tau = value = log_positive(sum);
    }

    template <class V>
    void weigh(V r, V tau, V& q, V& s) const {
        q = s = exp_nonpositive(r - tau);
    }
    template <class V>
    V log_q(V r, V tau) const {
        return r - tau;
    }
    template <class V>
    V log_slope(V r, V) const {
        return r > V{} - infinity<S> ? V{} + S(1) : V{};
    }
};

// α = 2 and α = 1.5, whose powers are cheap, and any other α, which loses digits as α → 1 and so is double throughout:
// q = t^p, s = t^(p−1) with t = ((α−1) r − τ)₊ and p = 1/(α−1); τ lies in [−1, 0).
template <class S>
struct PowerOne {
    using Real = S;
    explicit PowerOne(double) {}
    template <class V>
    V less_one(V t) const {
        return t > V{} ? V{} + S(1) : V{};
    }
    template <class V>
    V root(V x) const {
        return x;
    }
};

template <class S>
struct PowerTwo {
    using Real = S;
    explicit PowerTwo(double) {}
    template <class V>
    V less_one(V t) const {
        return t;
    }
    template <class V>
    V root(V x) const {
        return square_root(x);
    }
};

template <class S>
struct PowerAny {
    using Real = double;
    double exponent;
    explicit PowerAny(double p) : exponent(p) {}
    template <class V>
    V less_one(V t) const {
        return exp_nonpositive((exponent - 1) * log_positive(t));
    }
    template <class V>
    V root(V x) const {
        return exp_nonpositive(log_positive(x) / exponent);
    }
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

    template <class V>
    V above(V r, V tau) const {
        const V t = slope * r - tau;
        return t > V{} ? t : V{};
    }

    // Newton's method on the p-norm of ((α−1) r − τ)₊, convex in τ and nearly linear: it climbs from τ = −1 to the root.
    template <class Scores, class V>
    void solve(const Scores& scores, V top, V& tau, V& value) const {
        const Tsallis omega = *this;
        V at = V{} - Real(1), climb, sum_q, sum_s;
        do {
            scores.sum(top, at, sum_q, sum_s, [&](V r, V own, V& total_q, V& total_s) {
                const V t = omega.above(r, own), s = omega.power.less_one(t);
                total_q += s * t;
                total_s += s;
            });
            const V norm = power.root(sum_q), steepness = norm * sum_s;
            climb = (norm - 1) * sum_q / (steepness > V{} ? steepness : V{} + Real(1));
            climb = climb > V{} ? climb : V{};
            at += climb;
        } while (any(climb > V{} + 2 * std::numeric_limits<Real>::epsilon()));
        // max_Ω = Σ q r − (Σ q^α − 1)/(α(α−1)), where q^α = q t. Below −1/(α−1) r is out of the support, so −∞ may rise.
        const Real scale = 1 / (alpha * slope);
        const V floor = V{} - 2 / slope;
        scores.sum(top, at, sum_q, sum_s, [&](V r, V own, V& total_q, V& total) {
            const V raised = r > floor ? r : floor;
            const V t = omega.above(raised, own), q = omega.power.less_one(t) * t;
            total_q += q;
            total += q * (raised - t * scale);
        });
        tau = at;
        value = sum_s / (sum_q > V{} ? sum_q : V{} + Real(1)) + (scale - vertex);
    }

    template <class V>
    void weigh(V r, V tau, V& q, V& s) const {
        const V t = above(r, tau);
        s = power.less_one(t);
        q = s * t;
    }
    template <class V>
    V log_q(V r, V tau) const {
        return log_positive(above(r, tau)) / slope;
    }
    template <class V>
    V log_slope(V r, V tau) const {
        const V t = above(r, tau);
        return t > V{} ? 1 / t : V{};
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

    template <class V>
    void weigh(V r, V, V& q, V& s) const {
        q = r == V{} ? V{} + S(1) : V{};
        s = V{};
    }
    template <class V>
    V log_q(V r, V) const {
        return r;
    }
    template <class V>
    V log_slope(V, V) const {
        return V{};
    }
};

// The Ω of a name, as in Python, and its numbers; false if there is none.
inline bool find_omega(const char* name, const double* numbers, std::size_t count, OmegaParameters& omega) {
    const auto is = [name](const char* other) { return std::strcmp(name, other) == 0; };
    if (is("negentropy")) omega = {1, 0};
    else if (is("l2")) omega = {2, 0.5};
    else if (is("hard")) omega = {infinity<double>, 0};
    else if (is("tsallis") && count == 1) omega = {numbers[0], 0};
    else return false;
    return true;
}

// Calls action with the Ω that the parameters name.
template <class S, class Action>
auto with_omega(OmegaParameters omega, Action action) {
    if (omega.alpha == 1) return action(Negentropy<S>(omega));
    if (omega.alpha == 2) return action(SquaredL2<S>(omega));
    if (omega.alpha == 1.5) return action(Root<S>(omega));
    if (omega.alpha < 2) return action(AnyTsallis<S>(omega));
    return action(Hard<S>(omega));
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
