// The value v of a cell of dynamic time warping, and how it follows from the cells before. Three ways to hold it:
//
//   Products   exp(−v) = mantissa · 2^whole in float, for negentropy: one exponential a cell and no logarithm
//   Parts      −v = whole + part in float, for an Ω of which only differences near 0 matter
//   Values     v in double, for any Ω
//
// The first two are as accurate at the end of a long path as at its beginning, and 8 cells fill a vector.
//
// combine: a cell from its neighbours, in vectors of cells, and the probabilities q of the moves diagonal, up, left.
// tilt: from the tangents y of the neighbours' values, those of the probabilities; returns Σ q y.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../omega/list.h"
#include "strips.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// A vector whose first lane is that of `entering` and whose others are those of v, one lane on.
template <class V>
inline V shifted(V v, V entering) {
    if constexpr (sizeof(v[0]) == 4) {
        return __builtin_shufflevector(v, entering, 8, 0, 1, 2, 3, 4, 5, 6);
    } else {
        return __builtin_shufflevector(v, entering, 4, 0, 1, 2);
    }
}

// The tangents of three probabilities with slopes s; `inverse` is 1 / Σ s, or anything if that is 0.
template <class Omega, class V>
inline V tilt_three(const Omega& omega, const V* q, const V* y, V* q_dot) {
    V own[3], s[3], mean{}, sum{}, weighted{};
    for (int n = 0; n < 3; ++n) {
        own[n] = q[n] > V{} ? y[n] : V{};
        s[n] = omega.slope(q[n]);
        mean += q[n] * own[n];
        sum += s[n];
        weighted += s[n] * own[n];
    }
    const V centre = weighted * omega.inverse_of_three(sum);
    for (int n = 0; n < 3; ++n) q_dot[n] = s[n] * (centre - own[n]);
    return mean;
}

// Any Ω but the hard one, in double, found for every vector of cells: beside its arithmetic a call is nothing, and the
// sweeps are compiled once for all of them.
struct Smooth {
    using V = Vec<double>;
    OmegaParameters parameters;
    double unit = omega::with<double>(parameters, [](auto omega) { return double(omega.unit); });

    explicit Smooth(OmegaParameters parameters) : parameters(parameters) {}

    template <bool Q>
    __attribute__((noinline)) V three(V least, V a, V b, V c, V* q) const {
        return omega::with<double>(parameters, [&](auto omega) { return omega.template three<Q>(least, a, b, c, q); });
    }
};

__attribute__((noinline)) inline Smooth::V tilt_three(const Smooth& smooth, const Smooth::V* q, const Smooth::V* y,
                                                      Smooth::V* q_dot) {
    return omega::with<double>(smooth.parameters, [&](auto omega) { return tilt_three(omega, q, y, q_dot); });
}

// Cells of two numbers. What no path reaches has a whole far below any other, so that masks cost nothing. Wholes may
// wrap for costs too large for them, which `has_room` finds out afterwards; so they are added as unsigned numbers.
struct TwoNumbers {
    using Real = float;
    using Tile = float;
    using V = Vec<float>;
    using Int = Shape<V>::Int;
    using Bits = Shape<V>::Bits;
    static constexpr std::int32_t unreached = -(1 << 30), forbidden = -(1 << 29), reached = -(1 << 28);

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
    static Node shifted(const Node& node, Slot entering) {
        const Node all = filled(entering);
        return {lattice::shifted(node.part, all.part), lattice::shifted(node.whole, all.whole)};
    }
    // Whether wholes stay apart from those of cells that no path reaches, for so many costs of that magnitude.
    static bool has_room(double greatest, int64_t cells) {
        return greatest < double(1 << 23) && greatest * double(cells) < double(1 << 26);
    }

    struct Column {
        alignas(32) float part[strip_rows];
        alignas(32) std::int32_t whole[strip_rows];

        Node load(int64_t r) const { return {bellmax::load<float>(part + r), load_vector<Int>(whole + r)}; }
        void store(int64_t r, const Node& node) {
            bellmax::store<float>(part + r, node.part);
            std::memcpy(whole + r, &node.whole, sizeof node.whole);
        }
        Slot get(int64_t r) const { return {part[r], whole[r]}; }
        void set(int64_t r, Slot slot) {
            part[r] = slot.part;
            whole[r] = slot.whole;
        }
        void clear(Slot dead) {
            std::fill(part, part + strip_rows, dead.part);
            std::fill(whole, whole + strip_rows, dead.whole);
        }
        void save(Slot* to) const {
            std::memcpy(static_cast<void*>(to), part, sizeof part);
            std::memcpy(static_cast<void*>(to + strip_rows / 2), whole, sizeof whole);
        }
        void restore(const Slot* from) {
            std::memcpy(part, from, sizeof part);
            std::memcpy(whole, from + strip_rows / 2, sizeof whole);
        }
    };

protected:
    // a + b and a − b as if they could not overflow.
    static Int plus(Int a, Int b) { return bits<Int>(bits<Bits>(a) + bits<Bits>(b)); }
    static Int minus(Int a, Int b) { return bits<Int>(bits<Bits>(a) - bits<Bits>(b)); }
};

struct Products : TwoNumbers {
    omega::Negentropy<float> omega;

    explicit Products(const omega::Negentropy<float>& omega) : omega(omega) {}

    static Slot start() { return {1.0f, 0}; }
    static Slot dead() { return {1.0f, unreached}; }
    static double value(Slot slot) {
        if (!alive(slot)) return infinity<double>;
        return -(double(slot.whole) * 0.69314718055994530942 + std::log(double(slot.part)));
    }
    static bool can_take(double greatest, int64_t cells) { return has_room(greatest, cells); }

    template <bool Q>
    Node combine(const Node& diagonal, const Node& up, const Node& left, V cost, V* q) const {
        using F = Format<float>;
        const Int low = minus(greater_int(greater_int(diagonal.whole, up.whole), left.whole), Int{} + F::bias);
        const V a = aligned(diagonal, low), b = aligned(up, low), c = aligned(left, low), sum = a + b + c;
        if constexpr (Q) {
            const V inverse = 1 / sum;
            q[0] = a * inverse;
            q[1] = b * inverse;
            q[2] = c * inverse;
        }
        // exp(−cost) = 2^n p, where a cost of +∞ makes n = `forbidden`.
        const V x = greater<float>(cost * -omega.unit, V{} + float(forbidden)), n = rounded(x), rest = x - n;
        V p = V{} + F::exp2_series(F::exp_terms);
#pragma GCC unroll 8
        for (int k = F::exp_terms - 1; k >= 0; --k) p = p * rest + F::exp2_series(k);
        const Bits product = bits<Bits>(sum * p);
        const Int whole = plus(plus(low, to_int(n)), bits<Int>(product >> F::mantissa));
        return {bits<V>((product & 0x7fffff) | 0x3f800000), greater_int(whole, Int{} + unreached)};
    }

    V tilt(const V* q, const V* y, V* q_dot) const { return tilt_three(omega, q, y, q_dot); }

private:
    // mantissa · 2^(whole − top), 0 where that is below 2^−126. `low` is top − 127.
    static V aligned(const Node& node, Int low) {
        return node.part * bits<V>(bits<Bits>(greater_int(minus(node.whole, low), Int{})) << 23);
    }
};

template <class Omega>
struct Parts : TwoNumbers {
    Omega omega;

    explicit Parts(const Omega& omega) : omega(omega) {}

    static Slot start() { return {0.0f, 0}; }
    static Slot dead() { return {0.0f, unreached}; }
    static double value(Slot slot) {
        return alive(slot) ? -(double(slot.whole) + double(slot.part)) : infinity<double>;
    }
    // A cost is added in float, so a large one would cost digits of the part.
    static bool can_take(double greatest, int64_t cells) { return greatest <= 64 && has_room(greatest, cells); }

    template <bool Q>
    Node combine(const Node& diagonal, const Node& up, const Node& left, V cost, V* q) const {
        const Int top = greater_int(greater_int(diagonal.whole, up.whole), left.whole);
        const V a = below(diagonal, top), b = below(up, top), c = below(left, top);
        const V least = lesser<float>(lesser<float>(a, b), c);
        const V soft = omega.template three<Q>(least, a, b, c, q);
        const V x = lesser<float>(least + soft + cost, V{} - float(forbidden)), n = rounded(x);
        return {n - x, greater_int(minus(top, to_int(n)), Int{} + unreached)};
    }

    V tilt(const V* q, const V* y, V* q_dot) const { return tilt_three(omega, q, y, q_dot); }

private:
    static V below(const Node& node, Int top) { return __builtin_convertvector(minus(top, node.whole), V) - node.part; }
};

template <class Omega, class TileReal = double>
struct Values {
    using Real = double;
    using Tile = TileReal;
    using V = Vec<double>;
    using Slot = double;
    using Node = V;
    Omega omega;

    explicit Values(const Omega& omega) : omega(omega) {}

    static Slot start() { return 0; }
    static Slot dead() { return infinity<double>; }
    static bool alive(Slot slot) { return slot < infinity<double>; }
    double value(Slot slot) const { return slot / omega.unit; }
    static bool can_take(double, int64_t) { return true; }
    static Node filled(Slot slot) { return broadcast<double>(slot); }
    static Slot lane(Node node, int l) { return node[l]; }
    static Node shifted(Node node, Slot entering) { return lattice::shifted(node, filled(entering)); }

    struct Column {
        alignas(32) double values[strip_rows];

        Node load(int64_t r) const { return bellmax::load<double>(values + r); }
        void store(int64_t r, Node node) { bellmax::store<double>(values + r, node); }
        Slot get(int64_t r) const { return values[r]; }
        void set(int64_t r, Slot slot) { values[r] = slot; }
        void clear(Slot dead) { std::fill(values, values + strip_rows, dead); }
        void save(Slot* to) const { std::copy(values, values + strip_rows, to); }
        void restore(const Slot* from) { std::copy(from, from + strip_rows, values); }
    };

    template <bool Q>
    Node combine(Node diagonal, Node up, Node left, V cost, V* q) const {
        const V least = lesser<double>(lesser<double>(diagonal, up), left);
        const V from = least < V{} + infinity<double> ? least : V{};
        return least + cost * omega.unit + omega.template three<Q>(from, diagonal, up, left, q);
    }

    V tilt(const V* q, const V* y, V* q_dot) const { return tilt_three(omega, q, y, q_dot); }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
