// Lattices by a table of moves: the batch of them, and the choice of Ω.
#include "table.h"

#include <atomic>
#include <memory>

#include "../base/threads.h"
#include "table_sweeps.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

using std::int64_t;
using lattice::Gradients;
using lattice::Rows;
using lattice::Rules;
using lattice::Table;
using lattice::TableSweeps;

int slots_of(const LatticeProblem& p) { return int(std::max<int64_t>(1, std::min<int64_t>(p.threads, p.batch))); }

double* tape_of(const LatticeProblem& p, int64_t b) { return p.tape + b * 2 * p.rows * p.columns * p.states; }

std::unique_ptr<const Rules> rules_of(OmegaParameters parameters) {
    return omega::with<double>(parameters, [](auto omega) -> std::unique_ptr<const Rules> {
        return std::make_unique<lattice::RulesOf<decltype(omega)>>(omega);
    });
}

// Calls body(sweeps, b, slot) for every lattice.
template <class Body>
void for_lattices(const LatticeProblem& p, bool with_masses, bool with_dots, Body body) {
    const Table table(p);
    const int slots = slots_of(p);
    std::unique_ptr<std::unique_ptr<Rows>[]> rows(new std::unique_ptr<Rows>[std::size_t(slots)]);
    const auto rules = rules_of(p.omega);
    parallel_for(p.batch, slots, [&](int64_t b, int slot) {
        auto& own = rows[std::size_t(slot)];
        if (!own) own.reset(new Rows(p, table, with_masses, with_dots));
        TableSweeps sweeps(p, table, *rules, b, tape_of(p, b), *own);
        body(sweeps, b, slot);
    });
}

// The same with a place for gradients, which are summed at the end.
template <class Body>
void for_gradients(const LatticeProblem& p, const Scores* out, bool with_dots, Body body) {
    const int slots = slots_of(p);
    std::unique_ptr<std::unique_ptr<Gradients>[]> own(new std::unique_ptr<Gradients>[std::size_t(slots)]);
    std::unique_ptr<Gradients*[]> all(new Gradients*[std::size_t(slots)]);
    for (int t = 0; t < slots; ++t) {
        own[std::size_t(t)].reset(new Gradients(p, out));
        all[std::size_t(t)] = own[std::size_t(t)].get();
    }
    for_lattices(p, true, with_dots, [&](TableSweeps& sweeps, int64_t b, int slot) {
        body(sweeps, b, *own[std::size_t(slot)]);
    });
    own[0]->finish_shared(all.get(), slots);
}

bool forward(const LatticeProblem& p, double* value) {
    std::atomic<bool> sound{true};
    for_lattices(p, false, false, [&](TableSweeps& sweeps, int64_t b, int) {
        if (!sweeps.forward(value + b)) sound = false;
    });
    return sound;
}

void backward(const LatticeProblem& p, const double* seed, const Scores* out) {
    for_gradients(p, out, false, [&](TableSweeps& sweeps, int64_t b, Gradients& own) {
        sweeps.backward(seed[b], own);
    });
}

void hessian(const LatticeProblem& p, const double* seed, const Scores* z, const Scores* out) {
    for_gradients(p, out, true, [&](TableSweeps& sweeps, int64_t b, Gradients& own) {
        sweeps.hessian(seed[b], z, own);
    });
}

void sample(const LatticeProblem& p, int64_t draws, const double* uniforms, int64_t* paths) {
    const int64_t longest = p.longest();
    for_lattices(p, false, false, [&](TableSweeps& sweeps, int64_t b, int) {
        sweeps.sample(draws, uniforms + b * draws * (longest + 1), paths + b * draws * longest * 2);
    });
}

}  // namespace

LatticeKernels lattice_kernels() { return {forward, backward, hessian, sample}; }

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
