// The value v of a node, and how it follows from the nodes before, a node in each lane. Three ways to hold it:
//
//   Products   exp(v) = part · 2^whole in float, for negentropy: one exponential a score and no logarithm
//   Parts      v = whole + part in float, for an Ω of which only differences near 0 matter
//   Values     v in double, for any Ω
//
// The first two are as accurate at the end of a long path as at its beginning, and 8 nodes fill a vector.
//
// prepare  a score as it is added to nodes: the planes of a Weight
// plus     a node and a weight: a candidate
// solve    a node from its candidates and its own score; N is their number where the compiler knows it, else 0
// weigh    the probabilities q of the candidates
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../omega/list.h"
#include "wide.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace table_engine {

using std::int64_t;

constexpr int most_candidates = 24;

// Nodes of two numbers. What no path reaches has a whole far below any other. Wholes may wrap for scores too large for
// them, which `has_room` finds out afterwards; so they are added as unsigned numbers.
struct TwoNumbers {
    using Real = float;
    using V = Vec<float>;
    using Int = Shape<V>::Int;
    using Bits = Shape<V>::Bits;
    static constexpr int planes = 2;
    static constexpr bool has_dots = false,
                          is_quick = true;  // quick: so that sweeps are worth a copy for few candidates
    static constexpr std::int32_t unreached = -(1 << 29), forbidden = -(1 << 28), reached = -(1 << 27);

    struct Slot {
        float part;
        std::int32_t whole;
    };
    struct Node {
        V part;
        Int whole;
    };
    static bool alive(Slot slot) { return slot.whole > reached; }
    static Node filled(Slot slot) { return {broadcast<float>(slot.part), Int{} + slot.whole}; }
    static Slot lane(const Node& node, int l) { return {node.part[l], node.whole[l]}; }
    static Node masked(const Node& node, Int inside) { return {node.part, inside ? node.whole : Int{} + unreached}; }

    // In memory the wholes are `plane` numbers after the parts.
    static Node load(const float* at, int64_t plane) {
        return {bellmax::load<float>(at), load_vector<Int>(at + plane)};
    }
    static void store(float* at, int64_t plane, const Node& node) {
        bellmax::store<float>(at, node.part);
        std::memcpy(at + plane, &node.whole, sizeof node.whole);
    }
    static void put(float* at, int64_t plane, Slot slot) {
        *at = slot.part;
        std::memcpy(at + plane, &slot.whole, sizeof slot.whole);
    }
    static Slot get(const float* at, int64_t plane) {
        Slot slot{*at, 0};
        std::memcpy(&slot.whole, at + plane, sizeof slot.whole);
        return slot;
    }

    // Whether wholes stay apart from those of nodes that no path reaches, for paths of so many scores of that
    // magnitude.
    static bool has_room(double greatest, int64_t length) {
        return greatest < double(1 << 23) && greatest * double(length) < double(1 << 26);
    }

protected:
    // a + b and a − b as if they could not overflow.
    static Int sum(Int a, Int b) { return bits<Int>(bits<Bits>(a) + bits<Bits>(b)); }
    static Int difference(Int a, Int b) { return bits<Int>(bits<Bits>(a) - bits<Bits>(b)); }

    template <int N>
    static Int greatest_whole(const Node* terms, int count) {
        Int top = Int{} + unreached;
#pragma GCC unroll 4
        for (int n = 0; n < (N ? N : count); ++n) top = greater_int(top, terms[n].whole);
        return top;
    }
    static Wide<8> wide_whole(const Node& node) {
        Wide<8> result;
        for (int p = 0; p < 2; ++p) {
            for (int l = 0; l < 4; ++l) {
                const std::int32_t whole = node.whole[4 * p + l];
                result.part[p][l] = whole > reached ? double(whole) : -infinity<double>;
            }
        }
        return result;
    }
};

struct Products : TwoNumbers {
    using Plain = Products;
    using Weight = Node;
    static constexpr int weight_planes = 2;
    static constexpr double unit = omega::Negentropy<double>::unit;
    omega::Negentropy<float> omega;

    explicit Products(OmegaParameters parameters) : omega(parameters) {}

    static Slot start() { return {1.0f, 0}; }
    static Slot dead() { return {1.0f, unreached}; }
    static Weight none() { return filled(start()); }
    static Wide<8> wide(const Node& node) { return wide_whole(node) + widen(log2_of(node.part)); }
    static double value(Slot slot) {
        if (!alive(slot)) return -infinity<double>;
        return double(slot.whole) * 0.69314718055994530942 + std::log(double(slot.part));
    }
    static bool can_take(double greatest, int64_t length) { return has_room(greatest, length); }

    // exp(score) = 2^n p, where a score of −∞ makes n = `forbidden`.
    static void prepare(V score, float scale, V* to) {
        using F = Format<float>;
        const V x = greater<float>(score * (scale * float(unit)), V{} + float(forbidden)), n = rounded(x), rest = x - n;
        V p = V{} + F::exp2_series(F::exp_terms);
#pragma GCC unroll 8
        for (int k = F::exp_terms - 1; k >= 0; --k) p = p * rest + F::exp2_series(k);
        to[0] = p;
        to[1] = bits<V>(to_int(n));
    }
    static Weight weight(const float* at, int64_t plane) { return load(at, plane); }
    static Node plus(const Node& node, const Weight& w) { return {node.part * w.part, sum(node.whole, w.whole)}; }

    template <int N>
    Node solve(const Node* terms, int count, const Weight& score) const {
        const Int low = difference(greatest_whole<N>(terms, count), Int{} + Format<float>::bias);
        V total{};
#pragma GCC unroll 4
        for (int n = 0; n < (N ? N : count); ++n) total += aligned(terms[n], low);
        const Bits product = bits<Bits>(total * score.part);
        const Int whole = sum(sum(low, score.whole), bits<Int>(product >> Format<float>::mantissa));
        return {bits<V>((product & 0x7fffff) | 0x3f800000), greater_int(whole, Int{} + unreached)};
    }
    template <int N>
    void weigh(const Node* terms, int count, V* q) const {
        const Int low = difference(greatest_whole<N>(terms, count), Int{} + Format<float>::bias);
        V total{};
#pragma GCC unroll 4
        for (int n = 0; n < (N ? N : count); ++n) total += q[n] = aligned(terms[n], low);
        const V inverse = 1 / (total > V{} ? total : V{} + 1.0f);
#pragma GCC unroll 4
        for (int n = 0; n < (N ? N : count); ++n) q[n] *= inverse;
    }
    void slopes(const V* q, int count, V* s) const { std::copy(q, q + count, s); }

private:
    // part · 2^(whole − top), 0 where that is below 2^−126. `low` is top − 127.
    static V aligned(const Node& node, Int low) {
        return node.part * bits<V>(bits<Bits>(greater_int(difference(node.whole, low), Int{})) << 23);
    }
};

template <class Omega>
struct Parts : TwoNumbers {
    using Plain = Parts;
    using Weight = V;
    static constexpr int weight_planes = 1;
    static constexpr double unit = 1;
    Omega omega;

    explicit Parts(OmegaParameters parameters) : omega(parameters) {}

    static Slot start() { return {0.0f, 0}; }
    static Slot dead() { return {0.0f, unreached}; }
    static Weight none() { return V{}; }
    static Wide<8> wide(const Node& node) { return wide_whole(node) + widen(node.part); }
    static double value(Slot slot) { return alive(slot) ? double(slot.whole) + double(slot.part) : -infinity<double>; }
    // A score is added in float, so a large one would cost digits of the part.
    static bool can_take(double greatest, int64_t length) { return greatest <= 64 && has_room(greatest, length); }

    static void prepare(V score, float scale, V* to) { *to = greater<float>(score * scale, V{} + float(forbidden)); }
    static Weight weight(const float* at, int64_t) { return bellmax::load<float>(at); }
    static Node plus(const Node& node, Weight w) { return {node.part + w, node.whole}; }

    template <int N>
    Node solve(const Node* terms, int count, Weight score) const {
        V below[N ? N : most_candidates], least, soft;
        const Int top = relative<N>(terms, count, below, least);
        if constexpr (N == 3) {
            soft = omega.template three<false>(least, below[0], below[1], below[2], below);
        } else {
            soft = -solve_many(below, count, least);
        }
        const V x = lesser<float>(least + soft - score, V{} - float(2 * forbidden)), n = rounded(x);
        return {n - x, greater_int(difference(top, to_int(n)), Int{} + unreached)};
    }
    template <int N>
    void weigh(const Node* terms, int count, V* q) const {
        V below[N ? N : most_candidates], least;
        relative<N>(terms, count, below, least);
        if constexpr (N == 3) {
            omega.template three<true>(least, below[0], below[1], below[2], q);
        } else {
            solve_many(below, count, least, q);
        }
    }
    void slopes(const V* q, int count, V* s) const {
        for (int n = 0; n < count; ++n) s[n] = omega.slope(q[n]);
    }

private:
    // How far candidates are below the greatest whole.
    template <int N>
    static Int relative(const Node* terms, int count, V* below, V& least) {
        const Int top = greatest_whole<N>(terms, count);
        least = V{} - float(2 * forbidden);
#pragma GCC unroll 4
        for (int n = 0; n < (N ? N : count); ++n) {
            below[n] = __builtin_convertvector(difference(top, terms[n].whole), V) - terms[n].part;
            least = lesser<float>(below[n], least);
        }
        return top;
    }
    V solve_many(const V* below, int count, V least, V* q = nullptr) const {
        V r[most_candidates], tau, most, unused;
        for (int n = 0; n < count; ++n) r[n] = least - below[n];
        omega.solve(omega::Columns<V, float>{reinterpret_cast<const float*>(r), 8, count}, V{}, tau, most);
        for (int n = 0; q && n < count; ++n) omega.weigh(r[n], tau, q[n], unused);
        return most;
    }
};

// Any Ω in double, found for every vector of nodes: beside its arithmetic a call is nothing, and the sweeps are
// compiled once for all of them.
struct AnyOmega {
    using V = Vec<double>;
    OmegaParameters parameters;
    double unit = omega::with<double>(parameters, [](auto omega) { return double(omega.unit); });

    explicit AnyOmega(OmegaParameters parameters) : parameters(parameters) {}

    // max_Ω of candidates x relative to `top`, their greatest, and their probabilities if wanted.
    __attribute__((noinline)) V solve(const V* x, int count, V top, V* q) const {
        return omega::with<double>(parameters, [&](auto omega) {
            V tau{}, most{}, unused;
            if constexpr (omega.by_slot) {
                auto open = top == top;
                for (int n = 0; q && n < count; ++n) {
                    q[n] = (open & (x[n] == top)) ? V{} + 1.0 : V{};
                    open &= x[n] != top;
                }
            } else {
                omega.solve(omega::Columns<V, double>{reinterpret_cast<const double*>(x), 4, count}, top, tau, most);
                for (int n = 0; q && n < count; ++n) omega.weigh(x[n] - top, tau, q[n], unused);
            }
            return most;
        });
    }
    __attribute__((noinline)) void slopes(const V* q, int count, V* s) const {
        omega::with<double>(parameters, [&](auto omega) {
            for (int n = 0; n < count; ++n) s[n] = omega.slope(q[n]);
        });
    }
};

template <class Omega>
struct Values {
    using Plain = Values;
    using Real = double;
    using V = Vec<double>;
    using Int = Shape<V>::Int;
    using Slot = double;
    using Node = V;
    using Weight = V;
    static constexpr int planes = 1, weight_planes = 1;
    static constexpr bool has_dots = false, is_quick = false;
    Omega omega;
    double unit;

    explicit Values(OmegaParameters parameters) : omega(parameters), unit(omega.unit) {}

    static Slot start() { return 0; }
    static Slot dead() { return -infinity<double>; }
    static bool alive(Slot slot) { return slot > -infinity<double>; }
    static Node filled(Slot slot) { return broadcast<double>(slot); }
    static Slot lane(Node node, int l) { return node[l]; }
    static Node masked(Node node, Int inside) { return inside ? node : V{} - infinity<double>; }
    static Node load(const double* at, int64_t) { return bellmax::load<double>(at); }
    static void store(double* at, int64_t, Node node) { bellmax::store<double>(at, node); }
    static void put(double* at, int64_t, Slot slot) { *at = slot; }
    static Slot get(const double* at, int64_t) { return *at; }
    static Weight none() { return V{}; }
    static Wide<4> wide(Node node) { return {node}; }
    double value(Slot slot) const { return slot / unit; }
    static bool can_take(double, int64_t) { return true; }

    void prepare(V score, double scale, V* to) const { *to = score * (scale * unit); }
    static Weight weight(const double* at, int64_t) { return bellmax::load<double>(at); }
    static Node plus(Node node, Weight w) { return node + w; }

    template <int N>
    Node solve(const Node* terms, int count, Weight score) const {
        const V top = greatest<N>(terms, count);
        return top + omega.solve(terms, count, finite(top), nullptr) + score;
    }
    template <int N>
    void weigh(const Node* terms, int count, V* q) const {
        omega.solve(terms, count, finite(greatest<N>(terms, count)), q);
    }
    void slopes(const V* q, int count, V* s) const { omega.slopes(q, count, s); }

private:
    template <int N>
    static V greatest(const Node* terms, int count) {
        V top = V{} - infinity<double>;
#pragma GCC unroll 4
        for (int n = 0; n < (N ? N : count); ++n) top = greater<double>(top, terms[n]);
        return top;
    }
    static V finite(V top) { return top > V{} - infinity<double> ? top : V{}; }
};

// Nodes with the tangents of their values.
template <class P>
struct WithDots : P {
    using Real = typename P::Real;
    using V = typename P::V;
    using Int = typename P::Int;
    using Weight = typename P::Weight;
    static constexpr int planes = P::planes + 1;
    static constexpr bool has_dots = true, is_quick = false;

    struct Slot {
        typename P::Slot value;
        Real dot;
    };
    struct Node {
        typename P::Node value;
        V dot;
    };
    using P::P;

    static Slot start() { return {P::start(), 0}; }
    static Slot dead() { return {P::dead(), 0}; }
    static bool alive(const Slot& slot) { return P::alive(slot.value); }
    static Node filled(Slot slot) { return {P::filled(slot.value), broadcast<Real>(slot.dot)}; }
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
    static void put(Real* at, int64_t plane, const Slot& slot) {
        P::put(at, plane, slot.value);
        at[P::planes * plane] = slot.dot;
    }
    static Slot get(const Real* at, int64_t plane) { return {P::get(at, plane), at[P::planes * plane]}; }
    double value(const Slot& slot) const { return P::value(slot.value); }
    static auto wide(const Node& node) { return P::wide(node.value); }
    static Node plus(const Node& node, const Weight& w) { return {P::plus(node.value, w), node.dot}; }

    template <int N>
    Node solve(const Node* terms, int count, const Weight& score) const {
        constexpr int most = N ? N : most_candidates;
        typename P::Node values[most];
        V q[most], q_dot[most];
        for (int n = 0; n < (N ? N : count); ++n) values[n] = terms[n].value;
        P::template weigh<N>(values, count, q);
        return {P::template solve<N>(values, count, score), tilt<N>(terms, count, q, q_dot)};
    }
    template <int N>
    void weigh(const Node* terms, int count, V* q) const {
        typename P::Node values[N ? N : most_candidates];
        for (int n = 0; n < (N ? N : count); ++n) values[n] = terms[n].value;
        P::template weigh<N>(values, count, q);
    }
    // The tangents of the probabilities; returns that of the value, Σ q y. Over a long path, the rounding of Σ q would
    // add up, so both are relative to the first candidate's.
    template <int N>
    V tilt(const Node* terms, int count, const V* q, V* q_dot) const {
        V s[N ? N : most_candidates], y[N ? N : most_candidates], mean{}, total{}, weighted{}, base{};
        P::slopes(q, N ? N : count, s);
        for (int n = (N ? N : count) - 1; n >= 0; --n) base = q[n] > V{} ? terms[n].dot : base;
        for (int n = 0; n < (N ? N : count); ++n) {
            y[n] = q[n] > V{} ? terms[n].dot - base : V{};
            mean += q[n] * y[n];
            total += s[n];
            weighted += s[n] * y[n];
        }
        const V centre = weighted / (total > V{} ? total : V{} + Real(1));
        for (int n = 0; n < (N ? N : count); ++n) q_dot[n] = s[n] * (y[n] - centre);
        return base + mean;
    }
};

}  // namespace table_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
