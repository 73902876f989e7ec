// The sweeps of any stored graph (Algorithms 1 and 2 of the paper, with any number of tails an edge).
//
// Backward, the second half of the Hessian product and the transpose of log q are one sweep: mass runs from the root to
// the tails, e = source + q · mass on each edge, and they differ in the source and in where mass begins.
#include "hyper.h"

#include <atomic>
#include <type_traits>

#include "../base/threads.h"
#include "../node.h"
#include "derivations.h"
#include "layouts.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

using std::int64_t;

// Runs body(Ω, layout) for the units of the batch over the threads.
template <class S, class Body>
void for_units(const HyperProblem<S>& problem, Body body) {
    const auto run = [&](auto omega) {
        constexpr int W = node::lanes<decltype(omega)>;
        constexpr int64_t worth_lanes = 3;  // with fewer rows, most lanes would repeat others
        if (problem.batch < worth_lanes) {
            parallel_for(problem.batch, problem.threads, [&](int64_t row, int) { body(omega, Along<W>{row}); });
        } else {
            parallel_for((problem.batch + W - 1) / W, problem.threads,
                         [&](int64_t n, int) { body(omega, Across<W>{n * W}); });
        }
    };
    // Negentropy is all exponentials, and wants eight lanes for float.
    if (problem.omega.alpha == 1) return run(omega::Negentropy<S>(problem.omega));
    omega::with<double>(problem.omega, run);
}

// What a sweep knows of the nodes, `per_node` numbers each, and room for the edges into one.
template <class S, class Omega, class Layout>
struct Sweep {
    static constexpr bool together = Layout::together;
    static constexpr int W = node::lanes<Omega>;
    using Numbers = Array<double>;

    const HyperProblem<S>& problem;
    const Hypergraph& graph;
    Omega omega;
    Layout layout;
    typename Layout::template View<const S> theta;
    Numbers tape;
    double *value, *base, *tau;
    Numbers x, q, s, y, e;  // of the run

    Sweep(const HyperProblem<S>& of, Omega own, Layout lanes)
        : problem(of),
          graph(of.graph),
          omega(own),
          layout(lanes),
          theta(weights(of.theta)),
          tape(nodes(3)),
          value(tape.get()),
          base(value + graph.num_nodes * Layout::per_node),
          tau(base + graph.num_nodes * Layout::per_node),
          x(edges()), q(edges()), s(edges()), y(edges()), e(edges()) {}

    Numbers nodes(int64_t numbers) const {
        return scratch<double>(numbers * graph.num_nodes * Layout::per_node + Layout::past_the_end);
    }
    Numbers zero_nodes() const { return zeros<double>(graph.num_nodes * Layout::per_node + Layout::past_the_end); }
    Numbers edges() const { return scratch<double>(Layout::vectors(graph.most_edges) * W); }

    template <class T>
    auto weights(T* data) const {
        return layout.view(data, graph.num_weights, problem.batch);
    }
    template <class T>
    auto by_edge(T* data) const {
        return layout.view(data, graph.num_edges, problem.batch);
    }
    template <class T>
    auto by_row(T* data) const {
        return layout.view(data, 1, problem.batch);
    }

    void read_tape() {
        const auto from = layout.view(problem.tape, 3 * graph.num_nodes, problem.batch);
        for (int64_t i = 0; i < 3 * graph.num_nodes; ++i) layout.put(value, i, from.read(i));
    }
    void write_tape(double* out) const {
        const auto to = layout.view(out, 3 * graph.num_nodes, problem.batch);
        for (int64_t i = 0; i < 3 * graph.num_nodes; ++i) to.write(i, layout.at(value, i));
    }

    void score(const Run& run) {
        layout.gather(run, theta, node::unit<Omega>, value, -infinity<double>, x.get());
    }
    template <bool with_s>
    void weigh(const Run& run, int64_t i) {
        score(run);
        node::weigh<together, with_s>(omega, x.get(), layout.vectors(run.edges), layout.at(base, i), layout.at(tau, i),
                                      q.get(), s.get());
    }
};

template <class S>
bool forward(const HyperProblem<S>& problem, S* value, double* tape) {
    std::atomic<bool> all_good{true};
    for_units(problem, [&](auto omega, auto layout) {
        using Omega = decltype(omega);
        Sweep<S, Omega, decltype(layout)> sweep(problem, omega, layout);
        constexpr int W = node::lanes<Omega>;
        const auto room = scratch<typename Omega::Real>(layout.vectors(sweep.graph.most_edges) * W);
        bool good = true;
        for (int64_t i = 0; i < sweep.graph.num_nodes; ++i) {
            node::Solution<W> solved{};
            if (i > 0 || sweep.graph.tail_offset) {
                const Run run = run_into(sweep.graph, i);
                sweep.score(run);
                solved = node::solve<layout.together>(omega, sweep.x.get(), layout.vectors(run.edges), room.get(), good);
            }
            layout.put(sweep.value, i, solved.value);
            layout.put(sweep.base, i, solved.base);
            layout.put(sweep.tau, i, solved.tau);
        }
        sweep.write_tape(tape);
        const Wide<W> root = layout.at(sweep.value, sweep.graph.num_nodes - 1);
        sweep.by_row(value).write(0, root * wide<W>(1 / node::unit<Omega>));
        if (!good) all_good = false;
    });
    return all_good;
}

// Where the sweep leaves what it finds by weight: what edges share is added up.
template <class Sweep, class S>
class Sink {
    Sweep& sweep;
    using View = decltype(std::declval<Sweep>().weights(std::declval<S*>()));
    View out;
    Array<double> sums;

public:
    Sink(Sweep& own, S* data) : sweep(own), out(own.weights(data)) {
        const Hypergraph& graph = sweep.graph;
        if (graph.weight != graph.edge) {
            sums = zeros<double>(graph.num_weights * sweep.layout.per_node + sweep.layout.past_the_end);
        }
    }
    void put(const Run& run, const double* e) {
        if (sums) {
            sweep.layout.add(run, run.weight, e, sums.get());
        } else {
            sweep.layout.write(run, run.weight, e, out);
        }
    }
    void finish() {
        for (int64_t w = 0; sums && w < sweep.graph.num_weights; ++w) out.write(w, sweep.layout.at(sums.get(), w));
    }
};

// From the root, where `mass` begins, to the tails. source.fill(run, i) leaves the source in e, unless there is none;
// source.is_silent(i): it would be 0.
template <class Sweep, class Source, class S>
void sweep_back(Sweep& sweep, Source& source, Array<double>& mass, S* by_weight) {
    constexpr int W = Sweep::W;
    Sink<Sweep, S> sink(sweep, by_weight);
    double* const e = sweep.e.get();
    for (int64_t i = sweep.graph.num_nodes - 1; i >= 0; --i) {
        const Run run = run_into(sweep.graph, i);
        const int64_t count = sweep.layout.vectors(run.edges);
        const Wide<W> held = sweep.layout.at(mass.get(), i);
        if (is_zero(held) && source.is_silent(i)) {
            for (int64_t n = 0; n < count; ++n) store_wide(e + n * W, Wide<W>{});
        } else {
            sweep.template weigh<Source::exists>(run, i);
            if constexpr (Source::exists) source.fill(run, i);
            node::share<Source::exists>(sweep.q.get(), count, held, e);
            sweep.layout.spread(run, e, mass.get());
        }
        sink.put(run, e);
    }
    sink.finish();
}

struct NoSource {
    static constexpr bool exists = false;
    bool is_silent(int64_t) const { return true; }
};

template <class S>
void backward(const HyperProblem<S>& problem, const S* seed, S* by_weight) {
    for_units(problem, [&](auto omega, auto layout) {
        Sweep<S, decltype(omega), decltype(layout)> sweep(problem, omega, layout);
        sweep.read_tape();
        auto mass = sweep.zero_nodes();
        layout.put(mass.get(), sweep.graph.num_nodes - 1, sweep.by_row(seed).read(0));
        NoSource none;
        sweep_back(sweep, none, mass, by_weight);
    });
}

// Along a direction z: the change of every node's value, and its mean (node.h).
template <class Sweep, class S>
struct Tangent {
    Sweep& sweep;
    decltype(std::declval<Sweep>().weights(std::declval<const S*>())) z;
    Array<double> value, mean;

    Tangent(Sweep& own, const S* direction)
        : sweep(own), z(own.weights(direction)), value(own.zero_nodes()), mean(own.zero_nodes()) {
        for (int64_t i = 0; i < sweep.graph.num_nodes; ++i) {
            const Run run = run_into(sweep.graph, i);
            sweep.template weigh<true>(run, i);
            gather(run);
            const auto change = node::change<Sweep::together, Sweep::W>(sweep.q.get(), sweep.s.get(), sweep.y.get(),
                                                                      sweep.layout.vectors(run.edges));
            sweep.layout.put(value.get(), i, change.value);
            sweep.layout.put(mean.get(), i, change.mean);
        }
    }

    // y of a run.
    void gather(const Run& run) { sweep.layout.gather(run, z, 1, value.get(), 0, sweep.y.get()); }
};

// The change of q, times the mass that Algorithm 1 brings to the node, which runs beside.
template <class Sweep, class S>
struct ChangeOfQ {
    static constexpr bool exists = true;
    Sweep& sweep;
    Tangent<Sweep, S>& tangent;
    Array<double> mass;

    bool is_silent(int64_t i) const { return is_zero(sweep.layout.at(mass.get(), i)); }
    void fill(const Run& run, int64_t i) {
        const int64_t count = sweep.layout.vectors(run.edges);
        const auto held = sweep.layout.at(mass.get(), i);
        tangent.gather(run);
        node::change_of_q(sweep.s.get(), sweep.y.get(), count, sweep.layout.at(tangent.mean.get(), i), held, sweep.e.get());
        node::share<false>(sweep.q.get(), count, held, sweep.y.get());
        sweep.layout.spread(run, sweep.y.get(), mass.get());
    }
};

template <class S>
void hessian(const HyperProblem<S>& problem, const S* seed, const S* z, S* by_weight) {
    for_units(problem, [&](auto omega, auto layout) {
        using Own = Sweep<S, decltype(omega), decltype(layout)>;
        Own sweep(problem, omega, layout);
        sweep.read_tape();
        Tangent<Own, S> tangent(sweep, z);
        ChangeOfQ<Own, S> source{sweep, tangent, sweep.zero_nodes()};
        layout.put(source.mass.get(), sweep.graph.num_nodes - 1, sweep.by_row(seed).read(0));
        auto mass = sweep.zero_nodes();
        sweep_back(sweep, source, mass, by_weight);
    });
}

// Writes what map(run, i, e) leaves in e for every edge.
template <class Sweep, class S, class Map>
void map_edges(Sweep& sweep, S* by_edge, Map map) {
    const auto out = sweep.by_edge(by_edge);
    for (int64_t i = 0; i < sweep.graph.num_nodes; ++i) {
        const Run run = run_into(sweep.graph, i);
        sweep.score(run);
        sweep.layout.write(run, run.edge, map(run, i), out);
    }
}

template <class S>
void log_transitions(const HyperProblem<S>& problem, S* by_edge) {
    for_units(problem, [&](auto omega, auto layout) {
        Sweep<S, decltype(omega), decltype(layout)> sweep(problem, omega, layout);
        sweep.read_tape();
        map_edges(sweep, by_edge, [&](const Run& run, int64_t i) {
            node::log_q<layout.together>(omega, sweep.x.get(), layout.vectors(run.edges), layout.at(sweep.base, i),
                                         layout.at(sweep.tau, i), sweep.e.get());
            return sweep.e.get();
        });
    });
}

template <class S>
void log_transitions_jvp(const HyperProblem<S>& problem, const S* z, S* by_edge) {
    for_units(problem, [&](auto omega, auto layout) {
        using Own = Sweep<S, decltype(omega), decltype(layout)>;
        Own sweep(problem, omega, layout);
        sweep.read_tape();
        Tangent<Own, S> tangent(sweep, z);
        map_edges(sweep, by_edge, [&](const Run& run, int64_t i) {
            tangent.gather(run);
            node::log_q_jvp<layout.together>(omega, sweep.x.get(), layout.vectors(run.edges), layout.at(sweep.base, i),
                                             layout.at(sweep.tau, i), layout.at(tangent.mean.get(), i), sweep.y.get());
            return sweep.y.get();
        });
    });
}

// The cotangent of log q on the edges into a node, as one of the scores.
template <class Sweep, class S>
struct CotangentOfLog {
    static constexpr bool exists = true;
    Sweep& sweep;
    decltype(std::declval<Sweep>().by_edge(std::declval<const S*>())) cotangent;

    bool is_silent(int64_t) const { return false; }
    void fill(const Run& run, int64_t i) {
        sweep.layout.read(run, cotangent, run.edge, sweep.e.get());
        node::log_q_vjp<Sweep::together>(sweep.omega, sweep.x.get(), sweep.s.get(), sweep.layout.vectors(run.edges),
                                         sweep.layout.at(sweep.base, i), sweep.layout.at(sweep.tau, i), sweep.e.get());
    }
};

template <class S>
void log_transitions_vjp(const HyperProblem<S>& problem, const S* cotangent_by_edge, S* by_weight) {
    for_units(problem, [&](auto omega, auto layout) {
        using Own = Sweep<S, decltype(omega), decltype(layout)>;
        Own sweep(problem, omega, layout);
        sweep.read_tape();
        CotangentOfLog<Own, S> source{sweep, sweep.by_edge(cotangent_by_edge)};
        auto mass = sweep.zero_nodes();
        sweep_back(sweep, source, mass, by_weight);
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
