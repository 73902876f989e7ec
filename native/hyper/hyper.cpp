// The sweeps of any stored graph (Algorithms 1 and 2 of the paper, with any number of tails an edge).
//
// Backward, the second half of the Hessian product and the transpose of log q are one sweep: mass runs from the root to
// the tails, e = source + q · mass on each edge, and they differ in the source and in where mass begins.
#include "hyper.h"

#include <atomic>

#include "sweep.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

template <class S>
bool forward(const HyperProblem<S>& problem, S* value, double* tape) {
    HyperProblem<S> own = problem;
    own.tape = tape;
    std::atomic<bool> all_good{true};
    for_sweeps(own, [&](Sweep<S>& sweep) {
        bool good = true;
        double *const values = sweep.found(tape), *const thresholds = values + sweep.num_numbers;
        sweep.up([&](const Tile& tile) {
            Heads found, threshold;
            if (tile.node > 0 || sweep.graph.tail_offset) {
                sweep.score(tile);
                good &= sweep.omega.solve(tile.matrix, sweep.x.get(), found, threshold);
            } else {
                std::fill_n(found.number, most_columns, 0.0);
                std::fill_n(threshold.number, most_columns, 0.0);
            }
            std::copy_n(found.number, tile.used, values + tile.node * sweep.rows);
            std::copy_n(threshold.number, tile.used, thresholds + tile.node * sweep.rows);
        });
        sweep.write_tape(tape);
        const double* const root = values + sweep.num_numbers - sweep.rows;
        for (int64_t r = 0; r < sweep.rows; ++r) value[sweep.first + r] = S(root[r] / sweep.omega.unit);
        if (!good) all_good = false;
    });
    return all_good;
}

// Where a sweep leaves what it finds by weight: what edges share is added up.
template <class S>
class Sink {
    const Sweep<S>& sweep;
    S* const out;
    const bool is_shared = sweep.graph.weight != sweep.graph.edge;
    const Array<double> sums = zeros<double>(is_shared ? sweep.graph.num_weights * sweep.rows : 0);

public:
    Sink(const Sweep<S>& own, S* by_weight) : sweep(own), out(by_weight) {}

    void put(const Tile& tile, const double* e) {
        if (is_shared) return sweep.spread(tile, e, nullptr, sweep.graph.weight, sums.get());
        sweep.scatter(tile, e, sweep.graph.weight, out, sweep.graph.num_weights);
    }
    void finish() {
        for (int64_t w = 0; is_shared && w < sweep.graph.num_weights; ++w) {
            for (int64_t r = 0; r < sweep.rows; ++r) {
                out[(sweep.first + r) * sweep.graph.num_weights + w] = S(sums[w * sweep.rows + r]);
            }
        }
    }
};

// Numbers of nodes, 0 but for the root's.
template <class S>
Array<double> at_root(const Sweep<S>& sweep, const S* seed) {
    Array<double> mass = sweep.zero_nodes();
    for (int64_t r = 0; r < sweep.rows; ++r) mass[sweep.num_numbers - sweep.rows + r] = seed[sweep.first + r];
    return mass;
}

// From the root, where `mass` begins, to the tails. source(tile, scale of q) leaves the source in e, and may use y;
// is_silent(tile): it would be 0.
template <class S, class IsSilent, class Source>
void sweep_back(Sweep<S>& sweep, double* mass, S* by_weight, IsSilent is_silent, Source source) {
    constexpr bool has_source = !std::is_same_v<Source, std::nullptr_t>;
    Sink<S> sink(sweep, by_weight);
    double* const e = sweep.e.get();
    sweep.down([&](const Tile& tile) {
        const Heads held(mass + tile.node * sweep.rows, tile);
        if (held.are_zero(tile) && is_silent(tile)) {
            std::fill_n(e, tile.matrix.size(), 0.0);
        } else {
            const Heads scale = sweep.weigh(tile, has_source);
            if constexpr (has_source) source(tile, scale);
            share(tile.matrix, sweep.q.get(), scale, held, has_source, e);
            sweep.spread_to_tails(tile, e, mass);
        }
        sink.put(tile, e);
    });
    sink.finish();
}

template <class S>
void backward(const HyperProblem<S>& problem, const S* seed, S* by_weight) {
    for_sweeps(problem, [&](Sweep<S>& sweep) {
        sweep.read_tape();
        const Array<double> mass = at_root(sweep, seed);
        sweep_back(sweep, mass.get(), by_weight, [](const Tile&) { return true; }, nullptr);
    });
}

// Along a direction z: the change of every node's value, and its mean (nodes.h).
template <class S>
class Tangent {
    const Sweep<S>& sweep;
    const S* const z;
    const Array<double> value, mean;

public:
    Tangent(const Sweep<S>& own, const S* direction)
        : sweep(own), z(direction), value(own.zero_nodes()), mean(own.zero_nodes()) {
        sweep.up([&](const Tile& tile) {
            const Heads scale = sweep.weigh(tile, true);
            Heads changed, middle;
            gather(tile);
            change(tile.matrix, sweep.q.get(), scale, sweep.s.get(), sweep.y.get(), changed, middle);
            std::copy_n(changed.number, tile.used, &value[tile.node * sweep.rows]);
            std::copy_n(middle.number, tile.used, &mean[tile.node * sweep.rows]);
        });
    }

    // y of a tile, and its mean.
    Heads gather(const Tile& tile) const {
        sweep.gather(tile, z, sweep.graph.num_weights, sweep.graph.weight, 1, value.get(), 0, sweep.y.get());
        return Heads(&mean[tile.node * sweep.rows], tile);
    }
};

template <class S>
void hessian(const HyperProblem<S>& problem, const S* seed, const S* z, S* by_weight) {
    for_sweeps(problem, [&](Sweep<S>& sweep) {
        sweep.read_tape();
        const Tangent<S> tangent(sweep, z);
        // The source is the change of q, times the mass that Algorithm 1 brings to the node, which runs beside.
        const Array<double> first = at_root(sweep, seed), mass = sweep.zero_nodes();
        const auto held = [&](const Tile& tile) { return Heads(&first[tile.node * sweep.rows], tile); };
        const auto source = [&](const Tile& tile, const Heads& scale) {
            const Heads own = held(tile), mean = tangent.gather(tile);
            double* const y = sweep.y.get();
            along(tile.matrix, sweep.s.get(), y, mean, own, sweep.e.get());
            share(tile.matrix, sweep.q.get(), scale, own, false, y);
            sweep.spread_to_tails(tile, y, first.get());
        };
        sweep_back(sweep, mass.get(), by_weight, [&](const Tile& tile) { return held(tile).are_zero(tile); }, source);
    });
}

// Writes what map(tile, its thresholds), which finds the scores in x, leaves in e for every edge.
template <class S, class Map>
void map_edges(Sweep<S>& sweep, S* by_edge, Map map) {
    sweep.up([&](const Tile& tile) {
        sweep.score(tile);
        map(tile, Heads(sweep.threshold + tile.node * sweep.rows, tile));
        sweep.scatter(tile, sweep.e.get(), sweep.graph.edge, by_edge, sweep.graph.num_edges);
    });
}

template <class S>
void log_transitions(const HyperProblem<S>& problem, S* by_edge) {
    for_sweeps(problem, [&](Sweep<S>& sweep) {
        sweep.read_tape();
        map_edges(sweep, by_edge, [&](const Tile& tile, const Heads& threshold) {
            sweep.omega.log_q(tile.matrix, sweep.x.get(), threshold, sweep.e.get());
        });
    });
}

template <class S>
void log_transitions_jvp(const HyperProblem<S>& problem, const S* z, S* by_edge) {
    for_sweeps(problem, [&](Sweep<S>& sweep) {
        sweep.read_tape();
        const Tangent<S> tangent(sweep, z);
        map_edges(sweep, by_edge, [&](const Tile& tile, const Heads& threshold) {
            sweep.omega.log_slope(tile.matrix, sweep.x.get(), threshold, sweep.q.get());
            const Heads mean = tangent.gather(tile);
            along(tile.matrix, sweep.q.get(), sweep.y.get(), mean, nullptr, sweep.e.get());
        });
    });
}

template <class S>
void log_transitions_vjp(const HyperProblem<S>& problem, const S* cotangent_by_edge, S* by_weight) {
    for_sweeps(problem, [&](Sweep<S>& sweep) {
        sweep.read_tape();
        const Array<double> mass = sweep.zero_nodes();
        // The source is the cotangent of log q, as one of the scores.
        const auto source = [&](const Tile& tile, const Heads&) {
            const Heads threshold(sweep.threshold + tile.node * sweep.rows, tile);
            double *const e = sweep.e.get(), *const slope = sweep.y.get();
            sweep.omega.log_slope(tile.matrix, sweep.x.get(), threshold, slope);
            sweep.gather(tile, cotangent_by_edge, sweep.graph.num_edges, sweep.graph.edge, 1, nullptr, 0, e);
            log_q_vjp(tile.matrix, slope, sweep.s.get(), e);
        };
        sweep_back(sweep, mass.get(), by_weight, [](const Tile&) { return false; }, source);
    });
}

}  // namespace

template <class S>
HyperKernels<S> hyper_kernels() {
    return {forward<S>,         backward<S>,         hessian<S>, log_transitions<S>, log_transitions_jvp<S>,
            log_transitions_vjp<S>, sample<S>, topk<S>};
}

template HyperKernels<float> hyper_kernels<float>();
template HyperKernels<double> hyper_kernels<double>();

}  // namespace bellmax::BELLMAX_ARCH
