// Scores of rows of cells from the tensors that they are read from, and masses of rows to their gradients.
#pragma once

#include <algorithm>

#include "../base/memory.h"
#include "../base/simd.h"
#include "lattice.h"
#include "region.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

using std::int64_t;

// Columns, or rows, the last excluded.
struct Span {
    int64_t from, to;

    bool is_empty() const { return from >= to; }
    int64_t size() const { return to - from; }
    // Whole vectors that cover it.
    Span rounded(int64_t lanes) const { return {from / lanes * lanes, (to + lanes - 1) / lanes * lanes}; }
};

inline Span common(Span a, Span b) { return {std::max(a.from, b.from), std::min(a.to, b.to)}; }
inline Span both(Span a, Span b) { return {std::min(a.from, b.from), std::max(a.to, b.to)}; }

// Numbers by row and column: row after row, or one row for all if `stride` is 0.
template <class Real>
struct RowBlock {
    Real* numbers;
    int64_t stride;

    Real* row(int64_t r) const { return numbers + r * stride; }
};

// A term as one lattice reads it: the entry of a cell is at the place of its row plus the place of its column.
class Term {
    const SlotTerm& own;
    const double coefficient;
    const TermTensor& tensor;
    const int64_t b;
    int64_t strides[most_axes];
    int row_axis = -1;               // the one that rows have their place by, if they have by no other
    int64_t fixed = 0;               // and the place that all of them have by the rest
    Array<int64_t> places;           // of columns, −1 where there is none
    Span columns{0, 0}, used{0, 0};  // from the first that there is to the last, and so their places
    bool is_straight = true;         // whether these are consecutive
    Array<float> turned;             // a group of rows by place and row, then a vector for no place
    Array<int64_t> vectors;          // where the vectors of columns begin in it

    static bool is_of_column(Follows by) { return by == Follows::column || by == Follows::label_of_column; }

    // The index along a dimension; −1 where there is none.
    int64_t index(int d, int64_t n) const {
        const TermAxis& axis = own.axes[d];
        int64_t at = axis.follows == Follows::nothing ? axis.constant : n + axis.offset;
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

    // The place of a row, −1 if it has none.
    int64_t place_of(int64_t i) const {
        if (row_axis < 0) return place(false, i);
        const int64_t at = i + own.axes[row_axis].offset;
        return fixed >= 0 && at >= 0 && at < tensor.shape[row_axis] ? fixed + at * strides[row_axis] : -1;
    }
    void find_row_axis() {
        for (int d = 0; d < tensor.dims; ++d) {
            const Follows by = own.axes[d].follows;
            if (by == Follows::label_of_row || (by == Follows::row && row_axis >= 0)) {
                row_axis = -1;
                return;
            }
            if (by == Follows::row) row_axis = d;
            const int64_t at = by == Follows::nothing ? index(d, 0) : 0;
            fixed = fixed < 0 || at < 0 ? -1 : fixed + at * strides[d];
        }
    }

public:
    bool by_row = false, by_column = false;

    // `scale` multiplies the coefficient; `count` is the number of columns.
    Term(const SlotTerm& own, const TermTensor& tensor, int64_t b, int64_t count, double scale)
        : own(own), coefficient(scale * own.coefficient), tensor(tensor), b(b) {
        int64_t stride = 1;
        for (int d = tensor.dims - 1; d >= 0; --d, stride *= tensor.shape[d + 1]) {
            strides[d] = stride;
            const Follows by = own.axes[d].follows;
            by_column |= is_of_column(by);
            by_row |= by == Follows::row || by == Follows::label_of_row;
        }
        find_row_axis();
        if (!by_column) return;
        places = scratch<int64_t>(count);
        columns = {count, 0};
        used = {tensor.size(), 0};
        for (int64_t j = 0; j < count; ++j) {
            const int64_t at = places[std::size_t(j)] = place(true, j);
            if (at < 0) continue;
            is_straight = is_straight && (columns.is_empty() || (columns.to == j && at == used.to));
            columns = both(columns, {j, j + 1});
            used = both(used, {at, at + 1});
        }
        // Worth turning where many columns share few places.
        if (is_straight || !by_row || used.size() > 2 * columns.size()) return;
        const int64_t none = up_to_groups(used.size());
        turned = scratch<float>((none + 1) * group);
        vectors = scratch<int64_t>(up_to_groups(count));
        for (int64_t j = 0; j < up_to_groups(count); ++j) {
            const int64_t at = j < count ? places[std::size_t(j)] : -1;
            vectors[std::size_t(j)] = (at < 0 ? none : at - used.from) * group;
        }
    }

    int slot() const { return own.slot; }
    int number() const { return own.tensor; }
    bool is_mask() const { return own.is_mask; }
    bool follows_rows() const { return row_axis >= 0; }
    // The numbers of this lattice, in a tensor of the same shape.
    template <class S>
    S* numbers(const TermTensor& like) const {
        return static_cast<S*>(like.numbers) + (like.is_shared ? 0 : b * tensor.size());
    }

    // Adds the entries of some rows, or sets them if they are the first; all columns have the same if none is named.
    template <class S, class Real>
    void read(const S* from, Span rows, Span span, Real missing, bool is_first, RowBlock<Real> to) const {
        if constexpr (sizeof(S) == 4 && sizeof(Real) == 4) {
            if (turned && read_turned(from, rows, span, missing, is_first, to)) return;
        }
        for (int64_t i = rows.from; i < rows.to; ++i) {
            read_row(from, i, span, missing, is_first, to.row(i - rows.from));
        }
    }
    // Whether its rows are read where another term's are.
    bool is_beside(const Term& other) const {
        return !by_column && other.turned && other.number() == number() && other.row_axis == row_axis;
    }
    // Asks for the entries of a row that will be read soon.
    template <class S>
    void fetch(const S* from, int64_t i, Span span) const {
        const int64_t base = place_of(i);
        if (base < 0) return;
        const S* const row = from + base;
        if (!by_column) return __builtin_prefetch(row);
        const Span there = common(span, columns);
        if (there.is_empty()) return;
        if (is_straight || turned) {
            const Span own =
                turned ? used : Span{places[std::size_t(there.from)], places[std::size_t(there.to - 1)] + 1};
            constexpr int64_t step = 64 / int64_t(sizeof(S));  // a line of the cache
            for (int64_t at = own.from; at < own.to + step - 1; at += step) __builtin_prefetch(row + at);
            return;
        }
        for (int64_t j = there.from; j < there.to; ++j) {
            if (places[std::size_t(j)] >= 0) __builtin_prefetch(row + places[std::size_t(j)]);
        }
    }
    // Sets `forbidden` where a mask is false.
    template <class Real>
    void mask(Span rows, Span span, Real forbidden, RowBlock<Real> to) const {
        const bool* const from = numbers<const bool>(tensor);
        for (int64_t i = rows.from; i < rows.to; ++i) {
            const int64_t base = place_of(i);
            Real* const line = to.row(i - rows.from);
            for (int64_t j = span.from; j < span.to; ++j) {
                const int64_t at = by_column ? places[std::size_t(j)] : 0;
                if (base < 0 || at < 0 || !from[base + at]) line[j] = forbidden;
            }
        }
    }
    // Adds the mass of a cell to a gradient.
    template <class Out>
    void land_one(int64_t i, int64_t j, double mass, Out* to) const {
        const int64_t base = place_of(i), at = by_column ? places[std::size_t(j)] : 0;
        if (base >= 0 && at >= 0) to[base + at] += Out(coefficient * mass);
    }
    // Raises the entry that a cell reads to a score, if it is lower.
    template <class Out>
    void raise(int64_t i, int64_t j, double score, Out* to) const {
        const int64_t base = place_of(i), at = by_column ? places[std::size_t(j)] : 0;
        if (base >= 0 && at >= 0) to[base + at] = std::max(to[base + at], Out(score));
    }
    // Adds the masses of some rows, whole vectors, to a gradient.
    template <class Real, class Out>
    void land(Span rows, Span span, RowBlock<const Real> from, Out* to) const {
        if constexpr (sizeof(Out) == 4 && sizeof(Real) == 4) {
            if (turned && land_turned(rows, span, from, to)) return;
        }
        for (int64_t i = rows.from; i < rows.to; ++i) land_row(i, span, from.row(i - rows.from), to);
    }

private:
    template <class S, class Real>
    void read_row(const S* from, int64_t i, Span span, Real missing, bool is_first, Real* __restrict line) const {
        const Real scale = Real(coefficient);
        const int64_t base = place_of(i);
        if (!by_column) {
            const Real x = base < 0 ? missing : scale * Real(from[base]);
            if (is_first && span.size() == lanes_of<Real>) return store<Real>(line + span.from, broadcast<Real>(x));
            if (is_first) std::fill(line + span.from, line + span.to, x);
            for (int64_t j = span.from; !is_first && j < span.to; ++j) line[j] += x;
            return;
        }
        const auto take = [=](Span part, auto entry) __attribute__((always_inline)) {
            if (is_first) {
                for (int64_t j = part.from; j < part.to; ++j) line[j] = entry(j);
            } else {
                for (int64_t j = part.from; j < part.to; ++j) line[j] += entry(j);
            }
        };
        const Span there = common(span, columns);
        if (base < 0 || there.is_empty()) return take(span, [=](int64_t) { return missing; });
        take({span.from, there.from}, [=](int64_t) { return missing; });
        take({there.to, span.to}, [=](int64_t) { return missing; });
        const int64_t* const at = places.get();
        const S* const row = from + base;
        if (is_straight) {
            const S* const straight = row + at[there.from] - there.from;
            take(there, [=](int64_t j) { return scale * Real(straight[j]); });
        } else {
            take(there, [=](int64_t j) { return at[j] < 0 ? missing : scale * Real(row[at[j]]); });
        }
    }
    template <class Real, class Out>
    void land_row(int64_t i, Span span, const Real* __restrict line, Out* __restrict to) const {
        const int64_t base = place_of(i);
        if (base < 0) return;
        const Real scale = Real(coefficient);
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

    // --- a group of rows at a time: the numbers of a place in all of them are a vector

    // Where each of a group of rows begins, the last of them again if there are fewer; false if one does not.
    template <class S>
    bool begins(S* from, Span rows, S** row) const {
        for (int64_t r = 0; r < group; ++r) {
            const int64_t base = place_of(std::min(rows.from + r, rows.to - 1));
            if (base < 0) return false;
            row[r] = from + base + used.from;
        }
        return rows.size() <= group;
    }
    // Where the vectors of a group of columns begin; those outside the span have the one for no place, from `room`.
    const int64_t* vectors_of(int64_t j, Span span, int64_t* room) const {
        const int64_t* const all = vectors.get() + j;
        if (j >= span.from && j + group <= span.to) return all;
        for (int64_t k = 0; k < group; ++k) {
            room[k] = j + k >= span.from && j + k < span.to ? all[k] : up_to_groups(used.size()) * group;
        }
        return room;
    }
    bool read_turned(const float* from, Span rows, Span span, float missing, bool is_first, RowBlock<float> to) const {
        const float* row[group];
        const float scale = float(coefficient);
        if (!begins(from, rows, row)) return false;
        for (int64_t n = 0; n < used.size(); n += group) {
            Vec<float> v[group];
#pragma GCC unroll 8
            for (int r = 0; r < group; ++r) v[r] = scale * load_some(row[r] + n, used.size() - n);
            transpose(v);
#pragma GCC unroll 8
            for (int k = 0; k < group; ++k) store<float>(turned.get() + (n + k) * group, v[k]);
        }
        store<float>(turned.get() + up_to_groups(used.size()) * group, broadcast(missing));
        for (int64_t j = span.from / group * group; j < span.to; j += group) {
            int64_t room[group];
            const int64_t* const at = vectors_of(j, span, room);
            Vec<float> v[group];
#pragma GCC unroll 8
            for (int k = 0; k < group; ++k) v[k] = load<float>(turned.get() + at[k]);
            transpose(v);
            for (int64_t r = 0; r < rows.size(); ++r) {
                float* const line = to.row(r) + j;
                store<float>(line, is_first ? v[r] : load<float>(line) + v[r]);
            }
        }
        return true;
    }
    bool land_turned(Span rows, Span span, RowBlock<const float> from, float* to) const {
        float* row[group];
        const float scale = float(coefficient);
        if (!begins(to, rows, row)) return false;
        span = common(span, columns);
        std::fill_n(turned.get(), (up_to_groups(used.size()) + 1) * group, 0.0f);
        for (int64_t j = span.from / group * group; j < span.to; j += group) {
            int64_t room[group];
            const int64_t* const at = vectors_of(j, span, room);
            Vec<float> v[group];
#pragma GCC unroll 8
            for (int64_t r = 0; r < group; ++r) v[r] = r < rows.size() ? load<float>(from.row(r) + j) : Vec<float>{};
            transpose(v);
#pragma GCC unroll 8
            for (int k = 0; k < group; ++k) {
                float* const own = turned.get() + at[k];
                store<float>(own, load<float>(own) + v[k]);
            }
        }
        for (int64_t n = 0; n < used.size(); n += group) {
            Vec<float> v[group];
#pragma GCC unroll 8
            for (int k = 0; k < group; ++k) v[k] = scale * load<float>(turned.get() + (n + k) * group);
            transpose(v);
            for (int64_t r = 0; r < rows.size(); ++r) {
                const int64_t count = used.size() - n;
                store_some<float>(row[r] + n, load_some(row[r] + n, count) + v[r], count);
            }
        }
        return true;
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
