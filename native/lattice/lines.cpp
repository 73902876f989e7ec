// Scores and masses by rows: whatever does not depend on the kind of nodes.
#include "lines.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

template <class Real>
Line<Real>::Line(const RowFrame& f, int score, const std::vector<Term>& all, int64_t rows, int weight_planes) : f(f) {
    const int m = score - f.p.states;
    is_move = m >= 0 && m < f.p.moves;
    is_start = score >= f.score_of_start(0) && score < f.score_of_end(0) &&
               (f.p.starts.place == Place::corner || f.p.starts.place == Place::column);
    for (const Term& term : all) {
        if (term.slot() != score) continue;
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
    weight = weight_planes ? RowBlock<Real>{raw.numbers + plane, stride} : raw;
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
    if (mask) mask->mask(rows, span, -infinity<Real>, raw);
    const bool is_cut = by_row && by_column && f.region.has_band();  // entries outside the band may be NaN
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

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
