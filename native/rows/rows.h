// The interface for the binding: lattices whose moves all lead to a later row, which are swept row by row. Scores are
// read where the caller has them, and gradients written there. See table/table.h for what a lattice is.
#pragma once

#include "../table/table.h"

namespace bellmax {

// How the index along one dimension of a tensor follows from the cell (i, j): i + offset, j + offset, the label of one
// of these, or a constant.
enum class Follows { row, column, label_of_row, label_of_column, nothing };

struct TermAxis {
    Follows follows;
    std::int64_t offset, place;
    const std::int64_t* labels;  // (batch, labels_count)
    std::int64_t labels_count;
};

constexpr int most_axes = 3;

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

// coefficient · tensor[axes], as a part of the score with that number; or a mask of a move, which is −∞ where it is not
// set. Where there is no such entry, a move is −∞ and other scores are 0.
struct RowTerm {
    int score, tensor;
    bool is_mask;
    double coefficient;
    TermAxis axes[most_axes];
};

struct RowsProblem : LatticeProblem {
    int terms_count, scores_tensors;  // masks are the tensors after the scores
    const RowTerm* terms;
    const TermTensor* tensors;
};

struct RowsKernels {
    std::int64_t (*tape_size)(const LatticeProblem&);
    // As those of tables, but for the gradients and the direction, which are tensors like the scores.
    bool (*forward)(const RowsProblem&, double* value);
    void (*backward)(const RowsProblem&, const double* seed, const TermTensor* out);
    void (*hessian)(const RowsProblem&, const double* seed, const TermTensor* z, const TermTensor* out);
    void (*sample)(const RowsProblem&, std::int64_t draws, const double* uniforms, std::int64_t* paths);
};

namespace baseline {
RowsKernels rows_kernels();
}
namespace avx2 {
RowsKernels rows_kernels();
}

}  // namespace bellmax
