// Lattices by a table of moves: the batch of them, and where gradients land.
#include "table.h"

#include <atomic>

#include "run.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

using std::int64_t;
using table_engine::Array2;
using table_engine::By;
using table_engine::Frame;
using table_engine::Region;
using table_engine::Seen;
using table_engine::Table;

static_assert(lattice_strip == table_engine::strip_rows);

Table table_of(const LatticeProblem& p) {
    return Table(p.table, p.moves, p.states, p.row + p.rows, p.column + p.columns);
}

int64_t tape_size(const LatticeProblem& p) {
    const int64_t columns = p.column + p.columns, ends = table_engine::EndList(p.ends, p.rows, columns).size();
    return table_of(p).tape_size(p.rows, columns) + ends;
}

// The arrays of lattice b.
struct Arrays {
    Array2 own[most_scores];

    Arrays(const LatticeProblem& p, const Scores* all, int64_t b) {
        for (int n = 0; n < p.scores_count(); ++n) own[n] = Array2(all[n], p.is_double, b);
    }
};

// Calls body(b, table, frame) for every lattice: a thread for each if there are enough, else all threads for one after
// the other.
template <class Body>
void for_frames(const LatticeProblem& p, Body body) {
    const Table table = table_of(p);
    const auto run = [&](int64_t b, int threads) {
        const Arrays scores(p, p.scores, b);
        const Frame frame{Region(p.lengths + 2 * b, p.band[b]),
                          p.row,
                          p.rows,
                          p.column + p.columns,
                          p.starts,
                          p.ends,
                          p.moves,
                          p.omega,
                          p.is_double,
                          p.scale,
                          threads,
                          p.tape ? p.tape + b * p.tape_size : nullptr,
                          scores.own,
                          nullptr,
                          p.line_above,
                          p.mass_below,
                          p.line_below,
                          p.mass_above};
        body(b, table, frame);
    };
    if (p.batch >= p.threads) {
        take_turns(p.batch, p.threads, [] { return 0; }, [&](int64_t b, int) { run(b, 1); });
    } else {
        for (int64_t b = 0; b < p.batch; ++b) run(b, p.threads);
    }
}

// The value, with nodes in float or not; whether they could hold it.
bool solve(const Table& table, const Frame& frame, bool in_float, double& value, Seen& seen) {
    bool could = false;
    seen = {};
    table_engine::with_nodes(frame, in_float, [&](auto* nodes) {
        table_engine::solve<std::remove_pointer_t<decltype(nodes)>>(table, frame, value, seen, could);
    });
    if (frame.tape) frame.tape[0] = in_float;
    return could;
}

// Calls action with the nodes that the value was found with.
template <class Action>
void with_right_nodes(const Frame& frame, Action action) {
    table_engine::with_nodes(frame, frame.tape[0] == 1, action);
}

bool forward(const LatticeProblem& p, double* value) {
    std::atomic<bool> sound{true};
    for_frames(p, [&](int64_t b, const Table& table, const Frame& frame) {
        Seen seen;
        if (!solve(table, frame, true, value[b], seen)) solve(table, frame, false, value[b], seen);
        if (seen.bad) sound = false;
    });
    return sound;
}

bool forward_block(const LatticeProblem& p, bool in_float, double* value, double* greatest) {
    Seen seen;
    for_frames(p, [&](int64_t, const Table& table, const Frame& frame) {
        solve(table, frame, in_float, *value, seen);
    });
    *greatest = seen.greatest;
    return !seen.bad;
}

// Where the masses of each array land: in the array itself if every lattice has one of its own, with an entry for every
// cell; else in sums of each lattice, in which strips may have their own.
class Gradients {
    const LatticeProblem& p;
    const Scores* const out;
    Array<double> sums[most_scores];

    bool is_own(int n) const { return table_engine::kind_of(out[n]) == By::cell && (out[n].batch || p.batch == 1); }
    static int64_t height(By by, int64_t rows) {
        const bool by_row = by == By::row || by == By::cell;
        return by_row ? rows : (rows + table_engine::strip_rows - 1) / table_engine::strip_rows;
    }
    int64_t width(int n) const { return out[n].column ? out[n].window.columns : 1; }
    int64_t size(int n) const { return height(table_engine::kind_of(out[n]), out[n].window.rows) * width(n); }

    template <class S>
    void finish(int n) const {
        const int64_t rows = out[n].row ? out[n].window.rows : 1, wide = width(n), size_out = rows * wide;
        for (int64_t b = 0; b < (out[n].batch ? p.batch : 1); ++b) {
            S* const to = static_cast<S*>(out[n].numbers) + b * out[n].batch;
            const auto total = zeros<double>(size_out);
            for (int64_t own = b; own < (out[n].batch ? b + 1 : p.batch); ++own) {
                for (int64_t m = 0; m < size(n); ++m)
                    total[std::size_t(m % size_out)] += sums[n][std::size_t(own * size(n) + m)];
            }
            for (int64_t m = 0; m < size_out; ++m) to[m] = S(total[std::size_t(m)]);
        }
    }

public:
    Gradients(const LatticeProblem& p, const Scores* out) : p(p), out(out) {
        for (int n = 0; n < p.scores_count(); ++n) {
            if (out[n].numbers && !is_own(n)) sums[n] = zeros<double>(p.batch * size(n));
        }
    }
    // For lattice b. There is no mass outside its region, nor for a move that is longer than the lattice.
    Arrays arrays(int64_t b, const Region& region) const {
        Arrays arrays(p, out, b);
        for (int n = 0; n < p.scores_count(); ++n) {
            Array2& own = arrays.own[n];
            if (sums[n]) {
                own.matrix.numbers = sums[n].get() + b * size(n);
                own.matrix.is_double = true;
                own.matrix.stride = width(n);
            } else if (own.by == By::cell) {
                table_engine::clear_outside(own.matrix, n < p.states ? region : Region::nowhere());
            }
            const int m = n - p.states;
            const bool is_move = m >= 0 && m < p.moves;
            if (is_move && (p.table[m].di >= p.rows || p.table[m].dj >= p.columns)) own.by = By::none;
        }
        return arrays;
    }
    void finish() const {
        for (int n = 0; n < p.scores_count(); ++n) {
            if (!sums[n]) continue;
            if (p.is_double) {
                finish<double>(n);
            } else {
                finish<float>(n);
            }
        }
    }
};

// The gradients or, along z, their change.
void differentiate(const LatticeProblem& p, const double* seed, const Scores* z, const Scores* out) {
    const Gradients gradients(p, out);
    for_frames(p, [&](int64_t b, const Table& table, Frame frame) {
        const Arrays own = gradients.arrays(b, frame.region), direction(p, z ? z : out, b);
        frame.z = z ? direction.own : nullptr;
        with_right_nodes(frame, [&](auto* nodes) {
            using P = std::remove_pointer_t<decltype(nodes)>;
            using Smooth = std::conditional_t<std::is_same_v<P, table_engine::Maximal>, table_engine::Precise, P>;
            if (z) return table_engine::differentiate<table_engine::WithDots<Smooth>>(table, frame, seed[b], own.own);
            table_engine::differentiate<P>(table, frame, seed[b], own.own);
        });
    });
    gradients.finish();
}

void backward(const LatticeProblem& p, const double* seed, const Scores* out) { differentiate(p, seed, nullptr, out); }

void sample(const LatticeProblem& p, int64_t draws, const double* uniforms, int64_t* paths) {
    const int64_t longest = p.longest();
    std::fill(paths, paths + p.batch * draws * longest * 2, int64_t(-1));
    for_frames(p, [&](int64_t b, const Table& table, const Frame& frame) {
        const auto visit = [&](int64_t d, int64_t taken, int64_t i, int64_t j, int state, int move) {
            int64_t* const path = paths + (b * draws + d) * longest * 2;
            path[2 * (longest - 1 - taken)] = (i * p.columns + j) * p.states + state;
            path[2 * (longest - 1 - taken) + 1] = move;
            if (move < 0) std::rotate(path, path + 2 * (longest - 1 - taken), path + 2 * longest);
        };
        const double* const numbers = uniforms + b * draws * (longest + 1);
        with_right_nodes(frame, [&](auto* nodes) {
            using P = std::remove_pointer_t<decltype(nodes)>;
            table_engine::draw<P>(table, frame, draws, longest + 1, numbers, visit);
        });
    });
}

}  // namespace

LatticeKernels lattice_kernels() {
    return {tape_size, forward, forward_block, table_engine::Products::can_take, backward, differentiate, sample};
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
