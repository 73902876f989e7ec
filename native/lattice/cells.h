// The value v of a node, and how it follows from the nodes before, a node in each lane. Three ways to hold it:
//
//   Products   exp(v) = part · 2^whole in float, for negentropy: one exponential a score and no logarithm
//   Parts      v = whole + part in float, for an Ω of which only differences near 0 matter
//   Values     v in double, for any Ω
//
// The first two are as accurate at the end of a long path as at its beginning, and 8 nodes fill a vector.
//
// Number      what scores, probabilities and masses are held in
// weight      a score as it is added to nodes
// line_weight the same of one that many nodes share, which was `prepared` for them
// plus        a node and a weight: a candidate
// put_values  v of each lane, in Ω's unit
// solve       a node from its candidates and its own score, and, if Q, their probabilities q; N is their number where
//             the compiler knows it, else 0. What q a node has that no path reaches does not matter,
//             if it is a number.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>

#include "../omega/list.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

using std::int64_t;

constexpr int most_candidates = 24;

// What inner loops are made of.
#define LATTICE_INLINE __attribute__((always_inline))

// body(n) for n < N, one after the other, or for n < count if N is 0.
template <class Body, int... n>
LATTICE_INLINE inline void for_known(Body body, std::integer_sequence<int, n...>) {
    (body(n), ...);
}
template <int N, class Body>
LATTICE_INLINE inline void for_each_of(int count, Body body) {
    if constexpr (N > 0) {
        for_known(body, std::make_integer_sequence<int, N>());
    } else {
        for (int n = 0; n < count; ++n) body(n);
    }
}

// Nodes of two numbers. What no path reaches has a whole far below any other. Wholes may wrap for scores too large for
// them, which `has_room` finds out later; so they are added as unsigned numbers.
struct TwoNumbers {
    using Real = float;
    using Number = float;
    using V = Vec<float>;
    using Int = Shape<V>::Int;
    using Bits = Shape<V>::Bits;
    static constexpr int planes = 2;
    static constexpr bool has_dots = false, is_hard = false;
    static constexpr std::int32_t unreached = -(1 << 29), forbidden = -(1 << 28), reached = -(1 << 27);

    struct StoredNode {
        float part;
        std::int32_t whole;
    };
    struct Node {
        V part;
        Int whole;
    };
    static bool alive(StoredNode slot) { return slot.whole > reached; }
    static Node filled(StoredNode slot) { return {broadcast<float>(slot.part), Int{} + slot.whole}; }
    static StoredNode lane(const Node& node, int l) { return {node.part[l], node.whole[l]}; }
    static Node masked(const Node& node, Int inside) { return {node.part, inside ? node.whole : Int{} + unreached}; }

    // In memory the wholes are `plane` numbers after the parts.
    static Node load(const float* at, int64_t plane) {
        return {bellmax::load<float>(at), load_vector<Int>(at + plane)};
    }
    static void store(float* at, int64_t plane, const Node& node) {
        bellmax::store<float>(at, node.part);
        std::memcpy(at + plane, &node.whole, sizeof node.whole);
    }
    static void put(float* at, int64_t plane, StoredNode slot) {
        *at = slot.part;
        std::memcpy(at + plane, &slot.whole, sizeof slot.whole);
    }
    static StoredNode get(const float* at, int64_t plane) {
        StoredNode slot{*at, 0};
        std::memcpy(&slot.whole, at + plane, sizeof slot.whole);
        return slot;
    }

    // Whether the wholes of reached nodes stay above the wholes of nodes that no path reaches, for paths of so many
    // scores of that magnitude.
    static bool has_room(double greatest, int64_t length) {
        return greatest < double(1 << 23) && greatest * double(length) < double(1 << 26);
    }

protected:
    // a + b and a − b as if they could not overflow.
    static Int sum(Int a, Int b) { return bits<Int>(bits<Bits>(a) + bits<Bits>(b)); }
    static Int difference(Int a, Int b) { return bits<Int>(bits<Bits>(a) - bits<Bits>(b)); }

    template <int N>
    static Int greatest_whole(const Node* terms, int count) {
        Int top = N ? terms[0].whole : Int{} + std::numeric_limits<std::int32_t>::min();
        for_each_of<N>(count, [&](int n) LATTICE_INLINE { top = greater_int(top, terms[n].whole); });
        return N || count ? top : Int{} + unreached;
    }
    // whole + part of each lane.
    static void put_sums(const Node& node, V part, double* to) {
        for (int l = 0; l < lanes_of<float>; ++l) {
            to[l] = node.whole[l] > reached ? double(node.whole[l]) + double(part[l]) : -infinity<double>;
        }
    }
};

struct Products : TwoNumbers {
    using Weight = Node;
    static constexpr int line_planes = 2;
    static constexpr double unit = omega::Negentropy<double>::unit;
    omega::Negentropy<float> omega;
    float factor;

    Products(OmegaParameters parameters, double scale) : omega(parameters), factor(float(scale * unit)) {}

    static StoredNode start() { return {1.0f, 0}; }
    static StoredNode dead() { return {1.0f, unreached}; }
    static Weight none() { return filled(start()); }
    static void put_values(const Node& node, double* to) { put_sums(node, log2_of(node.part), to); }
    static double value(StoredNode slot) {
        if (!alive(slot)) return -infinity<double>;
        return double(slot.whole) * 0.69314718055994530942 + std::log(double(slot.part));
    }
    static bool can_take(double greatest, int64_t length) { return has_room(greatest, length); }

    // exp(score) = 2^n p, where a score of −∞ makes n = `forbidden`.
    LATTICE_INLINE Weight weight(V score) const {
        using F = Format<float>;
        const V x = greater<float>(score * factor, V{} + float(forbidden)), n = rounded(x), rest = x - n;
        V p = V{} + exp2_series<float>.terms[F::exp_terms];
#pragma GCC unroll 8
        for (int k = F::exp_terms - 1; k >= 0; --k) p = p * rest + exp2_series<float>.terms[k];
        return {p, to_int(n)};
    }
    void prepare(float* at, int64_t plane) const { store(at, plane, weight(bellmax::load<float>(at))); }
    static Weight line_weight(const float* at, int64_t plane) { return load(at, plane); }
    static Node plus(const Node& node, const Weight& w) { return {node.part * w.part, sum(node.whole, w.whole)}; }

    template <bool Q, int N>
    LATTICE_INLINE Node solve(const Node* terms, int count, const Weight& score, V* q) const {
        const Int low = difference(greatest_whole<N>(terms, count), Int{} + Format<float>::bias);
        V total{};
        for_each_of<N>(count, [&](int n) LATTICE_INLINE {
            const V own = aligned(terms[n], low);
            if (Q) q[n] = own;
            total += own;
        });
        if constexpr (Q) {
            // Quotients by one division. x · (1/x) is never above 1 but often below, and the loss adds up over a long
            // path, so each quotient gets one Newton correction.
            const V inverse = 1 / total;
            for_each_of<N>(count, [&](int n) LATTICE_INLINE {
                const V quotient = q[n] * inverse;
                q[n] = quotient + (q[n] - quotient * total) * inverse;
            });
        }
        const Bits product = bits<Bits>(total * score.part);
        const Int whole = sum(sum(low, score.whole), bits<Int>(product >> Format<float>::mantissa));
        return {bits<V>((product & 0x7fffff) | 0x3f800000), greater_int(whole, Int{} + unreached)};
    }
    V slope(V q) const { return q; }
    V inverse_of_slopes(V) const { return V{} + 1.0f; }

private:
    // part · 2^(whole − top), 0 where that is below 2^−126. `low` is top − 127.
    static V aligned(const Node& node, Int low) {
        return node.part * bits<V>(bits<Bits>(greater_int(difference(node.whole, low), Int{})) << 23);
    }
};

template <class Omega>
struct Parts : TwoNumbers {
    using Weight = V;
    static constexpr int line_planes = 1;
    static constexpr double unit = 1;
    Omega omega;
    float factor;

    Parts(OmegaParameters parameters, double scale) : omega(parameters), factor(float(scale)) {}

    static StoredNode start() { return {0.0f, 0}; }
    static StoredNode dead() { return {0.0f, unreached}; }
    static Weight none() { return V{}; }
    static void put_values(const Node& node, double* to) { put_sums(node, node.part, to); }
    static double value(StoredNode slot) {
        return alive(slot) ? double(slot.whole) + double(slot.part) : -infinity<double>;
    }
    // A score is added in float, so a large one would cost digits of the part.
    static bool can_take(double greatest, int64_t length) { return greatest <= 64 && has_room(greatest, length); }

    Weight weight(V score) const { return score * factor; }
    static void prepare(float*, int64_t) {}
    Weight line_weight(const float* at, int64_t) const { return weight(bellmax::load<float>(at)); }
    static Node plus(const Node& node, Weight w) { return {node.part + w, node.whole}; }

    template <bool Q, int N>
    LATTICE_INLINE Node solve(const Node* terms, int count, Weight score, V* q) const {
        const V far = V{} - float(2 * forbidden);
        const Int top = greatest_whole<N>(terms, count);
        V below[N ? N : most_candidates], least = far, soft;
        for_each_of<N>(count, [&](int n) LATTICE_INLINE {
            below[n] = __builtin_convertvector(difference(top, terms[n].whole), V) - terms[n].part;
            least = lesser<float>(below[n], least);
        });
        if constexpr (N == 2 || N == 3) {
            V own[3];
            soft = omega.template three<Q>(least, below[0], below[1], N == 3 ? below[2 % N] : far, own);
            if (Q) std::copy(own, own + N, q);
        } else {
            soft = solve_many<Q>(below, count, least, q);
        }
        const V x = lesser<float>(least + soft - score, far), n = rounded(x);
        return {n - x, greater_int(difference(top, to_int(n)), Int{} + unreached)};
    }
    V slope(V q) const { return omega.slope(q); }
    V inverse_of_slopes(V sum) const { return 1 / (sum > V{} ? sum : V{} + 1.0f); }

private:
    template <bool Q>
    V solve_many(const V* below, int count, V least, V* q) const {
        V r[most_candidates], tau, most, unused;
        for (int n = 0; n < count; ++n) r[n] = least - below[n];
        omega.solve(omega::Columns<V, float>{reinterpret_cast<const float*>(r), 8, count}, V{}, tau, most);
        for (int n = 0; Q && n < count; ++n) omega.weigh(r[n], tau, q[n], unused);
        return -most;
    }
};

// Any Ω in double, chosen for every vector of nodes: its arithmetic takes much longer than a call, and the sweeps are
// compiled once for all Ω.
struct AnyOmega {
    using V = Vec<double>;
    OmegaParameters parameters;
    double unit = omega::with<double>(parameters, [](auto omega) { return double(omega.unit); });

    explicit AnyOmega(OmegaParameters parameters) : parameters(parameters) {}

    // max_Ω of candidates x relative to `top`, their greatest, and their probabilities if Q.
    template <bool Q>
    __attribute__((noinline)) V solve(const V* x, int count, V top, V* q) const {
        return omega::with<double>(parameters, [&](auto omega) {
            if constexpr (omega.by_slot) {
                if (Q) first_of<0>(x, count, top, q);
                return V{};
            } else if constexpr (omega.is_sum) {
                V terms[most_candidates], total{};
                for (int n = 0; n < count; ++n) total += terms[n] = omega.term(x[n] - top);
                if (Q) omega.shares(terms, count, total, q);
                return omega.of_sum(total);
            } else {
                if constexpr (omega.is_quadratic) {
                    if (count == 3) return -omega.template three<Q>(V{}, top - x[0], top - x[1], top - x[2], q);
                }
                V tau{}, most{}, unused;
                omega.solve(omega::Columns<V, double>{reinterpret_cast<const double*>(x), 4, count}, top, tau, most);
                for (int n = 0; Q && n < count; ++n) omega.weigh(x[n] - top, tau, q[n], unused);
                return most;
            }
        });
    }
    // That of the usual ones is so quick that a call matters.
    LATTICE_INLINE V slope(V q) const {
        if (parameters.is_sum) return omega::Negentropy<double>(parameters).slope(q);
        if (parameters.is_quadratic) return omega::SquaredL2<double>(parameters).slope(q);
        return slope_of_others(q);
    }

    // The first of those that are the greatest.
    template <int N>
    LATTICE_INLINE static void first_of(const V* x, int count, V top, V* q) {
        V rest = V{} + 1.0;
        for_each_of<N>(count, [&](int n) LATTICE_INLINE {
            q[n] = x[n] == top ? rest : V{};
            rest -= q[n];
        });
    }

private:
    __attribute__((noinline)) V slope_of_others(V q) const {
        return omega::with<double>(parameters, [&](auto omega) { return omega.slope(q); });
    }
};

// The hard one, which is so quick that a call matters.
struct OnlyHard {
    static constexpr double unit = 1;
    explicit OnlyHard(OmegaParameters) {}
};

template <class Omega, class NumberReal = double>
struct Values {
    using Real = double;
    using Number = NumberReal;
    using V = Vec<double>;
    using Int = Shape<V>::Int;
    using StoredNode = double;
    using Node = V;
    using Weight = V;
    static constexpr int planes = 1, line_planes = 1;
    static constexpr bool has_dots = false, is_hard = std::is_same_v<Omega, OnlyHard>;
    Omega omega;
    double unit, factor;

    Values(OmegaParameters parameters, double scale) : omega(parameters), unit(omega.unit), factor(scale * unit) {}

    static StoredNode start() { return 0; }
    static StoredNode dead() { return -infinity<double>; }
    static bool alive(StoredNode slot) { return slot > -infinity<double>; }
    static Node filled(StoredNode slot) { return broadcast<double>(slot); }
    static StoredNode lane(Node node, int l) { return node[l]; }
    static Node masked(Node node, Int inside) { return inside ? node : V{} - infinity<double>; }
    static Node load(const double* at, int64_t) { return bellmax::load<double>(at); }
    static void store(double* at, int64_t, Node node) { bellmax::store<double>(at, node); }
    static void put(double* at, int64_t, StoredNode slot) { *at = slot; }
    static StoredNode get(const double* at, int64_t) { return *at; }
    static Weight none() { return V{}; }
    static void put_values(Node node, double* to) { bellmax::store<double>(to, node); }
    double value(StoredNode slot) const { return slot / unit; }
    static bool can_take(double, int64_t) { return true; }

    LATTICE_INLINE Weight weight(V score) const { return score * factor; }
    static void prepare(Number*, int64_t) {}
    Weight line_weight(const Number* at, int64_t) const { return weight(load_as<double>(at)); }
    static Node plus(Node node, Weight w) { return node + w; }

    template <bool Q, int N>
    LATTICE_INLINE Node solve(const Node* terms, int count, Weight score, V* q) const {
        V top = N ? terms[0] : V{} - infinity<double>;
        for_each_of<N>(count, [&](int n) LATTICE_INLINE { top = greater<double>(top, terms[n]); });
        if constexpr (is_hard) {
            if (Q) AnyOmega::first_of<N>(terms, count, top, q);
            return top + score;
        } else {
            const V from = top > V{} - infinity<double> ? top : V{};
            return top + omega.template solve<Q>(terms, count, from, q) + score;
        }
    }
    V slope(V q) const { return omega.slope(q); }
    V inverse_of_slopes(V sum) const { return 1 / (sum > V{} ? sum : V{} + 1.0); }
};

// Nodes with the tangents of their values. The tangents of probabilities follow the probabilities.
template <class P>
struct WithDots : P {
    using Real = typename P::Real;
    using V = typename P::V;
    using Int = typename P::Int;
    using Weight = typename P::Weight;
    static constexpr int planes = P::planes + 1;
    static constexpr bool has_dots = true;

    struct StoredNode {
        typename P::StoredNode value;
        Real dot;
    };
    struct Node {
        typename P::Node value;
        V dot;
    };
    using P::P;

    static StoredNode start() { return {P::start(), 0}; }
    static StoredNode dead() { return {P::dead(), 0}; }
    static bool alive(const StoredNode& slot) { return P::alive(slot.value); }
    static Node filled(StoredNode slot) { return {P::filled(slot.value), broadcast<Real>(slot.dot)}; }
    static Node masked(const Node& node, Int inside) {
        return {P::masked(node.value, inside), inside ? node.dot : V{}};
    }
    static Node load(const Real* at, int64_t plane) {
        return {P::load(at, plane), bellmax::load<Real>(at + P::planes * plane)};
    }
    static void store(Real* at, int64_t plane, const Node& node) {
        P::store(at, plane, node.value);
        bellmax::store<Real>(at + P::planes * plane, node.dot);
    }
    static void put(Real* at, int64_t plane, const StoredNode& slot) {
        P::put(at, plane, slot.value);
        at[P::planes * plane] = slot.dot;
    }
    static StoredNode get(const Real* at, int64_t plane) { return {P::get(at, plane), at[P::planes * plane]}; }
    static void put_values(const Node& node, double* to) { P::put_values(node.value, to); }
    double value(const StoredNode& slot) const { return P::value(slot.value); }
    static Node plus(const Node& node, const Weight& w) { return {P::plus(node.value, w), node.dot}; }

    template <bool Q, int N>
    LATTICE_INLINE Node solve(const Node* terms, int count, const Weight& score, V* q) const {
        constexpr int most = N ? N : most_candidates;
        typename P::Node values[most];
        V own[most];
        for_each_of<N>(count, [&](int n) LATTICE_INLINE { values[n] = terms[n].value; });
        const auto value = P::template solve<true, N>(values, count, score, own);
        if (Q) for_each_of<N>(count, [&](int n) LATTICE_INLINE { q[n] = own[n]; });
        return {value, tilt<Q, N>(terms, count, own, q + count)};
    }

private:
    // Computes the tangents of the probabilities, if Q; returns the tangent of the value, Σ q y. Over a long path, the
    // rounding of Σ q would add up, so both are relative to the first candidate's.
    template <bool Q, int N>
    LATTICE_INLINE V tilt(const Node* terms, int count, const V* q, V* q_dot) const {
        constexpr int most = N ? N : most_candidates;
        V s[most], y[most], mean{}, total{}, weighted{}, base{};
        for_each_of<N>(count, [&](int m) LATTICE_INLINE {
            const int n = count - 1 - m;
            base = q[n] > V{} ? terms[n].dot : base;
        });
        for_each_of<N>(count, [&](int n) LATTICE_INLINE {
            y[n] = q[n] > V{} ? terms[n].dot - base : V{};
            mean += q[n] * y[n];
            if constexpr (!Q) return;
            s[n] = P::slope(q[n]);
            total += s[n];
            weighted += s[n] * y[n];
        });
        const V centre = Q ? weighted * P::inverse_of_slopes(total) : V{};
        if (Q) for_each_of<N>(count, [&](int n) LATTICE_INLINE { q_dot[n] = s[n] * (y[n] - centre); });
        return base + mean;
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
