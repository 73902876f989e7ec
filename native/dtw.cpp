// The sweeps of dynamic time warping.
//
// A strip of 64 rows is swept step by step: at step t its row r is in column first + t − r, so that a step is an
// anti-diagonal, and what it needs was computed in the two steps before. The value to the left of a cell is that of the
// same row one step ago, the one above is that of the row above one step ago, and the diagonal one was above a step ago.
// Strips follow each other; threads take them in turn, each a little behind the one before (or after, going back).
#include "dtw.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "cells.h"
#include "parallel.h"
#include "base/math.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

using std::int64_t;

constexpr int64_t R = dtw_strip;
constexpr int64_t chunk_size = R;

// Tiny probabilities would be denormal, which is slow, and are nothing.
class FlushDenormals {
#if defined(__SSE2__)
    unsigned before = _mm_getcsr();

public:
    FlushDenormals() { _mm_setcsr(before | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before); }
#else
public:
    FlushDenormals() {}
    ~FlushDenormals() {}
#endif
};

// The unmasked cells of a pair.
struct Region {
    int64_t rows, columns;
    double reach;  // |i (columns − 1) − j (rows − 1)| ≤ reach

    Region(const int64_t* lengths, double band) : rows(lengths[0]), columns(lengths[1]) {
        reach = std::max(band, 0.5) * double(std::max(rows, columns) - 1);
        if (rows == 1 || columns == 1 || std::isinf(band)) reach = infinity<double>;
    }

    bool has_band() const { return reach < infinity<double>; }
    bool inside(int64_t i, int64_t j) const {
        return std::abs(double(i) * double(columns - 1) - double(j) * double(rows - 1)) <= reach;
    }
    // The first and the last column of a row: a division, then the test itself where rounding might matter.
    int64_t first(int64_t i) const {
        if (!has_band()) return 0;
        int64_t j = std::max<int64_t>(0, int64_t((double(i) * double(columns - 1) - reach) / double(rows - 1)) - 1);
        while (!inside(i, j)) ++j;
        return j;
    }
    int64_t last(int64_t i) const {
        if (!has_band()) return columns - 1;
        const double bound = (double(i) * double(columns - 1) + reach) / double(rows - 1) + 1;
        int64_t j = bound < double(columns - 1) ? int64_t(bound) : columns - 1;
        while (!inside(i, j)) --j;
        return j;
    }
    int64_t strips() const { return (rows + R - 1) / R; }
};

struct Strip {
    int64_t row, rows, first, last, steps, chunks;  // row, rows: in the matrix; first, last: columns
    int64_t from[R], to[R];                         // the columns of each row
    int64_t enter[R / 4], leave[R / 4];             // of 4 rows: the anti-diagonals that are wholly inside
    int64_t wakes[R / 8], sleeps[R / 8];            // of 8 rows: the first and the last step that matter

    Strip(const Region& region, int64_t s) {
        row = s * R;
        rows = std::min(R, region.rows - row);
        for (int64_t r = 0; r < R; ++r) {
            from[r] = r < rows ? region.first(row + r) : region.columns;
            to[r] = r < rows ? region.last(row + r) : -1;
        }
        first = from[0];
        last = to[rows - 1];
        steps = last - first + rows;
        chunks = (steps + chunk_size - 1) / chunk_size;
        for (int64_t g = 0; g < R / 4; ++g) {
            enter[g] = 0;
            leave[g] = std::numeric_limits<int64_t>::max();
            for (int64_t r = 4 * g; r < 4 * g + 4; ++r) {
                enter[g] = std::max(enter[g], r < rows ? from[r] + r : std::numeric_limits<int64_t>::max());
                leave[g] = std::min(leave[g], to[r] + r);
            }
        }
        // A row's first cell looks back to the step before, and what it sends back is gone after another one; the row below
        // must see that nothing is behind its last cell.
        for (int64_t g = 0; 8 * g < rows; ++g) {
            wakes[g] = from[8 * g] + 8 * g - first - 2;
            const int64_t r = std::min(8 * g + 7, rows - 1);
            sleeps[g] = to[r] + r - first + 1;
        }
    }

    // The rows that matter at step t, whole groups of 8: r from low to below high.
    struct Rows {
        int64_t low = 0, high = 0;
    };
    Rows awake(int64_t t) const {
        Rows awake;
        while (sleeps[awake.low / 8] < t) awake.low += 8;
        awake.high = awake.low + 8;
        while (awake.high < rows && wakes[awake.high / 8] <= t) awake.high += 8;
        return awake;
    }
    // Whether 8 rows from r matter at one of the 8 steps from t.
    bool is_awake(int64_t r, int64_t t) const { return t + 7 >= wakes[r / 8] && t <= sleeps[r / 8]; }

    int64_t steps_in(int64_t c) const { return std::min(chunk_size, steps - c * chunk_size); }

    // Whether the square of V rows from r and V anti-diagonals from d is wholly inside.
    template <int V>
    bool covers(int64_t r, int64_t d) const {
        for (int64_t g = r / 4; g < (r + V) / 4; ++g) {
            if (d < enter[g] || d + V - 1 > leave[g]) return false;
        }
        return true;
    }
};

// The results of checking a cost matrix.
template <class S>
struct Seen {
    Vec<S> greatest{};  // of the finite magnitudes
    typename Shape<Vec<S>>::Int bad{};

    void look(Vec<S> v) {
        bad |= ~(v > Vec<S>{} - infinity<S>);
        const Vec<S> size = v < Vec<S>{} ? -v : v;
        greatest = greater<S>(size < Vec<S>{} + infinity<S> ? size : Vec<S>{}, greatest);
    }
};

// A chunk of a matrix as the steps see it: tile[k * R + r] is row r at step k. Masked cells are `outside`.
template <class S, class Look>
void fill(const S* matrix, int64_t stride, const Strip& strip, int64_t c, S outside, S* tile, Look look) {
    constexpr int V = lanes_of<S>;
    const int64_t count = strip.steps_in(c), begin = strip.first + c * chunk_size;
    const int64_t rows = (strip.rows + 7) / 8 * 8;
    constexpr int64_t ahead = 128 / sizeof(S);  // of each row: too many for the processor to foresee
    for (int64_t k = 0; k < count; k += V) {
        for (int64_t r = 0; r < rows; r += V) {
            if (!strip.is_awake(r, c * chunk_size + k)) continue;
            const S* corner = matrix + (strip.row + r) * stride + begin + k - r;
            Vec<S> v[V];
            if (strip.template covers<V>(r, begin + k)) {
                for (int l = 0; l < V; ++l) {
                    v[l] = load<S>(corner + l * (stride - 1));
                    __builtin_prefetch(corner + l * (stride - 1) + ahead);
                }
            } else {
                for (int l = 0; l < V; ++l) {
                    const int64_t column = begin + k - (r + l);
                    v[l] = load_between<S>(corner + l * (stride - 1), strip.from[r + l] - column,
                                           strip.to[r + l] - column, outside);
                }
            }
            for (int l = 0; l < V; ++l) look(v[l]);
            transpose(v);
            for (int l = 0; l < V; ++l) store<S>(tile + (k + l) * R + r, v[l]);
        }
    }
}

// And back.
template <class S>
void drain(S* matrix, int64_t stride, const Strip& strip, int64_t c, const S* tile) {
    constexpr int V = lanes_of<S>;
    const int64_t count = strip.steps_in(c), begin = strip.first + c * chunk_size;
    for (int64_t k = 0; k < count; k += V) {
        for (int64_t r = 0; r < strip.rows; r += V) {
            if (!strip.is_awake(r, c * chunk_size + k)) continue;
            S* corner = matrix + (strip.row + r) * stride + begin + k - r;
            Vec<S> v[V];
            for (int l = 0; l < V; ++l) v[l] = load<S>(tile + (k + l) * R + r);
            transpose(v);
            if (strip.template covers<V>(r, begin + k)) {
                for (int l = 0; l < V; ++l) store<S>(corner + l * (stride - 1), v[l]);
            } else {
                for (int l = 0; l < V; ++l) {
                    const int64_t column = begin + k - (r + l);
                    store_between<S>(corner + l * (stride - 1), v[l], strip.from[r + l] - column,
                                     strip.to[r + l] - column);
                }
            }
        }
    }
}

// Zero for what no chunk of the strip writes.
template <class S>
void clear_outside(S* matrix, int64_t stride, int64_t first, int64_t end, const Strip& strip) {
    for (int64_t r = 0; r < strip.rows; ++r) {
        S* line = matrix + (strip.row + r) * stride;
        std::fill(line + first, line + strip.from[r], S(0));
        std::fill(line + strip.to[r] + 1, line + end, S(0));
    }
}

// The buffers of one thread.
template <class P, class S>
struct Workspace {
    std::unique_ptr<S[]> cost = scratch<S>(R * chunk_size), path = scratch<S>(R * chunk_size);
    std::unique_ptr<S[]> q = scratch<S>(3 * R * chunk_size);
    // Of the tangent sweeps.
    std::unique_ptr<S[]> z, q_dot;

    explicit Workspace(bool tangents) {
        if (!tangents) return;
        z = scratch<S>(R * chunk_size);
        q_dot = scratch<S>(3 * R * chunk_size);
    }
};

// The last value of every row of a strip, and the one that was above it.
template <class P>
struct Front {
    typename P::Column here, above;

    void save(typename P::Slot* to) const {
        here.save(to);
        above.save(to + R);
    }
    void restore(const typename P::Slot* from) {
        here.restore(from);
        above.restore(from + R);
    }
};

// The same for the tangents of the values.
template <class Real>
struct Tangents {
    alignas(32) Real here[R + 16] = {}, above[R + 8] = {};  // `here` begins at 8, after what is above the strip

    void save(Real* to) const {
        std::copy(here + 8, here + 8 + R, to);
        std::copy(above, above + R, to + R);
    }
    void restore(const Real* from) {
        std::copy(from, from + R, here + 8);
        std::copy(from + R, from + 2 * R, above);
    }
};

// How far the strips are: each waits for its neighbour.
class Progress {
    std::unique_ptr<std::atomic<int64_t>[]> done;

public:
    explicit Progress(int64_t strips) : done(new std::atomic<int64_t>[std::size_t(strips)]) {
        for (int64_t s = 0; s < strips; ++s) done[std::size_t(s)].store(0, std::memory_order_relaxed);
    }
    void report(int64_t s, int64_t chunks) { done[std::size_t(s)].store(chunks, std::memory_order_release); }
    void wait(int64_t s, int64_t chunks) const {
        for (int spins = 0; done[std::size_t(s)].load(std::memory_order_acquire) < chunks; ++spins) {
            if (spins > 1000) std::this_thread::yield();
        }
    }
};

// body(n) for all n < count, each thread taking the next one: nobody waits for what no thread has taken.
// make() is what a thread needs for them.
template <class Make, class Body>
void take_turns(int64_t count, int threads, Make make, Body body) {
    std::atomic<int64_t> next{0};
    parallel_for(std::min<int64_t>(threads, count), threads, [&](int64_t) {
        auto own = make();
        const FlushDenormals flush;
        for (int64_t n = next++; n < count; n = next++) body(n, own);
    });
}

// One pair, whose strips `threads` threads share.
template <class P, class S>
class Pair {
    using Real = typename P::Real;
    using Slot = typename P::Slot;
    static constexpr int W = lanes_of<Real>;

    const P& program;
    const Region region;
    const DtwProblem<S>& problem;
    const int64_t stride, columns;         // of the matrix; of a line of it, which begins at column 0 of the pair
    const int64_t strips, begins, ends;    // of the pair; those in the matrix
    const S* cost;
    Slot* const rows;    // the last row of every strip
    Slot* const states;  // (strips, chunks_most, 2 R)
    const int64_t chunks_most;
    const int threads;

    Slot* state(int64_t s, int64_t c) const { return states + ((s - begins) * chunks_most + c) * 2 * R; }

    // Cell (0, 0) of the pair, for a matrix that may begin elsewhere.
    template <class T>
    T* origin(T* matrix) const {
        return matrix - (problem.row * stride + problem.column);
    }

    // The values of the row above strip s, by the tape.
    const Slot* line_above(int64_t s) const {
        return s > begins ? rows + (s - 1 - begins) * columns : reinterpret_cast<const Slot*>(problem.line_above);
    }

    // The first column of the strip before s.
    int64_t first_before(int64_t s) const { return region.first((s - 1) * R); }

    // The last column of the strip after s.
    int64_t last_after(int64_t s) const { return region.last(std::min((s + 2) * R, region.rows) - 1); }

    // The front before the first step of strip s.
    void begin(Front<P>& front, const Strip& strip, int64_t s, const Slot* above) const {
        front.here.clear();
        front.above.clear();
        if (s == 0) {
            front.above.set(0, P::start());
        } else if (strip.first > first_before(s)) {
            front.above.set(0, above[strip.first - 1]);
        }
    }

    // One chunk: `each(k)` after step k. Q is whether to keep probabilities.
    template <bool Q, class Each>
    void advance(Front<P>& front, const Strip& strip, int64_t s, int64_t c, const Slot* above, Workspace<P, S>& own,
                 Each each) const {
        const int64_t count = strip.steps_in(c);
        for (int64_t k = 0; k < count; ++k) {
            const int64_t column = strip.first + c * chunk_size + k;
            front.here.set(-1, s > 0 && column <= strip.last ? above[column] : P::dead());
            const auto awake = strip.awake(c * chunk_size + k);
            for (int64_t r = awake.high - W; r >= awake.low; r -= W) {
                const auto left = front.here.load(r), up = front.here.load(r - 1), diagonal = front.above.load(r);
                front.above.store(r, up);
                Vec<Real> q[3];
                front.here.store(r, program.template combine<Q>(diagonal, up, left,
                                                                load_as<Real>(&own.cost[k * R + r]), q));
                if constexpr (Q) {
                    for (int n = 0; n < 3; ++n) store_as<S, Real>(&own.q[(3 * k + n) * R + r], q[n]);
                }
            }
            each(k);
        }
    }

    // The same, with tangents.
    template <bool Keep, class Each>
    void advance_tangents(Front<P>& front, Tangents<Real>& dots, const Strip& strip, int64_t s, int64_t c,
                          const Slot* above, const Real* dots_above, Workspace<P, S>& own, Each each) const {
        const int64_t count = strip.steps_in(c);
        for (int64_t k = 0; k < count; ++k) {
            const int64_t column = strip.first + c * chunk_size + k;
            const bool below_another = s > 0 && column <= strip.last;
            front.here.set(-1, below_another ? above[column] : P::dead());
            dots.here[7] = below_another ? dots_above[column] : Real(0);
            const auto awake = strip.awake(c * chunk_size + k);
            for (int64_t r = awake.high - W; r >= awake.low; r -= W) {
                const auto left = front.here.load(r), up = front.here.load(r - 1), diagonal = front.above.load(r);
                const Vec<Real> y[3] = {load<Real>(dots.above + r), load<Real>(dots.here + 7 + r),
                                        load<Real>(dots.here + 8 + r)};
                front.above.store(r, up);
                store<Real>(dots.above + r, y[1]);
                Vec<Real> q[3], q_dot[3];
                front.here.store(r, program.template combine<true>(diagonal, up, left,
                                                                   load_as<Real>(&own.cost[k * R + r]), q));
                const Vec<Real> mean = program.tilt(q, y, q_dot);
                store<Real>(dots.here + 8 + r, load_as<Real>(&own.z[k * R + r]) + mean);
                if constexpr (Keep) {
                    for (int n = 0; n < 3; ++n) {
                        store_as<S, Real>(&own.q[(3 * k + n) * R + r], q[n]);
                        store_as<S, Real>(&own.q_dot[(3 * k + n) * R + r], q_dot[n]);
                    }
                }
            }
            each(k);
        }
    }

    // How many chunks of the strip before must be done for chunk c of strip s.
    static int64_t chunks_before(const Strip& before, const Strip& strip, int64_t c) {
        const int64_t column = std::min(strip.first + (c + 1) * chunk_size - 1, before.last);
        return std::min((column - before.first + before.rows - 1) / chunk_size + 1, before.chunks);
    }

    // How many chunks of the strip after must be done, from its end, for chunk c of strip s.
    static int64_t chunks_after(const Strip& after, const Strip& strip, int64_t c) {
        const int64_t column = strip.first + c * chunk_size - (strip.rows - 1);
        if (column >= after.first + after.steps) return 0;
        return column < after.first ? after.chunks : after.chunks - (column - after.first) / chunk_size;
    }

    // The mass that a strip holds, going back. Of a row r, at a step: what its left neighbour will get, what the rows
    // above will get by the moves down and along the diagonal, and what of the latter has to wait a step.
    struct Mass {
        alignas(32) S left[R + 8] = {}, above[R + 16] = {}, waiting[R + 8] = {};
    };

    // One group of rows at one step back: what arrives there, and how it is spread over the moves into them.
    static Vec<S> spread(Mass& mass, int64_t r, const Vec<S>* q) {
        const Vec<S> here = load<S>(mass.left + r) + load<S>(mass.above + r + 1);
        settle(mass, r, q[0] * here, q[1] * here, q[2] * here);
        return here;
    }

    static void settle(Mass& mass, int64_t r, Vec<S> diagonal, Vec<S> up, Vec<S> left) {
        store<S>(mass.left + r, left);
        store<S>(mass.above + r, up + load<S>(mass.waiting + r));
        store<S>(mass.waiting + r, diagonal);
    }

    static constexpr int64_t ring(int threads) { return threads + 1; }

public:
    Pair(const P& program, const DtwProblem<S>& problem, int64_t b, int threads, Slot* tape)
        : program(program),
          region(problem.lengths + 2 * b, problem.band[b]),
          problem(problem),
          stride(problem.columns),
          columns(problem.column + problem.columns),
          strips(region.strips()),
          begins(problem.row / R),
          ends(std::min(strips, (problem.row + problem.rows + R - 1) / R)),
          cost(origin(problem.cost + b * problem.rows * problem.columns)),
          rows(tape ? tape + 1 : nullptr),
          states(tape ? tape + 1 + (problem.rows + R - 1) / R * columns : nullptr),
          chunks_most((columns + R - 1 + chunk_size - 1) / chunk_size),
          threads(int(std::min<int64_t>(threads, ends - begins))) {}

    // The value, if the last cell is here; what was seen of the costs.
    double forward(Seen<S>& seen) const {
        const int64_t count = ends - begins, lines = rows ? count : ring(threads);
        Progress progress(count);
        std::unique_ptr<Slot[]> own_rows;
        if (!rows) own_rows = scratch<Slot>(lines * columns);
        Slot* const line = rows ? rows : own_rows.get();
        double value = infinity<double>;
        std::unique_ptr<Seen<S>[]> seen_by(new Seen<S>[std::size_t(count)]);
        take_turns(count, threads, [] { return Workspace<P, S>(false); }, [&](int64_t n, Workspace<P, S>& own) {
            const int64_t s = begins + n;
            const Strip strip(region, s), before(region, std::max<int64_t>(s - 1, 0));
            const Slot* const above = n > 0 ? line + (n - 1) % lines * columns : line_above(s);
            const bool is_last = s + 1 == ends && problem.line_below;
            Slot* const here = is_last ? reinterpret_cast<Slot*>(problem.line_below) : line + n % lines * columns;
            if (s + 1 < ends || is_last) {
                std::fill(here + strip.last + 1, here + (s + 1 < strips ? last_after(s) : strip.last) + 1, P::dead());
            }
            Front<P> front;
            Seen<S> found;
            for (int64_t c = 0; c < strip.chunks; ++c) {
                if (n > 0) progress.wait(n - 1, chunks_before(before, strip, c));
                if (c == 0) begin(front, strip, s, above);
                if (states) front.save(state(s, c));
                fill(cost, stride, strip, c, infinity<S>, own.cost.get(), [&](Vec<S> v) { found.look(v); });
                const int64_t behind = strip.first + c * chunk_size - (strip.rows - 1);
                advance<false>(front, strip, s, c, above, own, [&](int64_t k) {
                    if (behind + k >= strip.first) here[behind + k] = front.here.get(strip.rows - 1);
                });
                progress.report(n, c + 1);
            }
            seen_by[std::size_t(n)] = found;
            if (s == strips - 1) value = P::value(front.here.get(strip.rows - 1));
        });
        for (int64_t n = 0; n < count; ++n) {
            seen.bad |= seen_by[std::size_t(n)].bad;
            seen.greatest = greater<S>(seen_by[std::size_t(n)].greatest, seen.greatest);
        }
        return value;
    }

    void backward(S seed, S* gradient) const {
        const int64_t lines = ring(threads);
        Progress progress(ends - begins);
        const auto line = scratch<S>(lines * columns);
        S* const path = origin(gradient);
        take_turns(ends - begins, threads, [] { return Workspace<P, S>(false); }, [&](int64_t n, Workspace<P, S>& own) {
            const int64_t s = ends - 1 - n;
            const Strip strip(region, s), after(region, std::min(s + 1, strips - 1));
            const S* const below =
                n > 0 ? &line[(s + 1) % lines * columns] : reinterpret_cast<const S*>(problem.mass_below);
            S* const above =
                s > begins || s == 0 ? &line[s % lines * columns] : reinterpret_cast<S*>(problem.mass_above);
            if (s > 0) std::fill(above + first_before(s), above + strip.first, S(0));
            Mass mass;
            Front<P> front;
            for (int64_t c = strip.chunks - 1; c >= 0; --c) {
                front.restore(state(s, c));
                fill(cost, stride, strip, c, infinity<S>, own.cost.get(), [](Vec<S>) {});
                advance<true>(front, strip, s, c, line_above(s), own, [](int64_t) {});
                if (n > 0) progress.wait(n - 1, chunks_after(after, strip, c));
                if (s + 1 == strips && c == strip.chunks - 1 && P::alive(front.here.get(strip.rows - 1))) {
                    mass.left[strip.rows - 1] = seed;
                }
                for (int64_t k = strip.steps_in(c) - 1; k >= 0; --k) {
                    const int64_t column = strip.first + c * chunk_size + k, behind = column - (strip.rows - 1);
                    mass.above[strip.rows] = s + 1 < strips && behind >= strip.first ? below[behind] : S(0);
                    const auto awake = strip.awake(c * chunk_size + k);
                    for (int64_t r = awake.low; r < awake.high; r += lanes_of<S>) {
                        Vec<S> q[3];
                        for (int m = 0; m < 3; ++m) q[m] = load<S>(&own.q[(3 * k + m) * R + r]);
                        store<S>(&own.path[k * R + r], spread(mass, r, q));
                    }
                    if (s > 0 && column <= strip.last) above[column] = mass.above[0];
                }
                drain(path, stride, strip, c, own.path.get());
                if (c == 0 && s > 0 && strip.first > 0) above[strip.first - 1] = mass.waiting[0];
                progress.report(n, strip.chunks - c);
            }
            clear_outside(path, stride, problem.column, columns, strip);
        });
    }

    void hessian(S seed, const S* z, S* product) const {
        // Of a whole matrix.
        Progress ascending(strips), descending(strips);
        const auto dot_rows = scratch<Real>(strips * columns);
        const auto dot_states = scratch<Real>(strips * chunks_most * 2 * R);
        const auto dot_state = [&](int64_t s, int64_t c) { return &dot_states[(s * chunks_most + c) * 2 * R]; };
        const auto make = [] { return Workspace<P, S>(true); };
        const auto fetch = [&](const Strip& strip, int64_t c, Workspace<P, S>& own) {
            fill(cost, columns, strip, c, infinity<S>, own.cost.get(), [](Vec<S>) {});
            fill(z, columns, strip, c, S(0), own.z.get(), [](Vec<S>) {});
        };
        take_turns(strips, threads, make, [&](int64_t s, Workspace<P, S>& own) {
            const Strip strip(region, s), before(region, std::max<int64_t>(s - 1, 0));
            const Real* const dots_above = dot_rows.get() + (s - 1) * columns;
            Real* const dots_here = dot_rows.get() + s * columns;
            if (s + 1 < strips) std::fill(dots_here + strip.last + 1, dots_here + last_after(s) + 1, Real(0));
            Front<P> front;
            Tangents<Real> dots;
            for (int64_t c = 0; c < strip.chunks; ++c) {
                if (s > 0) ascending.wait(s - 1, chunks_before(before, strip, c));
                if (c == 0) {
                    begin(front, strip, s, line_above(s));
                    if (s > 0 && strip.first > before.first) dots.above[0] = dots_above[strip.first - 1];
                }
                dots.save(dot_state(s, c));
                fetch(strip, c, own);
                const int64_t behind = strip.first + c * chunk_size - (strip.rows - 1);
                advance_tangents<false>(front, dots, strip, s, c, line_above(s), dots_above, own, [&](int64_t k) {
                    if (behind + k >= strip.first) dots_here[behind + k] = dots.here[8 + strip.rows - 1];
                });
                ascending.report(s, c + 1);
            }
        });
        const int64_t lines = ring(threads);
        const auto line = scratch<S>(2 * lines * columns);
        take_turns(strips, threads, make, [&](int64_t turn, Workspace<P, S>& own) {
            const int64_t s = strips - 1 - turn;
            const Strip strip(region, s), after(region, std::min(s + 1, strips - 1));
            const S* const mass_below = &line[(s + 1) % lines * 2 * columns];
            S* const mass_above = &line[s % lines * 2 * columns];
            if (s > 0) {
                for (S* to : {mass_above, mass_above + columns}) {
                    std::fill(to + first_before(s), to + strip.first, S(0));
                }
            }
            Mass mass, mass_dot;
            Front<P> front;
            Tangents<Real> dots;
            for (int64_t c = strip.chunks - 1; c >= 0; --c) {
                front.restore(state(s, c));
                dots.restore(dot_state(s, c));
                fetch(strip, c, own);
                advance_tangents<true>(front, dots, strip, s, c, line_above(s), dot_rows.get() + (s - 1) * columns, own, [](int64_t) {});
                if (s + 1 < strips) {
                    descending.wait(s + 1, chunks_after(after, strip, c));
                } else if (c == strip.chunks - 1 && P::alive(front.here.get(strip.rows - 1))) {
                    mass.left[strip.rows - 1] = seed;
                }
                for (int64_t k = strip.steps_in(c) - 1; k >= 0; --k) {
                    const int64_t column = strip.first + c * chunk_size + k, behind = column - (strip.rows - 1);
                    const bool above_another = s + 1 < strips && behind >= strip.first;
                    mass.above[strip.rows] = above_another ? mass_below[behind] : S(0);
                    mass_dot.above[strip.rows] = above_another ? mass_below[columns + behind] : S(0);
                    const auto awake = strip.awake(c * chunk_size + k);
                    for (int64_t r = awake.low; r < awake.high; r += lanes_of<S>) {
                        Vec<S> q[3], d[3];
                        for (int n = 0; n < 3; ++n) q[n] = load<S>(&own.q[(3 * k + n) * R + r]);
                        const Vec<S> here = spread(mass, r, q);
                        const Vec<S> dot = load<S>(mass_dot.left + r) + load<S>(mass_dot.above + r + 1);
                        for (int n = 0; n < 3; ++n) {
                            d[n] = load<S>(&own.q_dot[(3 * k + n) * R + r]) * here + q[n] * dot;
                        }
                        settle(mass_dot, r, d[0], d[1], d[2]);
                        store<S>(&own.path[k * R + r], dot);
                    }
                    if (s > 0 && column <= strip.last) {
                        mass_above[column] = mass.above[0];
                        mass_above[columns + column] = mass_dot.above[0];
                    }
                }
                drain(product, columns, strip, c, own.path.get());
                if (c == 0 && s > 0 && strip.first > 0) {
                    mass_above[strip.first - 1] = mass.waiting[0];
                    mass_above[columns + strip.first - 1] = mass_dot.waiting[0];
                }
                descending.report(s, strip.chunks - c);
            }
            clear_outside(product, stride, 0, columns, strip);
        });
    }

    // Every draw walks from the last cell to the first, chunk by chunk.
    void sample(int64_t draws, int64_t moves, const double* uniforms, int64_t* paths) const {
        Workspace<P, S> own(false);
        const FlushDenormals flush;
        struct Walker {
            int64_t i, j, taken;
        };
        std::unique_ptr<Walker[]> walkers(new Walker[std::size_t(draws)]);
        for (int64_t d = 0; d < draws; ++d) walkers[std::size_t(d)] = {region.rows - 1, region.columns - 1, 0};
        std::fill(paths, paths + draws * (moves + 1), int64_t(-1));
        Front<P> front;
        for (int64_t s = strips - 1; s >= 0; --s) {
            const Strip strip(region, s);
            for (int64_t c = strip.chunks - 1; c >= 0; --c) {
                front.restore(state(s, c));
                fill(cost, columns, strip, c, infinity<S>, own.cost.get(), [](Vec<S>) {});
                advance<true>(front, strip, s, c, line_above(s), own, [](int64_t) {});
                if (s == strips - 1 && c == strip.chunks - 1 && !P::alive(front.here.get(strip.rows - 1))) return;
                for (int64_t d = 0; d < draws; ++d) {
                    Walker& at = walkers[std::size_t(d)];
                    while (at.i >= strip.row) {
                        const int64_t r = at.i - strip.row, k = at.j - strip.first + r - c * chunk_size;
                        if (k < 0) break;
                        paths[d * (moves + 1) + at.taken] = at.i * columns + at.j;
                        if (at.i == 0 && at.j == 0) {
                            at.i = -1;
                            break;
                        }
                        const double q[3] = {double(own.q[(3 * k) * R + r]), double(own.q[(3 * k + 1) * R + r]),
                                             double(own.q[(3 * k + 2) * R + r])};
                        const double target = uniforms[d * moves + at.taken] * (q[0] + q[1] + q[2]);
                        ++at.taken;
                        if (q[0] > target) {
                            --at.i, --at.j;
                        } else if (q[0] + q[1] > target) {
                            --at.i;
                        } else {
                            --at.j;
                        }
                    }
                }
            }
        }
        for (int64_t d = 0; d < draws; ++d) {
            int64_t* path = paths + d * (moves + 1);
            std::reverse(path, path + walkers[std::size_t(d)].taken + 1);
        }
    }
};

template <class S>
double* tape_of(const DtwProblem<S>& p, int64_t b) {
    return p.tape ? p.tape + b * dtw_tape_size(p.rows, p.column + p.columns) : nullptr;
}

// Calls action(program, tape) with the right engine for pair b: products of exponentials for negentropy in float, where
// no number is too large for them, else values in double.
template <class S, class Action>
void with_values(const DtwProblem<S>& p, int64_t b, Action action) {
    with_omega<double>(p.omega, [&](auto omega) { action(Values<decltype(omega)>(omega), tape_of(p, b)); });
}

template <class S, class Action>
void with_engine(const DtwProblem<S>& p, int64_t b, Action action) {
    if constexpr (std::is_same_v<S, float>) {
        double* tape = tape_of(p, b);
        if (tape[0] == 1) return action(Products(), reinterpret_cast<Products::Slot*>(tape));
    }
    with_values(p, b, action);
}

// body(b, threads) for every pair: a thread for each pair if there are enough, else all threads for one after the other.
template <class S, class Body>
void for_pairs(const DtwProblem<S>& p, Body body) {
    if (p.batch >= p.threads) {
        take_turns(p.batch, p.threads, [] { return 0; }, [&](int64_t b, int) { body(b, 1); });
    } else {
        for (int64_t b = 0; b < p.batch; ++b) body(b, p.threads);
    }
}

template <class S>
S greatest_of(const Seen<S>& seen) {
    S greatest = 0;
    for (int l = 0; l < lanes_of<S>; ++l) greatest = std::max(greatest, seen.greatest[l]);
    return greatest;
}

template <class S>
bool forward(const DtwProblem<S>& p, S* value) {
    std::atomic<bool> sound{true};
    for_pairs(p, [&](int64_t b, int threads) {
        Seen<S> seen;
        const auto run = [&](const auto& program, auto* tape) {
            using P = std::decay_t<decltype(program)>;
            value[b] = S(Pair<P, S>(program, p, b, threads, tape).forward(seen));
        };
        bool done = false;
        if constexpr (std::is_same_v<S, float>) {
            if (p.omega.alpha == 1) {
                run(Products(), reinterpret_cast<Products::Slot*>(tape_of(p, b)));
                done = Products::can_take(greatest_of(seen), p.lengths[2 * b] + p.lengths[2 * b + 1]);
            }
        }
        if (!done) with_values(p, b, run);
        if (p.tape) *tape_of(p, b) = done;
        if (any(seen.bad)) sound = false;
    });
    return sound;
}

template <class S>
bool forward_block(const DtwProblem<S>& p, S* value, S* greatest) {
    Seen<S> seen;
    const auto run = [&](const auto& program, auto* tape) {
        using P = std::decay_t<decltype(program)>;
        *value = S(Pair<P, S>(program, p, 0, p.threads, tape).forward(seen));
    };
    if (p.by_products) {
        if constexpr (std::is_same_v<S, float>) run(Products(), reinterpret_cast<Products::Slot*>(tape_of(p, 0)));
    } else {
        with_values(p, 0, run);
    }
    if (p.tape) *p.tape = p.by_products;
    *greatest = greatest_of(seen);
    return !any(seen.bad);
}

template <class S>
void clear_below(const DtwProblem<S>& p, int64_t b, S* matrix) {
    const int64_t rows = std::min(p.lengths[2 * b] - p.row, p.rows);
    std::fill(matrix + rows * p.columns, matrix + p.rows * p.columns, S(0));
}

template <class S>
void backward(const DtwProblem<S>& p, const S* seed, S* gradient) {
    for_pairs(p, [&](int64_t b, int threads) {
        S* own = gradient + b * p.rows * p.columns;
        with_engine(p, b, [&](const auto& program, auto* tape) {
            using P = std::decay_t<decltype(program)>;
            Pair<P, S>(program, p, b, threads, tape).backward(seed[b], own);
        });
        clear_below(p, b, own);
    });
}

template <class S>
void hessian(const DtwProblem<S>& p, const S* seed, const S* z, S* product) {
    for_pairs(p, [&](int64_t b, int threads) {
        S* own = product + b * p.rows * p.columns;
        with_engine(p, b, [&](const auto& program, auto* tape) {
            using P = std::decay_t<decltype(program)>;
            const S* direction = z + b * p.rows * p.columns;
            Pair<P, S>(program, p, b, threads, tape).hessian(seed[b], direction, own);
        });
        clear_below(p, b, own);
    });
}

template <class S>
void sample(const DtwProblem<S>& p, int64_t draws, const double* uniforms, int64_t* paths) {
    const int64_t moves = p.rows + p.columns - 2;
    take_turns(p.batch, p.threads, [] { return 0; }, [&](int64_t b, int) {
        with_engine(p, b, [&](const auto& program, auto* tape) {
            using P = std::decay_t<decltype(program)>;
            Pair<P, S>(program, p, b, 1, tape)
                .sample(draws, moves, uniforms + b * draws * moves, paths + b * draws * (moves + 1));
        });
    });
}

}  // namespace

template <class S>
DtwKernels<S> dtw_kernels() {
    return {forward<S>, forward_block<S>, backward<S>, hessian<S>, sample<S>};
}
template DtwKernels<float> dtw_kernels<float>();
template DtwKernels<double> dtw_kernels<double>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
