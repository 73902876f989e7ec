// Scores of a row of cells from the tensors that they are read from, and masses of a row to their gradients.
#pragma once

#include <algorithm>

#include "../base/memory.h"
#include "../base/simd.h"
#include "rows.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace row_engine {

using std::int64_t;

// Columns, the last excluded.
struct Span {
    int64_t from, to;

    bool is_empty() const { return from >= to; }
    // Whole vectors that cover it.
    Span rounded(int64_t lanes) const { return {from / lanes * lanes, (to + lanes - 1) / lanes * lanes}; }
};

inline Span common(Span a, Span b) { return {std::max(a.from, b.from), std::min(a.to, b.to)}; }

// A term as one lattice reads it: the entry of a cell is at the place of its row plus the place of its column.
class Term {
    const RowTerm& own;
    const TermTensor& tensor;
    const int64_t b;
    int64_t strides[most_axes];
    Array<int64_t> places;                      // of columns, −1 where there is none
    Span columns{0, 0};                         // from the first that there is to the last
    bool is_straight = true, has_gaps = false;  // whether their places are consecutive, or some are not there

    static bool is_of_column(Follows by) { return by == Follows::column || by == Follows::label_of_column; }

    // The index along a dimension; −1 where there is none.
    int64_t index(int d, int64_t n) const {
        const TermAxis& axis = own.axes[d];
        int64_t at = axis.follows == Follows::nothing ? axis.place : n + axis.offset;
        if (axis.follows == Follows::label_of_row || axis.follows == Follows::label_of_column) {
            at = at >= 0 && at < axis.labels_count ? axis.labels[b * axis.labels_count + at] : -1;
        }
        return at < tensor.shape[d] ? at : -1;
    }
    int64_t place(bool of_column, int64_t n) const {
        int64_t sum = 0;
        for (int d = 0; d < tensor.dims; ++d) {
            if (is_of_column(own.axes[d].follows) != of_column) continue;
            const int64_t at = index(d, n);
            if (at < 0) return -1;
            sum += at * strides[d];
        }
        return sum;
    }

public:
    bool by_row = false, by_column = false;

    Term(const RowTerm& own, const TermTensor& tensor, int64_t b, int64_t count) : own(own), tensor(tensor), b(b) {
        int64_t stride = 1;
        for (int d = tensor.dims - 1; d >= 0; --d, stride *= tensor.shape[d + 1]) {
            strides[d] = stride;
            const Follows by = own.axes[d].follows;
            by_column |= is_of_column(by);
            by_row |= by == Follows::row || by == Follows::label_of_row;
        }
        if (!by_column) return;
        places = scratch<int64_t>(count);
        columns = {count, 0};
        for (int64_t j = 0; j < count; ++j) {
            const int64_t at = places[std::size_t(j)] = place(true, j);
            if (at < 0) continue;
            has_gaps = has_gaps || (!columns.is_empty() && columns.to < j);
            is_straight = is_straight && !has_gaps && (columns.is_empty() || at == places[std::size_t(j - 1)] + 1);
            columns = {std::min(columns.from, j), j + 1};
        }
    }

    int score() const { return own.score; }
    int number() const { return own.tensor; }
    bool is_mask() const { return own.is_mask; }
    // The numbers of this lattice, in a tensor of the same shape.
    template <class S>
    S* numbers(const TermTensor& like) const {
        return static_cast<S*>(like.numbers) + (like.is_shared ? 0 : b * tensor.size());
    }

    // Adds the entries of row i, or sets them where they are the first; all columns have the same if none is named.
    template <class S, class Real>
    void read(const S* from, int64_t i, Span span, Real missing, bool is_first, Real* __restrict line) const {
        const Real scale = Real(own.coefficient);
        const auto take = [=](Span part, auto entry) __attribute__((always_inline)) {
            if (is_first) {
                for (int64_t j = part.from; j < part.to; ++j) line[j] = entry(j);
            } else {
                for (int64_t j = part.from; j < part.to; ++j) line[j] += entry(j);
            }
        };
        const int64_t base = place(false, i);
        if (!by_column || base < 0) {
            const Real x = base < 0 ? missing : scale * Real(from[base]);
            return take(span, [=](int64_t) { return x; });
        }
        const Span there = common(span, columns);
        if (there.is_empty()) return take(span, [=](int64_t) { return missing; });
        take({span.from, there.from}, [=](int64_t) { return missing; });
        take({there.to, span.to}, [=](int64_t) { return missing; });
        const int64_t* const at = places.get();
        const S* const row = from + base;
        if (is_straight) {
            const S* const straight = row + at[there.from] - there.from;
            take(there, [=](int64_t j) { return scale * Real(straight[j]); });
        } else if (!has_gaps) {
            take(there, [=](int64_t j) { return scale * Real(row[at[j]]); });
        } else {
            take(there, [=](int64_t j) { return at[j] < 0 ? missing : scale * Real(row[at[j]]); });
        }
    }
    // Asks for the entries of a row that will be read soon, if they are too far apart for the processor to foresee.
    template <class S>
    void fetch(const S* from, int64_t i, Span span) const {
        if (is_straight || columns.is_empty() || strides[0] < 4 * (columns.to - columns.from)) return;
        const Span there = common(span, columns);
        const int64_t base = place(false, i);
        for (int64_t j = there.from; base >= 0 && j < there.to; ++j) {
            if (places[std::size_t(j)] >= 0) __builtin_prefetch(from + base + places[std::size_t(j)]);
        }
    }
    // Sets −∞ where a mask is not set.
    template <class Real>
    void mask(int64_t i, Span span, Real* line) const {
        const bool* const from = numbers<const bool>(tensor);
        const int64_t base = place(false, i);
        for (int64_t j = span.from; j < span.to; ++j) {
            const int64_t at = by_column ? places[std::size_t(j)] : 0;
            if (base < 0 || at < 0 || !from[base + at]) line[j] = -infinity<Real>;
        }
    }
    // Adds the masses of row i, whole vectors, to a gradient.
    template <class Real, class Out>
    void land(int64_t i, Span span, const Real* __restrict line, Out* __restrict to) const {
        const int64_t base = place(false, i);
        if (base < 0) return;
        const Real scale = Real(own.coefficient);
        if (!by_column) {
            const Span whole = span.rounded(lanes_of<Real>);
            Vec<Real> sum{};
            for (int64_t j = whole.from; j < whole.to; j += lanes_of<Real>) sum += load<Real>(line + j);
            to[base] += Out(scale * sum_lanes<Real>(sum)[0]);
            return;
        }
        const Span there = common(span, columns);
        if (there.is_empty()) return;
        const int64_t* const at = places.get();
        if (is_straight) {
            Out* const straight = to + base + at[there.from] - there.from;
            for (int64_t j = there.from; j < there.to; ++j) straight[j] += Out(scale * line[j]);
        } else {
            for (int64_t j = there.from; j < there.to; ++j) {
                if (at[j] >= 0) to[base + at[j]] += Out(scale * line[j]);
            }
        }
    }
};

}  // namespace row_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
