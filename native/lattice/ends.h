// The ends of a lattice: a list of their values, and the maximum over them; walks from an end to a start.
#pragma once

#include <functional>

#include "../base/memory.h"
#include "../node.h"
#include "moves.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

// Where ends are in the list.
struct EndList {
    Ends ends;
    int64_t rows, columns;
    int count = 0;  // of the states

    EndList(Ends ends, int64_t rows, int64_t columns) : ends(ends), rows(rows), columns(columns) {
        for (int a = 0; a < most_states; ++a) count += int(ends.states >> a & 1);
    }
    bool by_row() const { return ends.place == Place::column || ends.place == Place::anywhere; }
    bool by_column() const { return ends.place == Place::row || ends.place == Place::anywhere; }
    int64_t cells() const { return (by_row() ? rows : 1) * (by_column() ? columns : 1); }
    // The e-th of the states in cell (i, j). States come one after the other, as in the graph, so that ties break
    // alike.
    int64_t position(int64_t i, int64_t j, int e) const {
        const int64_t row = by_row() ? i * (by_column() ? columns : 1) : 0;
        return e * cells() + row + (by_column() ? j : 0);
    }
    // Cell and state of a position; i and j keep what they are where all ends have them in common.
    void find(int64_t position, int64_t& i, int64_t& j, int& state) const {
        const int64_t cell = position % cells();
        if (by_row()) i = by_column() ? cell / columns : cell;
        if (by_column()) j = cell % columns;
        int64_t e = position / cells();
        for (state = 0; state < most_states - 1 && (!(ends.states >> state & 1) || e-- > 0);) ++state;
    }
    // Whole vectors.
    int64_t size() const { return (cells() * count + lanes_of<double> - 1) / lanes_of<double> * lanes_of<double>; }
    // A single one needs no maximum.
    bool is_single(const Region& region) const {
        int64_t cells = by_row() || by_column() ? 0 : 1;
        for (int64_t i = by_row() ? 0 : region.rows - 1; i < region.rows; ++i) {
            if (by_column()) cells += region.last(i) + 1 - region.first(i);
            if (ends.place == Place::column) cells += region.last(i) == region.columns - 1;
        }
        return count == 1 && cells == 1;
    }
};

// False for NaN and for a value that is above the greatest number of its type.
inline bool is_number(double value, bool is_double) {
    return value <= (is_double ? std::numeric_limits<double>::max() : double(std::numeric_limits<float>::max()));
}

// The maximum over values x in Ω's unit, whole vectors with −∞ where there is no end, and their masses q. If y
// holds the tangents of x, it is replaced by the tangents of the masses.
double solve_ends(const OmegaParameters& parameters, bool is_single, const double* x, int64_t size, double seed,
                  double* q, double* y);

// Where a walk from an end to a start is, and how many nodes of its path come after.
struct Walker {
    int64_t i, j, taken;
    int state;
};

// Called for each node of a path: the number of the draw, the node, and the move into it, −1 for a start.
using Visit = std::function<void(int64_t draw, const Walker& at, int move)>;

// Places a walker at an end that a uniform number chooses. False if there is no path.
bool draw_end(const OmegaParameters&, const EndList&, bool is_single, const double* end_values, double uniform,
              Walker& at);

// The number of the candidate that a uniform number chooses by the probabilities q.
inline int drawn(const double* q, int count, double uniform) {
    double sum = 0;
    for (int n = 0; n < count; ++n) sum += q[n];
    return int(node::draw(q, count, sum, uniform));
}

// Goes to the source of a candidate of a node, which are the start, if there is one, and the moves into the node; to
// row −1 from a start. Calls visit(at, move) first, with a move of the table or −1.
template <class Action>
void step_back(const Table& table, bool has_start, int candidate, Walker& at, Action visit) {
    const int m = candidate < has_start ? -1 : table.into[at.state] + candidate - has_start;
    visit(at, m);
    if (m < 0) {
        at.i = -1;
    } else {
        at = {at.i - table.move[m].di, at.j - table.move[m].dj, at.taken + 1, table.move[m].from};
    }
}

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
