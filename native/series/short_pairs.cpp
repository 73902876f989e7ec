// Pairs of short series, one a lane: costs are computed as they are needed, and nothing but a row of values is kept.
//
// A cell waits for its left neighbor; a few vectors of pairs side by side keep the processor busy meanwhile.
#include "short_pairs.h"

#include <algorithm>
#include <cmath>

#include "../base/memory.h"
#include "../base/threads.h"
#include "../lattice/cells.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

using std::int64_t;
using lattice::AnyOmega;
using lattice::OnlyHard;
using lattice::Parts;
using lattice::Products;
using lattice::Values;

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

// The room of one thread.
template <class P>
struct Workspace {
    Array<typename P::Real> x, y;
    Array<typename P::Node> row;

    template <class S>
    Workspace(const Series<S>& xs, const Series<S>& ys)
        : x(scratch<typename P::Real>(xs.length * xs.features * pairs_of<P>)),
          y(scratch<typename P::Real>(ys.length * ys.features * pairs_of<P>)),
          row(scratch<typename P::Node>(ys.length * beside)) {}
};

// One group of pairs: the lanes past `count` repeat the last pair.
template <class P, class S>
void sweep(const P& program, const ShortPairs<S>& p, int64_t begin, int64_t count, Workspace<P>& own, S* values) {
    using Real = typename P::Real;
    using Node = typename P::Node;
    constexpr int W = lanes_of<Real>;
    const int64_t features = p.x.features;
    interleave<P>(p.x, p.first + begin, count, own.x.get());
    interleave<P>(p.y, p.second + begin, count, own.y.get());
    int64_t rows = 0, width = 0;
    for (int64_t l = 0; l < count; ++l) {
        rows = std::max(rows, p.x.lengths[p.first[begin + l]]);
        width = std::max(width, p.y.lengths[p.second[begin + l]]);
    }
    Node* const row = own.row.get();
    const Node dead = P::filled(P::dead());
    std::fill(row, row + width * beside, dead);
    Pace pace;
    for (int64_t i = 0; i < rows; ++i) {
        pace.spend(width * pairs_of<P> * features);
        Node diagonal[beside], left[beside];
        for (int g = 0; g < beside; ++g) {
            diagonal[g] = i == 0 ? P::filled(P::start()) : dead;
            left[g] = dead;
        }
        for (int64_t j = 0; j < width; ++j) {
            for (int g = 0; g < beside; ++g) {
                const Node up = row[j * beside + g];
                const Real* const here = own.x.get() + i * features * pairs_of<P> + g * W;
                const Real* const there = own.y.get() + j * features * pairs_of<P> + g * W;
                const auto cost = cost_of<P>(here, there, features, p.power, Real(p.scale));
                const Node before[3] = {diagonal[g], up, left[g]};
                left[g] = program.template solve<false, 3>(before, 3, program.weight(cost), nullptr);
                diagonal[g] = up;
                row[j * beside + g] = left[g];
            }
        }
        for (int64_t l = 0; l < count; ++l) {
            if (p.x.lengths[p.first[begin + l]] != i + 1) continue;
            const int64_t last = p.y.lengths[p.second[begin + l]] - 1;
            values[begin + l] = S(-program.value(P::lane(row[last * beside + l / W], int(l % W))));
        }
    }
}

template <class P, class S>
void sweep_all(const P& program, const ShortPairs<S>& p, S* values) {
    const int64_t groups = (p.pairs + pairs_of<P> - 1) / pairs_of<P>;
    take_turns(groups, p.threads, [&] { return Workspace<P>(p.x, p.y); }, [&](int64_t g, Workspace<P>& own) {
        const int64_t begin = g * pairs_of<P>;
        sweep(program, p, begin, std::min(pairs_of<P>, p.pairs - begin), own, values);
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
        const int64_t cells = p.x.length + p.y.length;
        using Sparse = Parts<omega::SquaredL2<float>>;
        if (p.omega.is_sum && Products::can_take(most, cells)) {
            return sweep_all(Products(p.omega, -1), p, values);
        }
        if (p.omega.is_quadratic && Sparse::can_take(most, cells)) {
            return sweep_all(Sparse(p.omega, -1), p, values);
        }
    }
    if (p.omega.by_slot) {
        return sweep_all(Values<OnlyHard>(p.omega, -1), p, values);
    }
    sweep_all(Values<AnyOmega>(p.omega, -1), p, values);
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
