// One smoothed max over the edges into a node, and what follows from it, for several nodes at once; and how one of the
// edges is chosen. For every family.
//
// Numbers of edges are a matrix: a row an edge, a column a node. x are scores, q and s are as Ω has them
// (omega/omega.h), y is the change of x along a direction. Numbers of nodes are one a column. A column that only fills
// up a vector has x = −∞, and so q = s = 0; its other numbers are arbitrary.
#pragma once

#include <cstdint>
#include <memory>

#include "omega/omega.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace node {

struct Matrix {
    std::int64_t edges, columns;  // columns: a whole number of vectors

    std::int64_t size() const { return edges * columns; }
};

// What depends on Ω, behind one door, so that a sweep is compiled once and not for each.
class Kernels {
public:
    const double unit;   // of scores x = unit · θ + values
    const double reach;  // scores so far below the greatest have q = 0

    Kernels(double own_unit, double own_reach) : unit(own_unit), reach(own_reach) {}
    virtual ~Kernels() = default;

    // The value, and the threshold that x is weighed with; −∞, and one that gives q = 0, for a node without a way to
    // it. False for a score that is not below +∞.
    virtual bool solve(Matrix, const double* x, double* value, double* threshold) const = 0;
    // q, and s unless it is null.
    virtual void weigh(Matrix, const double* x, const double* threshold, double* q, double* s) const = 0;
    virtual void log_q(Matrix, const double* x, const double* threshold, double* out) const = 0;
    // The derivative of log q: s/q on the support.
    virtual void log_slope(Matrix, const double* x, const double* threshold, double* out) const = 0;
};

// `is_float`: for θ and results of float.
std::unique_ptr<Kernels> kernels(OmegaParameters, bool is_float);

// The following functions serve every Ω. Σq is 1 except for rounding, which would add up over a long path.

// The change of the value, Σ q y/Σq, and the mean ⟨s, y⟩/Σs, with which q changes by J y = s∘(y − mean).
void change(Matrix, const double* q, const double* s, const double* y, double* value, double* mean);
// e = slope∘(y − mean), times the mass of the node unless that is null.
void along(Matrix, const double* slope, const double* y, const double* mean, const double* mass, double* e);
// c becomes d = slope∘c less s Σd/Σs: the transpose of the change of log q.
void log_q_vjp(Matrix, const double* slope, const double* s, double* c);
// The mass of each node by Σq.
void shares(Matrix, const double* q, const double* mass, double* part);
// e = q/Σq times the mass of the node, added to e if `adds`.
void share(Matrix, const double* q, const double* mass, bool adds, double* e);

// Which of `count` edges, `stride` apart, a uniform number chooses, for probabilities that sum to `sum`; −1 if all are
// 0.
template <class R>
inline std::int64_t draw(const R* q, std::int64_t count, double sum, double uniform, std::int64_t stride = 1) {
    const double bar = uniform * sum;
    double below = 0;
    std::int64_t chosen = -1;
    for (std::int64_t k = 0; k < count && (chosen < 0 || below <= bar); ++k) {
        if (q[k * stride] > 0) chosen = k;
        below += double(q[k * stride]);
    }
    return chosen;
}

// The same for the edges into the node of a column, from the column's first number.
inline std::int64_t draw(const double* q, Matrix of, double uniform) {
    double sum = 0;
    for (std::int64_t k = 0; k < of.edges; ++k) sum += q[k * of.columns];
    return draw(q, of.edges, sum, uniform, of.columns);
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
