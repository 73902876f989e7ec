// An automaton as sweeps read it: the edges into each state, sorted, and members side by side in the lanes of a vector.
#pragma once

#include <cstdint>
#include <vector>

#include "../base/memory.h"
#include "../base/simd.h"
#include "automaton.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace automata {

using std::int32_t;
using std::int64_t;
using V = Vec<double>;
constexpr int lanes = lanes_of<double>;

// States have places, in an order in which ε-arcs lead forward. Numbers of places and of edges are matrices with a row
// for each of them and a column for each lane.
//
// Members that share an automaton need each number below once, others once for each lane (`copies`). Rows that only
// fill up a lane have arc −1 and a label that no path can use.
struct Plan {
    int copies;
    int64_t states, edges, labels;            // labels: those that arcs have, and then one that no path can use
    std::vector<int32_t> state_at, place_of;  // (states, copies)
    std::vector<int32_t> begin, middle;  // edges of a place: emitting from begin[p], ε from middle[p] to begin[p + 1]
    std::vector<int32_t> source, label, arc;  // (edges, copies); a source is a place, a label a row of `used`
    std::vector<int32_t> used;                // (labels, copies): labels of the user, −1 for none
    int64_t most_edges;                       // into a place
    int64_t depth;                            // arcs of the longest chain of ε-arcs

    // The greatest number of arcs of a path.
    int64_t longest(int64_t frames) const { return (frames + 1) * depth + frames; }
    int64_t copy(int64_t row, int lane) const { return row * copies + (copies > 1 ? lane : 0); }
};

// The plan of one automaton, or of one for each lane. `by_label` sorts the edges into a place by label.
Plan plan_of(const int32_t* const* automata, int count, int64_t arcs, int64_t states, int64_t labels, bool by_label);

// Members whose numbers are side by side. A lane without a member has length −1.
struct Group {
    int members;
    int64_t b[lanes], length[lanes], longest;
};

// The row of each lane in a table of rows.
template <bool is_shared>
inline V pick(const double* table, const int32_t* row) {
    if constexpr (is_shared) {
        return load(table + int64_t(row[0]) * lanes);
    } else {
        return V{table[int64_t(row[0]) * lanes], table[int64_t(row[1]) * lanes + 1], table[int64_t(row[2]) * lanes + 2],
                 table[int64_t(row[3]) * lanes + 3]};
    }
}

template <bool is_shared>
inline void add(double* table, const int32_t* row, V v) {
    if constexpr (is_shared) {
        double* const to = table + int64_t(row[0]) * lanes;
        store(to, load(to) + v);
    } else {
        for (int l = 0; l < lanes; ++l) table[int64_t(row[l]) * lanes + l] += v[l];
    }
}

}  // namespace automata
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
