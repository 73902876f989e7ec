#include "ends.h"

#include <algorithm>

#include "../omega/list.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

double solve_ends(const OmegaParameters& parameters, bool is_single, const double* x, int64_t size, double seed,
                  double* q, double* y) {
    double top = -infinity<double>;
    for (int64_t n = 0; n < size; ++n) top = std::max(top, x[n]);
    if (is_single || top == -infinity<double>) {
        for (int64_t n = 0; q && n < size; ++n) q[n] = x[n] > -infinity<double> ? seed : 0;
        if (y) std::fill_n(y, size, 0.0);
        return top;
    }
    return omega::with<double>(parameters, [&](auto omega) {
        const auto r = scratch<double>(size), s = scratch<double>(size);
        Vec<double> tau{}, value{};
        if constexpr (omega.by_slot) {
            std::fill_n(r.get(), size, -infinity<double>);
            r[std::size_t(std::find(x, x + size, top) - x)] = 0;
        } else {
            std::transform(x, x + size, r.get(), [top](double own) { return own - top; });
            omega.solve(omega::Row<double>{r.get(), size}, Vec<double>{}, tau, value);
        }
        if (!q) return top + value[0];
        double sum = 0, sum_s = 0, sum_sy = 0;
        for (int64_t n = 0; n < size; n += lanes_of<double>) {
            Vec<double> own_q, own_s;
            omega.weigh(load<double>(r.get() + n), tau, own_q, own_s);
            store<double>(q + n, own_q);
            store<double>(s.get() + n, own_s);
        }
        for (int64_t n = 0; n < size; ++n) {
            sum += q[n];
            if (y && s[std::size_t(n)] > 0) sum_s += s[std::size_t(n)], sum_sy += s[std::size_t(n)] * y[n];
        }
        for (int64_t n = 0; n < size; ++n) {
            q[n] *= seed / sum;
            if (y) y[n] = s[std::size_t(n)] > 0 ? s[std::size_t(n)] * (y[n] - sum_sy / sum_s) * seed : 0;
        }
        return top + value[0];
    });
}

bool draw_end(const OmegaParameters& parameters, const EndList& ends, bool is_single, const double* end_values,
              double uniform, Walker& at) {
    const auto q = zeros<double>(ends.size());
    solve_ends(parameters, is_single, end_values, ends.size(), 1, q.get(), nullptr);
    const int64_t chosen = node::draw(q.get(), ends.size(), 1, uniform);
    if (chosen >= 0) ends.find(chosen, at.i, at.j, at.state);
    return chosen >= 0;
}

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
