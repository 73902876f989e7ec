// The sweeps of any stored graph (Algorithms 1 and 2 of the paper, with any number of tails an edge).
//
// Backward, the second half of the Hessian product and the transpose of log q are one sweep: mass runs from the root to
// the tails, e = source + q · mass on each edge, and they differ in the source and in where mass begins.
#include "hyper.h"

#include <algorithm>
#include <atomic>

#include "../base/threads.h"
#include "derivations.h"
#include "nodes.h"
#include "tiles.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

// Numbers of nodes or of edges, in the arena of their sweep.
struct Numbers {
    double* first = nullptr;

    double* get() const { return first; }
    double& operator[](int64_t n) const { return first[n]; }
};

// What a sweep over one row of the batch, or W of them, knows of the nodes, and room for the edges of a tile.
template <class S, int W>
class Sweep {
public:
    static constexpr int width = W;
    static constexpr int most_nodes = 7, most_edges = 5;  // how many numbers of each a sweep needs

    const HyperProblem<S>& problem;
    const Hypergraph& graph;
    const NodeKernels<W>& omega;
    const Lanes lanes;  // rows, or those of a single row
    const int64_t first;
    const int64_t room = problem.graph.num_nodes * (lanes == Lanes::rows ? W : 1) + W;  // for numbers of nodes
    const int64_t by_shared_weight = problem.graph.weight == problem.graph.edge ? 0 : problem.graph.num_weights * W;
    const Rows<const S, W> theta;
    Arena arena;
    Numbers value, base, tau;
    Numbers x, q, s, y, e;  // of the tile

    Sweep(const HyperProblem<S>& of, const NodeKernels<W>& own, Lanes how, int64_t first_row)
        : problem(of),
          graph(of.graph),
          omega(own),
          lanes(how),
          first(first_row),
          theta(by_weight(of.theta)),
          arena(most_nodes * Arena::rounded(room) + most_edges * Arena::rounded(room_of_edges()) +
                Arena::rounded(by_shared_weight)),
          value{arena.take(room)},
          base{arena.take(room)},
          tau{arena.take(room)},
          x(edges()), q(edges()), s(edges()), y(edges()), e(edges()) {}

    int64_t room_of_edges() const { return (graph.most_edges + W) * W; }
    Numbers edges() { return {arena.take(room_of_edges())}; }
    Numbers zeros(int64_t count) {
        const Numbers numbers{arena.take(count)};
        std::fill_n(numbers.get(), count, 0.0);
        return numbers;
    }
    Numbers zero_nodes() { return zeros(room); }

    template <class T>
    Rows<T, W> rows(T* data, int64_t columns) const {
        return Rows<T, W>(data, columns, problem.batch, first, lanes);
    }
    template <class T>
    Rows<T, W> by_weight(T* data) const {
        return rows(data, problem.graph.num_weights);
    }
    template <class T>
    Rows<T, W> by_edge(T* data) const {
        return rows(data, problem.graph.num_edges);
    }

    // The number of a node, from the first lane or from every row's.
    Wide<W> of_node(const double* numbers, int64_t node) const {
        return lanes == Lanes::rows ? load_wide<W>(numbers + node * W) : wide<W>(numbers[node]);
    }
    void set_root(Numbers numbers, const Wide<W>& v) const {
        const int64_t root = graph.num_nodes - 1;
        if (lanes == Lanes::rows) return store_wide(&numbers[root * W], v);
        numbers[root] = v.part[0][0];
    }

    // body(tile), from the axioms to the root or back.
    template <class Body>
    void up(Body body) const {
        for (int64_t g = 0; g < graph.num_groups; ++g) for_group<W>(graph, g, lanes, body);
    }
    template <class Body>
    void down(Body body) const {
        for (int64_t g = graph.num_groups - 1; g >= 0; --g) for_group<W>(graph, g, lanes, body);
    }

    void read_tape() {
        const Rows<const double, W> tape = rows(problem.tape, 3 * graph.num_nodes);
        exchange([&](double* own, int64_t step, int l, int64_t column, int64_t count) {
            for (int64_t i = 0; i < count; ++i) own[i * step] = tape.row[l][column + i];
        });
    }
    void write_tape(double* out) const {
        const Rows<double, W> tape = rows(out, 3 * graph.num_nodes);
        exchange([&](const double* own, int64_t step, int l, int64_t column, int64_t count) {
            for (int64_t i = 0; i < count && l < tape.valid; ++i) tape.row[l][column + i] = own[i * step];
        });
    }
    // body(own, step, l, column, count) for the three parts of the tape of each row, a few nodes at a time: where their
    // numbers are here, and there.
    template <class Body>
    void exchange(Body body) const {
        constexpr int64_t few = 64;
        const int step = lanes == Lanes::rows ? W : 1;
        int64_t column = 0;
        for (double* own : {value.get(), base.get(), tau.get()}) {
            for (int64_t i = 0; i < graph.num_nodes; i += few) {
                const int64_t count = std::min(few, graph.num_nodes - i);
                for (int l = 0; l < step; ++l) body(own + i * step + l, int64_t(step), l, column + i, count);
            }
            column += graph.num_nodes;
        }
    }

    void score(const Tile& tile) {
        gather<W, S>(graph, tile, theta, graph.weight, omega.unit(), value.get(), -infinity<double>, x.get());
    }
    // q and s; the result is the scale of q (node.h).
    Wide<W> weigh(const Tile& tile, bool with_s) {
        score(tile);
        return omega.weigh(tile.together(), x.get(), tile.vectors, at<W>(base.get(), tile), at<W>(tau.get(), tile), q.get(),
                           with_s ? s.get() : nullptr);
    }
};

// Runs body(sweep) for the rows of the batch over the threads.
template <class S, class Body>
void for_sweeps(const HyperProblem<S>& problem, Body body) {
    const auto run = [&](const auto& omega_of_node) {
        constexpr int W = node::lanes<std::decay_t<decltype(omega_of_node)>>;
        const NodeKernelsOf<std::decay_t<decltype(omega_of_node)>> kernels(omega_of_node);
        const NodeKernels<W>& omega = kernels;
        const bool across = problem.batch >= W / 2;  // else most lanes would repeat others
        const int64_t each = across ? W : 1;
        parallel_for((problem.batch + each - 1) / each, problem.threads, [&](int64_t n, int) {
            Sweep<S, W> sweep(problem, omega, across ? Lanes::rows : Lanes::nodes, n * each);
            body(sweep);
        });
    };
    // Float has eight lanes for the exponentials of negentropy. The others are double, and take little time.
    if (sizeof(S) == 4 && problem.omega.alpha == 1) return run(omega::Negentropy<S>(problem.omega));
    omega::with<double>(problem.omega, run);
}

template <class S>
bool forward(const HyperProblem<S>& problem, S* value, double* tape) {
    std::atomic<bool> all_good{true};
    for_sweeps(problem, [&](auto& sweep) {
        constexpr int W = std::decay_t<decltype(sweep)>::width;
        bool good = true;
        sweep.up([&](const Tile& tile) {
            node::Solution<W> solved{};
            if (tile.node > 0 || sweep.graph.tail_offset) {
                sweep.score(tile);
                solved = sweep.omega.solve(tile.together(), sweep.x.get(), tile.vectors, sweep.y.get(), good);
            }
            put(sweep.value.get(), tile, solved.value);
            put(sweep.base.get(), tile, solved.base);
            put(sweep.tau.get(), tile, solved.tau);
        });
        sweep.write_tape(tape);
        const Wide<W> root = sweep.of_node(sweep.value.get(), sweep.graph.num_nodes - 1);
        sweep.rows(value, 1).write(0, root * wide<W>(1 / sweep.omega.unit()));
        if (!good) all_good = false;
    });
    return all_good;
}

// Where the sweep leaves what it finds by weight: what edges share is added up.
template <class S, int W>
class Sink {
    const Sweep<S, W>& sweep;
    const Rows<S, W> out;
    const Numbers sums;

public:
    Sink(Sweep<S, W>& own, S* data) : sweep(own), out(own.by_weight(data)), sums(own.zeros(own.by_shared_weight)) {}

    void put(const Tile& tile, const double* e) {
        if (sweep.by_shared_weight) {
            add<W>(tile, e, sweep.graph.weight, sums.get());
        } else {
            scatter<W, S>(tile, e, sweep.graph.weight, out);
        }
    }
    void finish() {
        for (int64_t w = 0; w * W < sweep.by_shared_weight; ++w) out.write(w, sweep.of_node(sums.get(), w));
    }
};

// From the root, where `mass` begins, to the tails. source.fill(tile, scale of q) leaves the source in e, unless there
// is none;
// source.is_silent(tile): it would be 0.
template <class S, int W, class Source>
void sweep_back(Sweep<S, W>& sweep, Source&& source, Numbers mass, S* by_weight) {
    constexpr bool has_source = std::decay_t<Source>::exists;
    Sink<S, W> sink(sweep, by_weight);
    double* const e = sweep.e.get();
    sweep.down([&](const Tile& tile) {
        const Wide<W> held = at<W>(mass.get(), tile);
        if (is_zero(held) && source.is_silent(tile)) {
            std::fill_n(e, tile.vectors * W, 0.0);
        } else {
            const Wide<W> scale = sweep.weigh(tile, has_source);
            if constexpr (has_source) source.fill(tile, scale);
            node::share<has_source>(sweep.q.get(), tile.vectors, held * scale, e);
            spread<W>(sweep.graph, tile, e, mass.get());
        }
        sink.put(tile, e);
    });
    sink.finish();
}

struct NoSource {
    static constexpr bool exists = false;
    bool is_silent(const Tile&) const { return true; }
};

template <class S>
void backward(const HyperProblem<S>& problem, const S* seed, S* by_weight) {
    for_sweeps(problem, [&](auto& sweep) {
        sweep.read_tape();
        Numbers mass = sweep.zero_nodes();
        sweep.set_root(mass, sweep.rows(seed, 1).read(0));
        sweep_back(sweep, NoSource(), mass, by_weight);
    });
}

// Along a direction z: the change of every node's value, and its mean (node.h).
template <class S, int W>
class Tangent {
    Sweep<S, W>& sweep;
    const Rows<const S, W> z;
    Numbers value;

public:
    Numbers mean;

    Tangent(Sweep<S, W>& own, const S* direction)
        : sweep(own), z(own.by_weight(direction)), value(own.zero_nodes()), mean(own.zero_nodes()) {
        sweep.up([&](const Tile& tile) {
            const Wide<W> scale = sweep.weigh(tile, true);
            gather_change(tile);
            const double *const q = sweep.q.get(), *const s = sweep.s.get(), *const y = sweep.y.get();
            const node::Change<W> change =
                tile.together() ? node::change<true>(q, scale, s, y, tile.vectors) : node::change<false>(q, scale, s, y, tile.vectors);
            put(value.get(), tile, change.value);
            put(mean.get(), tile, change.mean);
        });
    }

    // y of a tile.
    void gather_change(const Tile& tile) {
        gather<W, S>(sweep.graph, tile, z, sweep.graph.weight, 1, value.get(), 0, sweep.y.get());
    }
};

// The change of q, times the mass that Algorithm 1 brings to the node, which runs beside.
template <class S, int W>
struct ChangeOfQ {
    static constexpr bool exists = true;
    Sweep<S, W>& sweep;
    Tangent<S, W>& tangent;
    Numbers mass;

    bool is_silent(const Tile& tile) const { return is_zero(at<W>(mass.get(), tile)); }
    void fill(const Tile& tile, const Wide<W>& scale) {
        const Wide<W> held = at<W>(mass.get(), tile);
        double* const y = sweep.y.get();
        tangent.gather_change(tile);
        node::change_of_q(sweep.s.get(), y, tile.vectors, at<W>(tangent.mean.get(), tile), held, sweep.e.get());
        node::share<false>(sweep.q.get(), tile.vectors, held * scale, y);
        spread<W>(sweep.graph, tile, y, mass.get());
    }
};

template <class S>
void hessian(const HyperProblem<S>& problem, const S* seed, const S* z, S* by_weight) {
    for_sweeps(problem, [&](auto& sweep) {
        constexpr int W = std::decay_t<decltype(sweep)>::width;
        sweep.read_tape();
        Tangent<S, W> tangent(sweep, z);
        ChangeOfQ<S, W> source{sweep, tangent, sweep.zero_nodes()};
        sweep.set_root(source.mass, sweep.rows(seed, 1).read(0));
        Numbers mass = sweep.zero_nodes();
        sweep_back(sweep, source, mass, by_weight);
    });
}

// Writes what map(tile), which finds the scores, leaves for every edge.
template <class S, int W, class Map>
void map_edges(Sweep<S, W>& sweep, S* by_edge, Map map) {
    const Rows<S, W> out = sweep.by_edge(by_edge);
    sweep.up([&](const Tile& tile) {
        sweep.score(tile);
        scatter<W, S>(tile, map(tile), sweep.graph.edge, out);
    });
}

template <class S>
void log_transitions(const HyperProblem<S>& problem, S* by_edge) {
    for_sweeps(problem, [&](auto& sweep) {
        constexpr int W = std::decay_t<decltype(sweep)>::width;
        sweep.read_tape();
        map_edges(sweep, by_edge, [&](const Tile& tile) {
            sweep.omega.log_q(tile.together(), sweep.x.get(), tile.vectors, at<W>(sweep.base.get(), tile),
                              at<W>(sweep.tau.get(), tile), sweep.e.get());
            return sweep.e.get();
        });
    });
}

// d log q/dx of a tile whose scores are known, in q's place.
template <class S, int W>
const double* log_slope(Sweep<S, W>& sweep, const Tile& tile, Numbers room) {
    sweep.omega.log_slope(tile.together(), sweep.x.get(), tile.vectors, at<W>(sweep.base.get(), tile),
                          at<W>(sweep.tau.get(), tile), room.get());
    return room.get();
}

template <class S>
void log_transitions_jvp(const HyperProblem<S>& problem, const S* z, S* by_edge) {
    for_sweeps(problem, [&](auto& sweep) {
        constexpr int W = std::decay_t<decltype(sweep)>::width;
        sweep.read_tape();
        Tangent<S, W> tangent(sweep, z);
        map_edges(sweep, by_edge, [&](const Tile& tile) {
            tangent.gather_change(tile);
            node::log_q_jvp(log_slope(sweep, tile, sweep.e), tile.vectors, at<W>(tangent.mean.get(), tile), sweep.y.get());
            return sweep.y.get();
        });
    });
}

// The cotangent of log q on the edges, as one of the scores.
template <class S, int W>
struct CotangentOfLog {
    static constexpr bool exists = true;
    Sweep<S, W>& sweep;
    const Rows<const S, W> cotangent;

    bool is_silent(const Tile&) const { return false; }
    void fill(const Tile& tile, const Wide<W>&) {
        double* const e = sweep.e.get();
        gather<W, S>(sweep.graph, tile, cotangent, sweep.graph.edge, 1, nullptr, 0, e);
        const double *const slope = log_slope(sweep, tile, sweep.y), *const s = sweep.s.get();
        if (tile.together()) {
            node::log_q_vjp<true, W>(slope, s, tile.vectors, e);
        } else {
            node::log_q_vjp<false, W>(slope, s, tile.vectors, e);
        }
    }
};

template <class S>
void log_transitions_vjp(const HyperProblem<S>& problem, const S* cotangent_by_edge, S* by_weight) {
    for_sweeps(problem, [&](auto& sweep) {
        constexpr int W = std::decay_t<decltype(sweep)>::width;
        sweep.read_tape();
        Numbers mass = sweep.zero_nodes();
        sweep_back(sweep, CotangentOfLog<S, W>{sweep, sweep.by_edge(cotangent_by_edge)}, mass, by_weight);
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
