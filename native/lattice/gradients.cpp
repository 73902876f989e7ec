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

// The gradient from the sums (batch, size) of the lattices, which may share it.
template <class S>
void add_up(const TermTensor& out, int64_t batch, const double* sums) {
    const int64_t size = out.size(), sharing = out.is_shared ? batch : 1;
    S* const to = static_cast<S*>(out.numbers);
    for (int64_t b = 0; b < batch; b += sharing) {
        for (int64_t m = 0; m < size; ++m) {
            double sum = 0;
            for (int64_t k = 0; k < sharing; ++k) sum += sums[(b + k) * size + m];
            to[b * size + m] = S(sum);
        }
    }
}

}  // namespace

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
    targets.push_back({kind, offset, kind == Kind::summed ? zeros<double>(p.batch * out[n].size()) : nullptr});
}

void Gradients::clear(int n, int64_t b, Span rows) const {
    p.is_double ? clear_rows<double>(out[n], b, rows) : clear_rows<float>(out[n], b, rows);
}

void Gradients::finish() const {
    for (int n = 0; n < p.score_tensors; ++n) {
        const double* const sums = targets[std::size_t(n)].sums.get();
        if (!sums) continue;
        p.is_double ? add_up<double>(out[n], p.batch, sums) : add_up<float>(out[n], p.batch, sums);
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
    if (double* const sums = all.targets[std::size_t(n)].sums.get()) {
        term.land(rows, span, masses, sums + b * to.size());
    } else if (all.p.is_double) {
        term.land(rows, span, masses, term.numbers<double>(to));
    } else {
        term.land(rows, span, masses, term.numbers<float>(to));
    }
}

void LatticeGradients::land_one(const Term& term, int64_t i, int64_t j, double mass) const {
    const int n = term.number();
    const TermTensor& to = all.out[n];
    if (double* const sums = all.targets[std::size_t(n)].sums.get()) {
        term.land_one(i, j, mass, sums + b * to.size());
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
