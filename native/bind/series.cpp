// Pairs and collections of series.
#include "../series/costs.h"
#include "../series/neighbors.h"

#include "call.h"

namespace bellmax {
namespace {

template <class S>
CostsProblem<S> read_pairs(Call& call) {
    const Tensor x = call.tensor(), y = call.tensor();
    const int64_t *const sizes = x.shape, batch = sizes[0], features = sizes[2];
    const auto* const of_x = Call::array<const S>({any_size, any_size, any_size}, x);
    const auto* const of_y = Call::array<const S>({batch, any_size, features}, y);
    const int power = int(call.integer());
    need(power == 1 || power == 2, "the power is 1 or 2");
    return {batch, sizes[1], y.shape[1], features, power, of_x, of_y};
}

template <class S>
bool series_costs(Call& call) {
    const auto p = read_pairs<S>(call);
    return run(element_costs<S>, p, call.array<S>({p.batch, p.rows, p.columns}));
}

template <class S>
bool series_costs_vjp(Call& call) {
    const auto p = read_pairs<S>(call);
    const S* const grad = call.array<const S>({p.batch, p.rows, p.columns});
    S* const x_grad = call.array<S>({p.batch, p.rows, p.features});
    S* const y_grad = call.array<S>({p.batch, p.columns, p.features});
    std::fill_n(x_grad, p.batch * p.rows * p.features, S(0));
    std::fill_n(y_grad, p.batch * p.columns * p.features, S(0));
    return run(element_costs_vjp<S>, p, grad, x_grad, y_grad);
}

template <class S>
Collection<S> read_collection(Call& call, int64_t features) {
    const Tensor numbers = call.tensor(), begins = call.tensor();
    const auto* const at = Call::array<const int64_t>({any_size}, begins);
    const int64_t count = begins.shape[0] - 1;
    need(count >= 0 && at[0] == 0 && at[count] == numbers.shape[0], "the series do not fill their numbers");
    for (int64_t k = 0; k < count; ++k) need(at[k] < at[k + 1], "a series is empty");
    return {count, Call::array<const S>({any_size, features}, numbers), at};
}

template <class S>
bool dtw_neighbors(Call& call) {
    NeighborsProblem<S> p{};
    p.features = call.integer();
    p.x = read_collection<S>(call, p.features);
    p.y = read_collection<S>(call, p.features);
    p.without = call.array<const int64_t>({p.x.count});
    const Tensor distances = call.tensor();
    S* const nearest = Call::array<S>({p.x.count, any_size}, distances);
    p.k = distances.shape[1];
    int64_t* const indices = call.array<int64_t>({p.x.count, p.k});
    int64_t* const cells = call.array<int64_t>({p.x.count});
    p.power = int(call.integer());
    p.band = call.number();
    p.threads = threads_for(p.x.count * p.y.begins[p.y.count], int(call.integer()));
    need(p.features >= 1 && (p.power == 1 || p.power == 2) && p.band >= 0, "the cost or the band is out of range");
    for (int64_t q = 0; q < p.x.count; ++q) {
        need(p.k >= 1 && p.k <= p.y.count - (p.without[q] >= 0) && p.without[q] < p.y.count,
             "there are fewer neighbors");
    }
    static const NeighborsKernels<S> best = BELLMAX_BEST(neighbors_kernels<S>());
    return run(best.search, p, nearest, indices, cells);
}

}  // namespace

PyMethodDef series_methods[] = {method<dtw_neighbors<float>, dtw_neighbors<double>>("dtw_neighbors"),
                                method<series_costs<float>, series_costs<double>>("series_costs"),
                                method<series_costs_vjp<float>, series_costs_vjp<double>>("series_costs_vjp"),
                                {}};

}  // namespace bellmax
