// How one of the edges into a node is chosen, whichever family they are of.
#pragma once

#include <cstdint>

#ifndef BELLMAX_ARCH
#error "compile with -DBELLMAX_ARCH=baseline or avx2"
#endif

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace node {

// Which of `count` edges a uniform number chooses, for probabilities that sum to `sum`; −1 if all are 0.
template <class R>
inline std::int64_t draw(const R* q, std::int64_t count, double sum, double uniform) {
    const double bar = uniform * sum;
    double below = 0;
    std::int64_t chosen = -1;
    for (std::int64_t k = 0; k < count && (chosen < 0 || below <= bar); ++k) {
        if (q[k] > 0) chosen = k;
        below += double(q[k]);
    }
    return chosen;
}

// Puts a score and how it came about into a list of k, best first, of equals the earlier first. False if it is too low.
template <class R, class Way>
inline bool insert(R* scores, Way* ways, std::int64_t k, R score, const Way& way) {
    if (!(score > scores[k - 1])) return false;
    std::int64_t place = k - 1;
    for (; place > 0 && score > scores[place - 1]; --place) {
        scores[place] = scores[place - 1];
        ways[place] = ways[place - 1];
    }
    scores[place] = score;
    ways[place] = way;
    return true;
}

}  // namespace node
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
