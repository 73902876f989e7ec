// How a graph is read into matrices of its edges (node.h), and how what is found is written. Nothing here knows Ω.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <type_traits>

#include "../base/memory.h"
#include "../base/threads.h"
#include "../node.h"
#include "hyper.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

using std::int32_t;
using std::int64_t;

constexpr int64_t most_rows = 8, most_columns = 2 * most_rows;

// Nodes of a group. Each has a column for every row of the batch that the sweep takes.
struct Tile {
    int64_t node, nodes;  // the first, and how many
    int64_t slot, edges;  // of the first node; of each
    int64_t pitch;        // slots from one node to the next
    int64_t place, used;  // the offset of its numbers among the numbers of all nodes, and how many
    node::Matrix matrix;
    int64_t tail = 0;  // of the first edges, if the graph is a trellis
};

// True if all of these numbers are below a limit, and none is negative.
inline bool are_below(const int32_t* numbers, int64_t begin, int64_t end, int64_t limit) {
    std::uint32_t most = 0;  // negative numbers become large
    for (int64_t n = begin; n < end; ++n) most = std::max(most, std::uint32_t(numbers[n]));
    return begin == end || int64_t(most) < limit;
}

// True if the forms of slots have terms that exist, and these name weights. Each node has `pitch` slots. A form is not
// checked again if the slot before has it, or the node before at the same position.
inline bool have_terms(const Hypergraph& graph, int64_t begin, int64_t end, int64_t pitch) {
    const int32_t *const form = graph.weight, *const offset = graph.term_offset;
    for (int64_t slot = begin; slot < end; ++slot) {
        if (slot > begin && form[slot] == form[slot - 1]) continue;
        if (slot - begin >= pitch && form[slot] == form[slot - pitch]) continue;
        const int64_t first = offset[form[slot]], last = offset[form[slot] + 1];
        if (first < 0 || first > last || last > graph.num_terms) return false;
        for (int64_t t = first; t < last; ++t) {
            if (std::uint32_t(graph.entry[t]) >= graph.num_weights) return false;
        }
    }
    return true;
}

// Whether the edges into some nodes name what there is, and tails that come before. It is looked at where they are read
// next: a pass over all edges takes as long as a fifth of a sweep.
inline void need_sound(const Hypergraph& graph, int64_t node, int64_t nodes) {
    const int64_t begin = graph.offset[node], end = graph.offset[node + nodes];
    const int32_t* const tails = graph.tail_offset;
    const bool good = are_below(graph.tail, tails ? tails[begin] : begin, tails ? tails[end] : end, node) &&
                      are_below(graph.weight, begin, end, graph.num_forms) &&
                      (!graph.shares_weights() || are_below(graph.edge, begin, end, graph.num_edges)) &&
                      (!graph.term_offset || have_terms(graph, begin, end, (end - begin) / nodes));
    if (!good) throw std::invalid_argument("an index is out of range");
}

// The tails of the k-th edge into a node, which has a slot: one, those between offsets, or the k-th node of the step
// before. for_each: body(tail).
struct OneTail {
    const int32_t* tail;

    template <class Body>
    void for_each(int64_t slot, int64_t, Body body) const {
        body(int64_t(tail[slot]));
    }
};
struct AnyTails {
    const int32_t *tail, *offset;

    template <class Body>
    void for_each(int64_t slot, int64_t, Body body) const {
        for (int32_t t = offset[slot]; t < offset[slot + 1]; ++t) body(int64_t(tail[t]));
    }
};
struct StepTails {
    int64_t first;

    template <class Body>
    void for_each(int64_t, int64_t k, Body body) const {
        body(first + k);
    }
};

// A number for each row that a sweep takes.
template <int64_t rows>
struct PerRow {
    static constexpr int64_t count = rows / lanes_of<double>;
    Vec<double> part[count];

    static PerRow at(const double* from) {
        PerRow all;
        for (int64_t n = 0; n < count; ++n) all.part[n] = load(from + n * lanes_of<double>);
        return all;
    }
    // Entries that lie `stride` apart.
    template <class S>
    static PerRow at(const S* from, int64_t stride) {
        double own[rows];
        for (int64_t r = 0; r < rows; ++r) own[r] = double(from[r * stride]);
        return at(own);
    }
    void add(double unit, const PerRow& other) {
        for (int64_t n = 0; n < count; ++n) part[n] += unit * other.part[n];
    }
    PerRow& operator+=(const PerRow& other) {
        for (int64_t n = 0; n < count; ++n) part[n] += other.part[n];
        return *this;
    }
    PerRow& operator*=(const PerRow& other) {
        for (int64_t n = 0; n < count; ++n) part[n] *= other.part[n];
        return *this;
    }
    void to(double* where) const {
        for (int64_t n = 0; n < count; ++n) store(where + n * lanes_of<double>, part[n]);
    }
};
template <>
struct PerRow<1> {
    double own;

    static PerRow at(const double* from) { return {*from}; }
    template <class S>
    static PerRow at(const S* from, int64_t) {
        return {double(*from)};
    }
    void add(double unit, const PerRow& other) { own += unit * other.own; }
    PerRow& operator+=(const PerRow& other) { return own += other.own, *this; }
    PerRow& operator*=(const PerRow& other) { return own *= other.own, *this; }
    void to(double* where) const { *where = own; }
};

// Numbers (batch, count) under the names of weights or of edges, times a unit. Numbers that edges share are read often:
// `shared` holds them by number and row of the sweep, (count, rows), or is null. All are rounded alike.
template <class S>
struct Named {
    const S* first;  // the row that is the sweep's first
    int64_t count;
    const int32_t* name;  // by slot
    double unit;
    Array<double> shared;
    const Hypergraph* forms;  // the graph, if slots have forms (see FormSums); else null

    template <int64_t rows>
    PerRow<rows> at(int64_t number) const {
        return shared ? PerRow<rows>::at(&shared[number * rows]) : PerRow<rows>::at(first + number, count);
    }
    template <int64_t rows>
    void add(int64_t slot, PerRow<rows>& sum) const {
        sum.add(unit, at<rows>(name[slot]));
    }
};

// The sum over the terms of a form of at(weight), times the coefficient of the term.
template <int64_t rows, class At>
inline PerRow<rows> sum_of_form(const Hypergraph& graph, int64_t form, At at) {
    PerRow<rows> sum{};
    for_terms(graph, form, [&](int64_t weight, double coefficient) {
        const PerRow<rows> own = at(weight);
        sum.add(coefficient, own);
        if (coefficient < 0) sum.add(0, own);  // a weight of +∞ must give NaN, which is reported, and not −∞
    });
    return sum;
}

// Numbers by slot, from numbers of weights: the sum of the slot's form. The last sum is kept, since the next slot often
// has the same form.
template <class S, int64_t rows>
class FormSums {
    const Named<S>& named;
    int32_t form = -1;
    PerRow<rows> own{};

public:
    explicit FormSums(const Named<S>& of) : named(of) {}

    void add(int64_t slot, PerRow<rows>& sum) {
        if (named.name[slot] != form) {
            form = named.name[slot];
            const auto at = [&](int64_t weight) { return named.template at<rows>(weight); };
            own = sum_of_form<rows>(*named.forms, form, at);
        }
        sum.add(named.unit, own);
    }
};

// body(slot, edge, its first place in the matrix) for the edges of a tile. Inlined, since a call for each tile is
// measurable.
template <class Rows, class Body>
__attribute__((always_inline)) inline void for_edges(const Tile& tile, Rows rows, Body body) {
    for (int64_t n = 0; n < tile.nodes; ++n) {
        const int64_t slot = tile.slot + n * tile.pitch;
        for (int64_t k = 0; k < tile.edges; ++k) body(slot + k, k, k * tile.matrix.columns + n * rows);
    }
}

// As for_edges, in an order in which edges with the same form are neighbours: node by node if the edges into a node
// share it, as when a recursion adds a score to each cell of a table; else the first edges of all nodes, then their
// second edges, and so on.
template <class Rows, class Body>
__attribute__((always_inline)) inline void for_edges_by_form(const Tile& tile, const int32_t* form, Rows rows,
                                                             Body body) {
    if (tile.edges > 1 && form[tile.slot] == form[tile.slot + 1]) return for_edges(tile, rows, body);
    for (int64_t k = 0; k < tile.edges; ++k) {
        for (int64_t n = 0; n < tile.nodes; ++n) {
            body(tile.slot + n * tile.pitch + k, k, k * tile.matrix.columns + n * rows);
        }
    }
}

template <int64_t rows>
__attribute__((always_inline)) inline void add_to(PerRow<rows> sum, double* to) {
    sum += PerRow<rows>::at(to);
    sum.to(to);
}

// to = the numbers of edges plus Σ of_nodes at their tails, if of_nodes is not null.
template <class Rows, class Tails, class Numbers>
__attribute__((always_inline)) inline void gather_edges(const Tile& tile, Rows rows, Tails tails,
                                                        const Numbers& numbers, const double* __restrict of_nodes,
                                                        double* __restrict to) {
    for_edges(tile, rows, [&, to, of_nodes, tails](int64_t slot, int64_t k, int64_t place) {
        PerRow<rows> sum{};
        if (of_nodes) {
            tails.for_each(slot, k, [&](int64_t node) { sum += PerRow<rows>::at(of_nodes + node * rows); });
        }
        numbers.template add<rows>(slot, sum);
        sum.to(to + place);
    });
}

// Adds the number of each edge to the number of each of its tails.
template <class Rows, class Tails>
__attribute__((always_inline)) inline void spread_edges(const Tile& tile, Rows rows, Tails tails,
                                                        const double* __restrict from, double* __restrict of_nodes) {
    for_edges(tile, rows, [=](int64_t slot, int64_t k, int64_t place) {
        const auto own = PerRow<rows>::at(from + place);
        tails.for_each(slot, k, [=](int64_t node) { add_to<rows>(own, of_nodes + node * rows); });
    });
}

// Fills the columns of a tile that have no node.
inline void pad(const Tile& tile, double value, double* to) {
    const int64_t columns = tile.matrix.columns;
    if (tile.used == columns) return;
    for (int64_t k = 0; k < tile.edges; ++k) std::fill(to + k * columns + tile.used, to + (k + 1) * columns, value);
}

inline int64_t whole_vectors(int64_t columns) { return (columns + 3) / 4 * 4; }

// Numbers of a tile's edges: scores, q, s, directions, results.
struct EdgeNumbers {
    const Array<double> x, q, s, y, e;

    explicit EdgeNumbers(int64_t most_edges)
        : x(make(most_edges)), q(make(most_edges)), s(make(most_edges)), y(make(most_edges)), e(make(most_edges)) {}

private:
    static Array<double> make(int64_t most_edges) { return scratch<double>(most_edges * most_columns); }
};

// Reads the scores of nodes in any order into x, a column for each.
template <class AnySweep>
node::Matrix gather_nodes(const AnySweep& sweep, const int64_t* nodes, int64_t count) {
    Tile tiles[most_columns];
    node::Matrix matrix{0, whole_vectors(count)};
    for (int64_t c = 0; c < count; ++c) {
        tiles[c] = sweep.tile(nodes[c], 1);
        tiles[c].matrix.columns = matrix.columns;
        matrix.edges = std::max(matrix.edges, tiles[c].edges);
    }
    double* const x = sweep.x.get();
    std::fill_n(x, matrix.size(), -infinity<double>);
    for (int64_t c = 0; c < count; ++c) sweep.read_scores(tiles[c], x + c);
    return matrix;
}

template <class S>
class ByWeight;

// One row of the batch or most_rows of them, side by side: what nodes have is (num_nodes, rows), and room behind it.
// The vectors of a tile may reach into what follows, which `up` finds later.
template <class S>
class Sweep : public EdgeNumbers {
public:
    using Real = S;
    using Numbers = Named<S>;
    using Results = ByWeight<S>;

    const HyperProblem<S>& problem;
    const Hypergraph& graph;
    const node::Kernels& omega;
    const int64_t first, rows;

private:
    const int64_t num_numbers = (graph.num_nodes + room_on_tape) * rows;  // of nodes
    const Array<double> own_tape = scratch<double>(rows > 1 ? 2 * num_numbers : 0);

public:
    double *const value, *const threshold;  // on the tape, or on a copy that has the rows side by side
    const Named<S> theta;

    // `fresh` is a tape to write, or null: then the problem's is read, and nothing writes to it.
    Sweep(const HyperProblem<S>& of, const node::Kernels& own, double* fresh, int64_t first_row, int64_t num_rows)
        : EdgeNumbers(of.graph.most_edges),
          problem(of),
          graph(of.graph),
          omega(own),
          first(first_row),
          rows(num_rows),
          value(rows > 1 ? own_tape.get() : (fresh ? fresh : const_cast<double*>(of.tape)) + 2 * num_numbers * first),
          threshold(value + num_numbers),
          theta(by_weight(of.theta, own.unit)) {
        if (rows > 1 && !fresh) read_rows(of.tape, 2 * num_numbers / rows, own_tape.get());
    }

    // --- arrays (batch, count)

    void write_tape(double* fresh) const {
        if (rows > 1) write_rows(own_tape.get(), 2 * num_numbers / rows, fresh);
    }
    template <class T>
    void read_rows(const T* from, int64_t count, double* to) const {
        for (int64_t n = 0; n < count; ++n) {
            for (int64_t r = 0; r < rows; ++r) to[n * rows + r] = double(from[(first + r) * count + n]);
        }
    }
    template <class T>
    void write_rows(const double* from, int64_t count, T* to) const {
        for (int64_t n = 0; n < count; ++n) {
            for (int64_t r = 0; r < rows; ++r) to[(first + r) * count + n] = T(from[n * rows + r]);
        }
    }

    // --- tiles

    Tile tile(int64_t node, int64_t nodes) const {
        const int64_t slot = graph.offset[node], edges = graph.offset[node + 1] - slot, used = nodes * rows;
        return {node, nodes, slot, edges, edges, node * rows, used, {edges, whole_vectors(used)}};
    }

    // body(tile), from the axioms to the root or back.
    template <class Body>
    void up(Body body) const {
        Pace pace;
        for (int64_t g = 0; g < graph.num_groups; ++g) for_group(g, pace, body);
    }
    template <class Body>
    void down(Body body) const {
        Pace pace;
        for (int64_t g = graph.num_groups - 1; g >= 0; --g) for_group(g, pace, body);
    }

    // --- numbers of nodes

    Array<double> zero_nodes() const { return zeros<double>(num_numbers); }
    int64_t root() const { return (graph.num_nodes - 1) * rows; }

    // 0 but for the root's.
    Array<double> at_root(const S* seed) const {
        Array<double> numbers = zero_nodes();
        read_rows(seed, 1, &numbers[root()]);
        return numbers;
    }

    // --- numbers of edges

    Named<S> by_weight(const S* data, double unit = 1) const {
        const int64_t count = graph.num_weights;
        Array<double> shared;
        if (rows > 1 && graph.shares_weights()) {
            shared = scratch<double>(count * rows);
            read_rows(data, count, shared.get());
        }
        const Hypergraph* const forms = graph.term_offset ? &graph : nullptr;
        return {data + first * count, count, graph.weight, unit, std::move(shared), forms};
    }
    Named<S> by_edge(const S* data) const {
        return {data + first * graph.num_edges, graph.num_edges, graph.edge, 1, nullptr, nullptr};
    }

    const double* thresholds(const Tile& tile) const { return threshold + tile.place; }

    // The scores of a tile.
    void score(const Tile& tile) const {
        read_scores(tile, x.get());
        pad(tile, -infinity<double>, x.get());
    }
    void read_scores(const Tile& tile, double* to) const {
        need_sound(graph, tile.node, tile.nodes);
        read(tile, theta, value, to);
    }

    // q, and s if wanted.
    void weigh(const Tile& tile, bool with_s) const {
        score(tile);
        omega.weigh(tile.matrix, x.get(), thresholds(tile), q.get(), with_s ? s.get() : nullptr);
    }
    // q of up to most_columns nodes in any order, for a sweep of one row.
    node::Matrix weigh_nodes(const int64_t* nodes, int64_t count) const {
        const node::Matrix matrix = gather_nodes(*this, nodes, count);
        double own[most_columns] = {};
        for (int64_t c = 0; c < count; ++c) own[c] = threshold[nodes[c]];
        omega.weigh(matrix, x.get(), own, q.get(), nullptr);
        return matrix;
    }

    // As gather_edges; 0 in columns without a node.
    void gather(const Tile& tile, const Named<S>& named, const double* of_nodes, double* to) const {
        read(tile, named, of_nodes, to);
        pad(tile, 0, to);
    }
    __attribute__((noinline)) void read(const Tile& tile, const Named<S>& named, const double* __restrict of_nodes,
                                        double* __restrict to) const {
        if (named.forms) return read_sums(tile, named, of_nodes, to);
        with_tails([&, of_nodes, to](auto rows, auto tails) { gather_edges(tile, rows, tails, named, of_nodes, to); });
    }

    // Leaves what edges have under their names.
    __attribute__((noinline)) void scatter(const Tile& tile, const double* __restrict from, const int32_t* name,
                                           int64_t count, S* data) const {
        S* __restrict const to = data + first * count;
        with_rows([=](auto rows) {
            for_edges(tile, rows, [=](int64_t slot, int64_t, int64_t place) {
                for (int64_t r = 0; r < rows; ++r) to[name[slot] + r * count] = S(from[place + r]);
            });
        });
    }

    void write_edges(const Tile& tile, S* by_edge) const {
        scatter(tile, e.get(), graph.edge, graph.num_edges, by_edge);
    }

    __attribute__((noinline)) void spread(const Tile& tile, const double* __restrict from,
                                          double* __restrict of_nodes) const {
        with_tails([&tile, from, of_nodes](auto rows, auto tails) { spread_edges(tile, rows, tails, from, of_nodes); });
    }

    // Both, by weight, with what edges have times a factor for each column.
    __attribute__((noinline)) void deliver(const Tile& tile, const double* __restrict from,
                                           const double* __restrict factor, double* __restrict of_nodes,
                                           S* data) const {
        const int32_t* const name = graph.weight;
        const int64_t count = graph.num_weights;
        S* __restrict const to = data + first * count;
        with_tails([=](auto rows, auto tails) {
            for (int64_t n = 0; n < tile.nodes; ++n) {
                const auto part = PerRow<rows>::at(factor + n * rows);
                for (int64_t k = 0, slot = tile.slot + n * tile.edges; k < tile.edges; ++k, ++slot) {
                    double found[rows];
                    auto own = PerRow<rows>::at(from + k * tile.matrix.columns + n * rows);
                    own *= part;
                    tails.for_each(slot, k, [=](int64_t node) { add_to<rows>(own, of_nodes + node * rows); });
                    own.to(found);
                    for (int64_t r = 0; r < rows; ++r) to[name[slot] + r * count] = S(found[r]);
                }
            }
        });
    }

    // Adds what edges have to the number of their weight, once for edges in a row that share it.
    __attribute__((noinline)) void add_up(const Tile& tile, const double* __restrict from,
                                          double* __restrict of_weights) const {
        const int32_t* const weight = graph.weight;
        const int64_t end = tile.slot + tile.nodes * tile.edges;
        with_rows([=](auto rows) {
            PerRow<rows> sum{};
            for_edges(tile, rows, [=, &sum](int64_t slot, int64_t, int64_t place) {
                sum += PerRow<rows>::at(from + place);
                if (slot + 1 < end && weight[slot + 1] == weight[slot]) return;
                add_to<rows>(sum, of_weights + weight[slot] * rows);
                sum = {};
            });
        });
    }

    // Adds what edges have to the weights of the terms of their form, times their coefficients: once for edges in a row
    // that share a form.
    __attribute__((noinline)) void add_up_terms(const Tile& tile, const double* __restrict from,
                                                double* __restrict of_weights) const {
        with_rows([=](auto rows) {
            int32_t form = -1;
            PerRow<rows> sum{};
            const auto add_sum = [=, &form, &sum] {
                if (form < 0) return;
                for_terms(graph, form, [=, &sum](int64_t weight, double coefficient) {
                    auto total = PerRow<rows>::at(of_weights + weight * rows);
                    total.add(coefficient, sum);
                    total.to(of_weights + weight * rows);
                });
            };
            for_edges_by_form(tile, graph.weight, rows, [&](int64_t slot, int64_t, int64_t place) {
                if (graph.weight[slot] != form) {
                    add_sum();
                    form = graph.weight[slot];
                    sum = {};
                }
                sum += PerRow<rows>::at(from + place);
            });
            add_sum();
        });
    }

private:
    // As gather_edges, for numbers of forms.
    __attribute__((noinline)) void read_sums(const Tile& tile, const Named<S>& named, const double* __restrict of_nodes,
                                             double* __restrict to) const {
        with_tails([&, of_nodes, to](auto rows, auto tails) {
            FormSums<S, rows> sums(named);
            const auto read_one = [&, of_nodes, to, tails](int64_t slot, int64_t k, int64_t place) {
                PerRow<rows> sum{};
                tails.for_each(slot, k, [&](int64_t node) { sum += PerRow<rows>::at(of_nodes + node * rows); });
                sums.add(slot, sum);
                sum.to(to + place);
            };
            for_edges_by_form(tile, named.name, rows, read_one);
        });
    }

    template <class Body>
    void for_group(int64_t group, Pace& pace, Body body) const {
        const int64_t end = graph.group[group + 1];
        for (int64_t node = graph.group[group]; node < end;) {
            const int64_t edges = graph.offset[node + 1] - graph.offset[node], most = columns_for(edges) / rows;
            pace.spend(edges * most * rows);
            body(tile(node, std::min(most, end - node)));
            node += most;
        }
    }

    // Nodes with many edges are taken in narrower tiles, which stay in the cache.
    static int64_t columns_for(int64_t edges) { return edges > 64 ? most_rows : most_columns; }

    // body(rows, tails) for the kind of tails there are.
    template <class Body>
    void with_tails(Body body) const {
        with_rows([&](auto rows) {
            graph.tail_offset ? body(rows, AnyTails{graph.tail, graph.tail_offset}) : body(rows, OneTail{graph.tail});
        });
    }

    // body(rows), as a constant.
    template <class Body>
    void with_rows(Body body) const {
        rows == 1 ? body(std::integral_constant<int64_t, 1>()) : body(std::integral_constant<int64_t, most_rows>());
    }
};

// Results by weight. The results of edges that share a weight, or have it in a form, are added up.
template <class S>
class ByWeight {
    const Sweep<S>& sweep;
    const Array<double> sums;

public:
    const bool is_shared;
    S* const results;

    ByWeight(const Sweep<S>& own, S* by_weight)
        : sweep(own),
          sums(zeros<double>(own.graph.shares_weights() ? own.graph.num_weights * own.rows : 0)),
          is_shared(own.graph.shares_weights()),
          results(by_weight) {}

    // The numbers e of a tile.
    void write(const Tile& tile) const {
        if (sweep.graph.term_offset) return sweep.add_up_terms(tile, sweep.e.get(), sums.get());
        if (is_shared) return sweep.add_up(tile, sweep.e.get(), sums.get());
        sweep.scatter(tile, sweep.e.get(), sweep.graph.weight, sweep.graph.num_weights, results);
    }
    void finish() const {
        if (is_shared) sweep.write_rows(sums.get(), sweep.graph.num_weights, results);
    }
};

// body(sweep) for the rows of the batch, over the threads: several at once, and the rest one by one.
template <class S, class Body>
void for_sweeps(const HyperProblem<S>& problem, double* fresh, Body body) {
    const std::unique_ptr<node::Kernels> omega = node::kernels(problem.omega, sizeof(S) == 4);
    const int64_t several = problem.batch >= most_rows * problem.threads ? problem.batch / most_rows : 0;
    const int64_t rest = problem.batch - several * most_rows;
    parallel_for(several + rest, problem.threads, [&](int64_t n, int) {
        const int64_t first = n < several ? n * most_rows : n + several * (most_rows - 1);
        body(Sweep<S>(problem, *omega, fresh, first, n < several ? most_rows : 1));
    });
}

// As in HyperKernels; they are in derivations.cpp.
template <class S>
bool sample(const HyperProblem<S>&, int64_t draws, int64_t choices, const double* uniforms, S* counts);
template <class S>
bool topk(const HyperProblem<S>&, int64_t k, S* scores, S* counts);
template <class S>
bool max_marginals(const HyperProblem<S>&, S* by_weight);

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
