// Scores and masses by rows: whatever does not depend on the kind of nodes.
#include "lines.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace row_engine {

template <class Real>
Line<Real>::Line(const Frame& f, int score, const std::vector<Term>& all, int64_t rows, int weight_planes) : f(f) {
    const int m = score - f.p.states;
    is_move = m >= 0 && m < f.p.moves;
    is_start = score >= f.score_of_start(0) && score < f.score_of_end(0) &&
               (f.p.starts.place == Place::corner || f.p.starts.place == Place::column);
    for (const Term& term : all) {
        if (term.score() != score) continue;
        if (term.is_mask()) mask = &term;
        else terms.push_back(&term);
        by_row |= term.by_row;
        by_column |= term.by_column;
    }
    by_column |= is_start;
    if (terms.empty() && !mask && !is_start) return;
    const int64_t wide = by_column ? up_to_groups(f.p.columns) : W, stride = by_row ? wide : 0;
    plane = by_row ? rows * wide : wide;
    step = by_column ? -1 : 0;
    room = zeros<Real>((1 + (f.z ? 1 : 0) + weight_planes) * plane);
    raw = {room.get(), stride};
    weight = weight_planes ? Tile<Real>{raw.numbers + plane, stride} : raw;
    if (f.z) z = {room.get() + (1 + weight_planes) * plane, stride};
}

template <class Real>
Filled Line<Real>::read(Span rows, Span span, bool looks) {
    if (!raw.numbers) return {0, {0, 0}};
    if (!by_row) rows = {0, 1}, span = {0, f.region.columns};
    if (!by_column) span = {0, W};
    if (span.is_empty() || rows.is_empty()) return {0, {0, 0}};
    f.p.is_double ? fill<Real>(rows, span) : fill<float>(rows, span);  // doubles are for nodes in double
    const Filled filled = joined(rows.size(), span.rounded(W));
    if (looks) look(filled.rows, filled.whole);
    for (int64_t r = 0; z.numbers && r < filled.rows; ++r) {
        for (int64_t j = filled.whole.from; j < filled.whole.to; ++j) {
            if (raw.row(r)[j] == -infinity<Real>) z.row(r)[j] = 0;
        }
    }
    return filled;
}

template <class Real>
template <class S>
void Line<Real>::fill(Span rows, Span span) {
    const Real missing = is_move ? -infinity<Real> : Real(0);
    for (int64_t r = 0; terms.empty() && r < rows.size(); ++r) {
        std::fill(raw.row(r) + span.from, raw.row(r) + span.to, Real(0));
    }
    for (const Term* const term : terms) {
        const bool is_first = term == terms.front();
        const int n = term->number();
        term->read(term->numbers<const S>(f.p.tensors[n]), rows, span, missing, is_first, raw);
        if (z.numbers) term->read(term->numbers<const S>(f.z[n]), rows, span, Real(0), is_first, z);
    }
    if (mask) mask->mask(rows, span, raw);
    const bool is_cut = by_row && by_column && f.region.has_band();  // what is outside the band may be anything
    const int64_t from = std::max<int64_t>(span.from, 1);
    for (int64_t i = rows.from; (is_start || is_cut) && i < rows.to; ++i) {
        Real* const line = raw.row(i - rows.from);
        if (is_start) std::fill(line + from, line + std::max(span.to, from), -infinity<Real>);
        if (!is_cut) continue;
        const Span own = common(f.columns(i), span);
        std::fill(line + span.from, line + own.from, Real(0));
        std::fill(line + own.to, line + span.to, Real(0));
    }
}

template <class Real>
void Line<Real>::look(int64_t rows, Span whole) {
    using V = Vec<Real>;
    const V least = V{} - infinity<Real>, most = V{} + infinity<Real>;
    V greatest{};
    auto bad = most < most;
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t j = whole.from; j < whole.to; j += W) {
            const V x = bellmax::load<Real>(raw.row(r) + j);
            bad |= !(x < most);
            greatest = greater<Real>(greatest, x > least ? greater<Real>(x, -x) : V{});
        }
    }
    seen.bad = seen.bad || any(bad);
    seen.greatest = std::max(seen.greatest, double(greatest_lane<Real>(greatest)[0]));
}

template class Line<float>;
template class Line<double>;

namespace {

template <class S>
void clear_rows(const TermTensor& tensor, int64_t b, Span rows) {
    const Span there = common(rows, {0, tensor.shape[0]});
    if (there.is_empty()) return;
    const int64_t wide = tensor.size() / tensor.shape[0];
    S* const from = static_cast<S*>(tensor.numbers) + b * tensor.size();
    std::fill(from + there.from * wide, from + there.to * wide, S(0));
}

// The sums (batch, size) over the lattices that share a gradient.
template <class S>
void add_up(const TermTensor& out, int64_t batch, const double* sums) {
    const int64_t size = out.size(), own = out.is_shared ? batch : 1;
    S* const to = static_cast<S*>(out.numbers);
    for (int64_t b = 0; b < batch; b += own) {
        for (int64_t m = 0; m < size; ++m) {
            double sum = 0;
            for (int64_t k = 0; k < own; ++k) sum += sums[(b + k) * size + m];
            to[b * size + m] = S(sum);
        }
    }
}

}  // namespace

Gradients::Gradients(const RowsProblem& p, const TermTensor* out) : p(p), out(out) {
    for (int n = 0; n < p.scores_tensors; ++n) {
        bool is_direct = out[n].dims > 0 && !out[n].is_shared;
        int64_t offset = 0;
        for (int t = 0, found = 0; t < p.terms_count; ++t) {
            const RowTerm& term = p.terms[t];
            if (term.is_mask || term.tensor != n) continue;
            if (found++ == 0) offset = term.axes[0].offset;
            is_direct = is_direct && term.axes[0].follows == Follows::row && term.axes[0].offset == offset;
        }
        offsets.push_back(offset);
        direct.push_back(is_direct);
        sums.push_back(is_direct ? nullptr : zeros<double>(p.batch * out[n].size()));
    }
}

void Gradients::clear(int n, int64_t b, Span rows) const {
    p.is_double ? clear_rows<double>(out[n], b, rows) : clear_rows<float>(out[n], b, rows);
}

void Gradients::finish() const {
    for (int n = 0; n < p.scores_tensors; ++n) {
        const double* const own = sums[std::size_t(n)].get();
        if (!own) continue;
        p.is_double ? add_up<double>(out[n], p.batch, own) : add_up<float>(out[n], p.batch, own);
    }
}

Gradients::Own::Own(const Gradients& all, const Frame& f) : all(all), b(f.b) {
    for (int n = 0; n < all.p.scores_tensors; ++n) {
        const int64_t first = all.offsets[std::size_t(n)];
        if (!all.direct[std::size_t(n)]) continue;
        all.clear(n, b, {0, first});
        all.clear(n, b, {first + f.region.rows, all.out[n].shape[0]});
    }
}

void Gradients::Own::clear(Span rows) const {
    for (int n = 0; n < all.p.scores_tensors; ++n) {
        const int64_t offset = all.offsets[std::size_t(n)];
        if (all.direct[std::size_t(n)]) all.clear(n, b, {rows.from + offset, rows.to + offset});
    }
}

template <class Real>
void Gradients::Own::land(const Term& term, Span rows, Span span, Tile<const Real> masses) const {
    const int n = term.number();
    const TermTensor& to = all.out[n];
    if (!all.direct[std::size_t(n)]) {
        term.land(rows, span, masses, all.sums[std::size_t(n)].get() + b * to.size());
    } else if (all.p.is_double) {
        term.land(rows, span, masses, term.numbers<Real>(to));
    } else {
        term.land(rows, span, masses, term.numbers<float>(to));
    }
}

void Gradients::Own::land_one(const Term& term, int64_t i, int64_t j, double mass) const {
    const int n = term.number();
    const TermTensor& to = all.out[n];
    if (!all.direct[std::size_t(n)]) {
        term.land_one(i, j, mass, all.sums[std::size_t(n)].get() + b * to.size());
    } else if (all.p.is_double) {
        term.land_one(i, j, mass, term.numbers<double>(to));
    } else {
        term.land_one(i, j, mass, term.numbers<float>(to));
    }
}

template void Gradients::Own::land(const Term&, Span, Span, Tile<const float>) const;
template void Gradients::Own::land(const Term&, Span, Span, Tile<const double>) const;

}  // namespace row_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
