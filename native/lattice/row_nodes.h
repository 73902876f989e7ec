// Sweeps by rows of one lattice, for each kind of nodes, compiled in row_nodes.cpp.
#pragma once

#include "ends.h"
#include "lines.h"
#include "nodes.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// The size of a tape, without its first number and the ends: the rows before each block.
int64_t row_tape_size(const Table& table, int64_t rows, int64_t columns);

// As for strips, see strip_nodes.h. Costs count as negative scores.
template <class P>
void solve(const Table& table, const RowFrame& frame, double& value, Seen& seen, bool& could);
template <class P>
void differentiate(const Table& table, const RowFrame& frame, double seed, const LatticeGradients& gradients);
template <class P>
void draw(const Table& table, const RowFrame& frame, int64_t draws, int64_t count, const double* uniforms,
          const Visit& visit);

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
