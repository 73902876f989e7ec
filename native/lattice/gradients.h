// Where the masses of nodes and moves are added to the gradients of the tensors that their scores were read from.
#pragma once

#include <vector>

#include "terms.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// Three kinds of tensors: the sweeps write the gradient themselves; each row belongs to one row of one lattice, and
// masses are added to the gradient; or masses are summed in double for each lattice.
class Gradients {
    enum class Kind { written, by_row, summed };
    struct GradientTarget {
        Kind kind;
        int64_t offset;      // of the rows of a tensor by row
        Array<double> sums;  // (batch, size)
    };
    const LatticeProblem& p;
    const TermTensor* const out;
    std::vector<GradientTarget> targets;

    void clear(int n, int64_t b, Span rows) const;
    friend class LatticeGradients;

public:
    // `is_written(n)`: whether the sweeps write the gradient of tensor n themselves.
    template <class Predicate>
    Gradients(const LatticeProblem& p, const TermTensor* out, Predicate is_written) : p(p), out(out) {
        for (int n = 0; n < p.score_tensors; ++n) add(n, is_written(n));
    }
    // After all lattices: the sums become gradients.
    void finish() const;

private:
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
