// Pairs of short series, one a lane: costs are computed as they are needed, and nothing but a row of values is kept.
//
// A cell waits for its left neighbour; a few vectors of pairs side by side keep the processor busy meanwhile.
#include "short_pairs.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cells.h"
#include "parallel.h"
#include "base/math.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

using std::int64_t;

constexpr int beside = 4;  // vectors of pairs that are swept together

template <class P>
constexpr int64_t pairs_of = beside * lanes_of<typename P::Real>;

// The series of some pairs, element by element and feature by feature, a pair in each lane.
template <class P, class S>
void interleave(const Series<S>& series, const int64_t* members, int64_t count, typename P::Real* to) {
    const int64_t numbers = series.length * series.features;
    for (int64_t l = 0; l < pairs_of<P>; ++l) {
        const S* from = series.numbers + members[std::min(l, count - 1)] * numbers;
        for (int64_t n = 0; n < numbers; ++n) to[n * pairs_of<P> + l] = typename P::Real(from[n]);
    }
}

template <class P>
Vec<typename P::Real> cost_of(const typename P::Real* x, const typename P::Real* y, int64_t features, int power,
                              typename P::Real scale) {
    using Real = typename P::Real;
    using V = Vec<Real>;
    V total{};
    for (int64_t d = 0; d < features; ++d) {
        const V difference = load<Real>(x + d * pairs_of<P>) - load<Real>(y + d * pairs_of<P>);
        total += power == 2 ? difference * difference : difference < V{} ? -difference : difference;
    }
    return total * scale;
}

// One group of pairs: the lanes past `count` repeat the last pair.
template <class P, class S>
void sweep(const P& program, const ShortPairs<S>& p, int64_t begin, int64_t count, S* values) {
    using Real = typename P::Real;
    using Node = typename P::Node;
    using Slot = typename P::Slot;
    constexpr int W = lanes_of<Real>;
    static thread_local std::vector<Real> x, y;
    static thread_local std::vector<Slot> row;
    const int64_t features = p.x.features, columns = p.y.length;
    x.resize(std::size_t(p.x.length * features * pairs_of<P> + W));
    y.resize(std::size_t(columns * features * pairs_of<P> + W));
    row.resize(std::size_t(columns * pairs_of<P>));
    interleave<P>(p.x, p.first + begin, count, x.data());
    interleave<P>(p.y, p.second + begin, count, y.data());
    int64_t rows = 0, width = 0;
    for (int64_t l = 0; l < count; ++l) {
        rows = std::max(rows, p.x.lengths[p.first[begin + l]]);
        width = std::max(width, p.y.lengths[p.second[begin + l]]);
    }
    Node dead, diagonal[beside], left[beside];
    P::fill(dead, P::dead());
    for (int64_t n = 0; n < columns * pairs_of<P>; n += W) P::store(row.data() + n, dead);
    for (int64_t i = 0; i < rows; ++i) {
        for (int g = 0; g < beside; ++g) {
            P::fill(diagonal[g], i == 0 ? P::start() : P::dead());
            left[g] = dead;
        }
        for (int64_t j = 0; j < width; ++j) {
            for (int g = 0; g < beside; ++g) {
                Slot* const place = row.data() + j * pairs_of<P> + g * W;
                const Node up = P::load(place);
                const Real* const here = x.data() + i * features * pairs_of<P> + g * W;
                const Real* const there = y.data() + j * features * pairs_of<P> + g * W;
                const auto cost = cost_of<P>(here, there, features, p.power, Real(p.scale));
                left[g] = program.template combine<false>(diagonal[g], up, left[g], cost, nullptr);
                diagonal[g] = up;
                P::store(place, left[g]);
            }
        }
        for (int64_t l = 0; l < count; ++l) {
            if (p.x.lengths[p.first[begin + l]] != i + 1) continue;
            const int64_t last = p.y.lengths[p.second[begin + l]] - 1;
            values[begin + l] = S(P::value(P::get(row.data() + last * pairs_of<P> + l / W * W, int(l % W))));
        }
    }
}

// Values whose vectors lie in memory as they are.
template <class Omega>
struct ShortValues : Values<Omega> {
    using Values<Omega>::Values;
    using Node = Vec<double>;
    static void fill(Node& node, double slot) { node = Node{} + slot; }
    static Node load(const double* from) { return bellmax::load<double>(from); }
    static void store(double* to, Node node) { bellmax::store<double>(to, node); }
    static double get(const double* from, int lane) { return from[lane]; }
};

// A vector of products is its mantissas, then its exponents.
struct ShortProducts : Products {
    static void fill(Node& node, Slot slot) { node = {V{} + slot.mantissa, Int{} + slot.exponent}; }
    static Node load(const Slot* from) {
        Node node;
        std::memcpy(&node.mantissa, from, sizeof node.mantissa);
        std::memcpy(&node.exponent, from + W / 2, sizeof node.exponent);
        return node;
    }
    static void store(Slot* to, const Node& node) {
        std::memcpy(static_cast<void*>(to), &node.mantissa, sizeof node.mantissa);
        std::memcpy(static_cast<void*>(to + W / 2), &node.exponent, sizeof node.exponent);
    }
    static Slot get(const Slot* from, int lane) {
        const Node node = load(from);
        return {node.mantissa[lane], node.exponent[lane]};
    }
};

template <class P, class S>
void sweep_all(const P& program, const ShortPairs<S>& p, S* values) {
    const int64_t groups = (p.pairs + pairs_of<P> - 1) / pairs_of<P>, threads = std::min<int64_t>(p.threads, groups);
    parallel_for(threads, int(threads), [&](int64_t t) {
        for (int64_t g = t * groups / threads; g < (t + 1) * groups / threads; ++g) {
            const int64_t begin = g * pairs_of<P>;
            sweep(program, p, begin, std::min(pairs_of<P>, p.pairs - begin), values);
        }
    });
}

template <class S>
double greatest(const Series<S>& series) {
    double most = 0;
    for (int64_t n = 0; n < series.count * series.length * series.features; ++n) {
        most = std::max(most, std::abs(double(series.numbers[n])));
    }
    return most;
}

template <class S>
void values_of(const ShortPairs<S>& p, S* values) {
    if constexpr (std::is_same_v<S, float>) {
        const double apart = greatest(p.x) + greatest(p.y);
        const double most = p.scale * double(p.x.features) * (p.power == 2 ? apart * apart : apart);
        if (p.omega.alpha == 1 && most < 1e9 && Products::can_take(float(most), p.x.length + p.y.length)) {
            return sweep_all(ShortProducts(), p, values);
        }
    }
    with_omega<double>(p.omega, [&](auto omega) { sweep_all(ShortValues<decltype(omega)>(omega), p, values); });
}

}  // namespace

template <class S>
ShortPairsKernels<S> short_pairs_kernels() {
    return {values_of<S>};
}
template ShortPairsKernels<float> short_pairs_kernels<float>();
template ShortPairsKernels<double> short_pairs_kernels<double>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
