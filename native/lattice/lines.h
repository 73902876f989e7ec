// The scores of rows of cells, as the nodes of a lattice want them, and where the masses of nodes and moves land.
#pragma once

#include <vector>

#include "ends.h"
#include "gradients.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// One of the batch.
struct RowFrame {
    const LatticeProblem& p;
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

// Where a tile has vectors of numbers.
struct Filled {
    int64_t rows;
    Span whole;
};

// One score by row and column, as it is and its direction; and room for it as a weight of nodes, if that is more than
// one number. Without an entry for each column there is one vector for all. None of it is there if the score is 0.
template <class Real>
class Line {
    static constexpr int W = lanes_of<Real>;

    const RowFrame& f;
    std::vector<const Term*> terms;
    const Term* mask = nullptr;
    bool is_move, is_start, by_row = false, by_column = false;
    Array<Real> room;

public:
    RowBlock<Real> raw{nullptr, 0}, weight{nullptr, 0}, z{nullptr, 0};
    int64_t plane = 0, step = 0;  // numbers of a plane of the weight; column & step is where a column is
    Seen seen;

    // For so many rows at a time.
    Line(const RowFrame& f, int score, const std::vector<Term>& all, int64_t rows, int weight_planes);

    bool is_read() const { return !terms.empty(); }
    // Whether it has numbers that differ from row to row.
    bool changes() const { return raw.numbers && by_row; }

    // The numbers of some rows. Those outside the rows are some number or other. Returns where they are.
    Filled read(Span rows, Span span, bool looks);
    // Adds masses to the gradients of all that is read.
    template <class Mass>
    void land(const LatticeGradients& gradients, Span rows, Span span, RowBlock<const Mass> masses) const {
        for (const Term* const term : terms) gradients.land(*term, rows, span, masses);
    }

    void land_one(const LatticeGradients& gradients, int64_t i, int64_t j, double mass) const {
        for (const Term* const term : terms) gradients.land_one(*term, i, j, mass);
    }

private:
    template <class S>
    void fill(Span rows, Span span);
    void look(int64_t rows, Span whole);
    // Rows without a gap between them are a long one.
    Filled joined(int64_t rows, Span whole) const {
        return whole.size() == raw.stride ? Filled{1, {0, rows * raw.stride}} : Filled{rows, whole};
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
