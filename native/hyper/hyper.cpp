// The sweeps of any stored graph (Algorithms 1 and 2 of the paper, with any number of tails an edge).
//
// Backward, the second half of the Hessian product and the transpose of log q are one sweep: mass runs from the root to
// the tails, e = source + q · mass on each edge, and they differ in the source and in where mass begins.
#include "hyper.h"

#include <atomic>

#include "trellis.h"

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
template <class AnySweep, class IsSilent, class Source>
void sweep_back(const AnySweep& sweep, const Array<double>& mass, const typename AnySweep::Results& results,
                IsSilent is_silent, Source source) {
    constexpr bool has_source = !std::is_same_v<Source, std::nullptr_t>;
    double* const e = sweep.e.get();
    sweep.down([&](const Tile& tile) {
        if (are_zero(tile, mass) && is_silent(tile)) {
            if (results.is_shared) return;  // there is nothing to add
            std::fill_n(e, tile.matrix.size(), 0.0);
        } else {
            sweep.weigh(tile, has_source);
            if constexpr (has_source) {
                source(tile);
            } else if (!results.is_shared) {
                double part[most_columns];
                node::shares(tile.matrix, sweep.q.get(), &mass[tile.place], part);
                return sweep.deliver(tile, sweep.q.get(), part, mass.get(), results.results);
            }
            node::share(tile.matrix, sweep.q.get(), &mass[tile.place], has_source, e);
            sweep.spread(tile, e, mass.get());
        }
        results.write(tile);
    });
    results.finish();
}

template <class S>
void backward(const HyperProblem<S>& problem, const S* seed, S* by_weight) {
    for_sweeps(problem, nullptr, [&](const Sweep<S>& sweep) {
        const Array<double> mass = sweep.at_root(seed);
        sweep_back(sweep, mass, {sweep, by_weight}, [](const Tile&) { return true; }, nullptr);
    });
}

// Along a direction z: the change of every node's value, and its mean (node.h).
template <class AnySweep>
class NodeTangents {
    const AnySweep& sweep;
    const typename AnySweep::Numbers z;
    const Array<double> value;

public:
    const Array<double> mean;

    // visit(tile, mean) may read x, q, s and y of the tile.
    template <class Visit>
    NodeTangents(const AnySweep& own, const typename AnySweep::Real* direction, Visit visit)
        : sweep(own), z(own.by_weight(direction)), value(own.zero_nodes()), mean(own.zero_nodes()) {
        sweep.up([&](const Tile& tile) {
            sweep.weigh(tile, true);
            gather(tile);
            node::change(tile.matrix, sweep.q.get(), sweep.s.get(), sweep.y.get(), &value[tile.place],
                         &mean[tile.place]);
            visit(tile, &mean[tile.place]);
        });
    }

    // y of a tile.
    void gather(const Tile& tile) const { sweep.gather(tile, z, value.get(), sweep.y.get()); }
};

template <class S>
void hessian(const HyperProblem<S>& problem, const S* seed, const S* z, S* by_weight) {
    for_sweeps(problem, nullptr, [&](const Sweep<S>& sweep) {
        const NodeTangents<Sweep<S>> tangent(sweep, z, [](const Tile&, const double*) {});
        // The source is the change of q, times the mass of the node, which Algorithm 1 computes in the same loop.
        const Array<double> first = sweep.at_root(seed), mass = sweep.zero_nodes();
        const auto source = [&](const Tile& tile) {
            double* const y = sweep.y.get();
            tangent.gather(tile);
            node::along(tile.matrix, sweep.s.get(), y, &tangent.mean[tile.place], &first[tile.place], sweep.e.get());
            node::share(tile.matrix, sweep.q.get(), &first[tile.place], false, y);
            sweep.spread(tile, y, first.get());
        };
        const auto is_silent = [&](const Tile& tile) { return are_zero(tile, first); };
        sweep_back(sweep, mass, {sweep, by_weight}, is_silent, source);
    });
}

// --- log q, of stored graphs and of chains

template <class AnySweep, class S>
void find_log_q(const AnySweep& sweep, S* by_edge) {
    sweep.up([&](const Tile& tile) {
        sweep.score(tile);
        sweep.omega.log_q(tile.matrix, sweep.x.get(), sweep.thresholds(tile), sweep.e.get());
        sweep.write_edges(tile, by_edge);
    });
}

template <class AnySweep, class S>
void find_log_q_jvp(const AnySweep& sweep, const S* z, S* by_edge) {
    const NodeTangents<AnySweep> tangent(sweep, z, [&](const Tile& tile, const double* mean) {
        double* const slope = sweep.q.get();
        sweep.omega.log_slope(tile.matrix, sweep.x.get(), sweep.thresholds(tile), slope);
        node::along(tile.matrix, slope, sweep.y.get(), mean, nullptr, sweep.e.get());
        sweep.write_edges(tile, by_edge);
    });
}

template <class AnySweep, class S>
void find_log_q_vjp(const AnySweep& sweep, const S* cotangent_by_edge, S* by_weight) {
    const Array<double> mass = sweep.zero_nodes();
    const typename AnySweep::Numbers cotangent = sweep.by_edge(cotangent_by_edge);
    // The source is the cotangent of log q, as one of the scores.
    const auto source = [&](const Tile& tile) {
        double *const e = sweep.e.get(), *const slope = sweep.y.get();
        sweep.omega.log_slope(tile.matrix, sweep.x.get(), sweep.thresholds(tile), slope);
        sweep.gather(tile, cotangent, nullptr, e);
        node::log_q_vjp(tile.matrix, slope, sweep.s.get(), e);
    };
    sweep_back(sweep, mass, {sweep, by_weight}, [](const Tile&) { return false; }, source);
}

template <class S>
void log_transitions(const HyperProblem<S>& problem, S* by_edge) {
    for_sweeps(problem, nullptr, [&](const Sweep<S>& sweep) { find_log_q(sweep, by_edge); });
}

template <class S>
void log_transitions_jvp(const HyperProblem<S>& problem, const S* z, S* by_edge) {
    for_sweeps(problem, nullptr, [&](const Sweep<S>& sweep) { find_log_q_jvp(sweep, z, by_edge); });
}

template <class S>
void log_transitions_vjp(const HyperProblem<S>& problem, const S* cotangent, S* by_weight) {
    for_sweeps(problem, nullptr, [&](const Sweep<S>& sweep) { find_log_q_vjp(sweep, cotangent, by_weight); });
}

// body(sweep) for each sequence of dense chains. `out` is shaped like the potentials. It becomes 0 at masked steps, and
// `unused` for edges into the first step that no path takes.
template <class S, class Body>
void for_chains(const ScoresProblem<S>& problem, S unused, S* out, Body body) {
    const std::unique_ptr<node::Kernels> omega = node::kernels(problem.omega, false);
    parallel_for(problem.batch, problem.threads, [&](int64_t b, int) {
        clear_masked(problem, b, out + b * problem.transition_batch, problem.transition_step);
        if (!problem.lengths[b]) return;
        const TrellisSweep<S> sweep(problem, b, *omega, true);
        std::fill_n(out + sweep.graph.offset(0, 0), problem.transition_step, unused);
        body(sweep);
    });
}

}  // namespace

template <class S>
void log_transitions(const ScoresProblem<S>& problem, S* log_q) {
    for_chains(problem, -infinity<S>, log_q, [&](const TrellisSweep<S>& sweep) { find_log_q(sweep, log_q); });
}

template <class S>
void log_transitions_jvp(const ScoresProblem<S>& problem, const S* z, S* product) {
    for_chains(problem, S(0), product, [&](const TrellisSweep<S>& sweep) { find_log_q_jvp(sweep, z, product); });
}

template <class S>
void log_transitions_vjp(const ScoresProblem<S>& problem, const S* cotangent, S* product) {
    for_chains(problem, S(0), product, [&](const TrellisSweep<S>& sweep) {
        find_log_q_vjp(sweep, cotangent, product);
    });
}

template void log_transitions<float>(const ScoresProblem<float>&, float*);
template void log_transitions<double>(const ScoresProblem<double>&, double*);
template void log_transitions_jvp<float>(const ScoresProblem<float>&, const float*, float*);
template void log_transitions_jvp<double>(const ScoresProblem<double>&, const double*, double*);
template void log_transitions_vjp<float>(const ScoresProblem<float>&, const float*, float*);
template void log_transitions_vjp<double>(const ScoresProblem<double>&, const double*, double*);

template <class S>
HyperKernels<S> hyper_kernels() {
    return {forward<S>,         backward<S>,         hessian<S>, log_transitions<S>, log_transitions_jvp<S>,
            log_transitions_vjp<S>, sample<S>, topk<S>, max_marginals<S>};
}

template HyperKernels<float> hyper_kernels<float>();
template HyperKernels<double> hyper_kernels<double>();

}  // namespace bellmax::BELLMAX_ARCH
