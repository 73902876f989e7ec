// Which nodes and which table a lattice is swept with. Each kind of nodes is compiled in one file (products.cpp,
// others.cpp).
#pragma once

#include "sweeps.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace table_engine {

using Sparse = Parts<omega::SquaredL2<float>>;
using Maximal = Values<OnlyHard, float>;
using Precise = Values<AnyOmega>;

// Calls action(P) with the nodes to sweep with, as an empty pointer: in float, for scores and an Ω that have some, or
// in double. False if there are none.
template <class Action>
bool with_nodes(const Frame& frame, bool in_float, Action action) {
    const double alpha = frame.omega.alpha;
    if (!in_float && alpha == infinity<double> && !frame.is_double) {
        action(static_cast<Maximal*>(nullptr));
    } else if (!in_float) {
        action(static_cast<Precise*>(nullptr));
    } else if (frame.is_double || (alpha != 1 && alpha != 2)) {
        return false;
    } else if (alpha == 1) {
        action(static_cast<Products*>(nullptr));
    } else {
        action(static_cast<Sparse*>(nullptr));
    }
    return true;
}

// The loops of a table, as one that the compiler knows if it does: for products all of these, for other nodes that of
// dynamic time warping.
template <class P>
Loops<P> loops_of(const Table& table, const Frame& frame) {
    using Plain = KnownTable<PlainWarping>;
    using Penalised = KnownTable<PenalisedWarping>;
    using Affine = KnownTable<AffineGaps>;
    Kind kinds[most_scores];
    for (int n = 0; n < table.states + frame.moves; ++n) {
        const By by = frame.scores[n].by;
        kinds[n] = by == By::none ? Kind::none : by == By::cell ? Kind::cell : Kind::line;
    }
    if (Plain::is(table, kinds)) return Loops<P>::template of<Plain>();
    if constexpr (std::is_same_v<P, Products>) {
        if (Penalised::is(table, kinds)) return Loops<P>::template of<Penalised>();
        if (Affine::is(table, kinds)) return Loops<P>::template of<Affine>();
    }
    return Loops<P>::template of<AnyTable>();
}

// The value of a lattice; what was seen of its scores, and whether nodes could hold them.
template <class P>
void solve(const Table& table, const Frame& frame, double& value, Seen& seen, bool& could) {
    const Sweeps<P> sweeps(table, loops_of<P>(table, frame), frame, frame.tape);
    value = sweeps.forward(seen);
    could = sweeps.can_take(seen.greatest);
}

// The gradients of scores or, for nodes with dots, their change along the direction.
template <class P>
void differentiate(const Table& table, const Frame& frame, double seed, const Array2* out) {
    const Sweeps<P> sweeps(table, loops_of<P>(table, frame), frame, true);
    Seen unused;
    if (P::has_dots) sweeps.forward(unused);
    sweeps.backward(seed, out);
}

// Paths, from their ends on: see Sweeps.
template <class P>
void draw(const Table& table, const Frame& frame, int64_t draws, int64_t count, const double* uniforms,
          const Visit& visit) {
    Sweeps<P>(table, loops_of<P>(table, frame), frame, true).sample(draws, count, uniforms, visit);
}

#define LATTICE_NODES(compiled, P)                                                                 \
    compiled template void solve<P>(const Table&, const Frame&, double&, Seen&, bool&);         \
    compiled template void differentiate<P>(const Table&, const Frame&, double, const Array2*); \
    compiled template void draw<P>(const Table&, const Frame&, int64_t, int64_t, const double*, const Visit&)
#define LATTICE_DOTS(compiled, P) \
    compiled template void differentiate<WithDots<P>>(const Table&, const Frame&, double, const Array2*)

LATTICE_NODES(extern, Products);
LATTICE_NODES(extern, Sparse);
LATTICE_NODES(extern, Maximal);
LATTICE_NODES(extern, Precise);
LATTICE_DOTS(extern, Products);
LATTICE_DOTS(extern, Sparse);
LATTICE_DOTS(extern, Precise);

}  // namespace table_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
