// Lattices that are swept row by row: the batch of them, each on one thread, with the nodes that suit its scores.
#include "rows.h"

#include <atomic>

#include "../base/threads.h"
#include "sweeps.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

using namespace row_engine;
using table_engine::AnyOmega;
using table_engine::OnlyHard;
using table_engine::Parts;
using table_engine::Products;
using table_engine::Values;
using table_engine::WithDots;

Table table_of(const LatticeProblem& p) { return Table(p.table, p.moves, p.states, p.rows, p.columns); }

int64_t tape_size(const LatticeProblem& p) {
    return 1 + rows_kept(table_of(p), p.rows, p.columns) + EndList(p.ends, p.rows, p.columns).size();
}

// Calls action with the nodes to sweep with, as an empty pointer: in float, for scores and an Ω that have some, or in
// double. False if there are none.
template <class Action>
bool with_nodes(const RowsProblem& p, bool in_float, Action action) {
    const double alpha = p.omega.alpha;
    if (in_float && (p.is_double || (alpha != 1 && alpha != 2))) return false;
    if (in_float && alpha == 1) {
        action(static_cast<Products*>(nullptr));
    } else if (in_float) {
        action(static_cast<Parts<omega::SquaredL2<float>>*>(nullptr));
    } else if (alpha == infinity<double> && p.is_double) {
        action(static_cast<Values<OnlyHard>*>(nullptr));
    } else if (alpha == infinity<double>) {
        action(static_cast<Values<OnlyHard, float>*>(nullptr));
    } else {
        action(static_cast<Values<AnyOmega>*>(nullptr));
    }
    return true;
}

// Calls body(table, frame) for every lattice.
template <class Body>
void for_frames(const RowsProblem& p, const TermTensor* z, Body body) {
    const Table table = table_of(p);
    const int64_t size = tape_size(p);
    take_turns(
        p.batch, p.threads, [] { return 0; },
        [&](int64_t b, int) {
            body(table, Frame{p, b, Region(p.lengths + 2 * b, p.band[b]), p.tape ? p.tape + b * size : nullptr, z});
        });
}

bool forward(const RowsProblem& p, double* value) {
    std::atomic<bool> sound{true};
    for_frames(p, nullptr, [&](const Table& table, const Frame& f) {
        Seen seen;
        bool done = false;
        const auto run = [&](auto* nodes) {
            Sweeps<std::remove_pointer_t<decltype(nodes)>> sweeps(f, table, false);
            seen = {};
            value[f.b] = sweeps.forward(f.tape, seen);
            done = sweeps.can_take(seen.greatest);
        };
        const bool in_float = with_nodes(p, true, run) && done;
        if (!in_float) with_nodes(p, false, run);
        if (f.tape) f.tape[0] = in_float;
        if (seen.bad) sound = false;
    });
    return sound;
}

void backward(const RowsProblem& p, const double* seed, const TermTensor* out) {
    const Gradients gradients(p, out);
    for_frames(p, nullptr, [&](const Table& table, const Frame& f) {
        with_nodes(p, f.tape[0] == 1, [&](auto* nodes) {
            Sweeps<std::remove_pointer_t<decltype(nodes)>>(f, table, true).backward(seed[f.b], {gradients, f});
        });
    });
    gradients.finish();
}

void hessian(const RowsProblem& p, const double* seed, const TermTensor* z, const TermTensor* out) {
    const Gradients gradients(p, out);
    for_frames(p, z, [&](const Table& table, const Frame& f) {
        with_nodes(p, f.tape[0] == 1, [&](auto* nodes) {
            // But for products in double, which are compiled once.
            constexpr bool is_products = std::is_same_v<decltype(nodes), Products*>;
            Sweeps<WithDots<std::conditional_t<is_products, Products, Values<AnyOmega>>>> sweeps(f, table, true);
            Seen unused;
            sweeps.forward(true, unused);
            sweeps.backward(seed[f.b], {gradients, f});
        });
    });
    gradients.finish();
}

void sample(const RowsProblem& p, int64_t draws, const double* uniforms, int64_t* paths) {
    const int64_t longest = p.longest();
    std::fill(paths, paths + p.batch * draws * longest * 2, int64_t(-1));
    for_frames(p, nullptr, [&](const Table& table, const Frame& f) {
        const auto visit = [&](int64_t d, const Walker& at, int move) {
            int64_t* const path = paths + (f.b * draws + d) * longest * 2;
            const int64_t place = 2 * (longest - 1 - at.taken);
            path[place] = (at.i * p.columns + at.j) * p.states + at.state;
            path[place + 1] = move;
            if (move < 0) std::rotate(path, path + place, path + 2 * longest);
        };
        with_nodes(p, f.tape[0] == 1, [&](auto* nodes) {
            Sweeps<std::remove_pointer_t<decltype(nodes)>>(f, table, true)
                .sample(draws, longest + 1, uniforms + f.b * draws * (longest + 1), visit);
        });
    });
}

}  // namespace

RowsKernels rows_kernels() { return {tape_size, forward, backward, hessian, sample}; }

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
