// Where the masses of nodes and moves are added to the gradients of the tensors that their scores were read from.
#pragma once

#include <vector>

#include "terms.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// Three kinds of tensors: the sweeps write the gradient themselves; each row belongs to one row of one lattice, and
// masses are added to the gradient; or masses are summed in double, for each lattice or, if the batch shares the
// tensor, for each group of lattices. Lattice b is in group b % groups, whatever the number of threads.
class Gradients {
    enum class Kind { written, by_row, summed };
    struct GradientTarget {
        Kind kind;
        int64_t offset;      // of the rows of a tensor by row
        int64_t count;
        Array<double> sums;  // (count, size)

        double* sums_of(int64_t b, int64_t size) const { return sums ? sums.get() + b % count * size : nullptr; }
    };
    const LatticeProblem& p;
    const TermTensor* const out;
    std::vector<GradientTarget> targets;

    void clear(int n, int64_t b, Span rows) const;
    friend class LatticeGradients;

public:
    // `is_written(n)`: whether the sweeps write the gradient of tensor n themselves.
    template <class Predicate>
    Gradients(const LatticeProblem& p, const TermTensor* out, Predicate is_written)
        : p(p), out(out), groups(groups_for(p, out)) {
        for (int n = 0; n < p.score_tensors; ++n) add(n, is_written(n));
    }
    const int64_t groups;  // one thread at a time may sweep lattices of a group

    // After all lattices: the sums become gradients.
    void finish() const;

private:
    static int64_t groups_for(const LatticeProblem& p, const TermTensor* out);
    void add(int n, bool is_written);
};

// The gradients of one lattice.
class LatticeGradients {
    const Gradients& all;
    const int64_t b;

public:
    LatticeGradients(const Gradients& all, int64_t b, const Region& region);
    // Before masses are added to these rows.
    void clear(Span rows) const;
    template <class Real>
    void land(const Term& term, Span rows, Span span, RowBlock<const Real> masses) const;
    void land_one(const Term& term, int64_t i, int64_t j, double mass) const;
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
