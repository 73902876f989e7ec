// How a graph is read into matrices of its edges (nodes.h), and what is found is written. Nothing here knows Ω.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "../base/memory.h"
#include "../base/threads.h"
#include "hyper.h"
#include "nodes.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

using std::int32_t;
using std::int64_t;

constexpr int64_t most_columns = 16;

// Nodes of a group; each has a column for every row of the batch that the sweep takes.
struct Tile {
    int64_t node, nodes;  // the first, and how many
    int64_t slot, edges;  // of the first node; of each
    int64_t used;         // columns of the matrix
    Matrix matrix;
};

// One number for each column of a tile, read from the numbers of all nodes or written there.
struct Heads {
    alignas(32) double number[most_columns];

    Heads() {}
    Heads(const double* of_tile, const Tile& tile) {
        std::copy_n(of_tile, tile.used, number);
        std::fill_n(number + tile.used, tile.matrix.columns - tile.used, 0.0);
    }
    operator double*() { return number; }
    operator const double*() const { return number; }

    bool are_zero(const Tile& tile) const {
        return std::all_of(number, number + tile.used, [](double own) { return own == 0; });
    }
};

// body(tail) for the tails of a slot.
template <class Body>
inline void for_tails(const int32_t* offset, const int32_t* tail, int64_t slot, Body body) {
    if (!offset) return body(int64_t(tail[slot]));
    for (int32_t t = offset[slot]; t < offset[slot + 1]; ++t) body(int64_t(tail[t]));
}

// Several rows of the batch, side by side: numbers of nodes are (num_nodes, rows), those of weights (num_weights, rows).
template <class S>
class Sweep {
public:
    const HyperProblem<S>& problem;
    const Hypergraph& graph;
    const NodeKernels& omega;
    const int64_t first, rows;
    const int64_t num_numbers = graph.num_nodes * rows, room = graph.most_edges * most_columns;

private:
    Array<double> tape;  // of more than one row

public:
    const double *const value, *const threshold;  // of nodes
    const Array<double> x = scratch<double>(room), q = scratch<double>(room), s = scratch<double>(room),
                        y = scratch<double>(room), e = scratch<double>(room);  // of a tile's edges

    Sweep(const HyperProblem<S>& of, const NodeKernels& own, int64_t first_row, int64_t num_rows)
        : problem(of),
          graph(of.graph),
          omega(own),
          first(first_row),
          rows(num_rows),
          tape(rows > 1 ? scratch<double>(2 * num_numbers) : nullptr),
          value(rows > 1 ? tape.get() : of.tape + 2 * graph.num_nodes * first),
          threshold(value + num_numbers) {}

    // The tape has the numbers of a row together, the sweep those of a node.
    void read_tape() {
        const int64_t size = 2 * graph.num_nodes;
        for (int64_t n = 0; rows > 1 && n < size; ++n) {
            for (int64_t r = 0; r < rows; ++r) tape[n * rows + r] = problem.tape[(first + r) * size + n];
        }
    }
    void write_tape(double* out) const {
        const int64_t size = 2 * graph.num_nodes;
        for (int64_t n = 0; rows > 1 && n < size; ++n) {
            for (int64_t r = 0; r < rows; ++r) out[(first + r) * size + n] = tape[n * rows + r];
        }
    }
    // Where forward leaves values, and thresholds behind them.
    double* found(double* out) const { return rows > 1 ? tape.get() : out + 2 * graph.num_nodes * first; }

    Array<double> zero_nodes() const { return zeros<double>(num_numbers); }

    // --- tiles

    Tile tile(int64_t node, int64_t nodes) const {
        const int64_t slot = graph.offset[node], edges = graph.offset[node + 1] - slot, used = nodes * rows;
        return {node, nodes, slot, edges, used, {edges, (used + 3) / 4 * 4}};
    }

    // body(tile), from the axioms to the root or back.
    template <class Body>
    void up(Body body) const {
        for (int64_t g = 0; g < graph.num_groups; ++g) for_group(g, body);
    }
    template <class Body>
    void down(Body body) const {
        for (int64_t g = graph.num_groups - 1; g >= 0; --g) for_group(g, body);
    }

    // --- numbers of edges

    // The scores of a tile.
    void score(const Tile& tile) const {
        need_sound(tile);
        gather(tile, problem.theta, graph.num_weights, graph.weight, omega.unit, value, -infinity<double>, x.get());
    }

    // q, s if wanted, and the scale of q.
    Heads weigh(const Tile& tile, bool with_s) const {
        Heads scale;
        score(tile);
        omega.weigh(tile.matrix, x.get(), Heads(threshold + tile.node * rows, tile), q.get(), with_s ? s.get() : nullptr,
                    scale);
        return scale;
    }

    // to = unit · data[name] + Σ of_nodes at the tails, if there are of_nodes; `past` in columns without an edge. Names are
    // of weights or of edges, by slot, and data is (batch, width).
    void gather(const Tile& tile, const S* data, int64_t width, const int32_t* name, double unit,
                const double* __restrict of_nodes, double past, double* __restrict to) const {
        const S* __restrict const from = data + first * width;
        with_constants(graph.tail_offset, [&](auto rows, const int32_t* tail_offset) {
            for_edges(tile, rows, [&](int64_t slot, int64_t place) {
                const S* const own = from + name[slot];
                for (int64_t r = 0; r < rows; ++r) to[place + r] = unit * double(own[r * width]);
                if (!of_nodes) return;
                for_tails(tail_offset, graph.tail, slot, [&](int64_t tail) {
                    for (int64_t r = 0; r < rows; ++r) to[place + r] += of_nodes[tail * rows + r];
                });
            });
        });
        const int64_t unused = tile.matrix.columns - tile.used;
        for (int64_t k = 1; unused && k <= tile.edges; ++k) std::fill_n(to + k * tile.matrix.columns - unused, unused, past);
    }

    // Leaves what edges have under their names.
    void scatter(const Tile& tile, const double* __restrict from, const int32_t* name, S* out, int64_t width) const {
        S* __restrict const to = out + first * width;
        with_constants(nullptr, [&](auto rows, const int32_t*) {
            for_edges(tile, rows, [&](int64_t slot, int64_t place) {
                S* const own = to + name[slot];
                for (int64_t r = 0; r < rows; ++r) own[r * width] = S(from[place + r]);
            });
        });
    }

    // Adds what edges have to every tail's number, or to their weight's.
    void spread(const Tile& tile, const double* __restrict from, const int32_t* offset, const int32_t* tail,
                double* __restrict to) const {
        with_constants(offset, [&](auto rows, const int32_t* tail_offset) {
            for_edges(tile, rows, [&](int64_t slot, int64_t place) {
                for_tails(tail_offset, tail, slot, [&](int64_t own) {
                    for (int64_t r = 0; r < rows; ++r) to[own * rows + r] += from[place + r];
                });
            });
        });
    }
    void spread_to_tails(const Tile& tile, const double* from, double* to) const {
        spread(tile, from, graph.tail_offset, graph.tail, to);
    }

private:
    template <class Body>
    void for_group(int64_t group, Body body) const {
        const int64_t most = std::max<int64_t>(1, most_columns / rows), end = graph.group[group + 1];
        for (int64_t node = graph.group[group]; node < end; node += most) body(tile(node, std::min(most, end - node)));
    }

    // body(slot, its first place in the matrix) for the edges of a tile.
    template <class Rows, class Body>
    static void for_edges(const Tile& tile, Rows rows, Body body) {
        for (int64_t n = 0; n < tile.nodes; ++n) {
            const int64_t slot = tile.slot + n * tile.edges;
            for (int64_t k = 0; k < tile.edges; ++k) body(slot + k, k * tile.matrix.columns + n * rows);
        }
    }

    // body(rows, offset), with a constant for what is frequent: one row, and one tail an edge.
    template <class Body>
    void with_constants(const int32_t* offset, Body body) const {
        constexpr std::integral_constant<int64_t, 1> one{};
        if (rows == 1) return offset ? body(one, offset) : body(one, nullptr);
        return offset ? body(rows, offset) : body(rows, nullptr);
    }

    static int64_t greatest(const int32_t* numbers, int64_t count) {
        std::uint32_t most = 0;  // below 0 is far above
        for (int64_t n = 0; n < count; ++n) most = std::max(most, std::uint32_t(numbers[n]));
        return most;
    }

    // Checked here, where they are in the cache: what is named is there, and tails come before their heads.
    void need_sound(const Tile& tile) const {
        const int64_t begin = tile.slot, count = tile.nodes * tile.edges;
        const int64_t from = graph.tail_offset ? graph.tail_offset[begin] : begin;
        const int64_t tails = graph.tail_offset ? graph.tail_offset[begin + count] - from : count;
        const bool good = (tails == 0 || greatest(graph.tail + from, tails) < tile.node) &&
                          (count == 0 || greatest(graph.weight + begin, count) < graph.num_weights) &&
                          (graph.edge == graph.weight || count == 0 || greatest(graph.edge + begin, count) < graph.num_edges);
        if (!good) throw std::invalid_argument("an index is out of range");
    }
};

// body(sweep) for the rows of the batch, over the threads.
template <class S, class Body>
void for_sweeps(const HyperProblem<S>& problem, Body body) {
    constexpr int64_t most_rows = 8;
    const std::unique_ptr<NodeKernels> omega = node_kernels(problem.omega);
    const int64_t batch = problem.batch, share = batch / std::max(problem.threads, 1);
    const int64_t rows = std::max<int64_t>(1, std::min(most_rows, share));
    parallel_for((batch + rows - 1) / rows, problem.threads, [&](int64_t n, int) {
        Sweep<S> sweep(problem, *omega, n * rows, std::min(rows, batch - n * rows));
        body(sweep);
    });
}

// As in HyperKernels; derivations.cpp has them.
template <class S>
bool sample(const HyperProblem<S>&, int64_t draws, int64_t choices, const double* uniforms, S* counts);
template <class S>
bool topk(const HyperProblem<S>&, int64_t k, S* scores, S* counts);

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
