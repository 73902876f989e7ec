// The batch of lattices: the traversal, the nodes and the threads of each.
#include "lattice.h"

#include <atomic>
#include <optional>

#include "../base/threads.h"
#include "outside.h"
#include "row_nodes.h"
#include "slots.h"
#include "strip_nodes.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

using namespace lattice;

Table table_of(const LatticeProblem& p) {
    return Table(p.table, p.moves, p.states, p.row + p.rows, p.column + p.columns);
}

int64_t ends_size(const LatticeProblem& p) { return EndList(p.ends, p.rows, p.column + p.columns).size(); }

int64_t tape_size(const LatticeProblem& p) {
    const int64_t columns = p.column + p.columns, ends = ends_size(p);
    if (p.goes_by_rows()) return 1 + row_tape_size(table_of(p), p.rows, p.columns) + ends;
    return table_of(p).tape_size(p.rows, columns) + ends;
}

// What all lattices of a batch share.
struct Batch {
    const LatticeProblem& p;
    const Table table = table_of(p);
    const SlotPlan plan{p};
    const TermTensor* const z = nullptr;  // a direction

    double* tape(int64_t b) const { return p.tape ? p.tape + b * p.tape_size : nullptr; }
    double* end_values(int64_t b) const { return p.end_values ? p.end_values + b * ends_size(p) : nullptr; }
    Region region(int64_t b) const { return Region(p.lengths + 2 * b, p.band[b]); }
};

// One lattice, swept by strips.
class StripLattice {
    const Batch& batch;
    const int64_t b;
    const SlotTerms terms;
    const Region region;
    const SlotArrays scores;
    std::optional<SlotArrays> direction;
    StripFrame frame;

public:
    double* const tape;

    StripLattice(const Batch& batch, int64_t b, int threads)
        : batch(batch),
          b(b),
          terms(batch.plan, b),
          region(batch.region(b)),
          scores(terms, batch.p.tensors, region, false),
          frame{region, batch.p, threads, batch.tape(b), batch.end_values(b), scores.slots},
          tape(batch.tape(b)) {
        if (!batch.z) return;
        direction.emplace(terms, batch.z, region, true);
        direction->clear_forbidden(batch.p, scores, region);
        frame.z = direction->slots;
    }

    // All threads for one lattice after the other, unless there are enough lattices.
    static bool shares_threads(const LatticeProblem& p) { return p.batch < p.threads; }

    template <class P>
    void solve(double& value, Seen& seen, bool& could) const {
        lattice::solve<P>(batch.table, frame, value, seen, could);
    }
    template <class P>
    void differentiate(double seed, const Gradients& all, const TermTensor* out) const {
        const SlotGradients own(terms, out, region);
        lattice::differentiate<P>(batch.table, frame, seed, own.slots);
        own.land(LatticeGradients(all, b, region));
    }
    template <class P>
    void draw(int64_t draws, int64_t count, const double* uniforms, const Visit& visit) const {
        lattice::draw<P>(batch.table, frame, draws, count, uniforms, visit);
    }
};

// One lattice, swept by rows on one thread, in the sense of scores.
class RowLattice {
    const Batch& batch;
    const RowFrame frame;

public:
    double* const tape;

    RowLattice(const Batch& batch, int64_t b, int)
        : batch(batch), frame{batch.p, b, batch.region(b), batch.tape(b), batch.z}, tape(batch.tape(b)) {}

    static bool shares_threads(const LatticeProblem&) { return false; }

    template <class P>
    void solve(double& value, Seen& seen, bool& could) const {
        lattice::solve<P>(batch.table, frame, value, seen, could);
        value *= batch.p.scale;
    }
    template <class P>
    void differentiate(double seed, const Gradients& all, const TermTensor*) const {
        const LatticeGradients own(all, frame.b, frame.region);
        lattice::differentiate<P>(batch.table, frame, batch.p.scale * seed, own);
    }
    template <class P>
    void draw(int64_t draws, int64_t count, const double* uniforms, const Visit& visit) const {
        lattice::draw<P>(batch.table, frame, draws, count, uniforms, visit);
    }
};

template <class Lattice, class Body>
void for_lattices(const Batch& batch, int64_t groups, Body body) {
    const LatticeProblem& p = batch.p;
    if (Lattice::shares_threads(p)) {
        for (int64_t b = 0; b < p.batch; ++b) body(b, Lattice(batch, b, p.threads));
        return;
    }
    take_turns(groups, p.threads, [] { return 0; }, [&](int64_t group, int) {
        for (int64_t b = group; b < p.batch; b += groups) {
            check_interrupt();
            body(b, Lattice(batch, b, 1));
        }
    });
}

// Calls body(b, lattice) for every lattice, with the traversal that suits the moves: one thread for each group.
template <class Body>
void for_each_lattice(const Batch& batch, int64_t groups, Body body) {
    if (batch.p.goes_by_rows()) for_lattices<RowLattice>(batch, groups, body);
    else for_lattices<StripLattice>(batch, groups, body);
}
template <class Body>
void for_each_lattice(const Batch& batch, Body body) {
    for_each_lattice(batch, batch.p.batch, body);
}

// Finds the value with nodes in float or in double; false if there are no such nodes, or if they cannot hold it.
template <class Lattice>
bool solve(const LatticeProblem& p, const Lattice& one, bool in_float, double& value, Seen& seen) {
    bool could = false;
    seen = {};
    with_nodes(p.omega, p.is_double, in_float, [&](auto* nodes) {
        one.template solve<std::remove_pointer_t<decltype(nodes)>>(value, seen, could);
    });
    if (one.tape) one.tape[0] = in_float;
    return could;
}

bool forward(const LatticeProblem& p, double* value) {
    std::atomic<bool> is_sound{true};
    for_each_lattice(Batch{p}, [&](int64_t b, const auto& one) {
        Seen seen;
        if (!solve(p, one, true, value[b], seen)) solve(p, one, false, value[b], seen);
        if (seen.bad) is_sound = false;
    });
    return is_sound;
}

bool forward_block(const LatticeProblem& p, bool in_float, double* value, double* greatest) {
    Seen seen;
    for_each_lattice(Batch{p}, [&](int64_t, const auto& one) { solve(p, one, in_float, *value, seen); });
    *greatest = seen.greatest;
    return !seen.bad;
}

// Calls action(P) with the kind of nodes that the value was found with.
template <class Lattice, class Action>
void with_nodes_of(const LatticeProblem& p, const Lattice& one, Action action) {
    with_nodes(p.omega, p.is_double, one.tape[0] == 1, action);
}

// The gradients or, if there is a direction z, their derivative along it.
void differentiate(const LatticeProblem& p, const double* seed, const TermTensor* z, const TermTensor* out) {
    const Batch batch{p, table_of(p), SlotPlan(p), z};
    const bool by_rows = p.goes_by_rows();
    const Gradients gradients(p, out, [&](int n) { return !by_rows && batch.plan.is_written(n); });
    for_each_lattice(batch, gradients.groups, [&](int64_t b, const auto& one) {
        with_nodes_of(p, one, [&](auto* nodes) {
            using P = std::remove_pointer_t<decltype(nodes)>;
            if (z) one.template differentiate<WithTangents<P>>(seed[b], gradients, out);
            else one.template differentiate<P>(seed[b], gradients, out);
        });
    });
    gradients.finish();
}

void backward(const LatticeProblem& p, const double* seed, const TermTensor* out) {
    differentiate(p, seed, nullptr, out);
}

void sample(const LatticeProblem& p, int64_t draws, const double* uniforms, int64_t* paths) {
    const int64_t longest = p.longest();
    std::fill(paths, paths + p.batch * draws * longest * 2, int64_t(-1));
    for_each_lattice(Batch{p}, [&](int64_t b, const auto& one) {
        const auto visit = [&](int64_t d, const Walker& at, int move) {
            int64_t* const path = paths + (b * draws + d) * longest * 2;
            const int64_t place = 2 * (longest - 1 - at.taken);
            path[place] = (at.i * p.columns + at.j) * p.states + at.state;
            path[place + 1] = move;
            if (move < 0) std::rotate(path, path + place, path + 2 * longest);
        };
        const double* const own = uniforms + b * draws * (longest + 1);
        with_nodes_of(p, one, [&](auto* nodes) {
            one.template draw<std::remove_pointer_t<decltype(nodes)>>(draws, longest + 1, own, visit);
        });
    });
}

}  // namespace

LatticeKernels lattice_kernels() {
    return {tape_size, forward,       forward_block, Products::can_take, backward, differentiate,
            sample,    max_marginals, ends_size};
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
