// The value of a cell of dynamic time warping, and how it follows from the cells before.
//
// combine: a cell from its neighbours, in vectors of cells, and the probabilities q of the moves diagonal, up, left.
// tilt: from the tangents y of the neighbours' values, those of the probabilities; returns Σ q y.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "dtw.h"
#include "regularizers.h"
#include "base/math.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

template <class Real>
inline Vec<Real> hide(Vec<Real> y, Vec<Real> q) {
    return q > Vec<Real>{} ? y : Vec<Real>{};
}

// exp(−v) as mantissa · 2^exponent, the mantissa in [1, 2): one exponential a cell and no logarithm, and as accurate at
// the end of a long path as at its beginning. What no path reaches has an exponent far below any other.
struct Products {
    using Real = float;
    using V = Vec<float>;
    using Int = Shape<V>::Int;
    static constexpr int W = lanes_of<float>;
    static constexpr std::int32_t unreached = -(1 << 30), forbidden = -(1 << 29), reached = -(1 << 28);

    struct Slot {
        float mantissa;
        std::int32_t exponent;
    };
    struct Node {
        V mantissa;
        Int exponent;
    };
    static Slot start() { return {1.0f, 0}; }
    static Slot dead() { return {1.0f, unreached}; }
    static bool alive(Slot slot) { return slot.exponent > reached; }
    static double value(Slot slot) {
        if (!alive(slot)) return infinity<double>;
        return -(double(slot.exponent) * 0.69314718055994530942 + std::log(double(slot.mantissa)));
    }
    // Whether exponents stay apart from those of cells that no path reaches, for so many costs of that magnitude.
    static bool can_take(float greatest, std::int64_t cells) {
        return greatest < float(1 << 23) && double(greatest) * double(cells) < double(1 << 26);
    }

    class Column {
        alignas(32) float mantissa[dtw_strip + 16];
        alignas(32) std::int32_t exponent[dtw_strip + 16];

    public:
        Node load(std::int64_t r) const {
            Int e;
            std::memcpy(&e, exponent + 8 + r, sizeof e);
            return {bellmax::load<float>(mantissa + 8 + r), e};
        }
        void store(std::int64_t r, const Node& node) {
            bellmax::store<float>(mantissa + 8 + r, node.mantissa);
            std::memcpy(exponent + 8 + r, &node.exponent, sizeof node.exponent);
        }
        Slot get(std::int64_t r) const { return {mantissa[8 + r], exponent[8 + r]}; }
        void set(std::int64_t r, Slot slot) {
            mantissa[8 + r] = slot.mantissa;
            exponent[8 + r] = slot.exponent;
        }
        void clear() {
            std::fill(mantissa, mantissa + dtw_strip + 16, 1.0f);
            std::fill(exponent, exponent + dtw_strip + 16, unreached);
        }
        void save(Slot* to) const {
            std::memcpy(static_cast<void*>(to), mantissa + 8, dtw_strip * sizeof(float));
            std::memcpy(static_cast<void*>(to + dtw_strip / 2), exponent + 8, dtw_strip * sizeof(float));
        }
        void restore(const Slot* from) {
            std::memcpy(mantissa + 8, from, dtw_strip * sizeof(float));
            std::memcpy(exponent + 8, from + dtw_strip / 2, dtw_strip * sizeof(float));
        }
    };

    // mantissa · 2^(exponent − top), 0 where that is below 2^−126. `low` is top − 127.
    static V aligned(const Node& node, Int low) {
        return node.mantissa * bits<V>(greater_int(node.exponent - low, Int{}) << 23);
    }

    template <bool Q>
    Node combine(const Node& diagonal, const Node& up, const Node& left, V cost, V* q) const {
        using F = Format<float>;
        const Int low = greater_int(greater_int(diagonal.exponent, up.exponent), left.exponent) - 127;
        const V a = aligned(diagonal, low), b = aligned(up, low), c = aligned(left, low), sum = a + b + c;
        if constexpr (Q) {
            const V inverse = 1 / sum;
            q[0] = a * inverse;
            q[1] = b * inverse;
            q[2] = c * inverse;
        }
        // exp(−cost) = 2^n exp(x − n ln 2), as in exp_nonpositive.
        const V x = greater<float>(-cost, V{} - float(1 << 23)), n = rounded(x * 1.44269504088896341f);
        const V rest = (x - n * F::ln2_high) - n * F::ln2_low;
        V p = V{} + F::exp_series(F::exp_terms);
#pragma GCC unroll 8
        for (int k = F::exp_terms - 1; k >= 0; --k) p = p * rest + F::exp_series(k);
        const Int shift = cost < V{} + infinity<float> ? to_int(n) : Int{} + forbidden;
        const Int product = bits<Int>(sum * p);
        const Int exponent = low + shift + bits<Int>(bits<typename Shape<V>::Bits>(product) >> 23);
        return {bits<V>((product & 0x7fffff) | 0x3f800000), greater_int(exponent, Int{} + unreached)};
    }

    static V tilt(const V* q, const V* y, V* q_dot) {
        V own[3], mean{};
        for (int n = 0; n < 3; ++n) own[n] = hide<float>(y[n], q[n]);
        for (int n = 0; n < 3; ++n) mean += q[n] * own[n];
        for (int n = 0; n < 3; ++n) q_dot[n] = q[n] * (mean - own[n]);
        return mean;
    }
};

// −max_Ω of minus three numbers, relative to the least of them (0 where that is +∞), and its gradient q.
template <class Omega>
struct OfThree {
    Omega omega;

    template <bool Q>
    Vec<double> solve(Vec<double> least, Vec<double> a, Vec<double> b, Vec<double> c, Vec<double>* q) const {
        using V = Vec<double>;
        const V r[3] = {least - a, least - b, least - c};
        V tau, value, unused;
        omega.solve(Columns<V, double>{reinterpret_cast<const double*>(r), lanes_of<double>, 3}, V{}, tau, value);
        for (int n = 0; Q && n < 3; ++n) omega.weigh(r[n], tau, q[n], unused);
        return -value;
    }
    // s of the Hessian, and 1 / Σ s, or anything if that is 0.
    Vec<double> slope(Vec<double> q) const {
        return q > Vec<double>{} ? exp_nonpositive((2 - omega.alpha) * log_positive(q)) : Vec<double>{};
    }
    Vec<double> inverse(Vec<double> sum) const { return 1 / (sum > Vec<double>{} ? sum : Vec<double>{} + 1.0); }
};

template <>
struct OfThree<Negentropy<double>> {
    Negentropy<double> omega;

    template <bool Q>
    Vec<double> solve(Vec<double> least, Vec<double> a, Vec<double> b, Vec<double> c, Vec<double>* q) const {
        using V = Vec<double>;
        const V e[3] = {exp_nonpositive(least - a), exp_nonpositive(least - b), exp_nonpositive(least - c)};
        const V sum = e[0] + e[1] + e[2];
        if constexpr (Q) {
            const V inverse = 1 / (sum > V{} ? sum : V{} + 1.0);
            for (int n = 0; n < 3; ++n) q[n] = e[n] * inverse;
        }
        return -log_positive(sum);
    }
    Vec<double> slope(Vec<double> q) const { return q; }
    Vec<double> inverse(Vec<double>) const { return Vec<double>{} + 1.0; }
};

template <>
struct OfThree<SquaredL2<double>> {
    SquaredL2<double> omega;

    // Of the three candidates for τ, one for each size of the support, the greatest is right. An entry r of the support,
    // with q = r − τ, adds q r − q²/2 = (r² − τ²)/2 < 0 to max_Ω.
    template <bool Q>
    Vec<double> solve(Vec<double> least, Vec<double> a, Vec<double> b, Vec<double> c, Vec<double>* q) const {
        using V = Vec<double>;
        const V floor = V{} - 2.0;  // far out of the support, and finite
        const V less = lesser<double>(a, b), more = greater<double>(a, b);
        const V second = greater<double>(least - greater<double>(less, lesser<double>(more, c)), floor);
        const V third = greater<double>(least - greater<double>(more, c), floor);
        const V two = second * 0.5 - 0.5, three = (second + third) * (1.0 / 3) - 1.0 / 3;
        const V tau = greater<double>(greater<double>(two, three), V{} - 1.0), square = tau * tau;
        if constexpr (Q) {
            q[0] = greater<double>(least - a - tau, V{});
            q[1] = greater<double>(least - b - tau, V{});
            q[2] = greater<double>(least - c - tau, V{});
        }
        const V others = lesser<double>(second * second - square, V{}) + lesser<double>(third * third - square, V{});
        return 0.5 * (square - others) - (0.5 - omega.vertex);
    }
    Vec<double> slope(Vec<double> q) const { return q > Vec<double>{} ? Vec<double>{} + 1.0 : Vec<double>{}; }
    Vec<double> inverse(Vec<double> sum) const {
        const Vec<double> one = Vec<double>{} + 1.0;
        return sum > one + 1.5 ? one / 3 : sum > one + 0.5 ? one / 2 : one;
    }
};

template <>
struct OfThree<Hard<double>> {
    Hard<double> omega;

    template <bool Q>
    Vec<double> solve(Vec<double> least, Vec<double> a, Vec<double> b, Vec<double>, Vec<double>* q) const {
        using V = Vec<double>;
        if constexpr (Q) {
            const V one = V{} + 1.0;
            q[0] = a == least ? one : V{};
            q[1] = b == least ? one - q[0] : V{};
            q[2] = one - q[0] - q[1];
        }
        return V{};
    }
    Vec<double> slope(Vec<double>) const { return Vec<double>{}; }
    Vec<double> inverse(Vec<double>) const { return Vec<double>{}; }
};

// Values as they are, in double.
template <class Omega>
struct Values {
    using Real = double;
    using V = Vec<double>;
    using Slot = double;
    using Node = V;
    OfThree<Omega> three;

    explicit Values(const Omega& omega) : three{omega} {}

    static Slot start() { return 0; }
    static Slot dead() { return infinity<double>; }
    static bool alive(Slot slot) { return slot < infinity<double>; }
    static double value(Slot slot) { return slot; }

    class Column {
        alignas(32) double values[dtw_strip + 16];

    public:
        Node load(std::int64_t r) const { return bellmax::load<double>(values + 8 + r); }
        void store(std::int64_t r, Node node) { bellmax::store<double>(values + 8 + r, node); }
        Slot get(std::int64_t r) const { return values[8 + r]; }
        void set(std::int64_t r, Slot slot) { values[8 + r] = slot; }
        void clear() { std::fill(values, values + dtw_strip + 16, dead()); }
        void save(Slot* to) const { std::copy(values + 8, values + 8 + dtw_strip, to); }
        void restore(const Slot* from) { std::copy(from, from + dtw_strip, values + 8); }
    };

    template <bool Q>
    Node combine(Node diagonal, Node up, Node left, V cost, V* q) const {
        const V least = lesser<double>(lesser<double>(diagonal, up), left);
        const V from = least < V{} + infinity<double> ? least : V{};
        return least + cost + three.template solve<Q>(from, diagonal, up, left, q);
    }

    V tilt(const V* q, const V* y, V* q_dot) const {
        V own[3], s[3], mean{}, sum{}, weighted{};
        for (int n = 0; n < 3; ++n) {
            own[n] = hide<double>(y[n], q[n]);
            s[n] = three.slope(q[n]);
            mean += q[n] * own[n];
            sum += s[n];
            weighted += s[n] * own[n];
        }
        const V centre = weighted * three.inverse(sum);
        for (int n = 0; n < 3; ++n) q_dot[n] = s[n] * (centre - own[n]);
        return mean;
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
