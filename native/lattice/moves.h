// A table of moves as the sweeps read it; the compiler's where they are known to it.
#pragma once

#include <iterator>

#include "strips.h"
#include "lattice.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

struct Table {
    int states, moves = 0;
    Move move[most_moves] = {};                                 // by the states that they lead to
    int number[most_moves] = {};                                // in the list that they were given in
    int into[most_states + 1] = {};                             // the first move into each state
    int out[most_moves] = {}, first_out[most_states + 1] = {};  // the moves out of each state
    int64_t history = 0, reach = 0;                             // how many steps and rows back moves go
    int64_t pad = 0, height = 0;  // rows above a strip that are kept with it, and both together
    int64_t ring = 1;             // a power of two above `history` + 1

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
        while (ring <= history + 1) ring *= 2;
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

// How the score of a state or of a move is given: not at all, by few numbers that are shared along rows or columns, or
// for every cell.
enum class Kind { none, line, cell };

// Known at run time.
struct AnyTable {
    static constexpr bool is_known = false;
};

// Known to the compiler, with the kinds of the scores of states and moves.
template <class Program>
struct KnownTable : Program {
    static constexpr bool is_known = true;
    static constexpr int64_t no_end = std::numeric_limits<int64_t>::max();
    static constexpr Table table{Program::moves, int(std::size(Program::moves)), Program::states, no_end, no_end};

    static bool is(const Table& other, const Kind* kinds) {
        bool same = table.states == other.states && table.moves == other.moves;
        for (int m = 0; same && m < table.moves; ++m) {
            const Move &a = table.move[m], &b = other.move[m];
            same = a.di == b.di && a.dj == b.dj && a.from == b.from && a.to == b.to;
            same = same && table.number[m] == other.number[m];
        }
        return same && std::equal(std::begin(Program::kinds), std::end(Program::kinds), kinds);
    }
};

// Dynamic time warping, without and with penalties of its moves.
struct PlainWarping {
    static constexpr int states = 1;
    static constexpr Move moves[] = {{1, 1, 0, 0}, {1, 0, 0, 0}, {0, 1, 0, 0}};
    static constexpr Kind kinds[] = {Kind::cell, Kind::none, Kind::none, Kind::none};
};
struct PenalisedWarping : PlainWarping {
    static constexpr Kind kinds[] = {Kind::cell, Kind::line, Kind::line, Kind::line};
};

// Alignments with affine gaps: a pair, a row and a column without a partner.
struct AffineGaps {
    static constexpr int states = 3;
    static constexpr Move moves[] = {{1, 1, 0, 0}, {1, 1, 1, 0}, {1, 1, 2, 0}, {1, 0, 0, 1},
                                     {1, 0, 1, 1}, {0, 1, 0, 2}, {0, 1, 1, 2}, {0, 1, 2, 2}};
    static constexpr Kind kinds[] = {Kind::cell, Kind::none, Kind::none, Kind::none, Kind::none, Kind::none,
                                     Kind::line, Kind::line, Kind::line, Kind::line, Kind::line};
};

// Where a strip has cells of a set of them, which is counted from the first corner or from the last.
struct Places {
    static constexpr int64_t always = -1, never = -2;
    int64_t only, row, slope, rows;  // the one step with such a cell; at step t it is in that row + slope · t
    bool is_anywhere;

    LATTICE_APART Places(Place place, bool from_last, const Region& region, const Strip& strip)
        : only(always),
          row((from_last ? region.rows - 1 : 0) - strip.row),
          slope(0),
          rows(strip.rows),
          is_anywhere(place == Place::anywhere) {
        const int64_t column = (from_last ? region.columns - 1 : 0) - strip.first;
        if (place == Place::corner) only = row + column;
        if (place == Place::column) slope = 1, row = -column;
        if (!is_anywhere && slope == 0 && (row < 0 || row >= rows)) only = never;
    }
    Range at(int64_t t) const {
        if (only != always && only != t) return {0, -1};
        if (is_anywhere) return {0, rows - 1};
        const int64_t r = row + slope * t;
        return r >= 0 && r < rows ? Range{r, r} : Range{0, -1};
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
