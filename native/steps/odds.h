// The number that a step of a chain of two states passes on (see pair.cpp): δ = v(1) − v(0), the difference of the
// values of the states, in the unit of Ω.
#pragma once

#include <cmath>

#include "../omega/negentropy.h"
#include "../omega/tsallis.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// The contribution of a transition to δ, and its exponential.
template <class S>
struct Shift {
    S sum, factor;
};

// The probability of state 1 at the step before, if the current state is 1 (q) or 0 (r), and the probability of state
// 0: not as 1 − q, which would lose the digits of small probabilities.
template <class V>
struct Before {
    V q, q_less, r, r_less;
};

// The representation of δ, and the function F that updates it: `begin` for a first step, `next` for a further one,
// given the representation that a first step with its score would have. It is not for scores farther from 0 than `far`.

// By δ itself. Since f(u) = u + f(−u), nothing is large in a difference of f where δ is.
template <class S, class Omega>
struct Difference {
    using V = Vec<S>;
    static constexpr S far = infinity<S>;

    static V begin(V y) { return y; }
    static V next(V delta, V first, Shift<S> a, Shift<S> b, Before<V>& before) {
        before.q = slope(delta, a, before.q_less);
        before.r = slope(delta, b, before.r_less);
        const V sign = delta > V{} ? V{} - S(1) : V{} + S(1);
        return first + (delta > V{} ? V{} + (a.sum - b.sum) : V{}) +
               Omega::difference_of_two(sign * (delta + a.sum), sign * (delta + b.sum));
    }
    static V slope(V delta, Shift<S> shift, V& less) {
        less = Omega::slope_of_two(-(delta + shift.sum));
        return Omega::slope_of_two(delta + shift.sum);
    }
    static V curvature(V delta, Shift<S> shift, V q, V less) {
        return Omega::curvature_of_two(delta + shift.sum, q, less);
    }
};

// Negentropy by the odds exp(δ), where no shift is far from 0: what each step waits for is a division alone. No product
// overflows, since (1 + odds·e^a) / (1 + odds·e^b) lies between 1 and e^(a − b).
template <class S>
struct Odds {
    using V = Vec<S>;
    static constexpr S far = sizeof(S) == 4 ? S(105) : S(865), most_shift = S(6);

    static V begin(V y) { return exp2_of(y); }
    static V next(V odds, V first, Shift<S> a, Shift<S> b, Before<V>& before) {
        before.q = slope(odds, a, before.q_less);
        before.r = slope(odds, b, before.r_less);
        return first * ((1 + odds * a.factor) * before.r_less);
    }
    static V slope(V odds, Shift<S> shift, V& less) {
        const V shifted = odds * shift.factor;
        less = 1 / (1 + shifted);
        return shifted * less;
    }
    static V curvature(V, Shift<S>, V q, V less) { return q * less; }
};

// The scores that sequences share, as differences of state 1 to state 0, and the factor of the scores of steps.
template <class S>
struct Shared {
    S scale, unit;
    Shift<S> a, b, last;
    S change, first;

    Shared(const S* transitions, S first_score, S last_score, bool is_negentropy, S by)
        : scale(by),
          unit(is_negentropy ? by * omega::Negentropy<S>::unit : by),
          a(shift(double(transitions[3]) - transitions[2], is_negentropy)),
          b(shift(double(transitions[1]) - transitions[0], is_negentropy)),
          last(shift(last_score, is_negentropy)),
          change(shift(double(transitions[2]) - transitions[0], is_negentropy).sum),
          first(shift(first_score, is_negentropy).sum) {}

    bool is_finite() const {
        const S shifts = std::abs(a.sum) + std::abs(b.sum) + std::abs(last.sum);
        return shifts + std::abs(change) + std::abs(first) < infinity<S>;
    }
    bool is_near(S most) const {
        return std::abs(a.sum) <= most && std::abs(b.sum) <= most && std::abs(last.sum) <= most;
    }

private:
    // What all steps have in common must not be off by the rounding of a unit.
    static Shift<S> shift(double score, bool is_negentropy) {
        if (!is_negentropy) return {S(score), S(0)};
        return {S(score * omega::Negentropy<double>::unit), S(std::exp(score))};
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
