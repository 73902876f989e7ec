#include "node.h"

#include "omega/list.h"

namespace bellmax::BELLMAX_ARCH::node {
namespace {

using std::int64_t;
using V = Vec<double>;
constexpr int W = lanes_of<double>;

// x where the gate is not 0, and 0 elsewhere, whatever x is there.
V gated(V gate, V x) { return gate != V{} ? x : V{}; }

// a / b where b > 0, and 0 elsewhere.
V ratio(V a, V b) { return b > V{} ? a / b : V{}; }

// body(place) for the edges of W nodes; the place belongs to the first node.
template <class Body>
void for_edges(Matrix of, int64_t column, Body body) {
    for (int64_t k = 0, place = column; k < of.edges; ++k, place += of.columns) body(place);
}

// A vector as Ω computes with it is the doubles of W nodes for one edge, or their floats for two.
V first_edge(V v) { return v; }
V first_edge(Vec<float> v) { return convert<double, float>(shuffled<0, 1, 2, 3>(v, v)); }
V second_edge(Vec<float> v) { return convert<double, float>(shuffled<4, 5, 6, 7>(v, v)); }
Vec<float> two_edges(V first, V second) {
    const Part<float, 4> low = convert<float, double>(first), high = convert<float, double>(second);
    return shuffled<0, 1, 2, 3, 4, 5, 6, 7>(low, high);
}

// The scores of W nodes, less `base`, in Ω's precision.
template <class Real>
struct NodeScores {
    static constexpr int64_t at_once = lanes_of<Real> / W;
    Matrix of;
    const double* x;
    V base;

    Vec<Real> read(int64_t k) const {
        const V own = load(x + k * of.columns) - base;
        if constexpr (at_once == 1) return own;
        else return two_edges(own, k + 1 < of.edges ? load(x + (k + 1) * of.columns) - base : V{} - infinity<double>);
    }
    void write(double* to, int64_t k, Vec<Real> v) const {
        store(to + k * of.columns, first_edge(v));
        if constexpr (at_once == 2) {
            if (k + 1 < of.edges) store(to + (k + 1) * of.columns, second_edge(v));
        }
    }

    // As Ω asks for it (omega/omega.h). Of floats: plain over a stretch, double over the stretches.
    template <bool least = false, int K, class Term>
    void sum(Vec<Real>, Vec<Real> at, Vec<Real> (&totals)[K], Term term) const {
        if constexpr (at_once == 1) {
            omega::Columns<V, double>{x, of.columns, of.edges}.template sum<least>(base, at, totals, term);
        } else {
            static_assert(K == 1 && !least);
            constexpr int64_t stretch = 64;
            V all{};
            for (int64_t begin = 0; begin < of.edges; begin += stretch) {
                Vec<Real> sums[1] = {};
                for (int64_t k = begin; k < of.edges && k < begin + stretch; k += 2) term(read(k), at, sums);
                all += first_edge(sums[0]) + second_edge(sums[0]);
            }
            totals[0] = two_edges(all, all);
        }
    }
};

template <class Omega>
class KernelsOf final : public Kernels {
    using Real = typename Omega::Real;
    using R = Vec<Real>;
    const Omega omega;

    // body(r, τ, write) for all edges: r and τ as Ω takes them, relative to the greatest score, since weights may be so
    // large that they swallow a threshold; write(out, result).
    template <class Body>
    static void map(Matrix of, const double* x, const double* threshold, Body body) {
        for (int64_t c = 0; c < of.columns; c += W) {
            const V own = load(threshold + c);
            V top = V{} - infinity<double>;
            for_edges(of, c, [&](int64_t place) { top = greater<double>(load(x + place), top); });
            const NodeScores<Real> scores{of, x + c, top > V{} - infinity<double> ? top : V{}};
            R tau;
            if constexpr (NodeScores<Real>::at_once == 1) tau = own;
            else tau = two_edges(own, own);
            for (int64_t k = 0; k < of.edges; k += scores.at_once) {
                R r = scores.read(k);
                if constexpr (Omega::by_slot) r = own == V{} + double(k) ? V{} : V{} - infinity<double>;
                body(r, tau, [=, &scores](double* out, R result) { scores.write(out + c, k, result); });
            }
        }
    }

public:
    explicit KernelsOf(const Omega& own) : Kernels(own.unit, double(own.reach())), omega(own) {}

    bool solve(Matrix of, const double* x, double* value, double* threshold) const override {
        const V none = V{} - infinity<double>, highest = V{} + infinity<double>;
        auto bad = highest < highest;
        for (int64_t c = 0; c < of.columns; c += W) {
            V top = none, best = V{} - 1, slot{};
            for_edges(of, c, [&](int64_t place) {
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
                R tau, above;
                omega.solve(NodeScores<Real>{of, x + c, base}, R{}, tau, above);
                store(value + c, is_reached ? base + first_edge(above) : none);
                store(threshold + c, is_reached ? first_edge(tau) : V{});
            }
        }
        return !any(bad);
    }

    void weigh(Matrix of, const double* x, const double* threshold, double* q, double* s) const override {
        map(of, x, threshold, [own = omega, q, s](R r, R tau, auto write) {
            R edge_q, edge_s;
            own.weigh(r, tau, edge_q, edge_s);
            write(q, edge_q);
            if (s) write(s, edge_s);
        });
    }
    void log_q(Matrix of, const double* x, const double* threshold, double* out) const override {
        map(of, x, threshold, [own = omega, out](R r, R tau, auto write) { write(out, own.log_q(r, tau)); });
    }
    void log_slope(Matrix of, const double* x, const double* threshold, double* out) const override {
        map(of, x, threshold, [own = omega, out](R r, R tau, auto write) { write(out, own.log_slope(r, tau)); });
    }
};

}  // namespace

std::unique_ptr<Kernels> kernels(OmegaParameters parameters, bool is_float) {
    const auto make = [](const auto& omega) -> std::unique_ptr<Kernels> {
        return std::make_unique<KernelsOf<std::decay_t<decltype(omega)>>>(omega);
    };
    // The exponentials of floats take a quarter of the time. The other Ω take little, and are double.
    if (is_float && parameters.is_sum) return make(omega::Negentropy<float>(parameters));
    return omega::with<double>(parameters, make);
}

void change(Matrix of, const double* q, const double* s, const double* y, double* value, double* mean) {
    for (int64_t c = 0; c < of.columns; c += W) {
        V sum_q{}, sum_qy{}, sum_s{}, sum_sy{};
        for_edges(of, c, [&](int64_t place) {
            const V own_q = load(q + place), own_s = load(s + place), own_y = load(y + place);
            sum_q += own_q;
            sum_qy += gated(own_q, own_q * own_y);
            sum_s += own_s;
            sum_sy += gated(own_s, own_s * own_y);
        });
        store(value + c, ratio(sum_qy, sum_q));
        store(mean + c, ratio(sum_sy, sum_s));
    }
}

void along(Matrix of, const double* slope, const double* y, const double* mean, const double* mass,
           double* __restrict e) {
    for (int64_t c = 0; c < of.columns; c += W) {
        const V middle = load(mean + c), held = mass ? load(mass + c) : V{} + 1;
        for_edges(of, c, [&](int64_t place) {
            const V own = gated(held, load(slope + place));
            store(e + place, gated(own, own * (load(y + place) - middle) * held));
        });
    }
}

void log_q_vjp(Matrix of, const double* slope, const double* s, double* __restrict c) {
    for (int64_t column = 0; column < of.columns; column += W) {
        V sum_d{}, sum_s{};
        for_edges(of, column, [&](int64_t place) {
            const V own = load(slope + place), d = gated(own, own * load(c + place));
            sum_d += d;
            sum_s += load(s + place);
            store(c + place, d);
        });
        const V mean = ratio(sum_d, sum_s);
        for_edges(of, column, [&](int64_t place) { store(c + place, load(c + place) - load(s + place) * mean); });
    }
}

static V share_of(Matrix of, const double* q, const double* mass, int64_t c) {
    V sum{};
    for_edges(of, c, [&](int64_t place) { sum += load(q + place); });
    return ratio(load(mass + c), sum);
}

void shares(Matrix of, const double* q, const double* mass, double* part) {
    for (int64_t c = 0; c < of.columns; c += W) store(part + c, share_of(of, q, mass, c));
}

void share(Matrix of, const double* q, const double* mass, bool adds, double* __restrict e) {
    for (int64_t c = 0; c < of.columns; c += W) {
        const V part = share_of(of, q, mass, c);
        for_edges(of, c, [&](int64_t place) {
            const V own = load(q + place) * part;
            store(e + place, adds ? load(e + place) + own : own);
        });
    }
}

}  // namespace bellmax::BELLMAX_ARCH::node
