// The interface for the binding: lattices given by a table of moves, compiled once for each instruction set.
//
// Nodes are (i, j, state). A move (di, dj, from → to) leads from (i − di, j − dj, from) to (i, j, to). A move that
// stays in its cell leads to a higher state. With the scores of nodes s and of moves g, both of the node where they
// arrive,
//   v(node) = s(node) + max_Ω of σ(node), if a path may start here, and of v(source) + g for each move with a source
// and the value is v at the end, or max_Ω over the ends of v + ε if there are several.
//
// A slot is one of these scores: of a state, of a move, of a start in a state, of an end in a state, in this order. Its
// score is a sum of terms, which read tensors. If every move leads to a later row, a lattice is swept row by row, else
// in strips of rows, along anti-diagonals.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../omega/omega.h"

namespace bellmax {

// The number of rows in a strip.
constexpr std::int64_t lattice_strip = 64;

constexpr int most_states = 8, most_moves = 16, most_slots = 3 * most_states + most_moves, most_axes = 3;

struct Move {
    std::int64_t di, dj;
    int from, to;
};

// Where paths start or end: the corner cell, the row or column that contains it, or every cell.
enum class Place { corner, row, column, anywhere };

struct Ends {
    Place place;
    std::uint32_t states;  // a bit for each
};

// How the index along one dimension of a tensor follows from the cell (i, j): i + offset, j + offset, the label at one
// of these, or a constant.
enum class Follows { row, column, label_of_row, label_of_column, nothing };

struct TermAxis {
    Follows follows;
    std::int64_t offset, constant;
    const std::int64_t* labels;  // (batch, labels_count)
    std::int64_t labels_count;
};

// (batch or 1, *shape), of floats or doubles, or a mask of bools.
struct TermTensor {
    void* numbers;
    int dims;
    std::int64_t shape[most_axes];
    bool is_shared;  // by the batch

    std::int64_t size() const {
        std::int64_t all = 1;
        for (int d = 0; d < dims; ++d) all *= shape[d];
        return all;
    }
};

// coefficient · tensor[axes], a summand of the score of a slot; or the mask of a move, which is forbidden where the
// mask is false. Where a tensor has no such entry, a move is forbidden and another slot has the summand 0.
struct SlotTerm {
    int slot, tensor;
    bool is_mask;
    double coefficient;
    TermAxis axes[most_axes];
};

struct LatticeProblem {
    std::int64_t batch, rows, columns;
    int states, moves;
    Move table[most_moves];
    Ends starts, ends;
    const std::int64_t* lengths;  // (batch, 2)
    const double* band;           // (batch), the width of a Sakoe–Chiba band
    OmegaParameters omega;
    int threads;
    bool is_double;              // whether tensors hold doubles or floats
    double scale;                // −1 if scores are costs, and the value is a smoothed minimum; else 1
    int terms_count, score_tensors;  // masks are the tensors after the scores
    const SlotTerm* terms;
    const TermTensor* tensors;
    double* tape;  // (batch, tape_size), or null if only the value is needed
    std::int64_t tape_size;
    double* end_values;  // (batch, ends_size) for the values of all ends, in Ω's unit, or null if they are not needed

    // A block of rows, whole strips, of a single lattice whose moves are not longer than 1: its first row and column,
    // the values of the row above it and of its last row, and the masses that it exchanges with the blocks below and
    // above in the backward sweep. Each of these lines is as long as a row of the whole lattice.
    bool is_block;
    std::int64_t row, column;
    const double *line_above, *mass_below;
    double *line_below, *mass_above;

    int slots() const { return 3 * states + moves; }
    bool is_move(int slot) const { return slot >= states && slot < states + moves; }
    // The largest number of nodes of a path.
    std::int64_t longest() const { return (rows + columns - 1) * states; }
    bool goes_by_rows() const {
        return !is_block && std::all_of(table, table + moves, [](const Move& move) { return move.di > 0; });
    }
};

struct LatticeKernels {
    // The size of a tape, from the sizes, the moves and the ends.
    std::int64_t (*tape_size)(const LatticeProblem&);
    // True if every score of a cell of the region was below +∞ and not NaN.
    bool (*forward)(const LatticeProblem&, double* value);
    // The same for a block, with nodes in float or in double: the value, if the last cell is in the block, and the
    // greatest finite magnitude of its scores.
    bool (*forward_block)(const LatticeProblem&, bool in_float, double* value, double* greatest);
    // True if products in float can hold the values of so many scores of that magnitude.
    bool (*fits_products)(double greatest, std::int64_t scores);
    // `seed` (batch); `z` and `out` are tensors of the shapes of the scores.
    void (*backward)(const LatticeProblem&, const double* seed, const TermTensor* out);
    void (*hessian)(const LatticeProblem&, const double* seed, const TermTensor* z, const TermTensor* out);
    // uniforms (batch, draws, longest + 1); paths (batch, draws, longest, 2): the nodes (i · columns + j) · states +
    // state from the first to the last, each with the move into it, −1 for the first; then −1.
    void (*sample)(const LatticeProblem&, std::int64_t draws, const double* uniforms, std::int64_t* paths);
    // `out` has the shape of the first score: the score of the best path that uses each entry. As for forward.
    bool (*max_marginals)(const LatticeProblem&, const TermTensor& out);
    // The number of ends, rounded up to vectors.
    std::int64_t (*ends_size)(const LatticeProblem&);
};

BELLMAX_KERNELS(LatticeKernels lattice_kernels())

}  // namespace bellmax
