// The interface for the binding: the sweeps of dynamic time warping, compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "../omega/omega.h"

namespace bellmax {

// The rows of a cost matrix are swept in strips of this many, and a strip in chunks of as many steps.
constexpr std::int64_t dtw_strip = 64;

template <class S>
struct DtwProblem {
    std::int64_t batch, rows, columns;  // of the cost matrices
    const std::int64_t* lengths;        // (batch, 2): the rows and columns of each pair
    const double* band;                 // (batch)
    OmegaParameters omega;
    int threads;
    const S* cost;  // (batch, rows, columns)
    double* tape;   // (batch, dtw_tape_size), or none if the value is all that is wanted

    // Of a block of rows, whole strips, of the matrix of a single pair: its first row and column, whether the values
    // are products, the values of the row above it and of its last row, and the mass that the blocks below and above
    // exchange, going back. Each is as long as the whole row.
    std::int64_t row = 0, column = 0;
    bool by_products = false;
    const double *line_above = nullptr, *mass_below = nullptr;
    double *line_below = nullptr, *mass_above = nullptr;
};

// A tape holds which cells were right for a pair, the values of the last row of every strip, and what a strip's sweep
// knows where a chunk begins: chunks are swept anew for the other sweeps.
inline std::int64_t dtw_tape_size(std::int64_t rows, std::int64_t columns) {
    const std::int64_t strips = (rows + dtw_strip - 1) / dtw_strip;
    const std::int64_t chunks = (columns + dtw_strip - 1 + dtw_strip - 1) / dtw_strip;
    return 1 + strips * (columns + chunks * 2 * dtw_strip);
}

template <class S>
struct DtwKernels {
    // Whether every unmasked cost was above −∞ and not NaN.
    bool (*forward)(const DtwProblem<S>&, S* value);
    // The same for a block: its value, if the last cell is in it, and the greatest finite magnitude of its costs.
    bool (*forward_block)(const DtwProblem<S>&, S* value, S* greatest);
    void (*backward)(const DtwProblem<S>&, const S* seed, S* gradient);
    void (*hessian)(const DtwProblem<S>&, const S* seed, const S* z, S* product);
    // Paths (batch, draws, rows + columns − 1): the cells i·columns + j from the first to the last, then −1.
    void (*sample)(const DtwProblem<S>&, std::int64_t draws, const double* uniforms, std::int64_t* paths);
    // Whether products can hold the values of so many costs of that magnitude.
    bool (*fits_products)(double greatest, std::int64_t cells);
};

namespace baseline {
template <class S>
DtwKernels<S> dtw_kernels();
}
namespace avx2 {
template <class S>
DtwKernels<S> dtw_kernels();
}

}  // namespace bellmax
