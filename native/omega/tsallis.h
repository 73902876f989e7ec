// Ω(q) = (Σ q^α − 1)/(α(α−1)) + vertex, 1 < α ≤ 2: q = t^p, s = t^(p−1) with t = ((α−1) r − τ)₊ and p = 1/(α−1); τ lies
// in [−1, 0). α = 2 and, of floats, α = 1.5 have cheap powers; any other α loses digits as α → 1 and so is double
// throughout.
#pragma once

#include "omega.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace omega {

template <class R>
struct PowerOne {
    using Real = R;
    explicit PowerOne(double) {}
    template <class V>
    V less_one(V t) const {
        return t > V{} ? V{} + R(1) : V{};
    }
};

struct PowerTwo {
    using Real = float;
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

struct PowerAny {
    using Real = double;
    double exponent;
    explicit PowerAny(double p) : exponent(p) {}
    template <class V>
    V less_one(V t) const {
        if (exponent == 2) return t;
        return exp2_of((exponent - 1) * log2_of(t));
    }
    template <class V>
    V root(V x) const {
        if (exponent == 2) return square_root(x);
        return exp2_of(log2_of(x) / exponent);
    }
};

template <class Power>
struct Tsallis : General<typename Power::Real> {
    using Real = typename Power::Real;
    static constexpr bool is_quadratic = std::is_same_v<Power, PowerOne<Real>>;
    static constexpr int most_iterations = 200;  // of Newton's method, which takes up to 20 for α near 1

    Real alpha, steepness, vertex;  // steepness = α − 1
    Power power;

    // The first number is α. For α = 2 it is subtracted from Σ q²/2 instead.
    explicit Tsallis(const OmegaParameters& parameters)
        : Tsallis(is_quadratic ? 2 : parameters.numbers[0], is_quadratic ? 0.5 - parameters.numbers[0] : 0) {}
    Tsallis(double exponent, double at_vertex)
        : alpha(Real(exponent)), steepness(Real(exponent - 1)), vertex(Real(at_vertex)), power(1 / (exponent - 1)) {}
    Real at_vertex() const { return vertex; }
    Real reach() const { return 1 / steepness; }

    template <class Scores, class V>
    void solve(const Scores& scores, V top, V& tau, V& value) const {
        if constexpr (is_quadratic) {
            solve_quadratic(scores, top, V{} - Real(1), tau, value);
        } else {
            solve_by_norm(scores, top, tau, value);
        }
    }

    // For α = 2: Newton's method from the τ of `part`, a subset of the entries, which is a lower bound.
    template <class Part, class Scores, class V>
    void solve_after(const Part& part, const Scores& scores, V top, V& tau, V& value) const {
        V below, unused;
        solve_quadratic(part, top, V{} - Real(1), below, unused);
        solve_quadratic(scores, top, below, tau, value);
    }

    // Newton's method, from `at` below the root: the entries above it have mass 1 at the next τ. If the least of them
    // is above that as well it is the root, and their squares give the maximum: Σ q r − q²/2 = Σ (r² − τ²)/2.
    //
    // At most one iteration more than there are entries: a lane repeats only if τ rises past an entry, and NaN never
    // rises.
    template <class Scores, class V>
    void solve_quadratic(const Scores& scores, V top, V at, V& tau, V& value) const {
        V sums[4], count;
        for (bool is_done = false; !is_done;) {
            scores.template sum<true>(top, at, sums, [](V r, V own, V* total) {
                const auto is_in = r > own;
                const V above = is_in ? r : V{};
                total[0] += is_in ? V{} + Real(1) : V{};
                total[1] += above;
                total[2] += above * above;
                total[3] = lesser_of(is_in ? r : V{} + infinity<Real>, total[3]);
            });
            count = sums[0];
            const V next = (sums[1] - 1) / (count > V{} ? count : V{} + Real(1));
            const auto rises = next > at;
            at = rises ? next : at;  // rounding must not let an entry come back
            is_done = !any(rises & !(sums[3] > at));
        }
        tau = at;
        value = Real(0.5) * (sums[2] - count * at * at) + (Real(0.5) - vertex);
    }

    // Newton's method on the p-norm of t, convex in τ and nearly linear: it climbs from τ = −1 to the root. A call
    // costs nothing compared with it, and much of the compiler's time where it is inlined everywhere.
    template <class Scores, class V>
    __attribute__((noinline)) void solve_by_norm(const Scores& scores, V top, V& tau, V& value) const {
        const Tsallis omega = *this;
        V at = V{} - Real(1), climb = V{} + Real(1), sums[2];
        for (int n = 0; n < most_iterations && any(climb > V{} + 2 * std::numeric_limits<Real>::epsilon()); ++n) {
            scores.sum(top, at, sums, [&](V r, V own, V* total) {
                const V t = omega.above(r, own), s = omega.power.less_one(t);
                total[0] += s * t;
                total[1] += s;
            });
            const V norm = power.root(sums[0]), rise = norm * sums[1];
            climb = (norm - 1) * sums[0] / (rise > V{} ? rise : V{} + Real(1));
            climb = climb > V{} ? climb : V{};
            at += climb;
        }
        // max_Ω = Σ q r − (Σ q^α − 1)/(α(α−1)), where q^α = q t. Below −1/(α−1) r is out of the support: −∞ may rise.
        const Real scale = 1 / (alpha * steepness);
        const V floor = V{} - 2 / steepness;
        scores.sum(top, at, sums, [&](V r, V own, V* total) {
            const V raised = r > floor ? r : floor;
            const V t = omega.above(raised, own), q = omega.power.less_one(t) * t;
            total[0] += q;
            total[1] += q * (raised - t * scale);
        });
        tau = at;
        value = sums[1] / (sums[0] > V{} ? sums[0] : V{} + Real(1)) + (scale - vertex);
    }

    // The threshold of scores from which the greatest is not taken off.
    template <class V>
    V absolute(V tau, V top) const {
        return steepness * top + tau;
    }

    template <class V>
    V above(V r, V tau) const {
        const V t = steepness * r - tau;
        return t > V{} ? t : V{};
    }
    template <class V>
    void weigh(V r, V tau, V& q, V& s) const {
        const V t = above(r, tau);
        s = power.less_one(t);
        q = s * t;
    }
    template <class V>
    V slope(V q) const {
        if constexpr (is_quadratic) {
            return q > V{} ? V{} + Real(1) : V{};
        } else {
            return q > V{} ? exp2_of((2 - alpha) * log2_of(q)) : V{};
        }
    }
    template <class V>
    V log_q(V r, V tau) const {
        return log2_of(above(r, tau)) * (Real(0.693147180559945309417232) / steepness);
    }
    template <class V>
    V log_slope(V r, V tau) const {
        const V t = above(r, tau);
        return t > V{} ? 1 / t : V{};
    }

    // For α = 2: f(u) − f(w) for f(u) = max_Ω(u, 0), f', and f''.
    template <class V>
    static V difference_of_two(V u, V w) {
        return quadratic_of_two(u) - quadratic_of_two(w);
    }
    template <class V>
    static V slope_of_two(V u) {
        const V q = Real(0.5) * (u + 1);
        return q > V{} ? (q < V{} + Real(1) ? q : V{} + Real(1)) : V{};
    }
    template <class V>
    static V curvature_of_two(V u, V, V) {
        return ((u > V{} - Real(1)) & (u < V{} + Real(1))) ? V{} + Real(0.5) : V{};
    }

    // For α = 2: `least` of a, b and c is taken off; q are the probabilities, if Q. Entries join the support in their
    // order, while they are above the τ of those before: h above it, the second one lifts τ by h/2 and max_Ω by h²/4,
    // the third one by h/3 and h²/3.
    template <bool Q, class V>
    V three(V least, V a, V b, V c, V* q) const {
        const V less = lesser<Real>(a, b), more = greater<Real>(a, b);
        const V second = greater<Real>(less, lesser<Real>(more, c)), third = greater<Real>(more, c);
        const V h = greater<Real>((least - second) + Real(1), V{}), two = h * Real(0.5) - Real(1);
        const V k = greater<Real>((least - third) - two, V{});
        if constexpr (Q) {
            const V tau = two + k * Real(1. / 3);
            q[0] = greater<Real>(least - a - tau, V{});
            q[1] = greater<Real>(least - b - tau, V{});
            q[2] = greater<Real>(least - c - tau, V{});
        }
        return (vertex - h * Real(0.25) * h) - k * Real(1. / 3) * k;
    }

private:
    template <class V>
    static V quadratic_of_two(V u) {
        const V t = u > V{} - Real(1) ? u + 1 : V{};
        return u < V{} + Real(1) ? Real(0.25) * t * t : u;
    }
};

template <class R>
using SquaredL2 = Tsallis<PowerOne<R>>;
using Root = Tsallis<PowerTwo>;
template <class>
using AnyTsallis = Tsallis<PowerAny>;

}  // namespace omega
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
