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
    std::atomic<bool> all_good{true};
    for_sweeps(problem, tape, [&](const Sweep<S>& sweep) {
        bool good = true;
        sweep.up([&](const Tile& tile) {
            if (tile.node == 0 && !sweep.graph.tail_offset) {
                std::fill_n(sweep.value, sweep.rows, 0.0);
                std::fill_n(sweep.threshold, sweep.rows, 0.0);
            } else {
                sweep.score(tile);
                good &= sweep.omega.solve(tile.matrix, sweep.x.get(), sweep.value + tile.place,
                                          sweep.threshold + tile.place);
            }
        });
        sweep.write_tape(tape);
        for (int64_t r = 0; r < sweep.rows; ++r) {
            const S own = value[sweep.first + r] = S(sweep.value[sweep.root() + r] / sweep.omega.unit);
            good &= own < infinity<S>;
        }
        if (!good) all_good = false;
    });
    return all_good;
}

bool are_zero(const Tile& tile, const Array<double>& of_nodes) {
    return std::all_of(&of_nodes[tile.place], &of_nodes[tile.place] + tile.used, [](double own) { return own == 0; });
}

// From the root, where `mass` begins, to the tails. source(tile) leaves the source in e; it may need s, and use y.
// is_silent(tile): it would be 0.
template <class S, class IsSilent, class Source>
void sweep_back(const Sweep<S>& sweep, const Array<double>& mass, S* by_weight, IsSilent is_silent, Source source) {
    constexpr bool has_source = !std::is_same_v<Source, std::nullptr_t>;
    const Hypergraph& graph = sweep.graph;
    const bool is_shared = graph.weight != graph.edge;  // what edges share is added up
    const Array<double> sums = zeros<double>(is_shared ? graph.num_weights * sweep.rows : 0);
    double* const e = sweep.e.get();
    sweep.down([&](const Tile& tile) {
        if (are_zero(tile, mass) && is_silent(tile)) {
            std::fill_n(e, tile.matrix.size(), 0.0);
        } else {
            sweep.weigh(tile, has_source);
            if constexpr (has_source) {
                source(tile);
            } else if (!is_shared) {
                double part[most_columns];
                node::shares(tile.matrix, sweep.q.get(), &mass[tile.place], part);
                return sweep.deliver(tile, sweep.q.get(), part, mass.get(), by_weight);
            }
            node::share(tile.matrix, sweep.q.get(), &mass[tile.place], has_source, e);
            sweep.spread(tile, e, mass.get());
        }
        if (is_shared) {
            sweep.add_up(tile, e, sums.get());
        } else {
            sweep.scatter(tile, e, graph.weight, graph.num_weights, by_weight);
        }
    });
    if (is_shared) sweep.write_rows(sums.get(), graph.num_weights, by_weight);
}

template <class S>
void backward(const HyperProblem<S>& problem, const S* seed, S* by_weight) {
    for_sweeps(problem, nullptr, [&](const Sweep<S>& sweep) {
        const Array<double> mass = sweep.at_root(seed);
        sweep_back(sweep, mass, by_weight, [](const Tile&) { return true; }, nullptr);
    });
}

// Along a direction z: the change of every node's value, and its mean (node.h).
template <class S>
class Tangent {
    const Sweep<S>& sweep;
    const Named<S> z;
    const Array<double> value;

public:
    const Array<double> mean;

    Tangent(const Sweep<S>& own, const S* direction)
        : sweep(own), z(own.by_weight(direction)), value(own.zero_nodes()), mean(own.zero_nodes()) {
        sweep.up([&](const Tile& tile) {
            sweep.weigh(tile, true);
            gather(tile);
            node::change(tile.matrix, sweep.q.get(), sweep.s.get(), sweep.y.get(), &value[tile.place], &mean[tile.place]);
        });
    }

    // y of a tile.
    void gather(const Tile& tile) const {
        sweep.gather(tile, z, value.get(), 0, sweep.y.get());
    }
};

template <class S>
void hessian(const HyperProblem<S>& problem, const S* seed, const S* z, S* by_weight) {
    for_sweeps(problem, nullptr, [&](const Sweep<S>& sweep) {
        const Tangent<S> tangent(sweep, z);
        // The source is the change of q, times the mass that Algorithm 1 brings to the node, which runs beside.
        const Array<double> first = sweep.at_root(seed), mass = sweep.zero_nodes();
        const auto source = [&](const Tile& tile) {
            double* const y = sweep.y.get();
            tangent.gather(tile);
            node::along(tile.matrix, sweep.s.get(), y, &tangent.mean[tile.place], &first[tile.place], sweep.e.get());
            node::share(tile.matrix, sweep.q.get(), &first[tile.place], false, y);
            sweep.spread(tile, y, first.get());
        };
        sweep_back(sweep, mass, by_weight, [&](const Tile& tile) { return are_zero(tile, first); }, source);
    });
}

// Writes what map(tile), which finds the scores in x, leaves in e for every edge.
template <class S, class Map>
void map_edges(const Sweep<S>& sweep, S* by_edge, Map map) {
    sweep.up([&](const Tile& tile) {
        sweep.score(tile);
        map(tile);
        sweep.scatter(tile, sweep.e.get(), sweep.graph.edge, sweep.graph.num_edges, by_edge);
    });
}

template <class S>
void log_transitions(const HyperProblem<S>& problem, S* by_edge) {
    for_sweeps(problem, nullptr, [&](const Sweep<S>& sweep) {
        map_edges(sweep, by_edge, [&](const Tile& tile) {
            sweep.omega.log_q(tile.matrix, sweep.x.get(), sweep.threshold + tile.place, sweep.e.get());
        });
    });
}

template <class S>
void log_transitions_jvp(const HyperProblem<S>& problem, const S* z, S* by_edge) {
    for_sweeps(problem, nullptr, [&](const Sweep<S>& sweep) {
        const Tangent<S> tangent(sweep, z);
        map_edges(sweep, by_edge, [&](const Tile& tile) {
            double* const slope = sweep.q.get();
            sweep.omega.log_slope(tile.matrix, sweep.x.get(), sweep.threshold + tile.place, slope);
            tangent.gather(tile);
            node::along(tile.matrix, slope, sweep.y.get(), &tangent.mean[tile.place], nullptr, sweep.e.get());
        });
    });
}

template <class S>
void log_transitions_vjp(const HyperProblem<S>& problem, const S* cotangent_by_edge, S* by_weight) {
    for_sweeps(problem, nullptr, [&](const Sweep<S>& sweep) {
        const Array<double> mass = sweep.zero_nodes();
        const Named<S> cotangent = sweep.by_edge(cotangent_by_edge);
        // The source is the cotangent of log q, as one of the scores.
        const auto source = [&](const Tile& tile) {
            double *const e = sweep.e.get(), *const slope = sweep.y.get();
            sweep.omega.log_slope(tile.matrix, sweep.x.get(), sweep.threshold + tile.place, slope);
            sweep.gather(tile, cotangent, nullptr, 0, e);
            node::log_q_vjp(tile.matrix, slope, sweep.s.get(), e);
        };
        sweep_back(sweep, mass, by_weight, [](const Tile&) { return false; }, source);
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
