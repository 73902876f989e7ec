// The sweeps of one lattice, strip by strip. Chunks are swept anew going back: a tape holds the last rows of every
// strip, and the steps before each chunk. Threads take the strips in turn, each a little behind the one before (or
// after, going back).
#pragma once

#include <functional>

#include "../base/threads.h"
#include "chunk.h"
#include "ends.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace table_engine {

// A node of a path: which draw it is of, how many nodes come after it, (i, j, state), and the move into it.
using Visit = std::function<void(int64_t draw, int64_t taken, int64_t i, int64_t j, int state, int move)>;

template <class P, class T>
class Sweeps {
    using Real = typename P::Real;
    using Slot = typename P::Slot;
    using Own = Chunk<P, T>;
    static constexpr int W = lanes_of<Real>, kinds = 1 + P::has_dots;

    const P cells;
    const T& program;
    const Frame& f;
    const Table& table;
    const int64_t strips, begins, ends;  // of the lattice; those in the arrays
    const int64_t lines, line_size, chunks_most, state_size;
    const EndList end_list;
    const bool single_end;
    Array<double> spare;     // for what is not on the tape
    Slot* kept_lines;        // the last rows of every strip, by column and state
    Real* states = nullptr;  // what chunks begin with
    double *end_values, *end_dots = nullptr;

    // --- what strips look back to

    int64_t kept_line(int64_t i) const {
        return ((i / strip_rows - begins) * lines + i % strip_rows - (strip_rows - lines)) * line_size;
    }
    Slot* line(int64_t i) const { return kept_lines + kept_line(i); }
    Real* mass_line(Real* masses, int64_t i) const { return masses + kept_line(i) * kinds; }

    // The rows above a strip, for the steps of chunk c and those before.
    __attribute__((noinline)) void enter(const Own& own, const Strip& strip, int64_t c) const {
        for (int64_t d = 1; d <= table.reach; ++d) {
            const int64_t i = strip.row - d;
            const int64_t from = i < 0 ? 1 : f.region.first(i), to = i < 0 ? 0 : f.region.last(i);
            const Slot* const row = i < 0 ? nullptr : line(i);
            for (int64_t k = -table.history; k < strip.steps_in(c); ++k) {
                const int64_t j = strip.first + c * chunk_steps + k + d;
                for (int a = 0; a < table.states; ++a) {
                    const bool is_inside = j >= from && j <= to;
                    P::put(own.node_at(k, a, -d), table.height, is_inside ? row[j * table.states + a] : P::dead());
                }
            }
        }
    }
    // The rows that the strip below looks back to: action(step, row, state, column).
    template <class Action>
    void for_rows_below(const Strip& strip, int64_t c, Action action) const {
        if (strip.row + strip.rows == f.region.rows) return;
        for (int64_t r = strip_rows - lines; r < strip_rows; ++r) {
            const int64_t last = std::min(strip.ends[r] - c * chunk_steps, strip.steps_in(c) - 1);
            for (int64_t k = std::max<int64_t>(strip.begins[r] - c * chunk_steps, 0); k <= last; ++k) {
                for (int a = 0; a < table.states; ++a) action(k, r, a, strip.first + c * chunk_steps + k - r);
            }
        }
    }

    // --- what chunks begin with

    // What is behind the last step of a chunk goes before the first of the next one; before the first chunk is nothing.
    void carry(const Own& own, int64_t c) const {
        const int64_t size = table.history * own.step();
        if (c > 0)
            return void(std::memmove(own.nodes.get(), own.nodes.get() + chunk_steps * own.step(), size * sizeof(Real)));
        for (int64_t at = 0; at < size; at += own.column()) {
            for (int64_t r = table.pad; r < table.height; ++r)
                P::put(own.nodes.get() + at + r, table.height, P::dead());
        }
    }
    // To the tape or from it.
    template <bool Save>
    void keep(const Own& own, const Strip& strip, int64_t c) const {
        Real* at = own.nodes.get() + table.pad;
        Real* tape = states + ((strip.row / strip_rows - begins) * chunks_most + c) * state_size;
        for (int64_t n = 0; n < state_size / strip_rows; ++n, at += table.height, tape += strip_rows) {
            std::memcpy(Save ? tape : at, Save ? at : tape, strip_rows * sizeof(Real));
        }
    }
    // Everything of chunk c, with what was seen of the scores.
    __attribute__((noinline)) void sweep(Own& own, const Strip& strip, int64_t c, Way way, Seen* seen) const {
        const typename P::Plain& plain = cells;
        for (int n = 0; n < own.tiles(); ++n) {
            const Seen one = f.scores[n].read(plain, strip, c, way, f.scale, own.scores[n]);
            if (seen) seen[n].add(one);
            if (P::has_dots) f.z[n].read(AsItIs<Real>(), strip, c, way, f.scale, own.z[n]);
        }
        enter(own, strip, c);
        own.advance(strip, c);
    }

    // --- ends

    const Array2& end_score(const Array2* arrays, int a) const { return arrays[2 * table.states + f.moves + a]; }

    // Calls action(step, state, row, place in the list) for the ends in chunk c.
    template <class Action>
    void for_ends(const Strip& strip, int64_t c, Action action) const {
        for (int64_t k = 0; k < strip.steps_in(c); ++k) {
            const int64_t now = c * chunk_steps + k;
            const Range range = cells_at(f.ends.place, true, f.region, strip, now);
            for (int a = 0, e = 0; a < table.states; ++a) {
                if (!(f.ends.states >> a & 1)) continue;
                for (int64_t r = range.low; r <= range.high; ++r) {
                    if (now < strip.begins[r] || now > strip.ends[r]) continue;
                    action(k, a, r, std::size_t(end_list.position(strip.row + r, strip.first + now - r, e)));
                }
                ++e;
            }
        }
    }
    LATTICE_SELDOM void record(const Own& own, const Strip& strip, int64_t c, Seen& seen) const {
        Wide<W> values;
        int64_t in_values = -1;
        for_ends(strip, c, [&](int64_t k, int a, int64_t r, std::size_t n) {
            const Real* const at = own.node_at(k, a, r / W * W);
            if (in_values != at - own.nodes.get()) values = P::wide(P::load(at, table.height));
            in_values = at - own.nodes.get();
            const int64_t i = strip.row + r, j = strip.first + c * chunk_steps + k - r;
            const double score = end_score(f.scores, a).score(i, j) * f.scale;
            if (!(score < infinity<double>)) seen.bad = true;
            end_values[n] = values.part[r % W / 4][r % 4] + double(cells.unit) * score;
            if constexpr (P::has_dots) {
                end_dots[n] =
                    double(P::get(own.node_at(k, a, r), table.height).dot) + end_score(f.z, a).score(i, j) * f.scale;
            }
        });
    }

    // --- back

    // Mass that enters at chunk c: from the strip below, and at the ends. Returns the first row that may get some.
    LATTICE_SELDOM int64_t inject(const Own& own, const Strip& strip, int64_t c, Real* masses, const double* end_masses,
                                  const Array2* out) const {
        const bool is_last = strip.row + strip.rows == f.region.rows;
        const bool by_row = f.ends.place == Place::corner || f.ends.place == Place::row;
        const int64_t low = !by_row   ? 0
                            : is_last ? (strip.rows - 1) / group * group
                                      : strip_rows - std::min(table.pad, strip_rows);
        for (int64_t n = 0; n < strip.steps_in(c) * table.states * kinds; ++n) {
            std::fill(own.inject.get() + n * strip_rows + low, own.inject.get() + (n + 1) * strip_rows, Real(0));
        }
        for_rows_below(strip, c, [&](int64_t k, int64_t r, int a, int64_t j) {
            const Real* const from = mass_line(masses, strip.row + r) + (j * table.states + a) * kinds;
            for (int kind = 0; kind < kinds; ++kind) own.injected_at(k, a)[kind * strip_rows + r] = from[kind];
        });
        for_ends(strip, c, [&](int64_t k, int a, int64_t r, std::size_t n) {
            own.injected_at(k, a)[r] += Real(end_masses[n]);
            if (P::has_dots) own.injected_at(k, a)[strip_rows + r] += Real(end_dots[n]);
            const double mass = P::has_dots ? end_dots[n] : end_masses[n];
            end_score(out, a).add(strip, strip.row + r, strip.first + c * chunk_steps + k - r, mass);
        });
        return low;
    }

    LATTICE_SELDOM void begin_back(const Own& own, const Strip& strip, Real* masses) const {
        std::fill_n(own.flows.get(), own.flows_size(), Real(0));
        for (int64_t d = 1; d <= table.reach; ++d) {
            const int64_t i = strip.row - d;
            const RowAbove<Real> none{0, -1, nullptr};
            own.above[std::size_t(d - 1)] =
                i < 0 ? none : RowAbove<Real>{f.region.first(i), f.region.last(i), mass_line(masses, i)};
        }
    }

    template <class Body>
    void for_strips(const Array2* out, Body body) const {
        Progress progress(ends - begins);
        const int threads = table.reach > strip_rows ? 1 : int(std::min<int64_t>(f.threads, ends - begins));
        const auto make = [&] { return Own(cells, program, f, out); };
        take_turns(ends - begins, threads, make,
                   [&](int64_t n, Own& own) { progress.guard([&] { body(n, own, progress); }); });
    }

public:
    // `keeps`: whether there will be a sweep back.
    LATTICE_SELDOM Sweeps(const T& program, const Frame& f, bool keeps)
        : cells(f.omega),
          program(program),
          f(f),
          table(program.table),
          strips((f.region.rows + strip_rows - 1) / strip_rows),
          begins(f.row / strip_rows),
          ends(std::min(strips, (f.row + f.rows + strip_rows - 1) / strip_rows)),
          lines(table.lines()),
          line_size(f.columns * table.states),
          chunks_most(Table::chunks(f.columns)),
          state_size(table.history * table.states * strip_rows * P::planes),
          end_list(f.ends, f.rows, f.columns),
          single_end(end_list.is_single(f.region)) {
        const auto doubles = [](int64_t bytes) { return (bytes + 7) / 8; };
        const int64_t all = (f.rows + strip_rows - 1) / strip_rows, ends_size = end_list.size();
        const int64_t lines_size = doubles(all * lines * line_size * int64_t(sizeof(Slot)));
        const int64_t states_size = keeps ? doubles(all * chunks_most * state_size * int64_t(sizeof(Real))) : 0;
        const bool is_own = P::has_dots || !f.tape;
        if (is_own) spare = scratch<double>(lines_size + states_size + 2 * ends_size);
        double* const tape = is_own ? spare.get() : f.tape + 1;
        kept_lines = reinterpret_cast<Slot*>(tape);
        if (keeps) states = reinterpret_cast<Real*>(tape + lines_size);
        end_values = tape + lines_size + states_size;
        if (P::has_dots) end_dots = end_values + ends_size;
    }

    // Whether the nodes could hold the values of scores whose magnitudes, of one array each, sum to `greatest`.
    bool can_take(double greatest) const {
        return P::can_take(greatest, (f.region.rows + f.region.columns) * table.states);
    }

    // The value, if the last cell is here; what was seen of the scores.
    double forward(Seen& seen) const {
        const int64_t count = ends - begins, arrays = 2 * table.states + f.moves;
        const auto seen_by = filled<Seen>(count * arrays, {});
        std::fill_n(end_values, end_list.size(), -infinity<double>);
        if (P::has_dots) std::fill_n(end_dots, end_list.size(), 0.0);
        for_strips(nullptr, [&](int64_t n, Own& own, Progress& progress) {
            const int64_t s = begins + n;
            const Strip strip(f.region, s), before(f.region, std::max<int64_t>(s - 1, 0));
            Seen* const own_seen = &seen_by[std::size_t(n * arrays)];
            for (int64_t c = 0; c < strip.chunks; ++c) {
                if (n > 0) progress.wait(n - 1, strip.chunks_before(before, c));
                carry(own, c);
                if (states) keep<true>(own, strip, c);
                sweep(own, strip, c, Way::forth, own_seen);
                for_rows_below(strip, c, [&](int64_t k, int64_t r, int a, int64_t j) {
                    line(strip.row + r)[j * table.states + a] = P::get(own.node_at(k, a, r), table.height);
                });
                record(own, strip, c, *own_seen);
                progress.report(n, c + 1);
            }
        });
        for (int m = 0; m < arrays; ++m) {
            Seen one;
            for (int64_t n = 0; n < count; ++n) one.add(seen_by[std::size_t(n * arrays + m)]);
            seen.greatest += one.greatest;
            seen.bad = seen.bad || one.bad;
        }
        return solve_ends(f.omega, single_end, end_values, end_list.size(), 1, nullptr, nullptr) / cells.unit;
    }

    // The masses of all nodes and moves, times the seed, or their tangents, to the gradients of their scores.
    void backward(double seed, const Array2* out) const {
        const int64_t ends_size = end_list.size();
        const auto masses = zeros<Real>((ends - begins) * lines * line_size * kinds);
        const auto end_masses = zeros<double>(ends_size);
        solve_ends(f.omega, single_end, end_values, ends_size, seed, end_masses.get(), end_dots);
        for_strips(out, [&](int64_t n, Own& own, Progress& progress) {
            const int64_t s = ends - 1 - n;
            const Strip strip(f.region, s), after(f.region, std::min(s + 1, strips - 1));
            begin_back(own, strip, masses.get());
            for (int64_t c = strip.chunks - 1; c >= 0; --c) {
                keep<false>(own, strip, c);
                sweep(own, strip, c, Way::back, nullptr);
                if (n > 0) progress.wait(n - 1, strip.chunks_after(after, c));
                for (int m = 0; m < own.tiles(); ++m) out[m].clear(own.out[m], m >= table.states + f.moves);
                own.descend(strip, c, inject(own, strip, c, masses.get(), end_masses.get(), out));
                for (int64_t now = -1; c == 0 && now >= -table.history; --now) own.send(strip, now);
                for (int m = 0; m < own.tiles(); ++m) out[m].write(strip, c, own.out[m]);
                progress.report(n, strip.chunks - c);
            }
        });
    }

    // Draws walk from an end to a start, whose move is −1, chunk by chunk. The first of the uniforms (draws, count)
    // chooses the end, if it is not plain.
    LATTICE_SELDOM void sample(int64_t draws, int64_t count, const double* uniforms, const Visit& visit) const {
        Own own(cells, program, f, nullptr);
        const auto at = filled<Walker>(draws, {f.region.rows - 1, f.region.columns - 1, 0, 0});
        for (int64_t d = 0; d < draws; ++d) {
            if (!draw_end(uniforms[d * count], at[std::size_t(d)])) return;
        }
        for (int64_t s = strips - 1; s >= 0; --s) {
            const Strip strip(f.region, s);
            for (int64_t c = strip.chunks - 1; c >= 0; --c) {
                keep<false>(own, strip, c);
                sweep(own, strip, c, Way::back, nullptr);
                for (int64_t d = 0; d < draws; ++d) {
                    walk(own, strip, c, d, uniforms + d * count + 1, at[std::size_t(d)], visit);
                }
            }
        }
    }

private:
    struct Walker {
        int64_t i, j, taken;
        int state;
    };

    // As far as chunk c goes.
    LATTICE_SELDOM void walk(Own& own, const Strip& strip, int64_t c, int64_t d, const double* uniforms, Walker& at,
                             const Visit& visit) const {
        while (at.i >= strip.row) {
            const int64_t r = at.i - strip.row, k = at.j - strip.first + r - c * chunk_steps;
            if (k < 0) return;
            double q[most_candidates], sum = 0;
            int count;
            own.mark_starts(strip, c * chunk_steps + k);
            const int starts = own.probabilities(at.state, k, r, q, count);
            for (int n = 0; n < count; ++n) sum += q[n];
            const int chosen = int(node::draw(q, count, sum, uniforms[at.taken])) - starts,
                      m = table.into[at.state] + chosen;
            const bool is_first = chosen < 0;
            visit(d, at.taken++, at.i, at.j, at.state, is_first ? -1 : table.number[m]);
            if (is_first) {
                at.i = -1;
            } else {
                at = {at.i - table.move[m].di, at.j - table.move[m].dj, at.taken, table.move[m].from};
            }
        }
    }
    LATTICE_SELDOM bool draw_end(double uniform, Walker& at) const {
        const auto q = zeros<double>(end_list.size());
        solve_ends(f.omega, single_end, end_values, end_list.size(), 1, q.get(), nullptr);
        const int64_t chosen = node::draw(q.get(), end_list.size(), 1, uniform), cell = chosen / end_list.count;
        if (end_list.by_row()) at.i = end_list.by_column() ? cell / f.columns : cell;
        if (end_list.by_column()) at.j = cell % f.columns;
        int64_t e = chosen % end_list.count;
        while (!(f.ends.states >> at.state & 1) || e-- > 0) ++at.state;
        return chosen >= 0;
    }
};

}  // namespace table_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
