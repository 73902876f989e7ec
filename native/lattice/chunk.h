// One chunk of a strip: nodes of the kind P, moves of the table T.
//
// Nodes are kept in columns, one for each state at each of the last steps, of `height` rows: the rows of the strip, and
// above them the rows that moves into the strip come from. A move looks back at an earlier column, and up. For the
// sweep back, the probabilities of all moves of the chunk are kept.
#pragma once

#include "scores.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// A lattice, or a block of whole strips of it, with what it exchanges with the blocks above and below: lines that begin
// at column 0, of slots (values) and of numbers (mass).
struct StripFrame {
    Region region;
    const int64_t row, rows, columns;  // of the arrays: the first row, their rows; the numbers of a line
    const Ends starts, ends;
    const int moves;
    const OmegaParameters omega;
    const bool is_double;
    const double scale;
    const int threads;
    double *const tape, *const end_values;
    const SlotArray* const scores;
    const SlotArray* z = nullptr;  // a direction
    const void *const line_above, *const mass_below;
    void *const line_below, *const mass_above;

    StripFrame(const Region& region, const LatticeProblem& p, int threads, double* tape, double* end_values,
               const SlotArray* scores)
        : region(region),
          row(p.row),
          rows(p.rows),
          columns(p.column + p.columns),
          starts(p.starts),
          ends(p.ends),
          moves(p.moves),
          omega(p.omega),
          is_double(p.is_double),
          scale(p.scale),
          threads(threads),
          tape(tape),
          end_values(end_values),
          scores(scores),
          line_above(p.line_above),
          mass_below(p.mass_below),
          line_below(p.line_below),
          mass_above(p.mass_above) {}
};

// Calls action(a) for every state, as the compiler's numbers if the table is.
template <bool backwards, class Action, int... a>
LATTICE_INLINE inline void for_known_states(Action action, std::integer_sequence<int, a...>) {
    (action(std::integral_constant<int, backwards ? int(sizeof...(a)) - 1 - a : a>()), ...);
}
template <bool backwards, class T, class Action>
LATTICE_INLINE inline void for_states(int states, Action action) {
    if constexpr (T::is_known) {
        for_known_states<backwards>(action, std::make_integer_sequence<int, T::table.states>());
    } else {
        for (int a = 0; a < states; ++a) action(backwards ? states - 1 - a : a);
    }
}

// The working memory of a thread for the chunks that it sweeps.
template <class P>
struct Room {
    using Real = typename P::Real;
    using Number = typename P::Number;
    static constexpr int kinds = 1 + P::has_dots;

    // A row that strips have to do with each other for: its columns, its nodes, and the mass that goes there.
    struct Border {
        int64_t from, to;
        typename P::StoredNode* nodes;
        Number* mass;
    };

    const P& cells;
    const Table& table;
    const StripFrame& f;
    Array<Real> nodes;          // by step, state and row: a ring of the last steps
    Array<Real> starts;         // nodes of the rows where paths may start
    Array<Number> kept;         // probabilities by step, move, kind and row, also for `history` steps after the chunk
    Array<Number> kept_starts;  // by step, state, kind and row
    Array<Number> masses;       // by step, state, kind and row: a ring of the steps after
    Array<Number> inject;       // the mass that enters, by step, state, kind and row, from row `low` on
    int64_t low = 0;
    Array<Number> numbers;  // of the tiles
    Array<Border> above, below;  // of the strip: rows −1, −2, …, and its last ones
    ScoreTile<Number> scores[most_slots], z[most_slots], out[most_slots];
    Range marked{0, -1};

    // `keeps`: whether probabilities are kept, `arrays`: the gradients, if masses are swept too.
    LATTICE_APART Room(const P& cells, const Table& t, const StripFrame& f, bool keeps, const SlotArray* arrays)
        : cells(cells), table(t), f(f) {
        nodes = scratch<Real>(t.ring * t.states * P::planes * t.height);
        numbers = scratch<Number>(tiles() * 3 * tile_size);
        starts = scratch<Real>(P::planes * strip_rows);
        above = scratch<Border>(t.reach);
        below = scratch<Border>(t.lines());
        for (int64_t r = 0; r < strip_rows; ++r) P::put(starts.get() + r, strip_rows, P::dead());
        Number* next = numbers.get();
        for (int n = 0; n < tiles(); ++n) {
            scores[n] = f.scores[n].tile(next, P::line_planes);
            if (P::has_dots) z[n] = f.z[n].tile(next, 1);
            if (!arrays) continue;
            // Scores of cells are not needed any more when their gradients come.
            const bool is_shared = arrays[n].by == By::cell && f.scores[n].by == By::cell;
            out[n] = is_shared ? scores[n] : arrays[n].tile(next, 1);
        }
        if (!keeps) return;
        const int64_t kept_size = (chunk_steps + t.history) * t.moves * kinds * strip_rows;
        kept = scratch<Number>(kept_size + t.pad);
        kept_starts = scratch<Number>(kinds * t.states * tile_size);
        std::fill_n(kept.get() + kept_size, t.pad, Number(0));
        if (!arrays) return;
        masses = scratch<Number>(masses_size());
        inject = scratch<Number>(kinds * t.states * tile_size);
    }

    // The slots of ends have no tiles.
    int tiles() const { return 2 * table.states + f.moves; }
    int64_t masses_size() const { return table.ring * table.states * kinds * table.height; }
    int64_t injected_rows() const { return strip_rows - low; }

    // The cells of a step where paths may start.
    LATTICE_INLINE void mark_starts(Range range) {
        if (range.low != marked.low || range.high != marked.high) mark_others(range);
    }
    bool has_starts(int a) const { return !marked.is_empty() && (f.starts.states >> a & 1); }

private:
    LATTICE_SELDOM void mark_others(Range range) {
        for (int64_t r = marked.low; r <= marked.high; ++r) P::put(starts.get() + r, strip_rows, P::dead());
        for (int64_t r = range.low; r <= range.high; ++r) P::put(starts.get() + r, strip_rows, P::start());
        marked = range;
    }
};

// A chunk in a room, and its steps.
template <class P, class T>
class Chunk {
    using Real = typename P::Real;
    using Number = typename P::Number;
    using V = typename P::V;
    using Int = typename P::Int;
    using Node = typename P::Node;
    static constexpr bool has_dots = P::has_dots;
    static constexpr int W = lanes_of<Real>, kinds = 1 + has_dots, most = most_candidates;

    // Scores of one slot at one step.
    struct StepScores {
        Kind kind;
        const Number* at;
        int64_t plane;
    };
    // Where the nodes of a candidate are, the score that is added to them, and its tangent.
    struct Source {
        const Real* node;
        int64_t plane;
        StepScores score;
        const Number* z;
    };

    Room<P>& room;

public:
    explicit Chunk(Room<P>& room) : room(room) {}

    LATTICE_INLINE const Table& table() const {
        if constexpr (T::is_known) return T::table;
        return room.table;
    }
    int64_t column() const { return P::planes * table().height; }
    int64_t step() const { return table().states * column(); }
    int64_t kept_step() const { return table().moves * kinds * strip_rows; }
    int score_of_move(int m) const { return table().states + table().number[m]; }
    int score_of_start(int a) const { return table().states + room.f.moves + a; }

    // Row 0 of state a, or of move m; `now` counts the steps of the strip, k the steps of the chunk.
    Real* node_at(int64_t now, int a) const {
        const Table& t = table();
        return room.nodes.get() + (now & (t.ring - 1)) * step() + a * column() + t.pad;
    }
    Number* mass_at(int64_t now, int a) const {
        const Table& t = table();
        return room.masses.get() + ((now & (t.ring - 1)) * t.states + a) * kinds * t.height;
    }
    Number* kept_at(int64_t k, int m) const { return room.kept.get() + k * kept_step() + m * kinds * strip_rows; }
    Number* kept_start_at(int64_t k, int a) const {
        return room.kept_starts.get() + (k * table().states + a) * kinds * strip_rows;
    }
    // From row `low` on.
    Number* injected_at(int64_t k, int a) const {
        return room.inject.get() + (k * table().states + a) * kinds * room.injected_rows() - room.low;
    }

    // --- forward

    // The nodes of the rows above at one step.
    LATTICE_INLINE void enter(const Strip& strip, int64_t now) const {
        const Table& t = table();
        for (int64_t d = 1; d <= t.reach; ++d) {
            const auto& row = room.above[std::size_t(d - 1)];
            const int64_t j = strip.first + now + d;
            const bool is_inside = j >= row.from && j <= row.to;
            for (int a = 0; a < t.states; ++a) {
                P::put(node_at(now, a) - d, t.height, is_inside ? row.nodes[j * t.states + a] : P::dead());
            }
        }
    }
    // The nodes of the last rows at one step, for the strip below.
    LATTICE_INLINE void leave(const Strip& strip, int64_t now) const {
        const Table& t = table();
        const int64_t count = t.lines();
        for (int64_t n = 0; n < count; ++n) {
            const auto& row = room.below[std::size_t(n)];
            const int64_t r = strip_rows - count + n, j = strip.first + now - r;
            if (j < row.from || j > row.to) continue;
            for (int a = 0; a < t.states; ++a) {
                row.nodes[j * t.states + a] = P::get(node_at(now, a) + r, t.height);
            }
        }
    }

    // One step. Keep: probabilities are kept.
    template <bool Keep>
    LATTICE_INLINE void advance(const Strip& strip, int64_t now, int64_t k) const {
        const auto awake = strip.awake(now);
        for_states<false, T>(table().states, [&](auto a) LATTICE_INLINE {
            const bool starts_here = room.has_starts(a);
            if constexpr (T::is_known) {
                constexpr int count = T::table.into[a + 1] - T::table.into[a];
                if (starts_here) return solve<Keep, count + 1>(a, 1, count + 1, strip, now, k, awake);
                solve<Keep, count>(a, 0, count, strip, now, k, awake);
            } else {
                const int count = starts_here + table().into[a + 1] - table().into[a];
                if (count == 2) return solve<Keep, 2>(a, starts_here, 2, strip, now, k, awake);
                if (count == 3) return solve<Keep, 3>(a, starts_here, 3, strip, now, k, awake);
                solve<Keep, 0>(a, starts_here, count, strip, now, k, awake);
            }
        });
    }

    // --- back

    // Copies the probabilities of the steps after chunk c from the next chunk; 0 after the last.
    void carry_back(const Strip& strip, int64_t c) const {
        const int64_t size = table().history * kept_step();
        if (c + 1 < strip.chunks) {
            std::memmove(kept_at(chunk_steps, 0), kept_at(0, 0), std::size_t(size) * sizeof(Number));
        } else {
            std::fill_n(kept_at(strip.steps_in(c), 0), size + table().pad, Number(0));
        }
    }

    // The mass of every node, with what enters, goes to the gradients of scores; or its tangent does.
    __attribute__((noinline)) void descend(const Strip& strip, const Places& where, int64_t c) const {
        for (int64_t k = strip.steps_in(c) - 1; k >= 0; --k) {
            const int64_t now = c * chunk_steps + k;
            const auto awake = strip.awake(now);
            room.mark_starts(where.at(now));
            for_states<true, T>(table().states, [&](auto a) LATTICE_INLINE {
                pull(a, now, k, awake);
                const Table& t = table();
                const ScoreTile<Number>* const out = room.out;
                for (int m = t.into[a]; m < t.into[a + 1]; ++m) {
                    land(out[score_of_move(m)], kept_at(k, m), mass_at(now, a), k, awake);
                }
                if (room.has_starts(a)) land(out[score_of_start(a)], kept_start_at(k, a), mass_at(now, a), k, awake);
            });
            send(strip, now, k);
        }
        for (int64_t now = -1; c == 0 && now >= -table().history; --now) send(strip, now, now);
    }

private:
    // The mass that leaves a strip for the rows above.
    LATTICE_INLINE void send(const Strip& strip, int64_t now, int64_t k) const {
        const Table& t = table();
        if (strip.row == 0) return;
        for (int64_t d = 1; d <= t.reach; ++d) {
            const auto& row = room.above[std::size_t(d - 1)];
            const int64_t j = strip.first + now + d;
            if (j < row.from || j > row.to) continue;
            for_each_of<known_moves()>(t.moves, [&](int m) LATTICE_INLINE {
                if (t.move[m].di < d || now + t.back(m) < 0) return;
                const Number* const q = kept_at(k + t.back(m), m) + t.move[m].di - d;
                const Number* const mass = mass_at(now + t.back(m), t.move[m].to) + t.move[m].di - d;
                Number* const to = row.mass + (j * t.states + t.move[m].from) * kinds;
                to[0] += *q * *mass;
                if constexpr (has_dots) to[1] += q[strip_rows] * *mass + *q * mass[t.height];
            });
        }
    }

    // All moves, and those out of a state, as the compiler's numbers, or 0.
    static constexpr int known_moves() {
        if constexpr (T::is_known) return T::table.moves;
        return 0;
    }
    template <class A>
    static constexpr int known_leaving() {
        if constexpr (T::is_known) return T::table.first_out[A::value + 1] - T::table.first_out[A::value];
        return 0;
    }

    LATTICE_INLINE StepScores score_at(int n, int64_t k) const {
        const ScoreTile<Number>& tile = room.scores[n];
        Kind kind = tile.kind();
        if constexpr (T::is_known) {
            if (n < int(std::size(T::kinds))) kind = T::kinds[n];
        }
        return {kind, kind == Kind::none ? nullptr : tile.at(k, 0), tile.plane};
    }
    LATTICE_INLINE static typename P::Weight weight(const P& cells, const StepScores& score, int64_t r) {
        if (score.kind == Kind::cell) return cells.weight(load_as<Real>(score.at + r));
        return score.kind == Kind::line ? cells.line_weight(score.at + r, score.plane) : P::none();
    }
    LATTICE_INLINE Source source(const Real* node, int64_t plane, int n, int64_t k) const {
        const ScoreTile<Number>& z = room.z[n];
        return {node, plane, score_at(n, k), has_dots && z.data ? z.at(k, 0) : nullptr};
    }
    LATTICE_INLINE static Node candidate(const P& cells, const Source& source, int64_t r, Real scale) {
        Node node = P::load(source.node + r, source.plane);
        if (source.score.kind != Kind::none) node = P::plus(node, weight(cells, source.score, r));
        if constexpr (has_dots) {
            if (source.z) node.dot += load_as<Real>(source.z + r) * scale;
        }
        return node;
    }

    // The nodes of one state at one step, by their candidates, N where it is not 0; the first may be a start.
    template <bool Keep, int N, class A>
    LATTICE_INLINE void solve(A a, int first, int count, const Strip& strip, int64_t now, int64_t k,
                              Strip::RowRange awake) const {
        const Table& t = table();
        constexpr int room_for = N ? N : most;
        const P local = room.cells;  // so that it stays in registers
        const Real scale = Real(room.f.scale);
        Source from[room_for];
        for_each_of<N>(count, [&](int n) LATTICE_INLINE {
            if (n < first) return void(from[n] = source(room.starts.get(), strip_rows, score_of_start(a), k));
            const int m = t.into[a] + n - first;
            from[n] = source(node_at(now - t.back(m), t.move[m].from) - t.move[m].di, t.height, score_of_move(m), k);
        });
        Real* const here = node_at(now, a);
        const Source own = source(here, t.height, a, k);
        Number* const q_to = Keep ? kept_at(k, t.into[a]) : nullptr;
        Number* const q_start = Keep && first ? kept_start_at(k, a) : nullptr;
        const bool is_whole = now >= strip.all_enter && now <= strip.all_leave;
        for (int64_t r = awake.low; r < awake.high; r += W) {
            Node terms[room_for];
            V q[room_for * kinds];
            for_each_of<N>(count, [&](int n) LATTICE_INLINE { terms[n] = candidate(local, from[n], r, scale); });
            Node node = local.template solve<Keep, N>(terms, count, weight(local, own.score, r), q);
            if constexpr (has_dots) {
                if (own.z) node.dot += load_as<Real>(own.z + r) * scale;
            }
            if (!is_whole && !strip.covers(r, now, 1)) node = P::masked(node, strip.inside<Int>(r, now));
            P::store(here + r, t.height, node);
            if (Keep) for_each_of<N>(count, [&](int n) LATTICE_INLINE {
                Number* const to = (n < first ? q_start : q_to + (n - first) * kinds * strip_rows) + r;
                for_each_of<kinds>(kinds, [&](int kind) LATTICE_INLINE {
                    store_as<Number, Real>(to + kind * strip_rows, q[kind * count + n]);
                });
            });
        }
        if (awake.low > 0 || awake.high < strip_rows) sleep<Keep>(a, strip, now, k, awake);
    }
    // Rows without a cell; also those behind the last one that a sweep back will look at.
    template <bool Keep>
    LATTICE_SELDOM void sleep(int a, const Strip& strip, int64_t now, int64_t k, Strip::RowRange awake) const {
        const Table& t = table();
        const Node dead = P::filled(P::dead());
        const int64_t end = std::min(strip_rows, strip.groups * group + t.pad);
        const int64_t planes = Keep ? (t.into[a + 1] - t.into[a]) * kinds : 0;
        for (int64_t r = 0; r < end; r += W) {
            if (r == awake.low) r = awake.high;
            if (r >= end) return;
            P::store(node_at(now, a) + r, t.height, dead);
            for (int64_t n = 0; n < planes; ++n) {
                store_as<Number, Real>(kept_at(k, t.into[a]) + n * strip_rows + r, V{});
            }
        }
    }

    // The mass of one state at one step, from the nodes that its moves lead to.
    template <class A>
    LATTICE_INLINE void pull(A a, int64_t now, int64_t k, Strip::RowRange awake) const {
        using M = Vec<Number>;
        const Table& t = table();
        const int leaving = t.first_out[a + 1] - t.first_out[a];
        const Number *q[most_moves], *after[most_moves], *const entering = injected_at(k, a);
        Number* const here = mass_at(now, a);
        const ScoreTile<Number> gain = room.out[a];
        const int64_t from = room.low;
        for_each_of<known_leaving<A>()>(leaving, [&](int n) LATTICE_INLINE {
            const int m = t.out[t.first_out[a] + n];
            q[n] = kept_at(k + t.back(m), m) + t.move[m].di;
            after[n] = mass_at(now + t.back(m), t.move[m].to) + t.move[m].di;
        });
        for (int64_t r = 0; r < strip_rows; r += lanes_of<Number>) {
            if (r == awake.low) r = awake.high;
            for (int kind = 0; r < strip_rows && kind < kinds; ++kind) store<Number>(here + kind * t.height + r, M{});
        }
        for (int64_t r = awake.low; r < awake.high; r += lanes_of<Number>) {
            M mass[kinds] = {};
            for_each_of<known_leaving<A>()>(leaving, [&](int n) LATTICE_INLINE {
                const M own = load<Number>(q[n] + r), whole = load<Number>(after[n] + r);
                mass[0] += own * whole;
                if constexpr (has_dots) {
                    const M q_dot = load<Number>(q[n] + strip_rows + r);
                    mass[1] += q_dot * whole + own * load<Number>(after[n] + t.height + r);
                }
            });
            for_each_of<kinds>(kinds, [&](int kind) LATTICE_INLINE {
                if (r >= from) mass[kind] += load<Number>(entering + kind * (strip_rows - from) + r);
                store<Number>(here + kind * t.height + r, mass[kind]);
            });
            if (gain.data) gain.land(k, r, mass[kinds - 1]);
        }
    }
    // The mass that goes along one move, for the gradient of its score.
    void land(const ScoreTile<Number>& gain, const Number* q, const Number* mass, int64_t k,
              Strip::RowRange awake) const {
        if (!gain.data) return;
        const int64_t height = table().height;
        for (int64_t r = awake.low; r < awake.high; r += lanes_of<Number>) {
            auto flow = load<Number>(q + r) * load<Number>(mass + (kinds - 1) * height + r);
            if constexpr (has_dots) flow += load<Number>(q + strip_rows + r) * load<Number>(mass + r);
            gain.land(k, r, flow);
        }
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
