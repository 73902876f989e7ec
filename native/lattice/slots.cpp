#include "slots.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {
namespace {

int64_t strips_of(int64_t rows) { return (rows + strip_rows - 1) / strip_rows; }

// The number that stands for a forbidden move.
double forbidden(const LatticeProblem& p) { return -p.scale * infinity<double>; }

// Whether a term reads each cell's own entry: no sum, no label, no other coefficient.
bool is_plain(const LatticeProblem& p, const SlotTerm& term) {
    const TermTensor& tensor = p.tensors[term.tensor];
    const TermAxis* const axes = term.axes;
    if (term.coefficient != 1 || tensor.dims > 2) return false;
    if (tensor.dims == 2) return axes[0].follows == Follows::row && axes[1].follows == Follows::column;
    if (tensor.dims == 0) return true;
    if (axes[0].offset != 0) return false;
    if (axes[0].follows == Follows::row) return tensor.shape[0] >= p.rows;
    return axes[0].follows == Follows::column && tensor.shape[0] >= p.columns;
}

}  // namespace

SlotPlan::SlotPlan(const LatticeProblem& p) : p(p), slots(std::size_t(p.slots())) {
    std::vector<int> readers(std::size_t(p.score_tensors));
    for (int n = 0; n < p.terms_count; ++n) {
        const SlotTerm& term = p.terms[n];
        Slot& slot = slots[std::size_t(term.slot)];
        if (term.is_mask) slot.mask = n;
        else slot.summands.push_back(n), ++readers[std::size_t(term.tensor)];
        for (int d = 0; d < p.tensors[term.tensor].dims; ++d) {
            const Follows follows = term.axes[d].follows;
            slot.by_row |= follows == Follows::row || follows == Follows::label_of_row;
            slot.by_column |= follows == Follows::column || follows == Follows::label_of_column;
        }
    }
    for (Slot& slot : slots) {
        if (slot.summands.size() != 1 || slot.mask >= 0) continue;
        const SlotTerm& term = p.terms[slot.summands[0]];
        if (!is_plain(p, term)) continue;
        const TermTensor& tensor = p.tensors[term.tensor];
        slot.view = &term;
        slot.is_written =
            tensor.dims == 2 && readers[std::size_t(term.tensor)] == 1 && (!tensor.is_shared || p.batch == 1);
    }
}

bool SlotPlan::is_written(int tensor) const {
    return std::any_of(slots.begin(), slots.end(),
                       [tensor](const Slot& slot) { return slot.is_written && slot.view->tensor == tensor; });
}

SlotArray SlotPlan::view(const Slot& slot, const TermTensor* tensors, int64_t b, double missing) const {
    const SlotTerm& term = *slot.view;
    const TermTensor& tensor = tensors[term.tensor];
    SlotArray array;
    if (tensor.dims == 2 && tensor.size() == 0) return array;
    array.by = slot.by();
    const int64_t columns = tensor.dims == 2 ? tensor.shape[1] : p.columns, size = p.is_double ? 8 : 4;
    array.matrix = {static_cast<char*>(tensor.numbers) + (tensor.is_shared ? 0 : b * tensor.size() * size),
                    p.is_double, columns, {0, 0, p.rows, columns}, missing};
    if (tensor.dims == 2) array.matrix.window = {-term.axes[0].offset, -term.axes[1].offset, tensor.shape[0], columns};
    return array;
}

SlotTerms::SlotTerms(const SlotPlan& plan, int64_t b) : terms(std::size_t(plan.p.terms_count)), plan(plan), b(b) {
    for (const SlotPlan::Slot& slot : plan.slots) {
        const auto make = [&](int n) {
            const SlotTerm& term = plan.p.terms[n];
            terms[std::size_t(n)] = std::make_unique<Term>(term, plan.p.tensors[term.tensor], b, plan.p.columns, 1);
        };
        if (slot.is_written && !plan.p.is_move(slot.view->slot)) continue;
        for (const int n : slot.summands) make(n);
        if (slot.mask >= 0) make(slot.mask);
    }
}

SlotArrays::SlotArrays(const SlotTerms& terms, const TermTensor* tensors, const Region& region, bool is_direction) {
    const LatticeProblem& p = terms.plan.p;
    for (int n = 0; n < p.slots(); ++n) {
        const SlotPlan::Slot& slot = terms.plan.slots[std::size_t(n)];
        if (!slot.has_scores() && (slot.mask < 0 || is_direction)) continue;
        const double missing = p.is_move(n) && !is_direction ? forbidden(p) : 0;
        const bool is_copy = is_direction && p.is_move(n);  // clear_forbidden changes it
        if (slot.view && !is_copy) {
            slots[n] = terms.plan.view(slot, tensors, terms.b, missing);
        } else if (p.is_double) {
            slots[n] = sum<double>(terms, slot, tensors, region, missing, !is_direction);
        } else {
            slots[n] = sum<float>(terms, slot, tensors, region, float(missing), !is_direction);
        }
    }
}

template <class S>
SlotArray SlotArrays::sum(const SlotTerms& terms, const SlotPlan::Slot& slot, const TermTensor* tensors,
                          const Region& region, S missing, bool is_masked) {
    const int64_t rows = slot.by_row ? region.rows : 1, columns = slot.by_column ? region.columns : 1;
    const int64_t stride = slot.by_column ? up_to_groups(columns) : 1;
    sums.push_back(scratch<double>((rows * stride * int64_t(sizeof(S)) + 7) / 8));
    S* const numbers = reinterpret_cast<S*>(sums.back().get());
    if (!slot.has_scores()) std::fill_n(numbers, rows * stride, S(0));
    for (int64_t i = 0; i < rows; i += group) {
        const Span block{i, std::min(i + group, rows)};
        const RowBlock<S> to{numbers + i * stride, stride};
        for (const int n : slot.summands) {
            const Term& term = terms.term(n);
            const S* const from = term.numbers<const S>(tensors[term.number()]);
            term.read(from, block, Span{0, columns}, missing, n == slot.summands.front(), to);
        }
        if (slot.mask >= 0 && is_masked) {
            terms.term(slot.mask).mask(block, Span{0, columns}, S(forbidden(terms.plan.p)), to);
        }
    }
    SlotArray array;
    array.by = slot.by();
    array.matrix = {numbers, sizeof(S) == sizeof(double), stride, {0, 0, region.rows, region.columns}, 0};
    return array;
}

void SlotArrays::clear_forbidden(const LatticeProblem& p, const SlotArrays& scores, const Region& region) {
    for (int n = p.states; n < p.states + p.moves; ++n) {
        SlotArray& own = slots[n];
        const SlotArray& score = scores.slots[n];
        if (own.by == By::none) continue;
        const bool by_row = own.by == By::row || own.by == By::cell,
                   by_column = own.by == By::column || own.by == By::cell;
        for (int64_t i = 0; i < (by_row ? region.rows : 1); ++i) {
            for (int64_t j = 0; j < (by_column ? region.columns : 1); ++j) {
                if (score.score(i, j) == forbidden(p)) own.set(i, j, 0);
            }
        }
    }
}

SlotGradients::SlotGradients(const SlotTerms& terms, const TermTensor* out, const Region& region)
    : terms(terms), region(region), sums(terms.plan.slots.size()) {
    const LatticeProblem& p = terms.plan.p;
    for (int n = 0; n < p.slots(); ++n) {
        const SlotPlan::Slot& slot = terms.plan.slots[std::size_t(n)];
        if (!slot.has_scores()) continue;
        SlotArray& own = slots[n];
        if (slot.is_written) {
            own = terms.plan.view(slot, out, terms.b, 0);
            // No mass lands outside the region, nor for a move that is longer than the lattice.
            if (own.by == By::cell) clear_outside(own.matrix, n < p.states ? region : Region::nowhere());
        } else {
            own.by = slot.by();
            const bool by_strip = own.by == By::column || own.by == By::nothing;
            const int64_t rows = by_strip ? strips_of(region.rows) : region.rows;
            const int64_t stride = slot.by_column ? up_to_groups(region.columns) : 1;
            sums[std::size_t(n)] = zeros<double>(rows * stride);
            own.matrix = {sums[std::size_t(n)].get(), true, stride, {0, 0, region.rows, stride}, 0};
        }
        const int m = n - p.states;
        if (p.is_move(n) && (p.table[m].di >= p.rows || p.table[m].dj >= p.columns)) own.by = By::none;
    }
}

void SlotGradients::land(const LatticeGradients& gradients) const {
    gradients.clear({0, region.rows});
    for (int n = 0; n < terms.plan.p.slots(); ++n) {
        double* const numbers = sums[std::size_t(n)].get();
        const By by = slots[n].by;
        if (!numbers || by == By::none) continue;
        const int64_t stride = slots[n].matrix.stride;
        const Span columns{0, by == By::cell || by == By::column ? region.columns : 1};
        const bool by_strip = by == By::column || by == By::nothing;
        for (int64_t s = 1; by_strip && s < strips_of(region.rows); ++s) {
            for (int64_t j = 0; j < columns.to; ++j) numbers[j] += numbers[s * stride + j];
        }
        for (const int t : terms.plan.slots[std::size_t(n)].summands) {
            const Term& term = terms.term(t);
            if (by == By::cell) {
                gradients.land(term, {0, region.rows}, columns, RowBlock<const double>{numbers, stride});
                continue;
            }
            for (int64_t i = 0; i < (by_strip ? 1 : region.rows); ++i) {
                for (int64_t j = 0; j < columns.to; ++j) gradients.land_one(term, i, j, numbers[i * stride + j]);
            }
        }
    }
}

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
