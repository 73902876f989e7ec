// The scores of one row of cells, as the nodes of a lattice want them.
#pragma once

#include <vector>

#include "../table/ends.h"
#include "terms.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace row_engine {

using table_engine::Region;

// One of the batch.
struct Frame {
    const RowsProblem& p;
    const int64_t b;
    const Region region;
    double* const tape;
    const TermTensor* const z;  // a direction, or none

    Span columns(int64_t i) const { return {region.first(i), region.last(i) + 1}; }
    int score_of_start(int a) const { return p.states + p.moves + a; }
    int score_of_end(int a) const { return 2 * p.states + p.moves + a; }
    // Whether row i has cells of a place, counted from the first corner or from the last.
    bool has(const Ends& ends, bool from_last, int64_t i) const {
        const bool is_of_rows = ends.place == Place::column || ends.place == Place::anywhere;
        return is_of_rows || i == (from_last ? region.rows - 1 : 0);
    }
    // Its columns among them.
    Span cells(const Ends& ends, bool from_last, int64_t i) const {
        const bool is_all = ends.place == Place::row || ends.place == Place::anywhere;
        const int64_t one = from_last ? region.columns - 1 : 0;
        return is_all ? columns(i) : common(columns(i), {one, one + 1});
    }
};

// What was seen of a score: whether an entry was not below +∞, and the greatest finite magnitude.
struct Seen {
    bool bad = false;
    double greatest = 0;
};

// One score by column: as it is, as a weight of nodes, and its direction. Without an entry for each column there is one
// vector for all. None of it is there if the score is 0.
template <class P>
class Line {
    using Real = typename P::Real;
    using V = Vec<Real>;
    static constexpr int W = lanes_of<Real>;

    const Frame& f;
    const int score;
    std::vector<const Term*> terms;
    const Term* mask = nullptr;
    bool is_move, is_start, by_row = false, by_column = false;
    Array<Real> room;

public:
    const Real *raw = nullptr, *weight = nullptr, *z = nullptr;
    int64_t plane = 0, step = 0;  // between planes of the weight; column & step is where a column is
    Seen seen;

    Line(const Frame& f, int score, const std::vector<Term>& all) : f(f), score(score) {
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
        plane = by_column ? (f.p.columns + W - 1) / W * W : W;
        step = by_column ? -1 : 0;
        room = zeros<Real>((2 + P::line_planes) * plane);
        raw = room.get();
        weight = raw + plane;
        z = raw + (1 + P::line_planes) * plane;
    }
    bool is_read() const { return !terms.empty(); }

    // Whether it has numbers that differ from row to row.
    bool changes() const { return raw && by_row; }

    // The numbers of row i. Lanes outside the row hold some number or other. Row `next` will be read soon.
    template <bool looks>
    void read(const P& cells, int64_t i, Span span, int64_t next) {
        if (!raw) return;
        if (!by_row) span = {0, f.region.columns};
        if (!by_column) span = {0, W};
        if (span.is_empty()) return;
        f.p.is_double ? fill<double>(i, span, next) : fill<float>(i, span, next);
        const Span whole = span.rounded(W);
        const V least = V{} - infinity<Real>, most = V{} + infinity<Real>;
        V greatest{};
        auto bad = most < most;
        Real *const to = room.get() + plane, *const along = to + P::line_planes * plane;
        for (int64_t j = whole.from; j < whole.to; j += W) {
            const V x = load<Real>(raw + j);
            store<Real>(to + j, x);
            cells.prepare(to + j, plane);
            if (looks) {
                bad |= !(x < most);
                const V finite = x > least ? bellmax::greater<Real>(x, -x) : V{};
                if (sizeof(Real) == 4) greatest = bellmax::greater<Real>(greatest, finite);
            }
            if (P::has_dots) store<Real>(along + j, x > least ? load<Real>(along + j) : V{});
        }
        if (!looks) return;
        seen.bad = seen.bad || any(bad);
        seen.greatest = std::max(seen.greatest, double(greatest_lane<Real>(greatest)[0]));
    }

    // Adds masses to the gradients of all that is read, which are of the type Out or summed in doubles.
    template <class Gradients>
    void land(Gradients& gradients, int64_t i, Span span, const Real* masses) const {
        for (const Term* const term : terms) gradients.land(*term, i, span, masses);
    }

private:
    template <class S>
    void fill(int64_t i, Span span, int64_t next) {
        const Real missing = is_move ? -infinity<Real> : Real(0);
        Real *const line = room.get(), *const along = line + (1 + P::line_planes) * plane;
        if (terms.empty()) std::fill(line + span.from, line + span.to, Real(0));
        for (const Term* const term : terms) {
            const bool is_first = term == terms.front();
            const S* const numbers = term->numbers<const S>(f.p.tensors[term->number()]);
            term->fetch(numbers, next, span);
            term->read(numbers, i, span, missing, is_first, line);
            if (P::has_dots) term->read(term->numbers<const S>(f.z[term->number()]), i, span, Real(0), is_first, along);
        }
        if (mask) mask->mask(i, span, line);
        const int64_t from = std::max<int64_t>(span.from, 1);
        if (is_start) std::fill(line + from, line + std::max(span.to, from), -infinity<Real>);
    }
};

}  // namespace row_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
