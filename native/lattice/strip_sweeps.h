// The sweeps of one lattice, strip by strip. The backward sweep repeats chunks: a tape holds the last rows of every
// strip, and the steps before each chunk. Threads take the strips in turn, each a little behind the one before (or
// after, going back).
#pragma once

#include "../base/threads.h"
#include "chunk.h"
#include "ends.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

template <class P>
class StripSweeps;

// The loops that are compiled for each table that the compiler knows. For chunk c: `forth` records the last rows, the
// ends and a summary of the scores; `back` repeats the chunk and keeps the probabilities; `descend` computes the
// masses.
template <class P>
struct Loops {
    using ChunkSweep = void (*)(const StripSweeps<P>&, Room<P>&, const Strip&, int64_t c, Seen*);
    ChunkSweep forth, back;
    void (*descend)(Room<P>&, const Strip&, const Places& starts, int64_t c);

    template <class T>
    static Loops of() {
        return {sweep<T, Way::forth>, sweep<T, Way::back>,
                [](Room<P>& own, const Strip& strip, const Places& starts, int64_t c) {
                    Chunk<P, T>(own).descend(strip, starts, c);
                }};
    }

private:
    template <class T, Way way>
    static void sweep(const StripSweeps<P>& all, Room<P>& own, const Strip& strip, int64_t c, Seen* seen) {
        const StripFrame& f = own.f;
        all.read(own, strip, c, way, seen);
        const Chunk<P, T> chunk(own);
        const int64_t first = c * chunk_steps, count = strip.steps_in(c);
        const Places starts(f.starts.place, false, f.region, strip), stops(f.ends.place, true, f.region, strip);
        for (int64_t now = first - chunk.table().history; now <= first; ++now) chunk.enter(strip, now);
        for (int64_t k = 0; k < count; ++k) {
            const int64_t now = first + k;
            // One step ahead: a vector that is read over a number just stored has to wait.
            if (k + 1 < count) chunk.enter(strip, now + 1);
            own.mark_starts(starts.at(now));
            chunk.template advance<way == Way::back>(strip, now, k);
            if (way == Way::back) continue;
            chunk.leave(strip, now);
            const Range range = stops.at(now);
            if (!range.is_empty()) all.record(own, strip, now, range, *seen);
        }
    }
};

template <class P>
class StripSweeps {
    using Real = typename P::Real;
    using Number = typename P::Number;
    using StoredNode = typename P::StoredNode;
    using Own = Room<P>;
    using In = Chunk<P, AnyTable>;
    static constexpr int W = lanes_of<Real>, kinds = 1 + P::has_dots;

    const P cells;
    const Table& table;
    const Loops<P> loops;
    const StripFrame& f;
    const int64_t strips, begins, ends;  // of the lattice; those in the arrays
    const int64_t lines, line_size, chunks_most, state_size;
    const EndList end_list;
    const bool single_end;
    Array<double> spare;     // for what is not on the tape
    StoredNode* kept_lines;        // the last rows of every strip, by column and state
    Real* states = nullptr;  // what chunks begin with
    double *end_values, *end_dots = nullptr;

    // --- what strips look back to

    int64_t kept_line(int64_t i) const {
        return ((i / strip_rows - begins) * lines + i % strip_rows - (strip_rows - lines)) * line_size;
    }
    StoredNode* line(int64_t i) const {
        if (i < f.row) return static_cast<StoredNode*>(const_cast<void*>(f.line_above));
        if (f.line_below && i == f.row + f.rows - 1) return static_cast<StoredNode*>(f.line_below);
        return kept_lines + kept_line(i);
    }
    Number* mass_line(Number* masses, int64_t i) const {
        if (i < f.row) return static_cast<Number*>(f.mass_above);
        if (f.mass_below && i == f.row + f.rows - 1) return static_cast<Number*>(const_cast<void*>(f.mass_below));
        return masses + kept_line(i) * kinds;
    }

    // The rows that a strip has in common with its neighbors; `masses`, if the sweep goes back.
    LATTICE_APART void look_around(const Own& own, const Strip& strip, Number* masses) const {
        const auto border = [&](int64_t i) {
            return typename Own::Border{f.region.first(i), f.region.last(i), line(i),
                                        masses ? mass_line(masses, i) : nullptr};
        };
        const typename Own::Border none{0, -1, nullptr, nullptr};
        for (int64_t d = 1; d <= table.reach; ++d) {
            own.above[std::size_t(d - 1)] = strip.row >= d ? border(strip.row - d) : none;
        }
        const bool is_last = strip.row + strip.rows == f.region.rows;
        for (int64_t n = 0; n < lines; ++n) {
            own.below[std::size_t(n)] = is_last ? none : border(strip.row + strip_rows - lines + n);
        }
    }

    // --- what chunks begin with

    // Before the first chunk is nothing.
    void begin(Own& own) const {
        for (int64_t now = -table.history; now < 0; ++now) {
            for (int a = 0; a < table.states; ++a) {
                for (int64_t r = 0; r < strip_rows; ++r) P::put(In(own).node_at(now, a) + r, table.height, P::dead());
            }
        }
    }
    // To the tape or from it.
    template <bool Save>
    void keep(Own& own, const Strip& strip, int64_t c) const {
        Real* tape = states + ((strip.row / strip_rows - begins) * chunks_most + c) * state_size;
        for (int64_t now = c * chunk_steps - table.history; now < c * chunk_steps; ++now) {
            for (int n = 0; n < table.states * P::planes; ++n, tape += strip_rows) {
                Real* const at = In(own).node_at(now, 0) + n * table.height;
                std::memcpy(Save ? tape : at, Save ? at : tape, strip_rows * sizeof(Real));
            }
        }
    }

    // --- ends

    const SlotArray& end_score(const SlotArray* arrays, int a) const { return arrays[2 * table.states + f.moves + a]; }

    // Calls action(state, row, place in the list) for the ends of one step.
    template <class Action>
    void for_ends(const Strip& strip, int64_t now, Range range, Action action) const {
        for (int a = 0, e = 0; a < table.states; ++a) {
            if (!(f.ends.states >> a & 1)) continue;
            for (int64_t r = range.low; r <= range.high; ++r) {
                if (now < strip.begins[r] || now > strip.ends[r]) continue;
                action(a, r, std::size_t(end_list.position(strip.row + r, strip.first + now - r, e)));
            }
            ++e;
        }
    }

public:
    // The scores of chunk c, and what was seen of them.
    LATTICE_APART void read(const Own& own, const Strip& strip, int64_t c, Way way, Seen* seen) const {
        for (int n = 0; n < own.tiles(); ++n) {
            const Seen one = f.scores[n].read(cells, strip, c, way, f.scale, way == Way::forth, own.scores[n]);
            if (seen) seen[n].add(one);
            if (P::has_dots) f.z[n].read(Unprepared(), strip, c, way, f.scale, false, own.z[n]);
        }
    }
    // The values of the ends of one step.
    LATTICE_SELDOM void record(Own& own, const Strip& strip, int64_t now, Range range, Seen& seen) const {
        const In in(own);
        double values[W];
        const Real* in_values = nullptr;
        for_ends(strip, now, range, [&](int a, int64_t r, std::size_t n) {
            const Real* const at = in.node_at(now, a) + r / W * W;
            if (single_end) {
                values[r % W] = cells.value(P::get(in.node_at(now, a) + r, table.height)) * cells.unit;
            } else if (in_values != at) {
                P::put_values(P::load(at, table.height), values);
            }
            in_values = at;
            const int64_t i = strip.row + r, j = strip.first + now - r;
            const double score = end_score(f.scores, a).score(i, j) * f.scale;
            if (!(score < infinity<double>)) seen.bad = true;
            end_values[n] = values[r % W] + double(cells.unit) * score;
            if constexpr (P::has_dots) {
                end_dots[n] =
                    double(P::get(in.node_at(now, a) + r, table.height).dot) + end_score(f.z, a).score(i, j) * f.scale;
            }
        });
    }

private:
    struct Unprepared {
        using Number = typename P::Number;
        static void prepare(Number*, int64_t) {}
    };

    // --- back

    // Mass that enters at chunk c: from the strip below, and at the ends.
    LATTICE_APART void inject(Own& own, const Strip& strip, int64_t c, const double* end_masses,
                              const SlotArray* out) const {
        const Places stops(f.ends.place, true, f.region, strip);
        const bool is_last = strip.row + strip.rows == f.region.rows;
        const bool by_row = f.ends.place == Place::corner || f.ends.place == Place::row;
        own.low = !by_row   ? 0
                  : is_last ? (strip.rows - 1) / group * group
                            : strip_rows - std::min(table.pad, strip_rows);
        const int64_t height = own.injected_rows(), size = strip.steps_in(c) * table.states * kinds * height;
        std::fill_n(own.inject.get(), size, Number(0));
        for (int64_t n = 0; n < lines; ++n) {
            const auto& row = own.below[std::size_t(n)];
            const int64_t r = strip_rows - lines + n, first = strip.first + c * chunk_steps - r;
            for (int64_t j = std::max(row.from, first); j <= std::min(row.to, first + strip.steps_in(c) - 1); ++j) {
                const Number* const from = row.mass + j * table.states * kinds;
                Number* const to = In(own).injected_at(j - first, 0) + r;
                for (int m = 0; m < table.states * kinds; ++m) to[m * height] = from[m];
            }
        }
        for (int64_t k = 0; k < strip.steps_in(c); ++k) {
            const int64_t now = c * chunk_steps + k;
            for_ends(strip, now, stops.at(now), [&](int a, int64_t r, std::size_t n) {
                In(own).injected_at(k, a)[r] += Number(end_masses[n]);
                if (P::has_dots) In(own).injected_at(k, a)[height + r] += Number(end_dots[n]);
                const double mass = P::has_dots ? end_dots[n] : end_masses[n];
                end_score(out, a).add(strip, strip.row + r, strip.first + now - r, mass);
            });
        }
    }

    template <class Body>
    void for_strips(bool keeps, const SlotArray* out, Body body) const {
        Progress progress(ends - begins);
        const int threads = table.reach > strip_rows ? 1 : int(std::min<int64_t>(f.threads, ends - begins));
        const auto make = [&] { return Own(cells, table, f, keeps, out); };
        take_turns(ends - begins, threads, make,
                   [&](int64_t n, Own& own) { progress.guard([&] { body(n, own, progress); }); });
    }

public:
    // `keeps`: whether there will be a sweep back.
    LATTICE_APART StripSweeps(const Table& table, const Loops<P>& loops, const StripFrame& f, bool keeps)
        : cells(f.omega, f.scale),
          table(table),
          loops(loops),
          f(f),
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
        const int64_t lines_size = doubles(all * lines * line_size * int64_t(sizeof(StoredNode)));
        const int64_t states_size = keeps ? doubles(all * chunks_most * state_size * int64_t(sizeof(Real))) : 0;
        const bool is_own = P::has_dots || !f.tape;
        if (is_own) spare = scratch<double>(lines_size + states_size + 2 * ends_size);
        double* const tape = is_own ? spare.get() : f.tape + 1;
        kept_lines = reinterpret_cast<StoredNode*>(tape);
        if (keeps) states = reinterpret_cast<Real*>(tape + lines_size);
        end_values = f.end_values ? f.end_values : tape + lines_size + states_size;
        if (P::has_dots) end_dots = end_values + ends_size;
    }

    // Whether the nodes could hold the values of scores whose magnitudes, of one array each, sum to `greatest`.
    bool can_take(double greatest) const {
        return P::can_take(greatest, (f.region.rows + f.region.columns) * table.states);
    }

    // The value, if the last cell is here, and a summary of the scores.
    double forward(Seen& seen) const {
        const int64_t count = ends - begins, arrays = 2 * table.states + f.moves;
        const auto seen_by = filled<Seen>(count * arrays, {});
        std::fill_n(end_values, end_list.size(), -infinity<double>);
        if (P::has_dots) std::fill_n(end_dots, end_list.size(), 0.0);
        for_strips(false, nullptr, [&](int64_t n, Own& own, Progress& progress) {
            const int64_t s = begins + n;
            const Strip strip(f.region, s), before(f.region, std::max<int64_t>(s - 1, 0));
            Seen* const own_seen = &seen_by[std::size_t(n * arrays)];
            look_around(own, strip, nullptr);
            begin(own);
            for (int64_t c = 0; c < strip.chunks; ++c) {
                if (n > 0) progress.wait(n - 1, strip.chunks_before(before, c));
                check_interrupt();
                if (states) keep<true>(own, strip, c);
                loops.forth(*this, own, strip, c, own_seen);
                progress.report(n, c + 1);
            }
        });
        for (int m = 0; m < arrays; ++m) {
            Seen one;
            for (int64_t n = 0; n < count; ++n) one.add(seen_by[std::size_t(n * arrays + m)]);
            seen.greatest += one.greatest;
            seen.bad = seen.bad || one.bad;
        }
        const bool is_plain = single_end || f.end_values;  // if the values of ends are wanted, their maximum is not
        const double value = solve_ends(f.omega, is_plain, end_values, end_list.size(), 1, nullptr, nullptr);
        if (!is_number(value / cells.unit, f.is_double)) seen.bad = true;
        return value * (f.scale / cells.unit);
    }

    // The masses of all nodes and moves, times the seed, or their tangents, to the gradients of their scores.
    void backward(double seed, const SlotArray* out) const {
        const int64_t ends_size = end_list.size();
        const auto masses = zeros<Number>((ends - begins) * lines * line_size * kinds);
        const auto end_masses = zeros<double>(ends_size);
        solve_ends(f.omega, single_end, end_values, ends_size, seed, end_masses.get(), end_dots);
        if (f.mass_above) std::fill_n(static_cast<Number*>(f.mass_above), line_size, Number(0));
        for_strips(true, out, [&](int64_t n, Own& own, Progress& progress) {
            const int64_t s = ends - 1 - n;
            const Strip strip(f.region, s), after(f.region, std::min(s + 1, strips - 1));
            const Places starts(f.starts.place, false, f.region, strip);
            look_around(own, strip, masses.get());
            std::fill_n(own.masses.get(), own.masses_size(), Number(0));
            for (int64_t c = strip.chunks - 1; c >= 0; --c) {
                check_interrupt();
                keep<false>(own, strip, c);
                In(own).carry_back(strip, c);
                loops.back(*this, own, strip, c, nullptr);
                if (n > 0) progress.wait(n - 1, strip.chunks_after(after, c));
                for (int m = 0; m < own.tiles(); ++m) out[m].clear(own.out[m], m >= table.states + f.moves);
                inject(own, strip, c, end_masses.get(), out);
                loops.descend(own, strip, starts, c);
                for (int m = 0; m < own.tiles(); ++m) out[m].write(strip, c, own.out[m]);
                progress.report(n, strip.chunks - c);
            }
        });
    }

    // Draws walk from an end to a start, whose move is −1, chunk by chunk. The first of the uniforms (draws, count)
    // chooses the end, if it is not plain.
    LATTICE_SELDOM void sample(int64_t draws, int64_t count, const double* uniforms, const Visit& visit) const {
        Own own(cells, table, f, true, nullptr);
        const auto at = filled<Walker>(draws, {f.region.rows - 1, f.region.columns - 1, 0, 0});
        for (int64_t d = 0; d < draws; ++d) {
            if (!draw_end(f.omega, end_list, single_end, end_values, uniforms[d * count], at[std::size_t(d)])) return;
        }
        for (int64_t s = strips - 1; s >= 0; --s) {
            const Strip strip(f.region, s);
            look_around(own, strip, nullptr);
            for (int64_t c = strip.chunks - 1; c >= 0; --c) {
                check_interrupt();
                keep<false>(own, strip, c);
                loops.back(*this, own, strip, c, nullptr);
                for (int64_t d = 0; d < draws; ++d) {
                    walk(own, strip, c, d, uniforms + d * count + 1, at[std::size_t(d)], visit);
                }
            }
        }
    }

private:
    // Walks as far as chunk c goes.
    LATTICE_SELDOM void walk(Own& own, const Strip& strip, int64_t c, int64_t d, const double* uniforms, Walker& at,
                             const Visit& visit) const {
        const Places starts(f.starts.place, false, f.region, strip);
        while (at.i >= strip.row) {  // every move leads to an earlier node
            const int64_t r = at.i - strip.row, k = at.j - strip.first + r - c * chunk_steps;
            if (k < 0) return;
            double q[most_candidates];
            own.mark_starts(starts.at(c * chunk_steps + k));
            const int has_start = own.has_starts(at.state), first = table.into[at.state];
            if (has_start) q[0] = double(In(own).kept_start_at(k, at.state)[r]);
            for (int m = first; m < table.into[at.state + 1]; ++m) {
                q[has_start + m - first] = double(In(own).kept_at(k, m)[r]);
            }
            const int count = has_start + table.into[at.state + 1] - first;
            step_back(table, has_start, drawn(q, count, uniforms[at.taken]), at, [&](const Walker& here, int m) {
                visit(d, here, m < 0 ? -1 : table.number[m]);
            });
        }
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
