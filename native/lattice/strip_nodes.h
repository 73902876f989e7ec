// Sweeps by strips of one lattice, for each kind of nodes. Each kind is compiled in one file (products.cpp,
// others.cpp).
#pragma once

#include "nodes.h"
#include "strip_sweeps.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// The loops of a table, specialized if the compiler knows the table: for products three tables, for other nodes only
// dynamic time warping.
template <class P>
Loops<P> loops_of(const Table& table, const StripFrame& frame) {
    using PlainTable = KnownTable<PlainWarping>;
    using Penalised = KnownTable<PenalisedWarping>;
    using Affine = KnownTable<AffineGaps>;
    Kind kinds[most_slots];
    for (int n = 0; n < table.states + frame.moves; ++n) {
        const By by = frame.scores[n].by;
        kinds[n] = by == By::none ? Kind::none : by == By::cell ? Kind::cell : Kind::line;
    }
    if (PlainTable::is(table, kinds)) return Loops<P>::template of<PlainTable>();
    if constexpr (std::is_same_v<P, Products>) {
        if (Penalised::is(table, kinds)) return Loops<P>::template of<Penalised>();
        if (Affine::is(table, kinds)) return Loops<P>::template of<Affine>();
    }
    return Loops<P>::template of<AnyTable>();
}

// The value of a lattice, a summary of its scores, and whether nodes could hold them.
template <class P>
void solve(const Table& table, const StripFrame& frame, double& value, Seen& seen, bool& could) {
    const StripSweeps<P> sweeps(table, loops_of<P>(table, frame), frame, frame.tape);
    value = sweeps.forward(seen);
    could = sweeps.can_take(seen.greatest);
}

// The gradients of scores or, for nodes with dots, their change along the direction.
template <class P>
void differentiate(const Table& table, const StripFrame& frame, double seed, const SlotArray* out) {
    const StripSweeps<P> sweeps(table, loops_of<P>(table, frame), frame, true);
    Seen unused;
    if (P::has_dots) sweeps.forward(unused);
    sweeps.backward(seed, out);
}

// Paths, from their ends on: see StripSweeps.
template <class P>
void draw(const Table& table, const StripFrame& frame, int64_t draws, int64_t count, const double* uniforms,
          const Visit& visit) {
    StripSweeps<P>(table, loops_of<P>(table, frame), frame, true).sample(draws, count, uniforms, visit);
}

#define LATTICE_NODES(compiled, P)                                                                 \
    compiled template void solve<P>(const Table&, const StripFrame&, double&, Seen&, bool&);         \
    compiled template void differentiate<P>(const Table&, const StripFrame&, double, const SlotArray*); \
    compiled template void draw<P>(const Table&, const StripFrame&, int64_t, int64_t, const double*, const Visit&)
#define LATTICE_DOTS(compiled, P) \
    compiled template void differentiate<WithDots<P>>(const Table&, const StripFrame&, double, const SlotArray*)

LATTICE_NODES(extern, Products);
LATTICE_NODES(extern, Sparse);
LATTICE_NODES(extern, HardFloat);
LATTICE_NODES(extern, HardDouble);
LATTICE_NODES(extern, Precise);
LATTICE_DOTS(extern, Products);
LATTICE_DOTS(extern, Sparse);
LATTICE_DOTS(extern, Precise);

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
