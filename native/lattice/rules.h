// An Ω for rows of candidates: row c of x, `width` after the one before, has candidate c of every place of a wave. Only
// what is here is compiled for each Ω.
#pragma once

#include <algorithm>

#include "../omega/list.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

using std::int64_t;

struct Candidates {
    double* x;
    int64_t width;
    int count;
    int64_t places;
};

// The greatest of many numbers in a row, and the threshold and max_Ω relative to it. A single one is the value itself.
struct Sink {
    int64_t count;
    double top = -infinity<double>, tau = 0, most = 0;

    bool is_reached() const { return top > -infinity<double>; }
    double value() const { return is_reached() ? top + most : -infinity<double>; }
};

class Rules {
public:
    const double unit;

    explicit Rules(double unit) : unit(unit) {}
    virtual ~Rules() = default;

    // max_Ω of the candidates, −∞ where there is none, and its threshold.
    virtual void solve(const Candidates& rows, double* value, double* threshold) const = 0;
    // Candidates become their probabilities.
    virtual void weigh(const Candidates& rows, const double* threshold) const = 0;
    // The same, and their tangents y, rows likewise, become those of the probabilities; those of max_Ω go to `mean`.
    virtual void weigh_dots(const Candidates& rows, const double* threshold, double* y, double* mean) const = 0;

    // The same for one vector x, whole vectors with −∞ at the end; y may be missing.
    virtual Sink solve_sink(const double* x, int64_t count) const = 0;
    virtual void weigh_sink(const Sink& sink, double* x, double* y) const = 0;
};

template <class Omega>
class RulesOf final : public Rules {
    using V = Vec<double>;
    static constexpr int W = lanes_of<double>;
    const Omega omega;

    // The greatest candidate, −∞ if there is none.
    static V greatest(const double* x, int64_t width, int count) {
        V top = V{} - infinity<double>;
        for (int c = 0; c < count; ++c) top = greater<double>(top, load<double>(x + c * width));
        return top;
    }
    static V finite(V top) { return top > V{} - infinity<double> ? top : V{}; }

    template <bool Dots>
    void weigh_rows(const Candidates& rows, const double* threshold, double* all_y, double* all_means) const {
        const int64_t width = rows.width;
        for (int64_t n = 0; n < rows.places; n += W) {
            double* const x = rows.x + n;
            const V top = finite(greatest(x, width, rows.count)), tau = load<double>(threshold + n);
            V sum{}, weighted{}, mean{};
            for (int c = 0; c < rows.count; ++c) {
                V r = load<double>(x + c * width) - top, q, s;
                if constexpr (Omega::by_slot) {
                    r = ((tau == V{} + double(c)) & (r == V{})) ? V{} : V{} - infinity<double>;
                }
                omega.weigh(r, tau, q, s);
                store<double>(x + c * width, q);
                if constexpr (Dots) {
                    const V y = q > V{} ? load<double>(all_y + c * width + n) : V{};
                    mean += q * y;
                    sum += s;
                    weighted += s * y;
                }
            }
            if constexpr (Dots) {
                const V centre = weighted / (sum > V{} ? sum : V{} + 1.0);
                for (int c = 0; c < rows.count; ++c) {
                    double* const y = all_y + c * width + n;
                    const V s = omega.slope(load<double>(x + c * width));
                    store<double>(y, s > V{} ? s * (load<double>(y) - centre) : V{});
                }
                store<double>(all_means + n, mean);
            }
        }
    }

public:
    explicit RulesOf(const Omega& omega) : Rules(Omega::unit), omega(omega) {}

    void solve(const Candidates& rows, double* value, double* threshold) const override {
        for (int64_t n = 0; n < rows.places; n += W) {
            const double* const x = rows.x + n;
            const V greatest_x = greatest(x, rows.width, rows.count), top = finite(greatest_x);
            V tau{}, most{};
            if constexpr (Omega::by_slot) {
                for (int c = rows.count - 1; c >= 0; --c) {
                    tau = load<double>(x + c * rows.width) == top ? V{} + double(c) : tau;
                }
            } else {
                omega.solve(omega::Columns<V, double>{x, rows.width, rows.count}, top, tau, most);
            }
            store<double>(value + n, greatest_x > V{} - infinity<double> ? top + most : greatest_x);
            store<double>(threshold + n, tau);
        }
    }
    void weigh(const Candidates& rows, const double* threshold) const override {
        weigh_rows<false>(rows, threshold, nullptr, nullptr);
    }
    void weigh_dots(const Candidates& rows, const double* threshold, double* y, double* mean) const override {
        weigh_rows<true>(rows, threshold, y, mean);
    }

    Sink solve_sink(const double* x, int64_t count) const override {
        Sink sink{count};
        for (int64_t n = 0; n < count; ++n) {
            if (!(x[n] > sink.top)) continue;
            sink.top = x[n];
            if constexpr (Omega::by_slot) sink.tau = double(n);
        }
        if constexpr (!Omega::by_slot) {
            if (count > 1 && sink.is_reached()) {
                V tau, most;
                omega.solve(omega::Row<double>{x, (count + W - 1) / W * W}, broadcast<double>(sink.top), tau, most);
                sink.tau = tau[0];
                sink.most = most[0];
            }
        }
        return sink;
    }
    void weigh_sink(const Sink& sink, double* x, double* y) const override {
        double sum = 0, weighted = 0;
        for (int64_t n = 0; n < sink.count; ++n) {
            double q = x[n] > -infinity<double>, s = 0;
            if (q > 0 && sink.count > 1) {
                const double r = x[n] - sink.top;
                omega.weigh(Omega::by_slot && double(n) != sink.tau ? -infinity<double> : r, sink.tau, q, s);
            }
            x[n] = q;
            sum += s;
            weighted += y && s > 0 ? s * y[n] : 0;
        }
        for (int64_t n = 0; y && n < sink.count; ++n) {
            const double s = sink.count > 1 ? omega.slope(x[n]) : 0;
            y[n] = s > 0 ? s * (y[n] - weighted / sum) : 0;
        }
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
