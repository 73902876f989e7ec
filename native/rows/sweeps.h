// The sweeps of one lattice, row by row, with nodes of the kind P (table/cells.h). A tape holds the rows before each
// block of rows; going back, a block is swept anew and its probabilities are kept until its masses are known.
#pragma once

#include <functional>

#include "../table/cells.h"
#include "../table/moves.h"
#include "gradients.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace row_engine {

using table_engine::EndList;
using table_engine::most_candidates;
using table_engine::Table;

constexpr int64_t group = 8;  // rows and columns come in multiples of it

constexpr int64_t up_to_groups(int64_t n) { return (n + group - 1) / group * group; }

// Rows between those that are kept.
inline int64_t block_rows(const Table& table) { return std::max(group, up_to_groups(table.reach)); }

// Numbers of a tape: what nodes it is of, the rows before each block, the ends.
inline int64_t rows_kept(const Table& table, int64_t rows, int64_t columns) {
    const int64_t block = block_rows(table);
    return (rows + block - 1) / block * table.reach * table.states * up_to_groups(columns);
}

// A node of a path: which draw it is of, how many nodes come after it, (i, j, state), and the move into it.
using Visit = std::function<void(int64_t draw, int64_t taken, int64_t i, int64_t j, int state, int move)>;

template <class P>
class Sweeps {
    using Real = typename P::Real;
    using V = Vec<Real>;
    using Int = typename P::Int;
    using Node = typename P::Node;
    static constexpr bool has_dots = P::has_dots;
    static constexpr int W = lanes_of<Real>, kinds = 1 + has_dots;

    // Where a candidate's node is in a row, its weight and the direction of that.
    struct Candidate {
        const Real *node, *weight, *z;
        int64_t plane, step;
    };

    const P cells;
    const Frame& f;
    const Table& table;
    const int64_t furthest;                  // columns that a move goes
    const int64_t wide, pad, block, blocks;  // numbers of a row, and before it; rows of a block
    const int64_t ring;                      // rows of nodes and of masses that are there at a time
    const EndList end_list;
    const bool single_end;
    int64_t starts_to = 0, ends_from = 0;    // columns that paths start before, and end from
    std::vector<Term> terms;
    std::vector<Line<P>> lines;
    std::vector<int> changing;  // from row to row
    Array<Real> nodes;   // by row, state and plane
    Array<Real> begin;   // a row of starts
    Array<Real> chosen;  // probabilities by row, candidate and kind
    std::vector<Candidate> candidates;
    Array<double> spare;
    double* kept;
    double *end_values, *end_dots = nullptr;

    static int64_t ring_of(const Table& table) {
        int64_t rows = 1;
        while (rows <= table.reach) rows *= 2;
        return rows;
    }
    static int64_t furthest_of(const Table& table) {
        int64_t most = 0;
        for (int m = 0; m < table.moves; ++m) most = std::max(most, table.move[m].dj);
        return most;
    }
    int64_t width() const { return pad + wide; }
    Real* node_at(int64_t i, int a) const {
        return nodes.get() + ((i & (ring - 1)) * table.states + a) * P::planes * width() + pad;
    }
    // Candidates of a state: the start, and its moves.
    int candidate(int a) const { return table.into[a] + a; }
    Real* chosen_at(int64_t r, int n) const {
        return chosen.get() + (r * (table.moves + table.states) + n) * kinds * wide;
    }
    int64_t rows_in(int64_t c) const { return std::min(block, f.region.rows - c * block); }

    // --- forward

    // The columns of row i between a start and an end.
    Span useful(int64_t i) const {
        const Span all = f.columns(i);
        return common(all, {ends_from - (f.region.rows - 1 - i) * furthest, starts_to + i * furthest});
    }
    // Past the last column where a path may start.
    int64_t last_start() const {
        if (f.p.starts.place == Place::corner || f.p.starts.place == Place::column) return 1;
        int64_t to = 0;
        for (int a = 0; a < table.states; ++a) {
            if (!(f.p.starts.states >> a & 1)) continue;
            const Line<P>& line = lines[std::size_t(f.score_of_start(a))];
            int64_t own = f.region.columns;
            const bool is_known = f.p.starts.place == Place::row && line.raw && line.step && !line.changes();
            while (is_known && own > 0 && line.raw[own - 1] == -infinity<Real>) --own;
            to = std::max(to, own);
        }
        return to;
    }
    bool starts(int a, int64_t i) const { return (f.p.starts.states >> a & 1) && f.has(f.p.starts, false, i); }

    // Those of a state, the start first, for a row with its nodes at that place of the ring.
    void list_candidates() {
        const auto add = [&](const Real* node, int score) {
            const Line<P>& line = lines[std::size_t(score)];
            candidates.push_back({node, line.weight, line.z, line.plane, line.step});
        };
        for (int64_t i = 0; i < ring; ++i) {
            for (int a = 0; a < table.states; ++a) {
                add(begin.get(), f.score_of_start(a));
                for (int m = table.into[a]; m < table.into[a + 1]; ++m) {
                    const Move& move = table.move[m];
                    add(node_at(i - move.di, move.from) - move.dj, table.states + table.number[m]);
                }
            }
        }
    }
    // Calls action with the number of candidates, as the compiler's if they are few.
    template <class Action>
    __attribute__((always_inline)) static void with_count(int count, Action action) {
        if constexpr (P::is_quick) {
            if (count == 2) return action(std::integral_constant<int, 2>());
            if (count == 3) return action(std::integral_constant<int, 3>());
        }
        action(std::integral_constant<int, 0>());
    }
    __attribute__((always_inline)) Node gather(const Candidate& from, int64_t j) const {
        Node node = P::load(from.node + j, width());
        if (from.weight) node = P::plus(node, cells.line_weight(from.weight + (j & from.step), from.plane));
        if constexpr (has_dots) {
            if (from.z) node.dot += load<Real>(from.z + (j & from.step));
        }
        return node;
    }
    template <int N, bool keeps>
    __attribute__((always_inline)) void solve_row(const Candidate* into, int size, int a, int64_t i, Span own,
                                                  Span whole) const {
        const int count = N ? N : size;
        Candidate all[N ? N : most_candidates];  // known not to change
        std::copy(into, into + count, all);
        const Line<P>& score = lines[std::size_t(a)];
        const Real *const weight = score.weight, *const z = score.z;
        const int64_t plane = score.plane, step = score.step;
        Real *const to = node_at(i, a), *const q_to = keeps ? chosen_at(i % block, candidate(a)) : nullptr;
        for (int64_t j = whole.from; j < whole.to; j += W) {
            Node before[N ? N : most_candidates];
            V q[kinds * (N ? N : most_candidates)];  // and behind them their tangents
#pragma GCC unroll 4
            for (int n = 0; n < count; ++n) before[n] = gather(all[n], j);
            const auto own_score = weight ? cells.line_weight(weight + (j & step), plane) : P::none();
            Node node = cells.template solve<keeps, N>(before, count, own_score, q);
            if constexpr (has_dots) {
                if (z) node.dot += load<Real>(z + (j & step));
            }
            if (j < own.from || j + W > own.to) node = P::masked(node, inside(j, own));
            P::store(to + j, width(), node);
#pragma GCC unroll 4
            for (int n = 0; keeps && n < count; ++n) {
                store<Real>(q_to + n * kinds * wide + j, q[n]);
                if (has_dots) store<Real>(q_to + (n * kinds + 1) * wide + j, q[count + n]);
            }
        }
    }
    static Int inside(int64_t j, Span own) {
        Int mask{};
        for (int l = 0; l < W; ++l) mask[l] = j + l >= own.from && j + l < own.to ? -1 : 0;
        return mask;
    }

    // Row i, where `wanted` or all of it.
    template <bool keeps>
    void advance(int64_t i, Span wanted) {
        const Span own = useful(i), whole = common(own.rounded(W), wanted);
        const Span read = keeps ? common(own, wanted) : f.columns(i);  // all are looked at once
        const int64_t next = keeps ? i - block : i + block;
        for (const int n : changing) {
            const bool is_start = n >= f.score_of_start(0);
            if (is_start && !f.has(f.p.starts, false, i)) continue;
            lines[std::size_t(n)].template read<!keeps>(cells, i, read, next);
        }
        const Node dead = P::filled(P::dead());
        for (int a = 0; a < table.states; ++a) {
            const bool is_start = starts(a, i);
            const int size = table.into[a + 1] - table.into[a] + is_start;
            const int64_t at = (i & (ring - 1)) * (table.moves + table.states) + candidate(a) + !is_start;
            const Candidate* const into = candidates.data() + at;
            Real* const to = node_at(i, a);
            for (int64_t j = wanted.from; j < std::min(whole.from, wanted.to); j += W) P::store(to + j, width(), dead);
            for (int64_t j = std::max(whole.to, wanted.from); j < wanted.to; j += W) P::store(to + j, width(), dead);
            with_count(size, [&](auto n) __attribute__((always_inline)) {
                solve_row<n, keeps>(into, size, a, i, own, whole);
            });
        }
    }

    // --- what blocks begin with

    // The rows before block c, to the tape or from it.
    template <bool saves>
    void keep(int64_t c) const {
        Real* tape = reinterpret_cast<Real*>(kept) + c * table.reach * table.states * P::planes * wide;
        for (int64_t i = c * block - table.reach; i < c * block; ++i) {
            for (int64_t n = 0; n < table.states * P::planes; ++n, tape += wide) {
                Real* const at = node_at(i, 0) + n * width();
                std::memcpy(saves ? tape : at, saves ? at : tape, std::size_t(wide) * sizeof(Real));
            }
        }
    }
    // Block c anew, with its probabilities.
    void repeat(int64_t c, Span wanted) {
        keep<false>(c);
        for (int64_t i = c * block; i < c * block + rows_in(c); ++i) advance<true>(i, wanted);
    }

    // --- ends

    // Calls action(state, number among the states, its score) for the states that paths end in.
    template <class Action>
    void for_ends(int64_t i, Action action) {
        if (!f.has(f.p.ends, true, i)) return;
        for (int a = 0, e = 0; a < table.states; ++a) {
            if (!(f.p.ends.states >> a & 1)) continue;
            action(a, e++, lines[std::size_t(f.score_of_end(a))]);
        }
    }
    void record(int64_t i) {
        const Span span = f.cells(f.p.ends, true, i);
        for_ends(i, [&](int a, int e, Line<P>& score) {
            score.template read<true>(cells, i, f.columns(i), i);
            for (int64_t j = span.from / W * W; j < span.to; j += W) {
                double values[W];
                P::put_values(P::load(node_at(i, a) + j, width()), values);
                for (int64_t l = std::max<int64_t>(span.from - j, 0); l < std::min<int64_t>(W, span.to - j); ++l) {
                    const int64_t n = end_list.position(i, j + l, e), at = (j + l) & score.step;
                    end_values[n] = values[l];
                    if (score.raw) end_values[n] += double(cells.unit) * double(score.raw[at]);
                    if constexpr (has_dots) {
                        end_dots[n] = double(P::get(node_at(i, a) + j + l, width()).dot);
                        if (score.z) end_dots[n] += double(score.z[at]);
                    }
                }
            }
        });
    }

public:
    Sweeps(const Frame& f, const Table& table, bool keeps)
        : cells(f.p.omega, 1),
          f(f),
          table(table),
          furthest(furthest_of(table)),
          wide(up_to_groups(f.p.columns)),
          pad(up_to_groups(furthest)),
          block(block_rows(table)),
          blocks((f.region.rows + block - 1) / block),
          ring(ring_of(table)),
          end_list(f.p.ends, f.p.rows, f.p.columns),
          single_end(end_list.is_single(f.region)) {
        terms.reserve(std::size_t(f.p.terms_count));
        for (int n = 0; n < f.p.terms_count; ++n) {
            terms.emplace_back(f.p.terms[n], f.p.tensors[f.p.terms[n].tensor], f.b, f.p.columns);
        }
        lines.reserve(std::size_t(f.p.scores_count()));
        for (int n = 0; n < f.p.scores_count(); ++n) lines.emplace_back(f, n, terms);
        for (int n = 0; n < f.score_of_end(0); ++n) {
            if (lines[std::size_t(n)].changes()) {
                changing.push_back(n);
            } else {
                lines[std::size_t(n)].template read<true>(cells, 0, {}, 0);
            }
        }
        starts_to = last_start();
        const bool at_last = f.p.ends.place == Place::corner || f.p.ends.place == Place::column;
        if (at_last) ends_from = f.region.columns - 1;
        nodes = scratch<Real>(ring * table.states * P::planes * width());
        for (int64_t n = 0; n < ring * table.states * P::planes * width(); n += P::planes * width()) {
            for (int64_t j = 0; j < width(); ++j) P::put(nodes.get() + n + j, width(), P::dead());
        }
        begin = scratch<Real>(P::planes * width());
        for (int64_t j = 0; j < wide; ++j) P::put(begin.get() + j, width(), P::start());
        list_candidates();
        if (keeps) chosen = zeros<Real>(block * (table.moves + table.states) * kinds * wide);
        const int64_t size = rows_kept(table, f.p.rows, f.p.columns) * (has_dots ? 2 : 1);
        if (has_dots || !f.tape) spare = scratch<double>((keeps ? size : 0) + 2 * end_list.size());
        kept = spare ? spare.get() : f.tape + 1;
        end_values = kept + (keeps || !spare ? size : 0);
        if (has_dots) end_dots = end_values + end_list.size();
    }

    bool can_take(double greatest) const {
        return P::can_take(greatest, (f.region.rows + f.region.columns) * table.states);
    }

    // The value, and what was seen of the scores.
    double forward(bool keeps, Seen& seen) {
        std::fill_n(end_values, end_list.size(), -infinity<double>);
        if (has_dots) std::fill_n(end_dots, end_list.size(), 0.0);
        for (int64_t c = 0; c < blocks; ++c) {
            if (keeps) keep<true>(c);
            for (int64_t i = c * block; i < c * block + rows_in(c); ++i) {
                advance<false>(i, {0, wide});
                record(i);
            }
        }
        for (const Line<P>& line : lines) {
            seen.bad = seen.bad || line.seen.bad;
            seen.greatest += line.seen.greatest;
        }
        return table_engine::solve_ends(f.p.omega, single_end, end_values, end_list.size(), 1, nullptr, nullptr) /
               cells.unit;
    }

    // --- back

private:
    // Going back through a lattice: what moves carry, by row, move and kind.
    struct Masses {
        int64_t wide, moves, ring;
        Array<Real> flows, own, entering;  // own: of the nodes of a row by state and kind, and of its starts
        std::vector<Span> spans, written;  // where rows have any, and where flows are not 0 for sure

        Real* flow(int64_t i, int64_t m) const { return flows.get() + ((i & (ring - 1)) * moves + m) * kinds * wide; }
        Span& span(int64_t i) { return spans[std::size_t(i & (ring - 1))]; }
        // Flows of row i will be written there; what was in their place before is cleared elsewhere.
        void prepare(int64_t i, Span whole) {
            Span& before = written[std::size_t(i & (ring - 1))];
            for (int64_t n = 0; n < moves * kinds; ++n) {
                Real* const line = flow(i, 0) + n * wide;
                for (int64_t j = before.from; j < std::min(whole.from, before.to); ++j) line[j] = 0;
                for (int64_t j = std::max(whole.to, before.from); j < before.to; ++j) line[j] = 0;
            }
            before = whole;
        }
        Real* mass(int64_t a) const { return own.get() + a * kinds * wide; }
        Real* enters(int64_t a) const { return entering.get() + a * kinds * wide; }
    };
    Masses no_masses() const {
        const int64_t flow_wide = wide + up_to_groups(furthest), of_row = table.states * kinds * flow_wide;
        return {flow_wide,
                table.moves,
                ring,
                zeros<Real>(ring * table.moves * kinds * flow_wide),
                zeros<Real>(2 * of_row),
                zeros<Real>(of_row),
                std::vector<Span>(std::size_t(ring), Span{wide, 0}),
                std::vector<Span>(std::size_t(ring), Span{0, 0})};
    }
    static Span both(Span a, Span b) { return {std::min(a.from, b.from), std::max(a.to, b.to)}; }

    // Where so many rows before row i may have mass that comes from it and those after.
    Span reached(Masses& masses, int64_t i, int64_t rows) const {
        Span span{wide, 0};
        for (int64_t d = 0; d < table.reach; ++d) span = both(span, masses.span(i + d));
        if (span.is_empty()) return span;
        return Span{std::max<int64_t>(span.from - rows * furthest, 0), span.to}.rounded(W);
    }

    // Mass that enters at the ends of row i.
    Span enter(const Masses& masses, int64_t i, const double* end_masses, const Gradients::Own& gradients) {
        const Span span = f.cells(f.p.ends, true, i);
        std::fill_n(masses.entering.get(), table.states * kinds * masses.wide, Real(0));
        for_ends(i, [&](int a, int e, const Line<P>& score) {
            Real* const to = masses.enters(a);
            for (int64_t j = span.from; j < span.to; ++j) {
                const int64_t n = end_list.position(i, j, e);
                to[j] = Real(end_masses[n]);
                if (has_dots) to[masses.wide + j] = Real(end_dots[n]);
            }
            score.land(gradients, i, span, to + (kinds - 1) * masses.wide);
        });
        return span.rounded(W);
    }

    // The mass of the nodes of a row in one state goes on to the rows before, along moves. Returns where there is some.
    template <int N>
    __attribute__((always_inline)) Span spread(const Masses& masses, int a, int64_t i, bool is_start, bool enters,
                                               Span whole) const {
        const int leaving = table.first_out[a + 1] - table.first_out[a], into = table.into[a + 1] - table.into[a],
                  count = N ? N : into + is_start;
        const int64_t size = masses.wide;
        const Real *from[most_moves], *const q = chosen_at(i % block, candidate(a)), *const entering = masses.enters(a);
        Real *to[most_candidates], *const own = masses.mass(a);
        for (int n = 0; n < leaving; ++n) {
            const int m = table.out[table.first_out[a] + n];
            from[n] = masses.flow(i + table.move[m].di, m) + table.move[m].dj;
        }
        for (int n = 0; n < count; ++n) {
            to[n] = n < is_start ? masses.mass(table.states + a) : masses.flow(i, table.into[a] + n - is_start);
        }
        Span some{wide, 0};
        for (int64_t j = whole.from; j < whole.to; j += W) {
            V mass[kinds] = {};
#pragma GCC unroll 2
            for (int kind = 0; kind < kinds; ++kind) {
                if (enters) mass[kind] = load<Real>(entering + kind * size + j);
                for (int n = 0; n < leaving; ++n) mass[kind] += load<Real>(from[n] + kind * size + j);
                store<Real>(own + kind * size + j, mass[kind]);
            }
            const bool is_empty = !any((mass[0] != V{}) | (mass[kinds - 1] != V{}));
            if (!is_empty) some = both(some, {j, j + W});
#pragma GCC unroll 4
            for (int n = 0; n < count; ++n) {
                const V part = load<Real>(q + n * kinds * wide + j);
                store<Real>(to[n] + j, part * mass[0]);
                if constexpr (has_dots) {
                    const V change = load<Real>(q + (n * kinds + 1) * wide + j);
                    store<Real>(to[n] + size + j, change * mass[0] + part * mass[1]);
                }
            }
        }
        return some;
    }

    void descend(Masses& masses, int64_t i, const double* end_masses, const Gradients::Own& gradients) {
        gradients.clear(i);
        const bool enters = f.has(f.p.ends, true, i);
        Span whole = reached(masses, i + 1, 1), some{wide, 0};
        if (enters) whole = both(whole, enter(masses, i, end_masses, gradients));
        whole = common(whole, useful(i).rounded(W));
        if (whole.is_empty()) whole = {0, 0};
        masses.prepare(i, whole);
        const int64_t last = (kinds - 1) * masses.wide;
        for (int a = 0; a < table.states; ++a) {
            const bool is_start = starts(a, i);
            with_count(table.into[a + 1] - table.into[a] + is_start, [&](auto n) __attribute__((always_inline)) {
                some = both(some, spread<n>(masses, a, i, is_start, enters, whole));
            });
        }
        masses.span(i) = some;
        if (some.is_empty()) return;
        for (int a = 0; a < table.states; ++a) {
            lines[std::size_t(a)].land(gradients, i, some, masses.mass(a) + last);
            if (starts(a, i)) {
                lines[std::size_t(f.score_of_start(a))].land(gradients, i, some, masses.mass(table.states + a) + last);
            }
        }
        for (int m = 0; m < table.moves; ++m) {
            const Line<P>& score = lines[std::size_t(table.states + table.number[m])];
            score.land(gradients, i, some, masses.flow(i, m) + last);
        }
    }

public:
    // The masses of all nodes and moves, times the seed, or their tangents, to the gradients of their scores.
    void backward(double seed, const Gradients::Own& gradients) {
        const auto end_masses = zeros<double>(end_list.size());
        table_engine::solve_ends(f.p.omega, single_end, end_values, end_list.size(), seed, end_masses.get(), end_dots);
        Masses masses = no_masses();
        const bool ends_last = f.p.ends.place == Place::corner || f.p.ends.place == Place::row;
        for (int64_t c = blocks - 1; c >= 0; --c) {
            const int64_t begin = c * block, end = begin + rows_in(c);
            Span wanted = reached(masses, end, end - begin);
            if (!ends_last || c == blocks - 1) wanted = {0, wide};
            if (!wanted.is_empty()) repeat(c, wanted);
            for (int64_t i = end - 1; i >= begin; --i) descend(masses, i, end_masses.get(), gradients);
        }
    }

    // Draws walk from an end to a start, whose move is −1. The first of the uniforms (draws, count) chooses the end.
    void sample(int64_t draws, int64_t count, const double* uniforms, const Visit& visit) {
        std::vector<Walker> at(std::size_t(draws), {f.region.rows - 1, f.region.columns - 1, 0, 0});
        for (int64_t d = 0; d < draws; ++d) {
            if (!draw_end(uniforms[d * count], at[std::size_t(d)])) return;
        }
        for (int64_t c = blocks - 1; c >= 0; --c) {
            repeat(c, {0, wide});
            for (int64_t d = 0; d < draws; ++d) walk(c, d, uniforms + d * count + 1, at[std::size_t(d)], visit);
        }
    }

private:
    struct Walker {
        int64_t i, j, taken;
        int state;
    };

    // As far as block c goes.
    void walk(int64_t c, int64_t d, const double* uniforms, Walker& at, const Visit& visit) const {
        while (at.i >= c * block) {
            const int a = at.state;
            const bool is_start = starts(a, at.i);
            const int count = table.into[a + 1] - table.into[a] + is_start;
            double q[most_candidates], sum = 0;
            for (int n = 0; n < count; ++n) {
                sum += q[n] = double(chosen_at(at.i - c * block, candidate(a) + n)[at.j]);
            }
            const int taken = int(node::draw(q, count, sum, uniforms[at.taken])) - is_start, m = table.into[a] + taken;
            visit(d, at.taken++, at.i, at.j, a, taken < 0 ? -1 : table.number[m]);
            if (taken < 0) {
                at.i = -1;
            } else {
                at = {at.i - table.move[m].di, at.j - table.move[m].dj, at.taken, table.move[m].from};
            }
        }
    }
    bool draw_end(double uniform, Walker& at) const {
        const auto q = zeros<double>(end_list.size());
        table_engine::solve_ends(f.p.omega, single_end, end_values, end_list.size(), 1, q.get(), nullptr);
        const int64_t number = node::draw(q.get(), end_list.size(), 1, uniform), cell = number / end_list.count;
        if (end_list.by_row()) at.i = end_list.by_column() ? cell / f.p.columns : cell;
        if (end_list.by_column()) at.j = cell % f.p.columns;
        int64_t e = number % end_list.count;
        while (!(f.p.ends.states >> at.state & 1) || e-- > 0) ++at.state;
        return number >= 0;
    }
};

}  // namespace row_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
