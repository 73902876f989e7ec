// The smoothed maxima over the edges into a group of nodes.
#pragma once

#include "../omega/list.h"
#include "unit.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

template <class Unit_, class Omega_>
struct Maxima {
    using Unit = Unit_;
    using Omega = Omega_;
    using Real = typename Unit::Real;
    using V = typename Unit::V;
    using Mask = typename Unit::Mask;
    static constexpr bool across = Unit::across;
    static constexpr int W = Unit::W, height = Unit::height;
    // Thresholds up to here keep their digits without taking off the greatest score. The others are NaN on the tape.
    static constexpr Real near = sizeof(Real) == 4 ? 20 : 4096;

    Unit& unit;
    const Omega omega;

    explicit Maxima(Unit& of) : unit(of), omega(of.problem.omega) {}

    // q and s of the edges at place k of a row.
    struct Weigh {
        Omega omega;
        V iota;

        void operator()(int64_t k, V score, V threshold, V& q, V& s) const {
            if constexpr (Omega::by_slot) {
                const V slots = iota + Real(across ? k / W : k);
                omega.weigh(slots == threshold ? V{} : V{} - infinity<Real>, threshold, q, s);
            } else {
                omega.weigh(score, threshold, q, s);
            }
        }
    };
    Weigh weigh() const { return {omega, unit.iota}; }

    // Their values and thresholds. `bad` gets the lanes with scores that are NaN or +∞.
    V solve(const EdgeScores<Real>& edges, int64_t g, V& threshold, Mask& bad) const {
        if constexpr (Omega::is_sum) {
            V sums[height];
            for (V& sum : sums) sum = V{} + Real(1);
            for (int l = 0; l < unit.rows(g); ++l) {
                V total{};
                unit.each(edges, l, [&](auto, V score) __attribute__((always_inline)) { total += Omega::term(score); });
                sums[l] = total;
            }
            const V all = Unit::sum(sums);
            if (Omega::fits(all)) return threshold = Omega::of_sum(all);
        }
        V top, tau;
        const V best = solve_relative(edges, unit.rows(g), top, tau, bad);
        if constexpr (Omega::by_slot) {
            threshold = tau;
        } else {
            const V absolute = omega.absolute(tau, top), far = V{} + std::numeric_limits<Real>::quiet_NaN();
            threshold = ((absolute < near) & (absolute > -near)) ? absolute : far;
            threshold = top > -infinity<Real> ? threshold : V{} + infinity<Real>;  // q is 0
        }
        return best;
    }

    // The same with thresholds relative to the greatest score, which is `top`.
    __attribute__((noinline)) V solve_relative(const EdgeScores<Real>& edges, int rows, V& top, V& tau,
                                               Mask& bad) const {
        const V never = V{} - infinity<Real>;
        V best[height], slot = V{} - Real(1);  // best: of every so many entries
        for (V& own : best) own = never;
        Mask unsound{};
        Real* const x = unit.x.get();
        unit.each_entry(edges, rows, [&](int64_t entry, int j, V score) __attribute__((always_inline)) {
            if constexpr (Omega::by_slot) slot = score > best[0] ? V{} + Real(entry) : slot;
            V& own = best[Omega::by_slot ? 0 : j];
            own = greater<Real>(score, own);
            unsound |= ~(score < infinity<Real>);
            if constexpr (!Omega::by_slot) store<Real>(x + entry * W, score);
        });
        bad |= unsound;
        top = best[0];
        for (int j = 1; j < height; ++j) top = greater<Real>(best[j], top);
        if constexpr (Omega::by_slot) {
            tau = slot;
            return top;
        } else {
            const int64_t count = across ? unit.states : keep_near(top);
            const omega::Columns<V, Real> all{x, W, count};
            const V from = top > never ? top : V{};
            V above;
            if constexpr (Omega::is_quadratic && !across) {
                const omega::Columns<V, Real> some{reinterpret_cast<const Real*>(best), W, height};
                omega.solve_after(some, all, from, tau, above);
            } else {
                omega.solve(all, from, tau, above);
            }
            tau = top > never ? tau : V{};
            return top + above;
        }
    }

    // Leaves out entries that no lane can have in its support, where this is worth a pass; returns how many are left.
    int64_t keep_near(V top) const {
        if (Omega::is_sum || unit.states < 6 * W) return unit.states;
        const V far = top - omega.reach();
        Real* const x = unit.x.get();
        int64_t count = 0;
        for (int64_t k = 0; k < unit.states; ++k) {
            const V score = load<Real>(x + k * W);
            store<Real>(x + count * W, score);
            count += any(score > far);
        }
        return count;
    }

    // The edges as they can be weighed with their thresholds, which may have to be found again.
    EdgeScores<Real> weighable(const EdgeScores<Real>& edges, int64_t g, V& threshold) const {
        if (Omega::by_slot || !any(threshold != threshold)) return edges;
        V top;
        Mask unused{};
        solve_relative(edges, unit.rows(g), top, threshold, unused);
        top = top > -infinity<Real> ? top : V{};
        for (int l = 0; l < unit.rows(g); ++l) {
            const V own = Unit::of_row(top, l);
            unit.each(edges, l, [&](auto at, V score) { store<Real>(&unit.x[l * unit.cells + at.k], score - own); });
        }
        return {unit.x.get(), unit.cells, 1, unit.none.get()};
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
