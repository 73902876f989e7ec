// The interface for the binding: lattices by a table of moves, compiled once for each instruction set.
//
// Nodes are (i, j, state). A move (di, dj, from → to) leads from (i − di, j − dj, from) to (i, j, to); one that stays
// in its cell leads to a higher state. With the scores of nodes s and of moves g, both of the node where they arrive,
//   v(node) = s(node) + max_Ω of σ(node), if a path may start here, and of v(source) + g for each move with a source
// and the value is v at the end, or max_Ω over the ends of v + ε if these are several.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../omega/omega.h"

namespace bellmax {

// The rows of a lattice are swept in strips of this many.
constexpr std::int64_t lattice_strip = 64;

constexpr int most_states = 8, most_moves = 16, most_scores = 3 * most_states + most_moves;

struct Move {
    std::int64_t di, dj;
    int from, to;
};

// Where paths start or end: the corner cell, the row or column that it is in, or every cell.
enum class Place { corner, row, column, anywhere };

struct Ends {
    Place place;
    std::uint32_t states;  // a bit for each
};

// A part of the cells.
struct Window {
    std::int64_t row, column, rows, columns;
};

// An array of scores. A stride of 0 shares it: along the batch, a row or a column. One by cell has those of a window.
struct Scores {
    void* numbers;  // none: 0 everywhere, or a gradient that is not wanted
    std::int64_t batch, row, column;
    Window window;
    double missing;  // the score of a cell outside
};

struct LatticeProblem {
    std::int64_t batch, rows, columns;
    int states, moves;
    Move table[most_moves];
    Ends starts, ends;
    const std::int64_t* lengths;  // (batch, 2)
    const double* band;           // (batch), as of dynamic time warping
    OmegaParameters omega;
    int threads;
    bool is_double;        // whether arrays hold doubles or floats
    double scale;          // of the scores: −1 if they are costs, and the value is a smoothed least one
    const Scores* scores;  // of the states, of the moves, of starts by state, of ends by state
    double* tape;          // (batch, tape_size), or none if the value is all that is wanted
    std::int64_t tape_size;

    // Of a block of rows, whole strips, of a single lattice whose moves are not longer than 1: its first row and
    // column, the values of the row above it and of its last row, and the mass that the blocks below and above
    // exchange, going back. Each is as long as the whole row.
    std::int64_t row, column;
    const double *line_above, *mass_below;
    double *line_below, *mass_above;

    Window all() const { return {row, column, rows, columns}; }
    int scores_count() const { return 3 * states + moves; }
    // The nodes that a path can have.
    std::int64_t longest() const { return (rows + columns - 1) * states; }
};

struct LatticeKernels {
    // How many numbers a tape needs, from the sizes, the moves and the ends.
    std::int64_t (*tape_size)(const LatticeProblem&);
    // Whether every score of a cell of the region was below +∞ and not NaN.
    bool (*forward)(const LatticeProblem&, double* value);
    // The same of a block, whose nodes are in float or not: the value, if the last cell is in it, and the greatest
    // finite magnitude of its scores.
    bool (*forward_block)(const LatticeProblem&, bool in_float, double* value, double* greatest);
    // Whether products in float can hold the values of so many scores of that magnitude.
    bool (*fits_products)(double greatest, std::int64_t scores);
    // `seed` (batch); `out` are as many arrays as there are scores.
    void (*backward)(const LatticeProblem&, const double* seed, const Scores* out);
    void (*hessian)(const LatticeProblem&, const double* seed, const Scores* z, const Scores* out);
    // uniforms (batch, draws, longest + 1); paths (batch, draws, longest, 2): the nodes (i · columns + j) · states +
    // state from the first to the last, each with the move that leads there, −1 for the first; then −1.
    void (*sample)(const LatticeProblem&, std::int64_t draws, const double* uniforms, std::int64_t* paths);
};

namespace baseline {
LatticeKernels lattice_kernels();
}
namespace avx2 {
LatticeKernels lattice_kernels();
}

}  // namespace bellmax
