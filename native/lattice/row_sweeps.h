// The sweeps of one lattice, row by row, with nodes of the kind P (cells.h). A tape holds the rows before each
// block of rows; the backward sweep repeats a block and keeps its probabilities until its masses are known.
#pragma once

#include "../base/threads.h"
#include "cells.h"
#include "moves.h"
#include "lines.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// What no inner loop calls is compiled for size: that takes a third less time.
#define ROWS_SELDOM __attribute__((cold))

// Rows between those that are kept.
inline int64_t block_rows(const Table& table) { return std::max(group, up_to_groups(table.reach)); }

// Numbers of a tape: what nodes it is of, the rows before each block, the ends.
inline int64_t rows_kept(const Table& table, int64_t rows, int64_t columns) {
    const int64_t block = block_rows(table);
    return (rows + block - 1) / block * table.reach * table.states * up_to_groups(columns);
}

template <class P>
class RowSweeps {
    using Real = typename P::Real;
    using Number = typename P::Number;
    using V = Vec<Real>;
    using Int = typename P::Int;
    using Node = typename P::Node;
    static constexpr bool has_dots = P::has_dots;
    static constexpr int W = lanes_of<Real>, kinds = 1 + has_dots;
    using Kept = std::conditional_t<P::is_hard, std::uint8_t, Real>;  // best candidates, or probabilities
    static constexpr int weight_planes = P::line_planes > 1 ? P::line_planes : 0;  // if weights differ from scores

    // The row that a candidate's node is in, and where it is with its weight.
    struct Candidate {
        const Real* node;
        const Line<Number>* score;
        Real* sum;
    };
    // The nodes of a state in a row, the candidates of its moves, and where these are.
    struct StateRow {
        Real* nodes;
        const Candidate* moves;
        const Real* const* sources;
        int count;
        bool is_weighed;
    };
    // A move that leaves a node: where its probability and the mass of its target are, relative to the row of the node.
    struct Leaving {
        int64_t chosen, mass;
    };

    const P cells;
    const RowFrame& f;
    const Table& table;
    const int64_t furthest;                  // columns that a move goes
    const int64_t wide, pad, block, blocks;  // numbers of a row, and of its left margin; rows of a block
    const int64_t ring;                      // rows of nodes that are there at a time
    const EndList end_list;
    const bool single_end;
    int64_t starts_to = 0, ends_from = 0;  // columns that paths start before, and end from
    std::vector<Term> terms;
    std::vector<const Term*> fetched;  // whose rows are asked for before they are read
    std::vector<Line<Number>> lines;
    std::vector<int> changing;  // from row to row
    Array<Real> nodes;          // by row, state and plane
    Array<Real> begin;          // a row of starts
    Array<Real> weighed;        // by candidate: rows of nodes with their weights
    std::vector<Candidate> candidates;  // by row of the ring
    std::vector<const Real*> sources;   // where their sums are
    std::vector<StateRow> ring_rows;         // by row of the ring and state
    std::vector<Leaving> leaving;       // by state
    Number no_score[P::line_planes * W] = {};
    // Of a block and the rows that its moves lead to: probabilities by row, candidate and kind, masses by row, state
    // and kind, and where rows have any.
    Array<Real> chosen, masses;
    std::vector<Span> spans;
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
    int candidate_of(int m) const { return m + table.move[m].to + 1; }
    int candidates_count() const { return table.moves + table.states; }
    Real* chosen_at(int64_t r, int n) const { return chosen.get() + (r * candidates_count() + n) * kinds * width(); }
    Real* mass_at(int64_t r, int a) const { return masses.get() + (r * table.states + a) * kinds * width(); }
    int64_t work_of_block() const { return block * wide * candidates_count(); }
    Span rows_of(int64_t c) const { return {c * block, std::min((c + 1) * block, f.region.rows)}; }
    // Under the hard maximum, the tape holds the number of the first best candidate of each node instead of rows. One
    // byte per node fits where at least one of 8 rows of doubles is kept. Without moves there is no choice.
    std::uint8_t* best_at(int64_t i, int a) const {
        return table.reach ? reinterpret_cast<std::uint8_t*>(kept) + (i * table.states + a) * wide : nullptr;
    }

    // --- forward

    // The columns of row i between a start and an end.
    Span useful(int64_t i) const {
        const Span all = f.columns(i);
        return common(all, {ends_from - (f.region.rows - 1 - i) * furthest, starts_to + i * furthest});
    }
    // Past the last column where a path may start.
    ROWS_SELDOM int64_t last_start() const {
        if (f.p.starts.place == Place::corner || f.p.starts.place == Place::column) return 1;
        int64_t to = 0;
        for (int a = 0; a < table.states; ++a) {
            if (!(f.p.starts.states >> a & 1)) continue;
            const Line<Number>& line = line_of(f.score_of_start(a));
            int64_t own = f.region.columns;
            const bool is_known = f.p.starts.place == Place::row && line.raw.numbers && line.step && !line.changes();
            while (is_known && own > 0 && line.raw.numbers[own - 1] == -infinity<Real>) --own;
            to = std::max(to, own);
        }
        return to;
    }
    bool starts(int a, int64_t i) const { return (f.p.starts.states >> a & 1) && f.has(f.p.starts, false, i); }
    // Those of a few rows that paths start in.
    Span starting(Span rows) const {
        const bool here = f.has(f.p.starts, false, rows.from), later = f.has(f.p.starts, false, rows.to);
        return {rows.from, later ? rows.to : rows.from + here};
    }
    const Line<Number>& line_of(int score) const { return lines[std::size_t(score)]; }
    const Line<Number>& line_of_move(int m) const { return line_of(table.states + table.number[m]); }

    // Those of a state, the start first, for a row with its nodes at that place of the ring.
    ROWS_SELDOM void list_candidates() {
        const auto add = [&](const Real* node, const Line<Number>& score) {
            const int64_t n = int64_t(candidates.size()) % candidates_count();
            Real* const sum = score.weight.numbers ? weighed.get() + n * P::planes * width() : nullptr;
            candidates.push_back({node, &score, sum});
            sources.push_back(sum ? sum : node);
        };
        for (int64_t i = 0; i < ring; ++i) {
            for (int a = 0; a < table.states; ++a) {
                add(begin.get(), line_of(f.score_of_start(a)));
                for (int m = table.into[a]; m < table.into[a + 1]; ++m) {
                    const Move& move = table.move[m];
                    add(node_at(i - move.di, move.from) - move.dj, line_of_move(m));
                }
            }
        }
        for (int64_t i = 0; i < ring; ++i) {
            for (int a = 0; a < table.states; ++a) {
                const int64_t at = i * candidates_count() + candidate(a) + 1;
                const int count = table.into[a + 1] - table.into[a];
                const Candidate* const moves = candidates.data() + at;
                const bool is_weighed = std::any_of(moves, moves + count, [](const Candidate& c) { return c.sum; });
                ring_rows.push_back({node_at(i, a), moves, sources.data() + at, count, is_weighed});
            }
        }
        for (int n = 0; n < table.moves; ++n) {
            const Move& move = table.move[table.out[n]];
            const int64_t chosen = (move.di * candidates_count() + candidate_of(table.out[n])) * kinds * width();
            leaving.push_back({chosen + move.dj, (move.di * table.states + move.to) * kinds * width() + move.dj});
        }
    }
    // Scores of some rows, and the weights that they are.
    void read(Line<Number>& line, Span rows, Span span, bool looks) const {
        const auto [count, whole] = line.read(rows, span, looks);
        const int64_t plane = line.plane;
        for (int64_t r = 0; weight_planes && r < count; ++r) {
            const Number* const __restrict from = line.raw.row(r);
            Number* const __restrict to = line.weight.row(r);
            for (int64_t j = whole.from; j < whole.to; j += W) {
                store<Number>(to + j, load<Number>(from + j));
                cells.prepare(to + j, plane);
            }
        }
    }
    // Those of a block that change from row to row, where `wanted` or all of them.
    void read_block(Span rows, Span wanted, bool is_again) {
        Span span{wide, 0};
        for (int64_t i = rows.from; i < rows.to; ++i) {
            span = both(span, is_again ? common(useful(i), wanted) : f.columns(i));  // all are looked at once
        }
        for (const int n : changing) {
            const Span own = n >= f.score_of_start(0) ? starting(rows) : rows;
            read(lines[std::size_t(n)], own, span, !is_again);
        }
        const Span near{is_again ? wanted.from - block * furthest : wanted.from, wanted.to};
        for (const Term* const term : fetched) {  // rows of the next block
            const TermTensor& tensor = f.p.tensors[term->number()];
            for (int64_t i = rows.from; i < rows.to; ++i) {
                const int64_t next = is_again ? i - block : i + block;
                if (f.p.is_double) {
                    term->fetch(term->template numbers<const double>(tensor), next, near);
                } else {
                    term->fetch(term->template numbers<const float>(tensor), next, near);
                }
            }
        }
    }
    // Calls action with a number of candidates or moves, as the compiler's if they are few.
    template <class Action>
    static void with_count(int count, Action action) {
        if (count == 2) return action(std::integral_constant<int, 2>());
        if (count == 3) return action(std::integral_constant<int, 3>());
        action(std::integral_constant<int, 0>());
    }
    // Nodes of a row before, with the scores of a move, as row r of a block has them.
    LATTICE_APART void weigh(const Candidate& from, int64_t r, Span whole) const {
        const Line<Number>& score = *from.score;
        const Number *const weight = score.weight.row(r), *const z = score.z.row(r);
        const int64_t size = width(), plane = score.plane, step = score.step;
        Real* const to = from.sum;
        for (int64_t j = whole.from; j < whole.to; j += W) {
            Node sum = P::plus(P::load(from.node + j, size), cells.line_weight(weight + (j & step), plane));
            if constexpr (has_dots) sum.dot += load<Real>(z + (j & step));
            P::store(to + j, size, sum);
        }
    }
    // The number of the first best of some candidates, as a byte for each lane.
    LATTICE_INLINE static std::uint32_t first_best(const V* terms, int count) {
        Int best{};
        V top = count ? terms[0] : V{};
#pragma GCC unroll 4
        for (int n = 1; n < count; ++n) {
            best = terms[n] > top ? Int{} + n : best;
            top = greater<Real>(top, terms[n]);
        }
        return low_bytes(best);
    }
    // A row of the nodes of one state, from rows of candidates, and if `keeps` their probabilities or the best of them.
    template <int N, bool keeps>
    LATTICE_APART void solve_row(const Real* const* rows, int size, const Line<Number>& score, int64_t r, Real* to,
                                 Kept* kept_to, Span own, Span whole) const {
        const int count = N ? N : size;
        const int64_t plane = width();
        const Real* from[N ? N : most_candidates];  // known not to change
        std::copy(rows, rows + count, from);
        const bool has_score = score.weight.numbers;
        const Number *const weight = has_score ? score.weight.row(r) : no_score, *const z = score.z.row(r);
        const int64_t weight_plane = has_score ? score.plane : W, step = score.step;
        for (int64_t j = whole.from; j < whole.to; j += W) {
            Node before[N ? N : most_candidates];
            V q[kinds * (N ? N : most_candidates)];  // and behind them their tangents
#pragma GCC unroll 4
            for (int n = 0; n < count; ++n) before[n] = P::load(from[n] + j, plane);
            const auto own_score = cells.line_weight(weight + (j & step), weight_plane);
            Node node = cells.template solve<keeps && !P::is_hard, N>(before, count, own_score, q);
            if constexpr (has_dots) {
                if (z) node.dot += load<Real>(z + (j & step));
            }
            P::store(to + j, plane, node);
            if constexpr (P::is_hard && keeps) {
                const std::uint32_t best = first_best(before, count);
                if (kept_to) std::memcpy(kept_to + j, &best, W);
            } else if constexpr (keeps) {
#pragma GCC unroll 4
                for (int n = 0; n < count; ++n) {
                    store<Real>(kept_to + n * kinds * plane + j, q[n]);
                    if (has_dots) store<Real>(kept_to + (n * kinds + 1) * plane + j, q[count + n]);
                }
            }
        }
        // Columns of the first and the last vector that do not belong to the row.
        for (const int64_t edge : {own.from, own.to}) {
            const int64_t j = edge / W * W;
            if (edge == j || j < whole.from || j >= whole.to) continue;
            P::store(to + j, plane, P::masked(P::load(to + j, plane), inside(j, own)));
        }
    }
    static Int inside(int64_t j, Span own) {
        using Lane = std::remove_reference_t<decltype(Int{}[0])>;
        Int lane{};
        for (int l = 0; l < W; ++l) lane[l] = l;
        return (lane >= Lane(std::max<int64_t>(own.from - j, 0))) & (lane < Lane(std::min<int64_t>(own.to - j, W)));
    }

    // Row r of the block that begins with row `first_row`, where `wanted` or all of it.
    template <bool keeps>
    LATTICE_APART void advance(int64_t first_row, int64_t r, Span wanted) const {
        const int64_t i = first_row + r;
        const Span own = useful(i), whole = common(own.rounded(W), wanted);
        const Node dead = P::filled(P::dead());
        const std::uint32_t begins = f.has(f.p.starts, false, i) ? f.p.starts.states : 0;
        const StateRow* row = ring_rows.data() + (i & (ring - 1)) * table.states;
        for (int a = 0; a < table.states; ++a, ++row) {
            const int start = begins >> a & 1, size = row->count + start;
            for (int n = -start; (start || row->is_weighed) && n < row->count; ++n) {
                if (row->moves[n].sum) weigh(row->moves[n], r, whole);
            }
            Real* const to = row->nodes;
            Kept* kept_to = nullptr;
            if constexpr (keeps && P::is_hard) kept_to = best_at(i, a);
            else if constexpr (keeps) kept_to = chosen_at(r, candidate(a) + 1 - start);
            for (int64_t j = wanted.from; j < std::min(whole.from, wanted.to); j += W) P::store(to + j, width(), dead);
            for (int64_t j = std::max(whole.to, wanted.from); j < wanted.to; j += W) P::store(to + j, width(), dead);
            with_count(size, [&](auto n) {
                solve_row<n, keeps>(row->sources - start, size, line_of(a), r, to, kept_to, own, whole);
            });
        }
    }

    // --- what blocks begin with

    // The rows before block c, where `wanted`, to the tape or from it.
    template <bool saves>
    void keep(int64_t c, Span wanted) const {
        const int64_t size = table.reach * table.states * P::planes * wide;
        Real* tape = reinterpret_cast<Real*>(kept) + c * size + wanted.from;
        for (int64_t i = c * block - table.reach; i < c * block; ++i) {
            for (int64_t n = 0; n < table.states * P::planes; ++n, tape += wide) {
                Real* const at = node_at(i, 0) + n * width() + wanted.from;
                for (int64_t j = 0; !saves && c > 0 && j < wanted.size(); j += 64 / int64_t(sizeof(Real))) {
                    __builtin_prefetch(tape - size + j);
                }
                std::memcpy(saves ? tape : at, saves ? at : tape, std::size_t(wanted.size()) * sizeof(Real));
            }
        }
    }
    // Sweeps block c again and keeps its probabilities.
    void repeat(int64_t c, Span wanted) {
        keep<false>(c, {std::max<int64_t>(wanted.from - pad, 0), wanted.to});
        const Span rows = rows_of(c);
        read_block(rows, wanted, true);
        for (int64_t r = 0; r < rows.size(); ++r) advance<true>(rows.from, r, wanted);
    }

    // --- ends

    // Calls action(state, number among the states, its score) for the states that paths end in.
    template <class Action>
    void for_ends(Action action) {
        for (int a = 0, e = 0; a < table.states; ++a) {
            if (!(f.p.ends.states >> a & 1)) continue;
            action(a, e++, lines[std::size_t(f.score_of_end(a))]);
        }
    }
    ROWS_SELDOM void record(int64_t i) {
        const Span span = f.cells(f.p.ends, true, i);
        for_ends([&](int a, int e, Line<Number>& score) {
            score.read({i, i + 1}, f.columns(i), true);
            for (int64_t j = span.from / W * W; j < span.to; j += W) {
                double values[W];
                P::put_values(P::load(node_at(i, a) + j, width()), values);
                for (int64_t l = std::max<int64_t>(span.from - j, 0); l < std::min<int64_t>(W, span.to - j); ++l) {
                    const int64_t n = end_list.position(i, j + l, e), at = (j + l) & score.step;
                    end_values[n] = values[l];
                    if (score.raw.numbers) end_values[n] += double(cells.unit) * double(score.raw.numbers[at]);
                    if constexpr (has_dots) {
                        end_dots[n] = double(P::get(node_at(i, a) + j + l, width()).dot);
                        if (score.z.numbers) end_dots[n] += double(score.z.numbers[at]);
                    }
                }
            }
        });
    }

public:
    ROWS_SELDOM RowSweeps(const RowFrame& f, const Table& table, bool keeps)
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
            terms.emplace_back(f.p.terms[n], f.p.tensors[f.p.terms[n].tensor], f.b, f.p.columns, f.p.scale);
        }
        for (const Term& term : terms) {
            const auto is_beside = [&](const Term& other) { return term.is_beside(other); };
            if (term.is_mask() || !term.follows_rows()) continue;
            if (std::none_of(terms.begin(), terms.end(), is_beside)) fetched.push_back(&term);
        }
        lines.reserve(std::size_t(f.p.slots()));
        for (int n = 0; n < f.p.slots(); ++n) {
            lines.emplace_back(f, n, terms, n < f.score_of_end(0) ? block : 1, weight_planes);
            if (n >= f.score_of_end(0)) continue;
            if (lines.back().changes()) {
                changing.push_back(n);
            } else {
                read(lines.back(), {0, 1}, {}, true);
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
        weighed = scratch<Real>(candidates_count() * P::planes * width());
        cells.prepare(no_score, W);
        list_candidates();
        if (keeps && !P::is_hard) chosen = zeros<Real>((block + table.reach) * candidates_count() * kinds * width());
        const int64_t size = rows_kept(table, f.p.rows, f.p.columns) * (has_dots ? 2 : 1);
        if (has_dots || !f.tape) spare = scratch<double>((keeps ? size : 0) + 2 * end_list.size());
        kept = spare ? spare.get() : f.tape + 1;
        end_values = kept + (keeps || !spare ? size : 0);
        if (f.p.end_values) end_values = f.p.end_values + f.b * end_list.size();
        if (has_dots) end_dots = end_values + end_list.size();
    }

    bool can_take(double greatest) const {
        return P::can_take(greatest, (f.region.rows + f.region.columns) * table.states);
    }

    // The value, and what was seen of the scores.
    double forward(bool keeps, Seen& seen) {
        std::fill_n(end_values, end_list.size(), -infinity<double>);
        if (has_dots) std::fill_n(end_dots, end_list.size(), 0.0);
        Pace pace;
        for (int64_t c = 0; c < blocks; ++c) {
            pace.spend(work_of_block());
            if (keeps && !P::is_hard) keep<true>(c, {0, wide});
            const Span rows = rows_of(c);
            read_block(rows, {0, wide}, false);
            for (int64_t r = 0; r < rows.size(); ++r) {
                if (keeps && P::is_hard) advance<P::is_hard>(rows.from, r, {0, wide});
                else advance<false>(rows.from, r, {0, wide});
                if (f.has(f.p.ends, true, rows.from + r)) record(rows.from + r);
            }
        }
        for (const Line<Number>& line : lines) {
            seen.bad = seen.bad || line.seen.bad;
            seen.greatest += line.seen.greatest;
        }
        const bool is_plain = single_end || f.p.end_values;  // if the values of ends are wanted, their maximum is not
        const double value =
            solve_ends(f.p.omega, is_plain, end_values, end_list.size(), 1, nullptr, nullptr) / cells.unit;
        if (!is_number(value, f.p.is_double)) seen.bad = true;
        return value;
    }

    // --- back

private:
    // The first rows of a block, which are done, become those that the moves of the block before lead to.
    void move_on(Span wanted) {
        const Span near{wanted.from, wanted.to + pad};
        const auto move = [&](const Real* from, Real* to, int64_t lines) {
            for (int64_t n = near.from; n < lines * width(); n += width()) std::copy_n(from + n, near.size(), to + n);
        };
        move(chosen_at(0, 0), chosen_at(block, 0), table.reach * candidates_count() * kinds);
        move(mass_at(0, 0), mass_at(block, 0), table.reach * table.states * kinds);
    }
    // Where so many rows before row r of a block may have mass that comes from it and those after.
    Span reached(int64_t r, int64_t rows) const {
        Span span = nowhere();
        for (int64_t d = 0; d < table.reach; ++d) span = both(span, spans[std::size_t(r + d)]);
        if (span.is_empty()) return span;
        return Span{std::max<int64_t>(span.from - rows * furthest, 0), span.to}.rounded(W);
    }
    Span nowhere() const { return {wide, 0}; }

    // Mass that enters at the ends of row i, by state and kind.
    ROWS_SELDOM Span enter(int64_t i, const double* end_masses, Real* entering, const LatticeGradients& gradients) {
        const Span span = f.cells(f.p.ends, true, i);
        std::fill_n(entering, table.states * kinds * width(), Real(0));
        for_ends([&](int a, int e, const Line<Number>& score) {
            Real* const to = entering + a * kinds * width();
            for (int64_t j = span.from; j < span.to; ++j) {
                const int64_t n = end_list.position(i, j, e);
                to[j] = Real(end_masses[n]);
                if (has_dots) to[width() + j] = Real(end_dots[n]);
            }
            score.land(gradients, {i, i + 1}, span, RowBlock<const Real>{to + (kinds - 1) * width(), 0});
        });
        return span.rounded(W);
    }

    // q · mass, and what it tends to.
    struct Flow {
        const Real *q, *mass;
        int64_t size;

        LATTICE_INLINE void add(int64_t j, V* sum) const {
            const V part = load<Real>(q + j), own = load<Real>(mass + j);
            sum[0] += part * own;
            if constexpr (has_dots) sum[1] += load<Real>(q + size + j) * own + part * load<Real>(mass + size + j);
        }
    };

    // The mass of the nodes of a row in one state, from the moves that leave them; 0 in the other columns.
    template <int N>
    LATTICE_APART void collect(int a, int64_t r, const Real* entering, Span whole, Span cleared) const {
        const int count = N ? N : table.first_out[a + 1] - table.first_out[a];
        const int64_t size = width();
        // What node (r + di, j + dj) gives along a move is what its source (r, j) gets.
        const Real *const q = chosen_at(r, 0), *const mass_of = mass_at(r, 0);
        const Leaving* const moves = leaving.data() + table.first_out[a];
        Flow flows[N ? N : most_moves];
        for (int n = 0; n < count; ++n) flows[n] = {q + moves[n].chosen, mass_of + moves[n].mass, size};
        Real* const to = mass_at(r, a);
        for (int64_t j = whole.from; j < whole.to; j += W) {
            V mass[kinds] = {};
#pragma GCC unroll 4
            for (int n = 0; n < count; ++n) flows[n].add(j, mass);
#pragma GCC unroll 2
            for (int kind = 0; kind < kinds; ++kind) {
                if (entering) mass[kind] += load<Real>(entering + (a * kinds + kind) * size + j);
                store<Real>(to + kind * size + j, mass[kind]);
            }
        }
        for (int64_t n = 0; n < kinds * size; n += size) {
            for (int64_t j = cleared.from; j < whole.from; j += W) store<Real>(to + n + j, V{});
            for (int64_t j = whole.to; j < cleared.to; j += W) store<Real>(to + n + j, V{});
        }
    }
    // Vectors of row r that have any mass.
    Span trimmed(int64_t r, Span whole) const {
        const auto is_empty = [&](int64_t j) {
            auto some = V{} != V{};
            for (int n = 0; n < table.states * kinds; ++n) some |= load<Real>(mass_at(r, 0) + n * width() + j) != V{};
            return !any(some);
        };
        while (!whole.is_empty() && is_empty(whole.from)) whole.from += W;
        while (!whole.is_empty() && is_empty(whole.to - W)) whole.to -= W;
        return whole.is_empty() ? nowhere() : whole;
    }
    // The masses of row r of the block that begins with row `first_row`.
    void descend(int64_t first_row, int64_t r, Span wanted, const double* end_masses, Real* entering,
                 const LatticeGradients& gradients) {
        const int64_t i = first_row + r;
        const bool enters = f.has(f.p.ends, true, i);
        Span whole = reached(r + 1, 1);
        if (enters) whole = both(whole, enter(i, end_masses, entering, gradients));
        whole = common(whole, useful(i).rounded(W));
        if (whole.is_empty()) whole = {wanted.from, wanted.from};
        const Span cleared = r < table.reach ? Span{0, width()} : Span{wanted.from, wanted.to + pad};
        for (int a = 0; a < table.states; ++a) {
            with_count(table.first_out[a + 1] - table.first_out[a], [&](auto n) {
                collect<n>(a, r, enters ? entering : nullptr, whole, cleared);
            });
        }
        spans[std::size_t(r)] = trimmed(r, whole);
    }
    // Adds the masses of a block to the gradients of all scores except ends. `room` holds the masses of one score.
    void land(Span rows, Real* room, const LatticeGradients& gradients) const {
        Span span = nowhere();
        for (int64_t r = 0; r < rows.size(); ++r) span = both(span, spans[std::size_t(r)]);
        if (span.is_empty()) return;
        const int64_t last = (kinds - 1) * width();
        const auto land_flow = [&](const Line<Number>& score, Span own, int n, int to) {
            if (!score.is_read() || own.is_empty()) return;
            for (int64_t r = 0; r < own.size(); ++r) {
                const Flow flow{chosen_at(r, n), mass_at(r, to), width()};
                for (int64_t j = span.from; j < span.to; j += W) {
                    V mass[kinds] = {};
                    flow.add(j, mass);
                    store<Real>(room + r * wide + j, mass[kinds - 1]);
                }
            }
            score.land(gradients, own, span, RowBlock<const Real>{room, wide});
        };
        const Span started = starting(rows);
        for (int a = 0; a < table.states; ++a) {
            line_of(a).land(gradients, rows, span,
                            RowBlock<const Real>{mass_at(0, a) + last, table.states * kinds * width()});
            if (f.p.starts.states >> a & 1) land_flow(line_of(f.score_of_start(a)), started, candidate(a), a);
        }
        for (int m = 0; m < table.moves; ++m) land_flow(line_of_move(m), rows, candidate_of(m), table.move[m].to);
    }

public:
    // The masses of all nodes and moves, times the seed, or their tangents, to the gradients of their scores.
    void backward(double seed, const LatticeGradients& gradients) {
        if constexpr (P::is_hard) {
            follow(seed, gradients);
        } else {
            flow(seed, gradients);
        }
    }

    // Draws walk from an end to a start. The first of the uniforms (draws, count) chooses the end.
    ROWS_SELDOM void sample(int64_t draws, int64_t count, const double* uniforms, const Visit& visit) {
        std::vector<Walker> at(std::size_t(draws), last_corner());
        for (int64_t d = 0; d < draws; ++d) {
            if (!draw_end(f.p.omega, end_list, single_end, end_values, uniforms[d * count], at[std::size_t(d)])) return;
        }
        Pace pace;
        for (int64_t c = blocks - 1; c >= 0; --c) {
            pace.spend(work_of_block());
            if constexpr (!P::is_hard) repeat(c, {0, wide});
            for (int64_t d = 0; d < draws; ++d) {
                const double* const own = uniforms + d * count + 1;
                walk(c, at[std::size_t(d)], own, [&](const Walker& here, int m) {
                    visit(d, here, m < 0 ? -1 : table.number[m]);
                });
            }
        }
    }

private:
    void flow(double seed, const LatticeGradients& gradients) {
        const auto end_masses = zeros<double>(end_list.size());
        solve_ends(f.p.omega, single_end, end_values, end_list.size(), seed, end_masses.get(), end_dots);
        const auto entering = scratch<Real>(table.states * kinds * width()), room = scratch<Real>(block * wide);
        masses = zeros<Real>((block + table.reach) * table.states * kinds * width());
        spans.assign(std::size_t(block + table.reach), nowhere());
        const bool ends_last = f.p.ends.place == Place::corner || f.p.ends.place == Place::row;
        Pace pace;
        for (int64_t c = blocks - 1; c >= 0; --c) {
            pace.spend(work_of_block());
            const Span rows = rows_of(c);
            if (c < blocks - 1) std::copy_n(spans.begin(), table.reach, spans.begin() + block);
            Span wanted = reached(block, block);
            if (!ends_last || c == blocks - 1) wanted = {0, wide};
            gradients.clear(rows);
            if (wanted.is_empty()) continue;
            if (c < blocks - 1) move_on(wanted);
            repeat(c, wanted);
            for (int64_t r = rows.size() - 1; r >= 0; --r) {
                descend(rows.from, r, wanted, end_masses.get(), entering.get(), gradients);
            }
            land(rows, room.get(), gradients);
        }
    }

    // The gradients of the one best path under the hard maximum.
    void follow(double seed, const LatticeGradients& gradients) {
        Walker at = last_corner();
        gradients.clear({0, f.region.rows});
        if (!draw_end(f.p.omega, end_list, single_end, end_values, 0, at)) return;
        walk(0, at, nullptr, [&](const Walker& here, int m) {
            const auto land = [&](const Line<Number>& score) { score.land_one(gradients, here.i, here.j, seed); };
            if (here.taken == 0) land(line_of(f.score_of_end(here.state)));
            land(line_of(here.state));
            land(m < 0 ? line_of(f.score_of_start(here.state)) : line_of_move(m));
        });
    }

    Walker last_corner() const { return {f.region.rows - 1, f.region.columns - 1, 0, 0}; }

    // Walks as far as block c goes; calls visit(node, move into it, −1 for a start).
    template <class Action>
    void walk(int64_t c, Walker& at, const double* uniforms, Action visit) const {
        while (at.i >= c * block) {  // every move leads to an earlier row
            const bool has_start = starts(at.state, at.i);
            step_back(table, has_start, choose(at.i - c * block, at, has_start, uniforms), at, visit);
        }
    }
    // The number of the candidate that a walk takes from a node in row r of its block.
    int choose(int64_t r, const Walker& at, bool has_start, const double* uniforms) const {
        const int a = at.state;
        if constexpr (P::is_hard) {
            const std::uint8_t* const best = best_at(at.i, a);
            return best ? best[at.j] : 0;
        }
        const int count = table.into[a + 1] - table.into[a] + has_start;
        double q[most_candidates];
        for (int n = 0; n < count; ++n) q[n] = double(chosen_at(r, candidate(a) + !has_start + n)[at.j]);
        return drawn(q, count, uniforms[at.taken]);
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
