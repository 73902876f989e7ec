#include "row_nodes.h"

#include "row_sweeps.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

int64_t row_tape_size(const Table& table, int64_t rows, int64_t columns) { return rows_kept(table, rows, columns); }

template <class P>
void solve(const Table& table, const RowFrame& frame, double& value, Seen& seen, bool& could) {
    RowSweeps<P> sweeps(frame, table, false);
    value = sweeps.forward(frame.tape != nullptr, seen);
    could = sweeps.can_take(seen.greatest);
}

template <class P>
void differentiate(const Table& table, const RowFrame& frame, double seed, const LatticeGradients& gradients) {
    RowSweeps<P> sweeps(frame, table, true);
    Seen unused;
    if (P::has_dots) sweeps.forward(true, unused);
    sweeps.backward(seed, gradients);
}

template <class P>
void draw(const Table& table, const RowFrame& frame, int64_t draws, int64_t count, const double* uniforms,
          const Visit& visit) {
    RowSweeps<P>(frame, table, true).sample(draws, count, uniforms, visit);
}

#define ROW_NODES(P)                                                                                    \
    template void solve<P>(const Table&, const RowFrame&, double&, Seen&, bool&);                       \
    template void differentiate<P>(const Table&, const RowFrame&, double, const LatticeGradients&);     \
    template void draw<P>(const Table&, const RowFrame&, int64_t, int64_t, const double*, const Visit&)
#define ROW_TANGENTS(P) \
    template void differentiate<WithDots<P>>(const Table&, const RowFrame&, double, const LatticeGradients&)

ROW_NODES(Products);
ROW_NODES(Sparse);
ROW_NODES(HardFloat);
ROW_NODES(HardDouble);
ROW_NODES(Precise);
ROW_TANGENTS(Products);
ROW_TANGENTS(Sparse);
ROW_TANGENTS(Precise);

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
