// The sweeps of dynamic time warping over one pair.
//
// A cell's left neighbour is its row's cell one step ago, the one above is that of the row above one step ago, and the
// diagonal one was above a step ago. Strips follow each other; threads take them in turn, each a little behind the one
// before (or after, going back).
#pragma once

#include "../base/memory.h"
#include "../base/threads.h"
#include "cells.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// A pair, or a block of whole strips of it, and what it exchanges with the blocks above and below: lines that begin at
// column 0 of the pair, of slots (values) and of numbers of a tile (mass).
struct Block {
    Region region;
    Matrix cost;
    int64_t rows, columns;  // of the matrix; of a line
    int threads;
    const void *line_above, *mass_below;
    void *line_below, *mass_above;
};

// The last value of every row of a strip, and the one that was above it.
template <class P>
struct Front {
    typename P::Column here, above;

    void save(typename P::Slot* to) const {
        here.save(to);
        above.save(to + strip_rows);
    }
    void restore(const typename P::Slot* from) {
        here.restore(from);
        above.restore(from + strip_rows);
    }
};

// The same for the tangents of the values.
template <class Real>
struct Tangents {
    alignas(32) Real here[strip_rows] = {}, above[strip_rows] = {};

    void save(Real* to) const {
        std::copy(here, here + strip_rows, to);
        std::copy(above, above + strip_rows, to + strip_rows);
    }
    void restore(const Real* from) {
        std::copy(from, from + strip_rows, here);
        std::copy(from + strip_rows, from + 2 * strip_rows, above);
    }
};

// What comes from the row above a strip, and where its last row goes: values and their tangents by column, or nothing.
template <class P>
struct Above {
    const typename P::Slot* values;
    const typename P::Real* dots;
};
template <class P>
struct Below {
    typename P::Slot* values;
    typename P::Real* dots;
};

// One vector of cells, from row r. Q: their probabilities are stored at q, a row for each move. Dots: tangents are
// swept too, and those of the probabilities follow.
template <bool Q, bool Dots, class P>
__attribute__((always_inline)) inline void visit(const P& program, Front<P>& front, Tangents<typename P::Real>& dots,
                                                 int64_t r, const typename P::Node& up, Vec<typename P::Real> dot_up,
                                                 const typename P::Tile* cost, const typename P::Tile* z,
                                                 typename P::Tile* q) {
    using Real = typename P::Real;
    using Tile = typename P::Tile;
    using V = Vec<Real>;
    const auto left = front.here.load(r), diagonal = front.above.load(r);
    V own[3];
    const auto here = program.template combine<Q || Dots>(diagonal, up, left, load_as<Real>(cost + r), own);
    front.above.store(r, up);
    front.here.store(r, here);
    for (int n = 0; Q && n < 3; ++n) store_as<Tile, Real>(q + n * strip_rows + r, own[n]);
    if constexpr (Dots) {
        const V y[3] = {load<Real>(dots.above + r), dot_up, load<Real>(dots.here + r)};
        V own_dot[3];
        const V mean = program.tilt(own, y, own_dot);
        store<Real>(dots.above + r, dot_up);
        store<Real>(dots.here + r, load_as<Real>(z + r) + mean);
        for (int n = 0; Q && n < 3; ++n) store_as<Tile, Real>(q + (3 + n) * strip_rows + r, own_dot[n]);
    }
}

// How many rows of probabilities a step has.
template <bool Dots>
constexpr int64_t kept_rows = Dots ? 6 : 3;

// One chunk.
template <bool Q, bool Dots, class P>
__attribute__((noinline)) void advance(const P& program, Front<P>& front, Tangents<typename P::Real>& dots,
                                       const Strip& strip, int64_t c,
                                       Above<P> above, Below<P> below, const typename P::Tile* __restrict cost,
                                       const typename P::Tile* __restrict z, typename P::Tile* __restrict q) {
    using Real = typename P::Real;
    constexpr int W = lanes_of<Real>;
    const int64_t count = strip.steps_in(c);
    for (int64_t k = 0; k < count; ++k) {
        const int64_t column = strip.column(c, k);
        const bool below_another = above.values && column <= strip.last;
        const auto awake = strip.awake(c * chunk_steps + k);
        const auto* const cost_k = cost + k * strip_rows;
        const auto* const z_k = Dots ? z + k * strip_rows : z;
        auto* const q_k = Q ? q + k * kept_rows<Dots> * strip_rows : q;
        // What enters is put in front in a register: a vector that is read over a number just stored has to wait.
        const auto entering = below_another ? above.values[column] : P::dead();
        const Real entering_dot = Dots && below_another ? above.dots[column] : Real(0);
        for (int64_t r = awake.high - W; r >= awake.low; r -= W) {
            const auto up = r > 0 ? front.here.load(r - 1) : P::shifted(front.here.load(0), entering);
            Vec<Real> dot_up{};
            if constexpr (Dots) {
                const Vec<Real> first = shifted(load<Real>(dots.here), broadcast<Real>(entering_dot));
                dot_up = r > 0 ? load<Real>(dots.here + r - 1) : first;
            }
            visit<Q, Dots>(program, front, dots, r, up, dot_up, cost_k, z_k, q_k);
        }
        const int64_t behind = column - (strip.rows - 1);
        if (behind < strip.first) continue;
        if (below.values) below.values[behind] = front.here.get(strip.rows - 1);
        if (Dots && below.dots) below.dots[behind] = dots.here[strip.rows - 1];
    }
}

// The mass that a strip holds, going back. Of a row r, at a step: what its left neighbour will get, what the rows above
// will get by the moves down and along the diagonal, and what of the latter has to wait a step.
template <class Tile>
struct Mass {
    alignas(32) Tile left[strip_rows] = {}, above[strip_rows] = {}, waiting[strip_rows] = {};

    // What arrives at the rows from r; `entering` arrives at the last of the strip from below.
    Vec<Tile> arriving(int64_t r, Tile entering) const {
        constexpr int W = lanes_of<Tile>;
        return load<Tile>(left + r) +
               (r + W < strip_rows ? load<Tile>(above + r + 1) : shifted_back(load<Tile>(above + r), entering));
    }
    void settle(int64_t r, Vec<Tile> diagonal, Vec<Tile> up, Vec<Tile> to_left) {
        store<Tile>(left + r, to_left);
        store<Tile>(above + r, up + load<Tile>(waiting + r));
        store<Tile>(waiting + r, diagonal);
    }

private:
    static Vec<float> shifted_back(Vec<float> v, float entering) {
        return __builtin_shufflevector(v, broadcast<float>(entering), 1, 2, 3, 4, 5, 6, 7, 8);
    }
    static Vec<double> shifted_back(Vec<double> v, double entering) {
        return __builtin_shufflevector(v, broadcast<double>(entering), 1, 2, 3, 4);
    }
};

// One step back: the mass of every cell, or with Dots its tangent, goes to `path`, and on to the cells before by q.
template <bool Dots, class Tile>
inline void step_back(Mass<Tile>& mass, Mass<Tile>& dots, Strip::Rows awake, Tile entering, Tile entering_dot,
                      const Tile* __restrict q, Tile* __restrict path) {
    using V = Vec<Tile>;
    for (int64_t r = awake.low; r < awake.high; r += lanes_of<Tile>) {
        const V a = load<Tile>(q + r), b = load<Tile>(q + strip_rows + r), c = load<Tile>(q + 2 * strip_rows + r);
        const V here = mass.arriving(r, entering);
        mass.settle(r, a * here, b * here, c * here);
        V out = here;
        if constexpr (Dots) {
            const Tile* const q_dot = q + 3 * strip_rows + r;
            out = dots.arriving(r, entering_dot);
            dots.settle(r, load<Tile>(q_dot) * here + a * out, load<Tile>(q_dot + strip_rows) * here + b * out,
                        load<Tile>(q_dot + 2 * strip_rows) * here + c * out);
        }
        store<Tile>(path + r, out);
    }
}

template <class P>
class Pair {
    using Real = typename P::Real;
    using Slot = typename P::Slot;
    using Tile = typename P::Tile;

    const P program;
    const Block& block;
    const Region& region;
    const int64_t strips, begins, ends;  // of the pair; those in the matrix
    Slot* const rows;                    // the last row of every strip
    Slot* const states;                  // (strips, chunks_most, 2 strip_rows)
    const int64_t chunks_most;
    const int threads;

    // The buffers of one thread.
    struct Workspace {
        Array<Tile> cost = scratch<Tile>(tile_size), q, z;
        explicit Workspace(int64_t kept, bool dots = false) {
            if (kept) q = scratch<Tile>(kept * tile_size);
            if (dots) z = scratch<Tile>(tile_size);
        }
    };

    // Tangents of the last row of every strip, and where chunks begin.
    struct Dots {
        Array<Real> rows, states;
    };

    int64_t place(int64_t s, int64_t c) const { return ((s - begins) * chunks_most + c) * 2 * strip_rows; }

    const Slot* line_above(int64_t s) const {
        return s > begins ? rows + (s - 1 - begins) * block.columns : static_cast<const Slot*>(block.line_above);
    }
    // The first column of the strip before s, and the last of the one after.
    int64_t first_before(int64_t s) const { return region.first((s - 1) * strip_rows); }
    int64_t last_after(int64_t s) const { return region.last(std::min((s + 2) * strip_rows, region.rows) - 1); }

    // Enough lines that no thread writes one that another reads.
    int64_t ring() const { return threads + 1; }

    // Calls body(n, own, progress) for every strip of the block, each thread with a workspace.
    template <class Make, class Body>
    void for_strips(Make make, Body body) const {
        Progress progress(ends - begins);
        take_turns(ends - begins, threads, make, [&](int64_t n, Workspace& own) {
            progress.guard([&] { body(n, own, progress); });
        });
    }

    // One strip from its first chunk to its last: values and the tape of its states or, with tangents, these.
    template <bool WithDots>
    Front<P> ascend(int64_t n, Above<P> above, Below<P> below, const Matrix* z, Dots* dots, Seen& seen, Workspace& own,
                    Progress& progress) const {
        const int64_t s = begins + n;
        const Strip strip(region, s), before(region, std::max<int64_t>(s - 1, 0));
        Front<P> front;
        Tangents<Real> front_dots;
        for (int64_t c = 0; c < strip.chunks; ++c) {
            if (n > 0) progress.wait(n - 1, strip.chunks_before(before, c));
            if (c == 0) {
                front.here.clear(P::dead());
                front.above.clear(P::dead());
                const bool has_diagonal = s > 0 && strip.first > before.first;
                if (s == 0 || has_diagonal) front.above.set(0, s == 0 ? P::start() : above.values[strip.first - 1]);
                if (WithDots && has_diagonal) front_dots.above[0] = above.dots[strip.first - 1];
            }
            if constexpr (WithDots) {
                front_dots.save(&dots->states[std::size_t(place(s, c))]);
                fill(block.cost, strip, c, Way::forth, infinity<double>, own.cost.get());
                fill(*z, strip, c, Way::forth, 0, own.z.get());
            } else {
                if (states) front.save(states + place(s, c));
                seen.add(fill<true>(block.cost, strip, c, Way::forth, infinity<double>, own.cost.get()));
            }
            advance<false, WithDots>(program, front, front_dots, strip, c, above, below, own.cost.get(), own.z.get(),
                                     own.q.get());
            progress.report(n, c + 1);
        }
        return front;
    }

    // Lines of mass, and of its tangent, that strips send to the one above.
    struct MassLine {
        Tile* mass;
        Tile* dots;
    };

    // One strip from its last chunk to its first: the mass of its cells, or its tangent, to `out`.
    template <bool WithDots>
    void descend(int64_t n, double seed, MassLine below, MassLine above, const Matrix* z, const Dots* dots,
                 const Matrix& out, Workspace& own, Progress& progress) const {
        const int64_t s = ends - 1 - n;
        const Strip strip(region, s), after(region, std::min(s + 1, strips - 1));
        const Above<P> from{s > 0 ? line_above(s) : nullptr,
                            WithDots && s > 0 ? &dots->rows[std::size_t((s - 1) * block.columns)] : nullptr};
        Mass<Tile> mass, mass_dots;
        Front<P> front;
        Tangents<Real> front_dots;
        for (int64_t c = strip.chunks - 1; c >= 0; --c) {
            front.restore(states + place(s, c));
            fill(block.cost, strip, c, Way::back, infinity<double>, own.cost.get());
            if constexpr (WithDots) {
                front_dots.restore(&dots->states[std::size_t(place(s, c))]);
                fill(*z, strip, c, Way::back, 0, own.z.get());
            }
            advance<true, WithDots>(program, front, front_dots, strip, c, from, {nullptr, nullptr}, own.cost.get(),
                                    own.z.get(), own.q.get());
            if (n > 0) progress.wait(n - 1, strip.chunks_after(after, c));
            const bool is_last = s + 1 == strips;
            if (is_last && c == strip.chunks - 1 && P::alive(front.here.get(strip.rows - 1))) {
                mass.left[strip.rows - 1] = Tile(seed);
            }
            for (int64_t k = strip.steps_in(c) - 1; k >= 0; --k) {
                const int64_t column = strip.column(c, k), behind = column - (strip.rows - 1);
                const bool above_another = !is_last && behind >= strip.first;
                step_back<WithDots, Tile>(mass, mass_dots, strip.awake(c * chunk_steps + k),
                                          above_another ? below.mass[behind] : Tile(0),
                                          WithDots && above_another ? below.dots[behind] : Tile(0),
                                          &own.q[std::size_t(k * kept_rows<WithDots> * strip_rows)],
                                          &own.cost[std::size_t(k * strip_rows)]);
                if (s > 0 && column <= strip.last) send(above, column, mass.above[0], mass_dots.above[0]);
            }
            if (c == 0 && s > 0 && strip.first > 0) send(above, strip.first - 1, mass.waiting[0], mass_dots.waiting[0]);
            drain(out, strip, c, own.cost.get());
            progress.report(n, strip.chunks - c);
        }
    }

    static void send(MassLine above, int64_t column, Tile mass, Tile dot) {
        above.mass[column] = mass;
        if (above.dots) above.dots[column] = dot;
    }

    template <bool WithDots>
    void back(double seed, const Matrix* z, const Dots* dots, const Matrix& out) const {
        constexpr int64_t kinds = WithDots ? 2 : 1;
        const auto lines = scratch<Tile>(ring() * kinds * block.columns);
        const auto line = [&](int64_t s) {
            Tile* const mass = &lines[std::size_t(s % ring() * kinds * block.columns)];
            return MassLine{mass, WithDots ? mass + block.columns : nullptr};
        };
        const auto make = [] { return Workspace(kept_rows<WithDots>, WithDots); };
        for_strips(make, [&](int64_t n, Workspace& own, Progress& progress) {
            const int64_t s = ends - 1 - n;
            // The sweep only reads what comes from below.
            const MassLine from_below{static_cast<Tile*>(const_cast<void*>(block.mass_below)), nullptr};
            const MassLine below = n > 0 ? line(s + 1) : from_below;
            const MassLine to_above{static_cast<Tile*>(block.mass_above), nullptr};
            const MassLine above = s > begins || s == 0 ? line(s) : to_above;
            if (s > 0) {
                const int64_t first = first_before(s), end = region.first(s * strip_rows);
                for (int64_t j = first; j < end; ++j) send(above, j, 0, 0);
            }
            descend<WithDots>(n, seed, below, above, z, dots, out, own, progress);
        });
    }

public:
    Pair(const P& program, const Block& block, double* tape)
        : program(program),
          block(block),
          region(block.region),
          strips((region.rows + strip_rows - 1) / strip_rows),
          begins(block.cost.row / strip_rows),
          ends(std::min(strips, (block.cost.row + block.rows + strip_rows - 1) / strip_rows)),
          rows(tape ? reinterpret_cast<Slot*>(tape) + 1 : nullptr),
          states(tape ? rows + (block.rows + strip_rows - 1) / strip_rows * block.columns : nullptr),
          chunks_most((block.columns + strip_rows - 1 + chunk_steps - 1) / chunk_steps),
          threads(int(std::min<int64_t>(block.threads, ends - begins))) {}

    // The value, if the last cell is here; what was seen of the costs.
    double forward(Seen& seen) const {
        const int64_t count = ends - begins, lines = rows ? count : ring(), columns = block.columns;
        const auto own_rows = rows ? Array<Slot>() : scratch<Slot>(lines * columns);
        Slot* const line = rows ? rows : own_rows.get();
        const auto seen_by = filled<Seen>(count, {});
        double value = infinity<double>;
        for_strips([] { return Workspace(0); }, [&](int64_t n, Workspace& own, Progress& progress) {
            const int64_t s = begins + n;
            const Slot* above = nullptr;
            if (s > 0) above = n > 0 ? line + (n - 1) % lines * columns : static_cast<const Slot*>(block.line_above);
            const bool goes_below = s + 1 == ends && block.line_below;
            Slot* const here = goes_below ? static_cast<Slot*>(block.line_below) : line + n % lines * columns;
            if (s + 1 < strips) {
                const int64_t last = region.last((s + 1) * strip_rows - 1);
                std::fill(here + last + 1, here + last_after(s) + 1, P::dead());
            }
            const Front<P> front = ascend<false>(n, {above, nullptr}, {here, nullptr}, nullptr, nullptr,
                                                 seen_by[std::size_t(n)], own, progress);
            if (s + 1 == strips) value = program.value(front.here.get(region.rows - 1 - s * strip_rows));
        });
        for (int64_t n = 0; n < count; ++n) seen.add(seen_by[std::size_t(n)]);
        return value;
    }

    void backward(double seed, const Matrix& out) const { back<false>(seed, nullptr, nullptr, out); }

    // Of a whole matrix.
    void hessian(double seed, const Matrix& z, const Matrix& out) const {
        const int64_t columns = block.columns;
        Dots dots{scratch<Real>(strips * columns), scratch<Real>(strips * chunks_most * 2 * strip_rows)};
        for_strips([] { return Workspace(0, true); }, [&](int64_t s, Workspace& own, Progress& progress) {
            Real* const here = &dots.rows[std::size_t(s * columns)];
            if (s + 1 < strips) {
                const int64_t last = region.last((s + 1) * strip_rows - 1);
                std::fill(here + last + 1, here + last_after(s) + 1, Real(0));
            }
            Seen unused;
            const Above<P> above{s > 0 ? line_above(s) : nullptr, s > 0 ? here - columns : nullptr};
            ascend<true>(s, above, {nullptr, here}, &z, &dots, unused, own, progress);
        });
        back<true>(seed, &z, &dots, out);
    }

    // Every draw walks from the last cell to the first, chunk by chunk. uniforms (draws, moves), paths (draws, moves +
    // 1): cells i · stride + j.
    void sample(int64_t draws, int64_t moves, const double* uniforms, int64_t* paths) const {
        Workspace own(kept_rows<false>);
        const auto walkers = filled<Walker>(draws, {region.rows - 1, region.columns - 1, 0});
        std::fill(paths, paths + draws * (moves + 1), int64_t(-1));
        Front<P> front;
        Tangents<Real> unused;
        for (int64_t s = strips - 1; s >= 0; --s) {
            const Strip strip(region, s);
            for (int64_t c = strip.chunks - 1; c >= 0; --c) {
                front.restore(states + place(s, c));
                fill(block.cost, strip, c, Way::back, infinity<double>, own.cost.get());
                advance<true, false>(program, front, unused, strip, c, {s > 0 ? line_above(s) : nullptr, nullptr},
                                     {nullptr, nullptr}, own.cost.get(), own.z.get(), own.q.get());
                if (s == strips - 1 && c == strip.chunks - 1 && !P::alive(front.here.get(strip.rows - 1))) return;
                for (int64_t d = 0; d < draws; ++d) {
                    walk(walkers[std::size_t(d)], strip, c, own.q.get(), uniforms + d * moves, paths + d * (moves + 1));
                }
            }
        }
        for (int64_t d = 0; d < draws; ++d) {
            int64_t* const path = paths + d * (moves + 1);
            std::reverse(path, path + walkers[std::size_t(d)].taken + 1);
        }
    }

private:
    struct Walker {
        int64_t i, j, taken;
    };

    // As far as chunk c of the strip goes.
    void walk(Walker& at, const Strip& strip, int64_t c, const Tile* q, const double* uniforms, int64_t* path) const {
        while (at.i >= strip.row) {
            const int64_t r = at.i - strip.row, k = at.j - strip.first + r - c * chunk_steps;
            if (k < 0) return;
            path[at.taken] = at.i * block.cost.stride + at.j;
            if (at.i == 0 && at.j == 0) {
                at.i = -1;
                return;
            }
            const Tile* const own = q + k * kept_rows<false> * strip_rows + r;
            const double diagonal = double(own[0]), up = double(own[strip_rows]), left = double(own[2 * strip_rows]);
            const double target = uniforms[at.taken] * (diagonal + up + left);
            ++at.taken;
            if (diagonal > target) {
                --at.i, --at.j;
            } else if (diagonal + up > target) {
                --at.i;
            } else {
                --at.j;
            }
        }
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
