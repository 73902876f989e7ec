// A table of moves as the sweeps read it; the compiler's where they are known to it.
#pragma once

#include "strips.h"
#include "table.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace table_engine {

struct Table {
    int states, moves = 0;
    Move move[most_moves] = {};                                 // by the states that they lead to
    int number[most_moves] = {};                                // in the list that they were given in
    int into[most_states + 1] = {};                             // the first move into each state
    int out[most_moves] = {}, first_out[most_states + 1] = {};  // the moves out of each state
    int64_t history = 0, reach = 0;                             // how many steps and rows back moves go
    int64_t pad = 0, height = 0;  // rows above a strip that are kept with it, and both together
    int64_t ring = 1;             // a power of two above `history`

    // Moves that are longer than the lattice have no source.
    constexpr Table(const Move* list, int count, int states, int64_t rows, int64_t columns) : states(states) {
        for (int k = 0; k < states; ++k) {
            into[k] = moves;
            for (int m = 0; m < count; ++m) {
                if (list[m].to != k || list[m].di >= rows || list[m].dj >= columns) continue;
                move[moves] = list[m];
                number[moves++] = m;
                history = std::max(history, list[m].di + list[m].dj);
                reach = std::max(reach, list[m].di);
            }
        }
        into[states] = moves;
        int n = 0;
        for (int k = 0; k < states; ++k) {
            first_out[k] = n;
            for (int m = 0; m < moves; ++m) {
                if (move[m].from == k) out[n++] = m;
            }
        }
        first_out[states] = n;
        pad = (reach + group - 1) / group * group;
        height = pad + strip_rows;
        while (ring <= history) ring *= 2;
    }

    // Rows of a strip that those below look back to.
    constexpr int64_t lines() const { return std::min(reach, strip_rows); }
    constexpr int64_t back(int m) const { return move[m].di + move[m].dj; }

    // How many numbers are kept for the sweep back: which nodes were right, the last rows of every strip, and the
    // steps before each chunk.
    constexpr int64_t tape_size(int64_t rows, int64_t columns) const {
        const int64_t strips = (rows + strip_rows - 1) / strip_rows;
        return 1 + strips * states * (lines() * columns + chunks(columns) * history * strip_rows);
    }
    static constexpr int64_t chunks(int64_t columns) {
        return (columns + strip_rows - 1 + chunk_steps - 1) / chunk_steps;
    }
};

// Known at run time.
struct AnyTable {
    Table table;
};

// Cells of a strip at one step, rows from `low` to `high`.
struct Range {
    int64_t low, high;
    bool has(int64_t r, int64_t count) const { return r <= high && r + count > low; }
};

// Those that are in a set of cells, counted from the first corner or from the last.
inline Range cells_at(Place place, bool from_last, const Region& region, const Strip& strip, int64_t t) {
    const int64_t row = (from_last ? region.rows - 1 : 0) - strip.row;
    const int64_t column = strip.first + t - (from_last ? region.columns - 1 : 0);
    const Range none{0, -1};
    if (place == Place::anywhere) return {0, strip.rows - 1};
    if (place == Place::corner && row != column) return none;
    const int64_t r = place == Place::column ? column : row;
    return r >= 0 && r < strip.rows ? Range{r, r} : none;
}

}  // namespace table_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
