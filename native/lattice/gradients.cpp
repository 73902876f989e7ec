#include "gradients.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {
namespace {

template <class S>
void clear_rows(const TermTensor& tensor, int64_t b, Span rows) {
    const Span there = common(rows, {0, tensor.shape[0]});
    if (there.is_empty()) return;
    const int64_t row_size = tensor.size() / tensor.shape[0];
    S* const from = static_cast<S*>(tensor.numbers) + b * tensor.size();
    std::fill(from + there.from * row_size, from + there.to * row_size, S(0));
}

// The gradient from the sums (count, size), which are added up in place if the batch shares the tensor.
template <class S>
void add_up(const TermTensor& out, int64_t count, double* sums) {
    const int64_t size = out.size();
    for (int64_t k = 1; out.is_shared && k < count; ++k) {
        for (int64_t m = 0; m < size; ++m) sums[m] += sums[k * size + m];
    }
    std::copy(sums, sums + (out.is_shared ? size : count * size), static_cast<S*>(out.numbers));
}

}  // namespace

int64_t Gradients::groups_for(const LatticeProblem& p, const TermTensor* out) {
    constexpr int64_t most_numbers = int64_t(1) << 20, fewest = 16;
    int64_t groups = p.batch;
    for (int n = 0; n < p.score_tensors; ++n) {
        const int64_t fitting = std::max(fewest, most_numbers / std::max<int64_t>(out[n].size(), 1));
        if (out[n].is_shared) groups = std::min(groups, fitting);
    }
    return groups;
}

void Gradients::add(int n, bool is_written) {
    bool is_by_row = out[n].dims > 0 && !out[n].is_shared;
    int64_t offset = 0;
    for (int t = 0, count = 0; t < p.terms_count; ++t) {
        const SlotTerm& term = p.terms[t];
        if (term.is_mask || term.tensor != n) continue;
        if (count++ == 0) offset = term.axes[0].offset;
        is_by_row = is_by_row && term.axes[0].follows == Follows::row && term.axes[0].offset == offset;
    }
    const Kind kind = is_written ? Kind::written : is_by_row ? Kind::by_row : Kind::summed;
    const int64_t count = out[n].is_shared ? std::max<int64_t>(groups, 1) : p.batch;
    targets.push_back({kind, offset, count, kind == Kind::summed ? zeros<double>(count * out[n].size()) : nullptr});
}

void Gradients::clear(int n, int64_t b, Span rows) const {
    p.is_double ? clear_rows<double>(out[n], b, rows) : clear_rows<float>(out[n], b, rows);
}

void Gradients::finish() const {
    for (int n = 0; n < p.score_tensors; ++n) {
        const GradientTarget& target = targets[std::size_t(n)];
        if (target.kind != Kind::summed) continue;
        p.is_double ? add_up<double>(out[n], target.count, target.sums.get())
                    : add_up<float>(out[n], target.count, target.sums.get());
    }
}

LatticeGradients::LatticeGradients(const Gradients& all, int64_t b, const Region& region) : all(all), b(b) {
    for (int n = 0; n < all.p.score_tensors; ++n) {
        const Gradients::GradientTarget& target = all.targets[std::size_t(n)];
        if (target.kind != Gradients::Kind::by_row) continue;
        all.clear(n, b, {0, target.offset});
        all.clear(n, b, {target.offset + region.rows, all.out[n].shape[0]});
    }
}

void LatticeGradients::clear(Span rows) const {
    for (int n = 0; n < all.p.score_tensors; ++n) {
        const Gradients::GradientTarget& target = all.targets[std::size_t(n)];
        if (target.kind == Gradients::Kind::by_row)
            all.clear(n, b, {rows.from + target.offset, rows.to + target.offset});
    }
}

template <class Real>
void LatticeGradients::land(const Term& term, Span rows, Span span, RowBlock<const Real> masses) const {
    const int n = term.number();
    const TermTensor& to = all.out[n];
    if (double* const sums = all.targets[std::size_t(n)].sums_of(b, to.size())) {
        term.land(rows, span, masses, sums);
    } else if (all.p.is_double) {
        term.land(rows, span, masses, term.numbers<double>(to));
    } else {
        term.land(rows, span, masses, term.numbers<float>(to));
    }
}

void LatticeGradients::land_one(const Term& term, int64_t i, int64_t j, double mass) const {
    const int n = term.number();
    const TermTensor& to = all.out[n];
    if (double* const sums = all.targets[std::size_t(n)].sums_of(b, to.size())) {
        term.land_one(i, j, mass, sums);
    } else if (all.p.is_double) {
        term.land_one(i, j, mass, term.numbers<double>(to));
    } else {
        term.land_one(i, j, mass, term.numbers<float>(to));
    }
}

template void LatticeGradients::land(const Term&, Span, Span, RowBlock<const float>) const;
template void LatticeGradients::land(const Term&, Span, Span, RowBlock<const double>) const;

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
