// The order in which a lattice by a table is swept: wave by wave, cells of a wave side by side. A wave is a row if
// every move leads to a later one, else an anti-diagonal.
#pragma once

#include "../base/memory.h"
#include "region.h"
#include "table.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// One of the numbers that a node is the smoothed maximum of: a start, or a move from a wave `back` before, where it is
// `along` places further on.
struct Candidate {
    int move, from;  // move −1: a start
    int64_t back, along;
};

struct Table {
    static constexpr int most = most_moves + most_states;
    bool by_rows = true;
    int64_t history = 0;  // how many waves the longest move goes back
    Candidate candidates[most];
    int first[most_states + 1];  // of each state's

    explicit Table(const LatticeProblem& p) {
        for (int m = 0; m < p.moves; ++m) by_rows = by_rows && (p.table[m].di > 0 || p.table[m].dj == 0);
        int count = 0;
        for (int k = 0; k < p.states; ++k) {
            first[k] = count;
            if (p.starts.states >> k & 1) candidates[count++] = {-1, -1, 0, 0};
            for (int m = 0; m < p.moves; ++m) {
                const Move& move = p.table[m];
                if (move.to != k) continue;
                const int64_t back = by_rows ? move.di : move.di + move.dj, along = by_rows ? move.dj : move.di;
                candidates[count++] = {m, move.from, back, along};
                history = std::max(history, back);
            }
        }
        first[p.states] = count;
    }
};

// The places from `low` to `high` of a wave; none if high < low.
struct Span {
    int64_t low, high;

    int64_t count() const { return std::max<int64_t>(high - low + 1, 0); }
    Span within(Span other) const { return {std::max(low, other.low), std::min(high, other.high)}; }
    Span moved(int64_t along) const { return {low + along, high + along}; }
};

// The waves of one region: place p of wave w is cell (w, p) or, on anti-diagonals, (p, w − p).
class Waves {
    const Region region;
    const bool by_rows;
    Array<Span> spans;
    Array<int64_t> offsets;

    Span diagonal(int64_t w) const {
        Span span{std::max<int64_t>(0, w - region.columns + 1), std::min(region.rows - 1, w)};
        if (!region.has_band()) return span;
        // i (rows + columns − 2) is within `reach` of w (rows − 1): a division, then the test where rounding might
        // matter.
        const double scale = double(region.rows + region.columns - 2), middle = double(w) * double(region.rows - 1);
        span.low = std::max(span.low, int64_t((middle - region.reach) / scale) - 1);
        span.high = std::min(span.high, int64_t((middle + region.reach) / scale) + 1);
        while (span.low <= span.high && !region.inside(span.low, w - span.low)) ++span.low;
        while (span.low <= span.high && !region.inside(span.high, w - span.high)) --span.high;
        return span;
    }

public:
    const int64_t count;

    Waves(const Region& region, bool by_rows)
        : region(region),
          by_rows(by_rows),
          spans(scratch<Span>(region.rows + region.columns)),
          offsets(scratch<int64_t>(region.rows + region.columns)),
          count(by_rows ? region.rows : region.rows + region.columns - 1) {
        int64_t offset = 0;
        for (int64_t w = 0; w < count; ++w) {
            const Span span = by_rows ? Span{region.first(w), region.last(w)} : diagonal(w);
            spans[std::size_t(w)] = span;
            offsets[std::size_t(w)] = offset;
            offset += span.count();
        }
    }

    Span span(int64_t w) const { return spans[std::size_t(w)]; }
    // Where the numbers of a wave and state are, in an array of all nodes that has the waves one after the other.
    int64_t offset(int64_t w, int k, int states) const {
        return offsets[std::size_t(w)] * states + k * spans[std::size_t(w)].count();
    }
    int64_t row(int64_t w, int64_t p) const { return by_rows ? w : p; }
    int64_t column(int64_t w, int64_t p) const { return by_rows ? p : w - p; }

    // The places of a wave that are in a set of cells, counted from the first corner or from the last.
    Span at(Place place, int64_t w, bool from_last) const {
        const int64_t i = from_last ? region.rows - 1 : 0, j = from_last ? region.columns - 1 : 0;
        const Span none{0, -1}, all = span(w);
        const Span row = by_rows ? (w == i ? all : none) : Span{i, i};
        const Span column = by_rows ? Span{j, j} : Span{w - j, w - j};
        if (place == Place::anywhere) return all;
        if (place == Place::row) return all.within(row);
        if (place == Place::column) return all.within(column);
        return all.within(row).within(column);
    }

    // Scores along a wave: from `first`, that of place 0, in steps.
    struct Line {
        void* numbers;
        int64_t first, step;
    };
    Line line(const Scores& scores, int64_t b, int64_t w) const {
        const int64_t step = by_rows ? scores.column : scores.row - scores.column;
        return {scores.numbers, b * scores.batch + w * (by_rows ? scores.row : scores.column), step};
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
