// Costs of matching the elements of pairs of series, and their gradients, for small pairs: the call takes longer than
// the arithmetic, so there is one version for all instruction sets.
#pragma once

#include <cmath>
#include <cstdint>

namespace bellmax {

// Pairs of series (batch, rows, features) and (batch, columns, features). An element costs Σ |x − y|^power, power 1 or
// 2.
template <class S>
struct CostsProblem {
    std::int64_t batch, rows, columns, features;
    int power;
    const S *x, *y;

    // Calls body(cell, element of x, element of y) for every cell; elements are where their features begin.
    template <class Body>
    void for_cells(Body body) const {
        for (std::int64_t b = 0, cell = 0; b < batch; ++b) {
            for (std::int64_t i = b * rows; i < (b + 1) * rows; ++i) {
                for (std::int64_t j = b * columns; j < (b + 1) * columns; ++j) body(cell++, i * features, j * features);
            }
        }
    }
};

template <class S>
void element_costs(const CostsProblem<S>& p, S* costs) {
    p.for_cells([&](std::int64_t cell, std::int64_t i, std::int64_t j) {
        S sum = 0;
        for (std::int64_t d = 0; d < p.features; ++d) {
            const S difference = p.x[i + d] - p.y[j + d];
            sum += p.power == 2 ? difference * difference : std::abs(difference);
        }
        costs[cell] = sum;
    });
}

// The gradients of ⟨grad, costs⟩, added to sums that begin at 0.
template <class S>
void element_costs_vjp(const CostsProblem<S>& p, const S* grad, S* x_grad, S* y_grad) {
    p.for_cells([&](std::int64_t cell, std::int64_t i, std::int64_t j) {
        for (std::int64_t d = 0; d < p.features; ++d) {
            const S difference = p.x[i + d] - p.y[j + d];
            const S slope = p.power == 2 ? 2 * difference : S((difference > 0) - (difference < 0));
            x_grad[i + d] += grad[cell] * slope;
            y_grad[j + d] -= grad[cell] * slope;
        }
    });
}

}  // namespace bellmax
