// The slots of one lattice as arrays, for sweeps by strips.
#pragma once

#include <memory>
#include <vector>

#include "gradients.h"
#include "scores.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// How strips read each slot, the same for all lattices of a batch.
class SlotPlan {
public:
    struct Slot {
        std::vector<int> summands;       // the numbers of its terms
        int mask = -1;                   // and of its mask
        const SlotTerm* view = nullptr;  // the only term, if the array of the slot is its tensor itself
        bool is_written = false;         // whether strips write the gradient of this tensor themselves
        bool by_row = false, by_column = false;

        bool has_scores() const { return !summands.empty(); }
        By by() const { return by_of(by_row, by_column); }
    };
    const LatticeProblem& p;
    std::vector<Slot> slots;

    explicit SlotPlan(const LatticeProblem& p);
    // Whether strips write the gradient of a tensor themselves.
    bool is_written(int tensor) const;
    // The array of a slot with a view, in a tensor like the one that the slot reads.
    SlotArray view(const Slot& slot, const TermTensor* tensors, int64_t b, double missing) const;
};

// The terms of one lattice that are read or written by rows.
class SlotTerms {
    std::vector<std::unique_ptr<Term>> terms;

public:
    const SlotPlan& plan;
    const int64_t b;

    SlotTerms(const SlotPlan& plan, int64_t b);
    const Term& term(int n) const { return *terms[std::size_t(n)]; }
};

// The scores of each slot, or their derivative along a direction.
class SlotArrays {
    std::vector<Array<double>> sums;

    template <class S>
    SlotArray sum(const SlotTerms& terms, const SlotPlan::Slot& slot, const TermTensor* tensors, const Region& region,
                  S missing, bool is_masked);

public:
    SlotArray slots[most_slots];

    SlotArrays(const SlotTerms& terms, const TermTensor* tensors, const Region& region, bool is_direction);
    // Sets the entries of a direction to 0 where a move is forbidden.
    void clear_forbidden(const LatticeProblem& p, const SlotArrays& scores, const Region& region);
};

// The gradients of the slots of one lattice: views of tensors, or sums that `land` adds to the gradients of tensors.
// For a slot that is shared along rows or columns, each strip has its sums.
class SlotGradients {
    const SlotTerms& terms;
    const Region& region;
    std::vector<Array<double>> sums;

public:
    SlotArray slots[most_slots];

    SlotGradients(const SlotTerms& terms, const TermTensor* out, const Region& region);
    void land(const LatticeGradients& gradients) const;
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
