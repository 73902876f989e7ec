// How a graph is laid into the W lanes of a vector. A tile is the edges into one node, or into several that do not depend
// on each other; its numbers are a run (node.h): one vector after the other. Nothing here knows Ω.
#pragma once

#include "../base/wide.h"
#include "hyper.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

using std::int32_t;
using std::int64_t;

enum class Lanes {
    rows,   // W rows of the batch, one node
    nodes,  // up to W nodes of as many edges each, one row
    edges   // the edges of one node, one row
};

struct Tile {
    Lanes lanes;
    int64_t node, nodes;  // the first, and how many
    int64_t slot, edges;  // of the first node; of each
    int64_t vectors;

    bool together() const { return lanes == Lanes::edges; }
};

// The tile that begins with a node, for one row of the batch. Lanes are nodes, unless few of them would be used: a tile
// then costs more than the sums over lanes do.
template <int W>
inline Tile tile_of_row(const Hypergraph& graph, int64_t node, int64_t end) {
    const int64_t slot = graph.offset[node], edges = graph.offset[node + 1] - slot, vectors = (edges + W - 1) / W;
    const int64_t nodes = end - node < W ? end - node : W;
    constexpr int64_t of_sums = 3;
    if (nodes * (vectors + of_sums) < edges) return {Lanes::edges, node, 1, slot, edges, vectors};
    return {Lanes::nodes, node, nodes, slot, edges, edges};
}

// body(tile) for the tiles of a group.
template <int W, class Body>
inline void for_group(const Hypergraph& graph, int64_t group, Lanes lanes, Body body) {
    const int64_t end = graph.group[group + 1];
    for (int64_t node = graph.group[group]; node < end;) {
        const int64_t slot = graph.offset[node], edges = graph.offset[node + 1] - slot;
        const Tile tile = lanes == Lanes::rows ? Tile{lanes, node, 1, slot, edges, edges} : tile_of_row<W>(graph, node, end);
        body(tile);
        node += tile.nodes;
    }
}

// A row of an array (batch, columns), or W rows. Lanes past the batch repeat its last row and are not written.
template <class T, int W>
struct Rows {
    using Number = std::remove_const_t<T>;
    T* row[W];
    int valid;

    Rows(T* data, int64_t columns, int64_t batch, int64_t first, Lanes lanes) {
        valid = lanes == Lanes::rows ? int(batch - first < W ? batch - first : W) : 1;
        for (int l = 0; l < W; ++l) row[l] = data + columns * (first + (l < valid ? l : valid - 1));
    }

    Wide<W> read(int64_t column) const {
        Wide<W> v;
        for (int p = 0; p < Wide<W>::parts; ++p) {
            T* const* own = row + 4 * p;
            v.part[p] = convert<double, Number>(Part<Number, 4>{own[0][column], own[1][column], own[2][column], own[3][column]});
        }
        return v;
    }
    void write(int64_t column, const Wide<W>& v) const {
        T numbers[W];
        for (int p = 0; p < Wide<W>::parts; ++p) store_as<T, double>(numbers + 4 * p, v.part[p]);
        for (int l = 0; l < valid; ++l) row[l][column] = numbers[l];
    }
};

// --- numbers of nodes: W each where lanes are rows, else one, and W more behind the last

template <int W>
__attribute__((always_inline)) inline Wide<W> at(const double* of_nodes, const Tile& tile) {
    if (tile.lanes == Lanes::rows) return load_wide<W>(of_nodes + tile.node * W);
    return tile.together() ? wide<W>(of_nodes[tile.node]) : load_wide<W>(of_nodes + tile.node);
}

// In ascending order of the nodes: lanes that are none overwrite what follows.
template <int W>
__attribute__((always_inline)) inline void put(double* of_nodes, const Tile& tile, const Wide<W>& v) {
    if (tile.together()) {
        of_nodes[tile.node] = v.part[0][0];
    } else {
        store_wide(of_nodes + tile.node * (tile.lanes == Lanes::rows ? W : 1), v);
    }
}

// --- numbers of edges

// body(tail) for the tails of a slot.
template <class Body>
inline void for_tails(const Hypergraph& graph, int64_t slot, Body body) {
    if (!graph.tail_offset) return body(graph.tail[slot]);
    for (int32_t t = graph.tail_offset[slot]; t < graph.tail_offset[slot + 1]; ++t) body(graph.tail[t]);
}

inline double sum_of_tails(const Hypergraph& graph, int64_t slot, const double* of_nodes) {
    double sum = 0;
    for_tails(graph, slot, [&](int32_t tail) { sum += of_nodes[tail]; });
    return sum;
}

// Four numbers, those of slots that lie `step` apart; past the last of `count` it is repeated.
struct Four {
    int64_t second, third, fourth;

    Four(int64_t count, int64_t step)
        : second(count > 1 ? step : 0), third(count > 2 ? 2 * step : second), fourth(count > 3 ? 3 * step : third) {}

    template <class T>
    __attribute__((always_inline)) Vec<double> pick(const T* from, const int32_t* at) const {
        return convert<double, T>(Part<T, 4>{from[at[0]], from[at[second]], from[at[third]], from[at[fourth]]});
    }
    Vec<double> sum_of_tails(const Hypergraph& graph, int64_t slot, const double* of_nodes) const {
        const auto sum = [&](int64_t own) { return bellmax::sum_of_tails(graph, own, of_nodes); };
        return Vec<double>{sum(slot), sum(slot + second), sum(slot + third), sum(slot + fourth)};
    }
};

// x = unit · data[name] + add(slot), four slots at a time, for the edges of four nodes.
template <int W, class T, class Add>
inline void gather_nodes(const Four& four, int64_t slot, int64_t edges, const T* __restrict data,
                         const int32_t* __restrict name, double unit, Add add, double* __restrict x) {
    for (int64_t k = 0; k < edges; ++k) store(x + k * W, four.pick(data, name + slot + k) * unit + add(four, slot + k));
}

// The same for the edges of one node, and `past` behind the last.
template <int W, class T, class Add>
inline void gather_edges(const Tile& tile, const T* __restrict data, const int32_t* __restrict name, double unit, Add add,
                         double past, double* __restrict x) {
    const int64_t whole = tile.edges / 4 * 4, rest = tile.edges - whole;
    const auto four_from = [&](const Four& four, int64_t k) {
        return four.pick(data, name + tile.slot + k) * unit + add(four, tile.slot + k);
    };
    for (int64_t k = 0; k < whole; k += 4) store(x + k, four_from(Four(4, 1), k));
    for (int64_t k = whole; k < tile.vectors * W; k += 4) store(x + k, broadcast(past));
    if (rest) store(x + whole, Vec<double>{0, 1, 2, 3} < double(rest) ? four_from(Four(rest, 1), whole) : broadcast(past));
}

// The same for a tile with one row.
template <int W, class T, class Add>
inline void gather_row(const Tile& tile, const T* data, const int32_t* name, double unit, Add add, double past, double* x) {
    if (tile.together()) return gather_edges<W>(tile, data, name, unit, add, past, x);
    for (int64_t n = 0; n < W; n += 4) {
        if (n < tile.nodes) {
            gather_nodes<W>(Four(tile.nodes - n, tile.edges), tile.slot + n * tile.edges, tile.edges, data, name, unit, add, x + n);
        } else {
            for (int64_t k = 0; k < tile.edges; ++k) store(x + n + k * W, broadcast(past));
        }
    }
}

// x = unit · data[name] + Σ of_nodes at the tails, if there are of_nodes; `past` in lanes without an edge. Names are of
// weights or of edges, by slot.
template <int W, class T>
void gather(const Hypergraph& graph, const Tile& tile, const Rows<const T, W>& data, const int32_t* name, double unit,
            const double* __restrict of_nodes, double past, double* __restrict x) {
    if (tile.lanes != Lanes::rows) {
        const T* const row = data.row[0];
        const int32_t* const tail = graph.tail;
        if (!of_nodes) return gather_row<W>(tile, row, name, unit, [](const Four&, int64_t) { return Vec<double>{}; }, past, x);
        if (graph.tail_offset) {
            const auto sums = [&](const Four& four, int64_t slot) { return four.sum_of_tails(graph, slot, of_nodes); };
            return gather_row<W>(tile, row, name, unit, sums, past, x);
        }
        const auto one = [=](const Four& four, int64_t slot) { return four.pick(of_nodes, tail + slot); };
        return gather_row<W>(tile, row, name, unit, one, past, x);
    }
    for (int64_t k = 0; k < tile.edges; ++k) {
        Wide<W> sum = data.read(name[tile.slot + k]) * wide<W>(unit);
        if (of_nodes) {
            for_tails(graph, tile.slot + k, [&](int32_t tail) { sum = sum + load_wide<W>(of_nodes + int64_t(tail) * W); });
        }
        store_wide(x + k * W, sum);
    }
}

// body(slot, its number) for the edges of a tile with one row.
template <int W, class Body>
inline void for_slots(const Tile& tile, const double* __restrict e, Body body) {
    const int64_t step = tile.together() ? 1 : W;
    for (int64_t n = 0; n < tile.nodes; ++n) {
        for (int64_t k = 0; k < tile.edges; ++k) body(tile.slot + n * tile.edges + k, e[n + k * step]);
    }
}

// Adds e to every tail's number.
template <int W>
void spread(const Hypergraph& graph, const Tile& tile, const double* __restrict e, double* __restrict of_nodes) {
    if (tile.lanes != Lanes::rows) {
        const int32_t* __restrict const tail = graph.tail;
        if (!graph.tail_offset) return for_slots<W>(tile, e, [=](int64_t slot, double own) { of_nodes[tail[slot]] += own; });
        return for_slots<W>(tile, e, [&](int64_t slot, double own) {
            for_tails(graph, slot, [&](int32_t node) { of_nodes[node] += own; });
        });
    }
    for (int64_t k = 0; k < tile.edges; ++k) {
        const Wide<W> own = load_wide<W>(e + k * W);
        for_tails(graph, tile.slot + k, [&](int32_t tail) {
            double* const to = of_nodes + int64_t(tail) * W;
            store_wide(to, load_wide<W>(to) + own);
        });
    }
}

// Leaves e under the names.
template <int W, class T>
void scatter(const Tile& tile, const double* __restrict e, const int32_t* __restrict name, const Rows<T, W>& to) {
    if (tile.lanes != Lanes::rows) {
        T* __restrict const row = to.row[0];
        return for_slots<W>(tile, e, [=](int64_t slot, double own) { row[name[slot]] = T(own); });
    }
    for (int64_t k = 0; k < tile.edges; ++k) to.write(name[tile.slot + k], load_wide<W>(e + k * W));
}

// Adds e to sums under the names, kept as the numbers of nodes are.
template <int W>
void add(const Tile& tile, const double* __restrict e, const int32_t* __restrict name, double* __restrict sums) {
    if (tile.lanes != Lanes::rows) return for_slots<W>(tile, e, [=](int64_t slot, double own) { sums[name[slot]] += own; });
    for (int64_t k = 0; k < tile.edges; ++k) {
        double* const to = sums + int64_t(name[tile.slot + k]) * W;
        store_wide(to, load_wide<W>(to) + load_wide<W>(e + k * W));
    }
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
