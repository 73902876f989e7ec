// Dynamic time warping: which cells a pair is swept with, and the pairs of a batch.
#include "dtw.h"

#include <atomic>

#include "dtw_pair.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

using std::int64_t;
using lattice::Block;
using lattice::Matrix;
using lattice::Pair;
using lattice::Parts;
using lattice::Products;
using lattice::Seen;
using lattice::Values;

static_assert(dtw_strip == lattice::strip_rows && dtw_strip == lattice::chunk_steps);

template <class S>
Matrix matrix_of(const DtwProblem<S>& p, const S* numbers, int64_t b) {
    return {const_cast<S*>(numbers) + b * p.rows * p.columns, sizeof(S) == sizeof(double), p.columns, p.row, p.column};
}

template <class S>
Block block_of(const DtwProblem<S>& p, int64_t b, int threads) {
    return {lattice::Region(p.lengths + 2 * b, p.band[b]), matrix_of(p, p.cost, b), p.rows, p.column + p.columns,
            threads, p.line_above, p.mass_below, p.line_below, p.mass_above};
}

template <class S>
double* tape_of(const DtwProblem<S>& p, int64_t b) {
    return p.tape ? p.tape + b * dtw_tape_size(p.rows, p.column + p.columns) : nullptr;
}

// Calls action(cells) with values in double. Only hard cells are so quick that the precision of a tile matters.
template <class S, class Action>
void with_values(OmegaParameters parameters, Action action) {
    using Hard = omega::Hard<double>;
    if (parameters.alpha == infinity<double>) return action(Values<Hard, S>(Hard(parameters)));
    action(Values<lattice::Smooth>(lattice::Smooth(parameters)));
}

// Calls action(cells) with the cells in float for an Ω that has some; returns whether it has.
template <class S, class Action>
bool with_two_numbers(OmegaParameters parameters, Action action) {
    if (std::is_same_v<S, double> || (parameters.alpha != 1 && parameters.alpha != 2)) return false;
    if (parameters.alpha == 1) {
        action(Products(omega::Negentropy<float>(parameters)));
    } else {
        action(Parts<omega::SquaredL2<float>>(omega::SquaredL2<float>(parameters)));
    }
    return true;
}

// Calls action(pair) with the cells that the forward sweep found right.
template <class S, class Action>
void with_pair(const DtwProblem<S>& p, int64_t b, int threads, Action action) {
    double* const tape = tape_of(p, b);
    const Block block = block_of(p, b, threads);
    const auto run = [&](const auto& cells) { action(Pair<std::decay_t<decltype(cells)>>(cells, block, tape)); };
    if (tape[0] == 0 || !with_two_numbers<S>(p.omega, run)) with_values<S>(p.omega, run);
}

// body(b, threads) for every pair: a thread for each pair if there are enough, else all threads for one after the
// other.
template <class S, class Body>
void for_pairs(const DtwProblem<S>& p, Body body) {
    if (p.batch >= p.threads) {
        take_turns(p.batch, p.threads, [] { return 0; }, [&](int64_t b, int) { body(b, 1); });
    } else {
        for (int64_t b = 0; b < p.batch; ++b) body(b, p.threads);
    }
}

template <class S>
bool forward(const DtwProblem<S>& p, S* value) {
    std::atomic<bool> sound{true};
    for_pairs(p, [&](int64_t b, int threads) {
        double* const tape = tape_of(p, b);
        const Block block = block_of(p, b, threads);
        Seen seen;
        bool done = false;
        const auto run = [&](const auto& cells) {
            using P = std::decay_t<decltype(cells)>;
            value[b] = S(Pair<P>(cells, block, tape).forward(seen));
            done = P::can_take(seen.greatest, block.region.rows + block.region.columns);
        };
        const bool has_two_numbers = with_two_numbers<S>(p.omega, run), by_two_numbers = has_two_numbers && done;
        if (!by_two_numbers) with_values<S>(p.omega, run);
        if (tape) tape[0] = by_two_numbers;
        if (seen.bad) sound = false;
    });
    return sound;
}

template <class S>
bool forward_block(const DtwProblem<S>& p, S* value, S* greatest) {
    double* const tape = tape_of(p, 0);
    const Block block = block_of(p, 0, p.threads);
    Seen seen;
    const auto run = [&](const auto& cells) {
        *value = S(Pair<std::decay_t<decltype(cells)>>(cells, block, tape).forward(seen));
    };
    if (!p.by_products || !with_two_numbers<S>(p.omega, run)) with_values<S>(p.omega, run);
    if (tape) tape[0] = p.by_products;
    *greatest = S(seen.greatest);
    return !seen.bad;
}

template <class S>
void clear(const DtwProblem<S>& p, int64_t b, const Matrix& out) {
    lattice::clear_outside<S>(out, lattice::Region(p.lengths + 2 * b, p.band[b]), p.row, p.row + p.rows);
}

template <class S>
void backward(const DtwProblem<S>& p, const S* seed, S* gradient) {
    for_pairs(p, [&](int64_t b, int threads) {
        const Matrix out = matrix_of(p, gradient, b);
        with_pair(p, b, threads, [&](const auto& pair) { pair.backward(double(seed[b]), out); });
        clear(p, b, out);
    });
}

template <class S>
void hessian(const DtwProblem<S>& p, const S* seed, const S* z, S* product) {
    for_pairs(p, [&](int64_t b, int threads) {
        const Matrix out = matrix_of(p, product, b), direction = matrix_of(p, z, b);
        with_pair(p, b, threads, [&](const auto& pair) { pair.hessian(double(seed[b]), direction, out); });
        clear(p, b, out);
    });
}

template <class S>
void sample(const DtwProblem<S>& p, int64_t draws, const double* uniforms, int64_t* paths) {
    const int64_t moves = p.rows + p.columns - 2;
    take_turns(p.batch, p.threads, [] { return 0; }, [&](int64_t b, int) {
        with_pair(p, b, 1, [&](const auto& pair) {
            pair.sample(draws, moves, uniforms + b * draws * moves, paths + b * draws * (moves + 1));
        });
    });
}

}  // namespace

template <class S>
DtwKernels<S> dtw_kernels() {
    return {forward<S>, forward_block<S>, backward<S>, hessian<S>, sample<S>, Products::can_take};
}
template DtwKernels<float> dtw_kernels<float>();
template DtwKernels<double> dtw_kernels<double>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
