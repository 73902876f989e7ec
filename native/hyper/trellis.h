// The trellis of a chain, as a graph that stores no edges.
//
// Node 0 is the start, node 1 + n · states + i is state i at the n-th step that a sequence visits, and the root is the
// end. An edge leads from each node of a step to each of the next: the k-th edge into a node comes from state k.
#pragma once

#include "../steps/problem.h"
#include "sweep.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// The trellis of one sequence of the batch.
template <class S>
class Trellis {
    const ScoresProblem<S>& problem;
    const bool dense;
    Array<S> end_scores;

public:
    const int64_t b, states, length;

    Trellis(const ScoresProblem<S>& of, int64_t sequence)
        : problem(of),
          dense(is_dense(of)),
          end_scores(zeros<S>(of.states)),
          b(sequence),
          states(of.states),
          length(of.lengths[sequence]) {
        if (!dense && length) std::copy_n(problem.scores.end + b * problem.end_batch, states, end_scores.get());
    }

    int64_t step(int64_t n) const { return visited(problem, b, n); }
    const S* end() const { return end_scores.get(); }

    // The offset of the edges into state i at the n-th step, in arrays shaped like the transitions.
    int64_t offset(int64_t n, int64_t i) const {
        return b * problem.transition_batch + (step(n) - !dense) * problem.transition_step + i * states;
    }
    // The scores of the edges into a node of layer n.
    const S* weights(int64_t n, int64_t i) const {
        if (n == length) return end();
        if (!dense && n == 0) return problem.scores.start + b * problem.start_batch + i;
        return problem.scores.transitions + offset(n, i);
    }

    // Values and thresholds on the tape, after n steps. For the hard max, a threshold is the previous state.
    const S* values(int64_t n) const { return problem.tape + (2 * b * (problem.steps + 1) + n) * states; }
    const S* thresholds(int64_t n) const { return values(n + problem.steps + 1); }

    // --- as a graph

    int64_t num_nodes() const { return length * states + 2; }
    // The number of steps before a node that is not the start.
    int64_t layer(int64_t node) const { return (node - 1) / states; }
    int64_t first_of(int64_t n) const { return 1 + n * states; }
    int64_t edges_into(int64_t n) const { return n == 0 ? 1 : states; }
    int64_t first_tail(int64_t n) const { return n == 0 ? 0 : first_of(n - 1); }

    bool has_start() const { return true; }
    // True if a path into the node has no choice left.
    bool is_decided(int64_t node) const { return node <= states; }

    struct Edges {
        const S* weights;
        int64_t count, first_tail;
        double emission;

        double weight(int64_t k) const { return double(weights[k]); }
        double of_head() const { return emission; }
        int64_t num_tails(int64_t) const { return 1; }
        int64_t tail(int64_t k, int64_t) const { return first_tail + k; }
    };
    Edges into(int64_t node) const {
        const int64_t n = layer(node), i = node - first_of(n);
        const bool is_emitted = !dense && n < length;
        const double emission =
            is_emitted ? double(problem.scores.emissions[(b * problem.steps + step(n)) * states + i]) : 0;
        return {weights(n, i), edges_into(n), first_tail(n), emission};
    }
};

// A sweep over the trellis of one sequence, with the interface of Sweep. It reads the values on the tape of the chain,
// but solves for the thresholds of each tile: the tape has them in the precision of the chain, and in exp space not at
// all.
template <class S>
class TrellisSweep : public EdgeNumbers {
public:
    using Real = S;

    // Numbers of edges: an array shaped like the transitions, and the edges into the root.
    struct Numbers {
        const S* steps;
        Array<double> end;
        double unit;
        bool rounds;
    };

    const Trellis<S> graph;
    const node::Kernels& omega;

private:
    const Array<double> value;
    const Numbers theta;
    const Array<double> threshold = scratch<double>(most_columns), node_values = scratch<double>(most_columns);
    using OneRow = std::integral_constant<int64_t, 1>;

    // Numbers by slot, which is an offset in the array.
    template <class Pointer>
    struct Rows {
        Pointer first;
        double unit;
        bool rounds;

        template <int64_t rows>
        void add(int64_t slot, PerRow<rows>& sum) const {
            sum.own += unit * double(first[slot]);
            if (rounds) sum.own = double(S(sum.own));
        }
    };

    Array<double> zero_end() const { return zeros<double>(graph.states); }
    bool is_root(const Tile& tile) const { return tile.node == graph.num_nodes() - 1; }

public:
    TrellisSweep(const ScoresProblem<S>& problem, int64_t b, const node::Kernels& own, bool in_log_space)
        : EdgeNumbers(problem.states),
          graph(problem, b),
          omega(own),
          value(scratch<double>(graph.num_nodes())),
          // The hard max rounds sums as its forward sweep does, so that ties are broken alike.
          theta{problem.scores.transitions, zero_end(), own.unit, problem.omega.by_slot} {
        value[0] = 0;
        const S *const begin = graph.values(1), *const end = begin + graph.length * graph.states;
        in_log_space ? std::copy(begin, end, &value[1]) : std::transform(begin, end, &value[1], log2_of<S>);
        std::copy_n(graph.end(), graph.states, theta.end.get());
    }

    // --- tiles

    Tile tile(int64_t node, int64_t nodes) const {
        const int64_t n = graph.layer(node), edges = graph.edges_into(n);
        const int64_t offset = n < graph.length ? graph.offset(n, node - graph.first_of(n)) : 0;
        const node::Matrix matrix{edges, whole_vectors(nodes)};
        return {node, nodes, offset, edges, graph.states, node, nodes, matrix, graph.first_tail(n)};
    }
    template <class Body>
    void up(Body body) const {
        Pace pace;
        for (int64_t n = 0; n <= graph.length; ++n) for_layer(n, pace, body);
    }
    template <class Body>
    void down(Body body) const {
        Pace pace;
        for (int64_t n = graph.length; n >= 0; --n) for_layer(n, pace, body);
    }

    // --- numbers of nodes and edges

    Array<double> zero_nodes() const { return zeros<double>(graph.num_nodes() + room_on_tape); }

    // In a dense chain, edges into the root have no weight.
    Numbers by_weight(const S* data) const { return {data, zero_end(), 1, false}; }
    // Edges into the root have no entry in arrays shaped like the transitions. The edge from state i to the root counts
    // with the edges into state i at the last step.
    Numbers by_edge(const S* data) const {
        Numbers numbers = by_weight(data);
        const int64_t last = graph.length - 1;
        for (int64_t i = 0; i < graph.states; ++i) {
            const S* const row = data + graph.offset(last, i);
            for (int64_t k = 0; k < graph.edges_into(last); ++k) numbers.end[i] += double(row[k]);
        }
        return numbers;
    }
    void write_edges(const Tile& tile, S* by_edge) const {
        if (!is_root(tile)) return write(tile, by_edge);
        for (int64_t i = 0; i < graph.states; ++i) {
            S* const row = by_edge + graph.offset(graph.length - 1, i);
            for (int64_t k = 0; k < graph.states; ++k) row[k] += S(e[i * tile.matrix.columns]);
        }
    }
    struct Results {
        static constexpr bool is_shared = false;
        const TrellisSweep& sweep;
        S* by_weight;

        void write(const Tile& tile) const {
            if (!sweep.is_root(tile)) sweep.write(tile, by_weight);
        }
        void finish() const {}
    };

    const double* thresholds(const Tile&) const { return threshold.get(); }
    void score(const Tile& tile) const {
        read_scores(tile, x.get());
        pad(tile, -infinity<double>, x.get());
        solve(tile.matrix);
    }
    void read_scores(const Tile& tile, double* to) const { read(tile, theta, value.get(), to); }
    void weigh(const Tile& tile, bool with_s) const {
        score(tile);
        omega.weigh(tile.matrix, x.get(), threshold.get(), q.get(), with_s ? s.get() : nullptr);
    }
    node::Matrix weigh_nodes(const int64_t* nodes, int64_t count) const {
        const node::Matrix matrix = gather_nodes(*this, nodes, count);
        solve(matrix);
        omega.weigh(matrix, x.get(), threshold.get(), q.get(), nullptr);
        return matrix;
    }
    void gather(const Tile& tile, const Numbers& numbers, const double* of_nodes, double* to) const {
        read(tile, numbers, of_nodes, to);
        pad(tile, 0, to);
    }
    void spread(const Tile& tile, const double* from, double* of_nodes) const {
        spread_edges(tile, OneRow(), StepTails{tile.tail}, from, of_nodes);
    }

private:
    template <class Body>
    void for_layer(int64_t n, Pace& pace, Body body) const {
        const int64_t begin = graph.first_of(n), end = n == graph.length ? begin + 1 : graph.first_of(n + 1);
        for (int64_t node = begin; node < end; node += most_columns) {
            pace.spend(graph.states * most_columns);
            body(tile(node, std::min(most_columns, end - node)));
        }
    }
    void solve(node::Matrix matrix) const { omega.solve(matrix, x.get(), node_values.get(), threshold.get()); }
    __attribute__((noinline)) void read(const Tile& tile, const Numbers& numbers, const double* of_nodes,
                                        double* to) const {
        const auto gather_from = [&](auto* first) {
            const Rows<decltype(first)> rows{first, numbers.unit, numbers.rounds};
            gather_edges(tile, OneRow(), StepTails{tile.tail}, rows, of_nodes, to);
        };
        is_root(tile) ? gather_from(numbers.end.get()) : gather_from(numbers.steps);
    }
    void write(const Tile& tile, S* data) const {
        const double* const from = e.get();
        for_edges(tile, OneRow(), [=](int64_t slot, int64_t, int64_t place) { data[slot] = S(from[place]); });
    }
};

// As in ChainKernels; they are in hyper.cpp and derivations.cpp.
template <class S>
void log_transitions(const ScoresProblem<S>&, S* log_q);
template <class S>
void log_transitions_jvp(const ScoresProblem<S>&, const S* z, S* product);
template <class S>
void log_transitions_vjp(const ScoresProblem<S>&, const S* cotangent, S* product);
template <class S>
void sample(const ScoresProblem<S>&, bool (*in_log_space)(const ScoresProblem<S>&, int64_t sequence), int64_t draws,
            const double* uniforms, int64_t* sequences);
// For k = 1, the hard max of the chain is faster.
template <class S>
bool topk(const ScoresProblem<S>&, int64_t k, S* scores, int64_t* sequences);
template <class S>
bool max_marginals(const ScoresProblem<S>&, S* by_edge);
template <class S>
bool node_values(const ScoresProblem<S>&, S* values);

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
