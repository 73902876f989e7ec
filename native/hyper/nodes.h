// An Ω behind one door, so that a sweep is compiled once and not for each.
#pragma once

#include <memory>

#include "../base/memory.h"
#include "../node.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// What depends on Ω in runs of W lanes (node.h).
template <int W>
class NodeKernels {
public:
    virtual ~NodeKernels() = default;
    virtual double unit() const = 0;
    virtual node::Solution<W> solve(bool together, const double* x, std::int64_t count, double* room, bool& good) const = 0;
    virtual Wide<W> weigh(bool together, const double* x, std::int64_t count, const Wide<W>& base, const Wide<W>& tau,
                          double* q, double* s) const = 0;
    virtual void log_q(bool together, const double* x, std::int64_t count, const Wide<W>& base, const Wide<W>& tau,
                       double* out) const = 0;
    virtual void log_slope(bool together, const double* x, std::int64_t count, const Wide<W>& base, const Wide<W>& tau,
                           double* out) const = 0;
};

template <class Omega, int W = node::lanes<Omega>>
class NodeKernelsOf final : public NodeKernels<W> {
    Omega omega;
    using Real = typename Omega::Real;
    using Numbers = const Wide<W>&;

public:
    explicit NodeKernelsOf(Omega own) : omega(own) {}

    double unit() const override { return node::unit<Omega>; }
    node::Solution<W> solve(bool together, const double* x, std::int64_t count, double* room, bool& good) const override {
        Real* const r = reinterpret_cast<Real*>(room);
        return together ? node::solve<true>(omega, x, count, r, good) : node::solve<false>(omega, x, count, r, good);
    }
    Wide<W> weigh(bool together, const double* x, std::int64_t count, Numbers base, Numbers tau, double* q,
                  double* s) const override {
        return together ? node::weigh<true>(omega, x, count, base, tau, q, s)
                        : node::weigh<false>(omega, x, count, base, tau, q, s);
    }
    void log_q(bool together, const double* x, std::int64_t count, Numbers base, Numbers tau, double* out) const override {
        together ? node::log_q<true>(omega, x, count, base, tau, out) : node::log_q<false>(omega, x, count, base, tau, out);
    }
    void log_slope(bool together, const double* x, std::int64_t count, Numbers base, Numbers tau, double* out) const override {
        together ? node::log_slope<true>(omega, x, count, base, tau, out)
                 : node::log_slope<false>(omega, x, count, base, tau, out);
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
