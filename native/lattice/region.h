// The cells of a grid that paths may pass: rows and columns up to their lengths, in a band around the diagonal.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "../omega/omega.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {

using std::int64_t;

constexpr int64_t group = 8;  // rows and columns come in multiples of it

constexpr int64_t up_to_groups(int64_t n) { return (n + group - 1) / group * group; }

// A summary of the scores that the forward sweep read.
struct Seen {
    double greatest = 0;  // of the finite magnitudes
    bool bad = false;     // +∞ or NaN

    void add(const Seen& other) {
        greatest = std::max(greatest, other.greatest);
        bad = bad || other.bad;
    }
};

struct Region {
    int64_t rows, columns;
    double reach;  // |i (columns − 1) − j (rows − 1)| ≤ reach

    Region(const int64_t* lengths, double band) : rows(lengths[0]), columns(lengths[1]) {
        reach = std::max(band, 0.5) * double(std::max(rows, columns) - 1);
        // If the band holds every cell, leave it out: first() and last() would overflow for a huge one.
        const bool holds_all = !(reach < double(rows - 1) * double(columns - 1));
        if (rows <= 1 || columns <= 1 || holds_all) reach = infinity<double>;
    }

    static Region nowhere() {
        const int64_t none[2] = {0, 0};
        return Region(none, infinity<double>);
    }
    bool has_band() const { return reach < infinity<double>; }
    bool inside(int64_t i, int64_t j) const {
        return std::abs(double(i) * double(columns - 1) - double(j) * double(rows - 1)) <= reach;
    }
    // The first and the last column of a row: a division, then the test itself, which at most three columns fail. The
    // band is so wide that every row has a column in it.
    int64_t first(int64_t i) const {
        if (!has_band()) return 0;
        int64_t j = std::max<int64_t>(0, int64_t((double(i) * double(columns - 1) - reach) / double(rows - 1)) - 1);
        while (!inside(i, j)) ++j;
        return j;
    }
    int64_t last(int64_t i) const {
        if (!has_band()) return columns - 1;
        const double bound = (double(i) * double(columns - 1) + reach) / double(rows - 1) + 1;
        int64_t j = bound < double(columns - 1) ? int64_t(bound) : columns - 1;
        while (!inside(i, j)) --j;
        return j;
    }
};

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
