#include "nodes.h"

#include "../omega/list.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

using std::int64_t;
using V = Vec<double>;
constexpr int W = lanes_of<double>;

// x where the gate is not 0, and 0 elsewhere, whatever x is there.
V gated(V gate, V x) { return gate != V{} ? x : V{}; }

// a / b where b > 0, and 0 elsewhere.
V ratio(V a, V b) { return b > V{} ? a / b : V{}; }

// body(place) for the edges of W nodes; the place is that of the first node's.
template <class Body>
void down(Matrix of, int64_t column, Body body) {
    for (int64_t k = 0, place = column; k < of.edges; ++k, place += of.columns) body(place);
}

template <class Omega>
class Kernels final : public NodeKernels {
    const Omega omega;

    // What Ω takes: the score, or whether it is of the best slot.
    static V relative(V score, double slot, V threshold) {
        if constexpr (!Omega::by_slot) return score;
        return threshold == slot ? V{} : V{} - infinity<double>;
    }

    // body(place, score as Ω takes it, threshold) for all edges.
    template <class Body>
    static void each(Matrix of, const double* x, const double* threshold, Body body) {
        for (int64_t c = 0; c < of.columns; c += W) {
            const V own = load(threshold + c);
            double slot = 0;
            down(of, c, [&](int64_t place) { body(place, relative(load(x + place), slot++, own), own); });
        }
    }

public:
    explicit Kernels(const Omega& own) : NodeKernels(Omega::unit), omega(own) {}

    bool solve(Matrix of, const double* x, double* value, double* threshold) const override {
        const V none = V{} - infinity<double>, highest = V{} + infinity<double>;
        auto bad = highest < highest;
        for (int64_t c = 0; c < of.columns; c += W) {
            V top = none, best = V{} - 1, slot{};
            down(of, c, [&](int64_t place) {
                const V score = load(x + place);
                bad |= !(score < highest);
                if constexpr (Omega::by_slot) best = score > top ? slot : best, slot += 1;
                top = greater<double>(score, top);
            });
            if constexpr (Omega::by_slot) {
                store(value + c, top);
                store(threshold + c, best);
            } else {
                const auto is_reached = top > none;
                const V base = is_reached ? top : V{};
                V tau, above;
                omega.solve(omega::Columns<V, double>{x + c, of.columns, of.edges}, base, tau, above);
                store(value + c, is_reached ? top + above : none);
                store(threshold + c, is_reached ? omega.absolute(tau, top) : V{});
            }
        }
        return !any(bad);
    }

    void weigh(Matrix of, const double* x, const double* threshold, double* __restrict q, double* __restrict s,
               double* __restrict scale) const override {
        for (int64_t c = 0; c < of.columns; c += W) {
            const V own = load(threshold + c);
            V sum{};
            double slot = 0;
            down(of, c, [&](int64_t place) {
                V edge_q, edge_s;
                omega.weigh(relative(load(x + place), slot++, own), own, edge_q, edge_s);
                sum += edge_q;
                store(q + place, edge_q);
                if (s) store(s + place, edge_s);
            });
            store(scale + c, ratio(V{} + 1, sum));
        }
    }

    void log_q(Matrix of, const double* x, const double* threshold, double* __restrict out) const override {
        each(of, x, threshold, [&](int64_t place, V r, V own) { store(out + place, omega.log_q(r, own)); });
    }
    void log_slope(Matrix of, const double* x, const double* threshold, double* __restrict out) const override {
        each(of, x, threshold, [&](int64_t place, V r, V own) { store(out + place, omega.log_slope(r, own)); });
    }
};

}  // namespace

std::unique_ptr<NodeKernels> node_kernels(OmegaParameters parameters) {
    return omega::with<double>(parameters, [](const auto& omega) -> std::unique_ptr<NodeKernels> {
        return std::make_unique<Kernels<std::decay_t<decltype(omega)>>>(omega);
    });
}

void change(Matrix of, const double* q, const double* scale, const double* s, const double* y, double* __restrict value,
            double* __restrict mean) {
    for (int64_t c = 0; c < of.columns; c += W) {
        V sum_qy{}, sum_sy{}, sum_s{};
        down(of, c, [&](int64_t place) {
            const V own_q = load(q + place), own_s = load(s + place), own_y = load(y + place);
            sum_qy += gated(own_q, own_q * own_y);
            sum_sy += gated(own_s, own_s * own_y);
            sum_s += own_s;
        });
        store(value + c, load(scale + c) * sum_qy);
        store(mean + c, ratio(sum_sy, sum_s));
    }
}

void along(Matrix of, const double* slope, const double* y, const double* mean, const double* mass, double* __restrict e) {
    for (int64_t c = 0; c < of.columns; c += W) {
        const V middle = load(mean + c), held = mass ? load(mass + c) : V{} + 1;
        down(of, c, [&](int64_t place) {
            const V own = gated(held, load(slope + place));
            store(e + place, gated(own, own * (load(y + place) - middle) * held));
        });
    }
}

void log_q_vjp(Matrix of, const double* slope, const double* s, double* __restrict c) {
    for (int64_t column = 0; column < of.columns; column += W) {
        V sum_d{}, sum_s{};
        down(of, column, [&](int64_t place) {
            const V own = load(slope + place), d = gated(own, own * load(c + place));
            sum_d += d;
            sum_s += load(s + place);
            store(c + place, d);
        });
        const V mean = ratio(sum_d, sum_s);
        down(of, column, [&](int64_t place) { store(c + place, load(c + place) - load(s + place) * mean); });
    }
}

void share(Matrix of, const double* q, const double* scale, const double* mass, bool beside, double* __restrict e) {
    for (int64_t c = 0; c < of.columns; c += W) {
        const V factor = load(scale + c) * load(mass + c);
        down(of, c, [&](int64_t place) {
            const V own = load(q + place) * factor;
            store(e + place, beside ? load(e + place) + own : own);
        });
    }
}

}  // namespace bellmax::BELLMAX_ARCH
