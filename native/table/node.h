// What follows from one smoothed max over the edges into a node, whichever family the edges are of.
//
// A run is `count` vectors of numbers, one number an edge: x are scores, q and s are as Ω has them (omega/omega.h), y
// is the change of x along a direction. Its lanes are edges of one node (`together`), and past the last edge x is −∞
// and the rest 0; or they are of a node each. What is said of a node is in every lane then, or in its own. Ω computes
// in its own precision, everything else is double: a float value of a long path has lost the digits that differences
// need.
#pragma once

#include "../node.h"
#include "../omega/list.h"
#include "wide.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace node {

using std::int64_t;

template <class Omega>
constexpr int lanes = lanes_of<typename Omega::Real>;

// Of Ω's scores x = unit · θ + v.
template <class Omega>
constexpr double unit = Omega::unit == 1 ? 1.0 : omega::Negentropy<double>::unit;

template <bool together, int W>
inline Wide<W> total(const Wide<W>& v) {
    if constexpr (together) return sum_lanes(v);
    return v;
}

// The number of each lane's edge among those of its node.
template <bool together, int W>
inline Wide<W> place(int64_t n) {
    Wide<W> places = wide<W>(double(together ? n * W : n));
    for (int p = 0; together && p < Wide<W>::parts; ++p) places.part[p] += Vec<double>{0, 1, 2, 3} + 4.0 * p;
    return places;
}

// --- value

// The greatest score; `good` becomes false for one that is not below +∞.
template <bool together, int W>
inline Wide<W> greatest(const double* x, int64_t count, bool& good) {
    const Vec<double> highest = broadcast(infinity<double>);
    Wide<W> top = wide<W>(-infinity<double>);
    auto bad = highest < highest;
    for (int64_t n = 0; n < count; ++n) {
        const Wide<W> score = load_wide<W>(x + n * W);
        top = greater(score, top);
        for (const Vec<double>& part : score.part) bad |= !(part < highest);
    }
    good &= !any(bad);
    if constexpr (together) return greatest_lane(top);
    return top;
}

// The value, what scores are relative to, and the threshold. A node without a way to it has −∞, 0, and q = 0.
template <int W>
struct Solution {
    Wide<W> value, base, tau;
};

template <bool together, class Omega, int W = lanes<Omega>>
inline Solution<W> solve_by_slot(const double* x, int64_t count, const Wide<W>& top) {
    Wide<W> first = wide<W>(infinity<double>);
    for (int64_t n = count - 1; n >= 0; --n) {
        const auto earlier = [](Vec<double> score, Vec<double> best, Vec<double> own, Vec<double> others) {
            return score < best ? others : own;
        };
        first = each(earlier, load_wide<W>(x + n * W), top, place<together, W>(n), first);
    }
    const Wide<W> none{};
    if constexpr (together) first = none - greatest_lane(none - first);
    const auto or_none = [](Vec<double> best, Vec<double> own) {
        return best > -infinity<double> ? own : Vec<double>{} - 1;
    };
    return {top, none, each(or_none, top, first)};
}

// `r` is room for as many numbers as the run has.
template <bool together, class Omega, class Real = typename Omega::Real, int W = lanes<Omega>>
inline Solution<W> solve(const Omega& omega, const double* x, int64_t count, Real* __restrict r, bool& good) {
    using V = Vec<Real>;
    const Wide<W> top = greatest<together, W>(x, count, good);
    if constexpr (Omega::by_slot) {
        return solve_by_slot<together, Omega>(x, count, top);
    } else {
        const auto finite = [](Vec<double> best) { return best > -infinity<double> ? best : Vec<double>{}; };
        const Wide<W> base = each(finite, top);
        for (int64_t n = 0; n < count; ++n) store<Real>(r + n * W, narrow(load_wide<W>(x + n * W) - base));
        V tau, value;
        if constexpr (together) {
            omega.solve(omega::Row<Real>{r, count * W}, V{}, tau, value);
        } else {
            omega.solve(omega::Columns<V, Real>{r, W, count}, V{}, tau, value);
        }
        const auto reached = [](Vec<double> best, Vec<double> own) {
            return best > -infinity<double> ? own : Vec<double>{};
        };
        return {top + each(reached, top, widen(value)), base, each(reached, top, widen(tau))};
    }
}

// --- probabilities

// r of the n-th vector, as Ω takes it.
template <bool together, class Omega, int W = lanes<Omega>>
inline Vec<typename Omega::Real> relative(const double* x, int64_t n, const Wide<W>& base, const Wide<W>& tau) {
    if constexpr (Omega::by_slot) {
        const auto chosen = [](Vec<double> own, Vec<double> best) {
            return own == best ? Vec<double>{} : Vec<double>{} - infinity<double>;
        };
        return narrow(each(chosen, place<together, W>(n), tau));
    } else {
        return narrow(load_wide<W>(x + n * W) - base);
    }
}

// q and, unless it is null, s. The result is what q has to be multiplied with to sum to 1: over a long path, its
// rounding would add up.
template <bool together, class Omega, int W = lanes<Omega>>
inline Wide<W> weigh(const Omega& omega, const double* x, int64_t count, const Wide<W>& base, const Wide<W>& tau,
                     double* __restrict q, double* __restrict s) {
    const auto own = narrow(tau);
    Wide<W> sum{};
    for (int64_t n = 0; n < count; ++n) {
        Vec<typename Omega::Real> edge_q, edge_s;
        omega.weigh(relative<together, Omega>(x, n, base, tau), own, edge_q, edge_s);
        const Wide<W> wide_q = widen(edge_q);
        sum = sum + wide_q;
        store_wide(q + n * W, wide_q);
        if (s) store_wide(s + n * W, widen(edge_s));
    }
    return ratio(wide<W>(1), total<together>(sum));
}

// --- along a direction y

// The change of the value, scale · Σ q y, and the mean ⟨s, y⟩/Σs, with which that of q is J y = s∘(y − mean).
template <int W>
struct Change {
    Wide<W> value, mean;
};

template <bool together, int W>
inline Change<W> change(const double* q, const Wide<W>& scale, const double* s, const double* y, int64_t count) {
    Wide<W> sum_qy{}, sum_sy{}, sum_s{};
    for (int64_t n = 0; n < count; ++n) {
        const Wide<W> own_q = load_wide<W>(q + n * W), own_s = load_wide<W>(s + n * W), own_y = load_wide<W>(y + n * W);
        sum_qy = sum_qy + where_nonzero(own_q, own_q * own_y);
        sum_sy = sum_sy + where_nonzero(own_s, own_s * own_y);
        sum_s = sum_s + own_s;
    }
    return {scale * total<together>(sum_qy), ratio(total<together>(sum_sy), total<together>(sum_s))};
}

// e = J y times the mass of the node.
template <int W>
inline void change_of_q(const double* s, const double* y, int64_t count, const Wide<W>& mean, const Wide<W>& mass,
                        double* __restrict e) {
    for (int64_t n = 0; n < count; ++n) {
        const Wide<W> own_s = where_nonzero(mass, load_wide<W>(s + n * W));
        store_wide(e + n * W, where_nonzero(own_s, own_s * (load_wide<W>(y + n * W) - mean) * mass));
    }
}

}  // namespace node
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
