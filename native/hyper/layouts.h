// Two ways to lay a graph into the W lanes of a vector: the edges of a node side by side, one row of the batch at a time,
// or W rows of the batch. A layout moves numbers between rows, nodes and runs (node.h); it knows no Ω.
#pragma once

#include "../base/memory.h"
#include "../base/wide.h"
#include "run.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// Lanes are edges of one node.
template <int W>
struct Along {
    static constexpr bool together = true;
    static constexpr std::int64_t per_node = 1, past_the_end = W;  // numbers of a node, and room behind those of the last
    static_assert(W % 4 == 0);

    std::int64_t row;

    static std::int64_t vectors(std::int64_t edges) { return (edges + W - 1) / W; }

    // A row of an array (batch, columns).
    template <class T>
    struct View {
        T* row;
        Wide<W> read(std::int64_t column) const { return wide<W>(double(row[column])); }
        void write(std::int64_t column, const Wide<W>& v) const { row[column] = T(v.part[0][0]); }
    };
    template <class T>
    View<T> view(T* data, std::int64_t columns, std::int64_t) const {
        return {data + row * columns};
    }

    static Wide<W> at(const double* of_nodes, std::int64_t node) { return wide<W>(of_nodes[node]); }
    static void put(double* of_nodes, std::int64_t node, const Wide<W>& v) { of_nodes[node] = v.part[0][0]; }

    // Four numbers; past the last of `count` it is repeated.
    template <class T>
    static Vec<double> pick(const T* from, const std::int32_t* at, std::int64_t count) {
        if (count >= 4) return Vec<double>{double(from[at[0]]), double(from[at[1]]), double(from[at[2]]), double(from[at[3]])};
        const std::int64_t last = count - 1, second = last < 1 ? last : 1;
        return Vec<double>{double(from[at[0]]), double(from[at[second]]), double(from[at[last]]), double(from[at[last]])};
    }

    // x = unit · data and, of a DAG, the number of each edge's tail.
    template <class T, bool with_tails>
    static void read_edges(const Run& run, View<const T> data, Names names, double unit, const double* of_nodes, double past,
                           double* __restrict x) {
        const T* __restrict from = data.row;
        const std::int64_t edges = run.edges;
        for (std::int64_t k = 0; k < edges; k += 4) {
            const bool whole = k + 4 <= edges;
            Vec<double> v = names.follow && whole ? load_as<double>(from + names.at[0] + k) : pick(from, names.at + k, edges - k);
            v *= unit;
            if constexpr (with_tails) {
                v += run.tail.follow ? load(of_nodes + run.tail.at[0] + k) : pick(of_nodes, run.tail.at + k, edges - k);
            }
            if (!whole) v = Vec<double>{0, 1, 2, 3} < double(edges - k) ? v : broadcast(past);
            store(x + k, v);
        }
        for (std::int64_t k = (edges + 3) / 4 * 4; k < vectors(edges) * W; k += 4) store(x + k, broadcast(past));
    }

    // The numbers of the edges by their names.
    template <class T>
    static void read(const Run& run, View<const T> data, Names names, double* x) {
        read_edges<T, false>(run, data, names, 1, nullptr, 0, x);
    }

    // x = unit · weight + Σ of_nodes at the tails; `past` behind the last edge.
    template <class T>
    static void gather(const Run& run, View<const T> weights, double unit, const double* of_nodes, double past, double* x) {
        if (!run.tail_offset) return read_edges<T, true>(run, weights, run.weight, unit, of_nodes, past, x);
        read_edges<T, false>(run, weights, run.weight, unit, of_nodes, past, x);
        for (std::int64_t k = 0; k < run.edges; ++k) {
            double sum = x[k];
            for (std::int32_t t = run.tail_offset[k]; t < run.tail_offset[k + 1]; ++t) sum += of_nodes[run.tail.at[t]];
            x[k] = sum;
        }
    }

    // to[name] += e for every edge.
    static void add(const Run& run, Names names, const double* __restrict e, double* __restrict to) {
        if (names.follow) {
            double* const first = to + names.at[0];
            for (std::int64_t k = 0; k < run.edges; k += 4) store(first + k, load(first + k) + load(e + k));
        } else {
            for (std::int64_t k = 0; k < run.edges; ++k) to[names.at[k]] += e[k];
        }
    }

    // The same for every tail.
    static void spread(const Run& run, const double* __restrict e, double* __restrict of_nodes) {
        if (!run.tail_offset) return add(run, run.tail, e, of_nodes);
        for (std::int64_t k = 0; k < run.edges; ++k) {
            for (std::int32_t t = run.tail_offset[k]; t < run.tail_offset[k + 1]; ++t) of_nodes[run.tail.at[t]] += e[k];
        }
    }

    template <class T>
    static void write(const Run& run, Names names, const double* __restrict e, View<T> out) {
        T* __restrict to = out.row;
        std::int64_t k = 0;
        for (; names.follow && k + 4 <= run.edges; k += 4) store_as<T, double>(to + names.at[0] + k, load(e + k));
        for (; k < run.edges; ++k) to[names.at[k]] = T(e[k]);
    }
};

// Lanes are rows of the batch.
template <int W>
struct Across {
    static constexpr bool together = false;
    static constexpr std::int64_t per_node = W, past_the_end = 0;

    std::int64_t first;  // row

    static std::int64_t vectors(std::int64_t edges) { return edges; }

    // Rows of an array (batch, columns). Lanes past the batch repeat its last row and are not written.
    template <class T>
    struct View {
        T* row[W];
        int valid;

        Wide<W> read(std::int64_t column) const {
            Wide<W> v;
            for (int p = 0; p < Wide<W>::parts; ++p) {
                T* const* own = row + 4 * p;
                v.part[p] = Vec<double>{double(own[0][column]), double(own[1][column]), double(own[2][column]),
                                        double(own[3][column])};
            }
            return v;
        }
        void write(std::int64_t column, const Wide<W>& v) const {
            T numbers[W];
            for (int p = 0; p < Wide<W>::parts; ++p) store_as<T, double>(numbers + 4 * p, v.part[p]);
            for (int l = 0; l < valid; ++l) row[l][column] = numbers[l];
        }
    };
    template <class T>
    View<T> view(T* data, std::int64_t columns, std::int64_t batch) const {
        View<T> rows;
        rows.valid = int(batch - first < W ? batch - first : W);
        for (int l = 0; l < W; ++l) rows.row[l] = data + columns * (first + (l < rows.valid ? l : rows.valid - 1));
        return rows;
    }

    static Wide<W> at(const double* of_nodes, std::int64_t node) { return load_wide<W>(of_nodes + node * W); }
    static void put(double* of_nodes, std::int64_t node, const Wide<W>& v) { store_wide(of_nodes + node * W, v); }

    // body(k, tail) for every tail of every edge.
    template <class Body>
    static void for_tails(const Run& run, std::int64_t k, Body body) {
        if (!run.tail_offset) return body(run.tail.at[k]);
        for (std::int32_t t = run.tail_offset[k]; t < run.tail_offset[k + 1]; ++t) body(run.tail.at[t]);
    }

    template <class T>
    static void read(const Run& run, const View<const T>& data, Names names, double* __restrict x) {
        for (std::int64_t k = 0; k < run.edges; ++k) store_wide(x + k * W, data.read(names.at[k]));
    }

    template <class T>
    static void gather(const Run& run, const View<const T>& weights, double unit, const double* __restrict of_nodes, double,
                       double* __restrict x) {
        for (std::int64_t k = 0; k < run.edges; ++k) {
            Wide<W> sum = weights.read(run.weight.at[k]) * wide<W>(unit);
            for_tails(run, k, [&](std::int32_t tail) { sum = sum + at(of_nodes, tail); });
            store_wide(x + k * W, sum);
        }
    }

    static void add(const Run& run, Names names, const double* __restrict e, double* __restrict to) {
        for (std::int64_t k = 0; k < run.edges; ++k) put(to, names.at[k], at(to, names.at[k]) + load_wide<W>(e + k * W));
    }

    static void spread(const Run& run, const double* __restrict e, double* __restrict of_nodes) {
        for (std::int64_t k = 0; k < run.edges; ++k) {
            const Wide<W> part = load_wide<W>(e + k * W);
            for_tails(run, k, [&](std::int32_t tail) { put(of_nodes, tail, at(of_nodes, tail) + part); });
        }
    }

    template <class T>
    static void write(const Run& run, Names names, const double* __restrict e, const View<T>& out) {
        for (std::int64_t k = 0; k < run.edges; ++k) out.write(names.at[k], load_wide<W>(e + k * W));
    }
};

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
