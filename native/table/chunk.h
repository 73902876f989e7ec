// One chunk of a strip: nodes of the kind P, moves of the table T.
//
// Nodes are kept in columns, one for each step and state, of `height` rows: those of the strip, and above them the rows
// that moves into the strip come from. A move looks back at an earlier column, and up.
#pragma once

#include "scores.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace table_engine {

// A lattice of a batch, and how it is swept.
struct Frame {
    Region region;
    int64_t row, rows, columns;  // of the arrays: the first row, their rows; the numbers of a line
    Ends starts, ends;
    int moves;  // of the list of scores
    OmegaParameters omega;
    bool is_double;  // whether arrays hold doubles or floats
    double scale;    // of the scores: −1 for costs
    int threads;
    double* tape;
    const Array2* scores;       // of the states, of the moves, of starts by state, of ends by state
    const Array2* z = nullptr;  // a direction, likewise
};

// A row above a strip: its columns, and the mass that goes there.
template <class Real>
struct RowAbove {
    int64_t from, to;
    Real* mass;
};

template <class P, class T>
class Chunk {
    using Real = typename P::Real;
    using V = typename P::V;
    using Int = typename P::Int;
    using Node = typename P::Node;
    static constexpr bool has_dots = P::has_dots;
    static constexpr int W = lanes_of<Real>, kinds = 1 + has_dots, most = most_candidates;

    const P& cells;
    const T& program;
    const Frame& f;

    // The candidates of one state at one step: where their nodes and scores are, and the tangents of both.
    struct Into {
        const Real *node[most], *weight[most], *z[most];
        int64_t plane[most], weight_plane[most];
        int count = 0, starts = 0;
    };
    // Calls action with the number of candidates, as the compiler's if they are few.
    template <class Action>
    __attribute__((always_inline)) static void with_count(int count, Action action) {
        if constexpr (P::is_quick) {
            if (count == 2) return action(std::integral_constant<int, 2>());
            if (count == 3) return action(std::integral_constant<int, 3>());
        }
        action(std::integral_constant<int, 0>());
    }

public:
    Array<Real> nodes;   // by step, state and row; first those of the steps before
    Array<Real> flows;   // the mass that moves carry, by step, move, kind and row: a ring of the steps after
    Array<Real> inject;  // the mass that enters, by step, state, kind and row
    Array<Real> starts, room;
    Array<RowAbove<Real>> above;
    Tile<Real> scores[most_scores], z[most_scores], out[most_scores];
    Range marked{0, -1};

    LATTICE_SELDOM Chunk(const P& cells, const T& program, const Frame& f, const Array2* arrays)
        : cells(cells), program(program), f(f) {
        const Table& t = table();
        nodes = scratch<Real>((chunk_steps + t.history) * step());
        room = scratch<Real>(tiles() * (P::weight_planes + 2) * tile_size);
        starts = scratch<Real>(P::planes * strip_rows);
        for (int64_t r = 0; r < strip_rows; ++r) P::put(starts.get() + r, strip_rows, P::dead());
        Real* next = room.get();
        for (int n = 0; n < tiles(); ++n) {
            scores[n] = f.scores[n].tile(next, P::weight_planes);
            if (has_dots) z[n] = f.z[n].tile(next, 1);
            if (arrays) out[n] = arrays[n].tile(next, 1);
        }
        if (!arrays) return;
        above = scratch<RowAbove<Real>>(t.reach);
        flows = scratch<Real>(flows_size());
        inject = scratch<Real>(kinds * t.states * tile_size);
    }

    const Table& table() const { return program.table; }
    int64_t column() const { return P::planes * program.table.height; }
    int64_t step() const { return program.table.states * column(); }
    int64_t flow_height() const { return strip_rows + program.table.pad + group; }
    int64_t flows_size() const { return table().ring * table().moves * kinds * flow_height(); }

    // Scores of states come first, then those of moves as they were given, of starts, and of ends, which have no tiles.
    int tiles() const { return 2 * table().states + f.moves; }
    int score_of_move(int m) const { return program.table.states + program.table.number[m]; }
    int score_of_start(int a) const { return program.table.states + f.moves + a; }

    // Row r of state a; k counts the steps, from −history.
    Real* node_at(int64_t k, int a, int64_t r) const {
        const Table& t = program.table;
        return nodes.get() + (k + t.history) * step() + a * column() + t.pad + r;
    }
    Real* flow_at(int64_t now, int m) const {
        const Table& t = program.table;
        return flows.get() + ((now & (t.ring - 1)) * t.moves + m) * kinds * flow_height();
    }
    Real* injected_at(int64_t k, int a) const {
        return inject.get() + (k * program.table.states + a) * kinds * strip_rows;
    }

    // --- candidates

    // The cells of step `now` where paths may start.
    void mark_starts(const Strip& strip, int64_t now) {
        const Range range = cells_at(f.starts.place, false, f.region, strip, now);
        if (range.low == marked.low && range.high == marked.high) return;
        for (int64_t r = marked.low; r <= marked.high; ++r) P::put(starts.get() + r, strip_rows, P::dead());
        for (int64_t r = range.low; r <= range.high; ++r) P::put(starts.get() + r, strip_rows, P::start());
        marked = range;
    }

    __attribute__((always_inline)) Into into(int a, int64_t k) const {
        const Table& t = program.table;
        Into all;
        const auto add = [&](const Real* node, int64_t plane, int n) {
            const int c = all.count++;
            all.node[c] = node;
            all.plane[c] = plane;
            all.weight[c] = all.z[c] = nullptr;
            if (scores[n].data) all.weight[c] = scores[n].at(k, 0);
            all.weight_plane[c] = scores[n].plane;
            if (has_dots && z[n].data) all.z[c] = z[n].at(k, 0);
        };
        all.starts = (f.starts.states >> a & 1) && marked.low <= marked.high;
        if (all.starts) add(starts.get(), strip_rows, score_of_start(a));
#pragma GCC unroll 4
        for (int m = t.into[a]; m < t.into[a + 1]; ++m) {
            const Move& move = t.move[m];
            add(node_at(k - move.di - move.dj, move.from, -move.di), t.height, score_of_move(m));
        }
        return all;
    }
    template <int N>
    __attribute__((always_inline)) static void gather(const Into& all, int64_t r, Node* terms) {
#pragma GCC unroll 4
        for (int n = 0; n < (N ? N : all.count); ++n) {
            Node node = P::load(all.node[n] + r, all.plane[n]);
            if (all.weight[n]) node = P::plus(node, P::weight(all.weight[n] + r, all.weight_plane[n]));
            if constexpr (has_dots) {
                if (all.z[n]) node.dot += load<Real>(all.z[n] + r);
            }
            terms[n] = node;
        }
    }
    // The probabilities of the candidates of one node; returns how many start there.
    LATTICE_SELDOM int probabilities(int a, int64_t k, int64_t r, double* q, int& count) const {
        const Into all = into(a, k);
        Node terms[most];
        V own[most];
        gather<0>(all, r / W * W, terms);
        cells.template weigh<0>(terms, all.count, own);
        count = all.count;
        for (int n = 0; n < count; ++n) q[n] = double(own[n][r % W]);
        return all.starts;
    }

    // --- forward

    __attribute__((noinline)) void advance(const Strip& strip, int64_t c) {
        const Table& t = program.table;
        const Node dead = P::filled(P::dead());
        for (int64_t k = 0; k < strip.steps_in(c); ++k) {
            const int64_t now = c * chunk_steps + k, rows = strip.groups * group;
            const auto awake = strip.awake(now);
            mark_starts(strip, now);
#pragma GCC unroll 2
            for (int a = 0; a < t.states; ++a) {
                Real* const here = node_at(k, a, 0);
                const Into all = into(a, k);
                const Real* const score = scores[a].data ? scores[a].at(k, 0) : nullptr;
                const int64_t plane = scores[a].plane;
                for (int64_t r = 0; r < awake.low; r += W) P::store(here + r, t.height, dead);
                for (int64_t r = awake.high; r < rows; r += W) P::store(here + r, t.height, dead);
                with_count(
                    all.count, [&](auto n) __attribute__((always_inline)) {
                        for (int64_t r = awake.low; r < awake.high; r += W) {
                            Node terms[most];
                            gather<n>(all, r, terms);
                            const auto own = score ? P::weight(score + r, plane) : P::none();
                            Node node = cells.template solve<n>(terms, all.count, own);
                            if constexpr (has_dots) {
                                if (z[a].data) node.dot += load<Real>(z[a].at(k, r));
                            }
                            if (!strip.covers(r, now, 1)) node = P::masked(node, strip.inside<Int>(r, now));
                            P::store(here + r, t.height, node);
                        }
                    });
            }
        }
    }

    // --- back

    // The mass of every node, from row `low` on with what enters, goes to the gradients of scores and on to the nodes
    // before; or its tangent does.
    __attribute__((noinline)) void descend(const Strip& strip, int64_t c, int64_t low) {
        const Table& t = program.table;
        for (int64_t k = strip.steps_in(c) - 1; k >= 0; --k) {
            const int64_t now = c * chunk_steps + k;
            const auto awake = strip.awake(now);
            mark_starts(strip, now);
#pragma GCC unroll 2
            for (int a = t.states - 1; a >= 0; --a) {
                const Into all = into(a, k);
                with_count(
                    all.count, [&](auto n) __attribute__((always_inline)) { spread<n>(all, a, k, now, awake, low); });
            }
            send(strip, now);
        }
    }

    // The mass that leaves a strip for the rows above, by the flows of the steps after `now`.
    void send(const Strip& strip, int64_t now) const {
        const Table& t = program.table;
        if (strip.row == 0) return;
        for (int64_t d = 1; d <= t.reach; ++d) {
            const RowAbove<Real>& row = above[std::size_t(d - 1)];
            const int64_t j = strip.first + now + d;
            if (j < row.from || j > row.to) continue;
#pragma GCC unroll 4
            for (int m = 0; m < t.moves; ++m) {
                if (t.move[m].di < d || now + t.back(m) < 0) continue;
                const Real* const flow = flow_at(now + t.back(m), m) + t.move[m].di - d;
                Real* const to = row.mass + (j * t.states + t.move[m].from) * kinds;
                for (int kind = 0; kind < kinds; ++kind) to[kind] += flow[kind * flow_height()];
            }
        }
    }

private:
    // A mass, or its tangent, at (k, r), for the gradient of a score.
    static void land(const Tile<Real>& tile, int64_t k, int64_t r, V mass) {
        if (tile.step == strip_rows) {
            store<Real>(tile.at(k, r), mass);
        } else if (tile.data) {
            tile.add(k, r, mass);
        }
    }

    // That of one state and step.
    template <int N>
    __attribute__((always_inline)) void spread(const Into& all, int a, int64_t k, int64_t now, Strip::Rows awake,
                                               int64_t low) const {
        const Table& t = program.table;
        const int64_t height = flow_height();
        const int count = N ? N : all.count, leaving = t.first_out[a + 1] - t.first_out[a];
        const bool is_partial = awake.low > 0 || awake.high < strip_rows;
        const Real *from[most_moves], *const entering = injected_at(k, a);
        Real* to[most];  // none for a start
        const Tile<Real>* gains[most];
#pragma GCC unroll 4
        for (int n = 0; n < count; ++n) {
            const int m = t.into[a] + n - all.starts;
            to[n] = n < all.starts ? nullptr : flow_at(now, m);
            gains[n] = out + (n < all.starts ? score_of_start(a) : score_of_move(m));
            for (int kind = 0; is_partial && to[n] && kind < kinds; ++kind) {
                std::fill(to[n] + kind * height, to[n] + kind * height + awake.low, Real(0));
                std::fill(to[n] + kind * height + awake.high, to[n] + kind * height + strip_rows, Real(0));
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < leaving; ++n) {
            const int m = t.out[t.first_out[a] + n];
            from[n] = flow_at(now + t.back(m), m) + t.move[m].di;
        }
        const Tile<Real> gain = out[a];
        for (int64_t r = awake.low; r < awake.high; r += W) {
            V mass[kinds] = {}, q[most], q_dot[has_dots ? most : 1];
            Node terms[most];
            for (int kind = 0; kind < kinds; ++kind) {
#pragma GCC unroll 4
                for (int n = 0; n < leaving; ++n) mass[kind] += load<Real>(from[n] + kind * height + r);
                if (r >= low) mass[kind] += load<Real>(entering + kind * strip_rows + r);
            }
            land(gain, k, r, mass[kinds - 1]);
            gather<N>(all, r, terms);
            cells.template weigh<N>(terms, all.count, q);
            if constexpr (has_dots) cells.template tilt<N>(terms, count, q, q_dot);
#pragma GCC unroll 4
            for (int n = 0; n < count; ++n) {
                V flow = q[n] * mass[0];
                if (to[n]) store<Real>(to[n] + r, flow);
                if constexpr (has_dots) {
                    flow = q_dot[n] * mass[0] + q[n] * mass[1];
                    if (to[n]) store<Real>(to[n] + height + r, flow);
                }
                land(*gains[n], k, r, flow);
            }
        }
    }
};

}  // namespace table_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
