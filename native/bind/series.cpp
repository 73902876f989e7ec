// Collections of series.
#include "../series/neighbors.h"

#include "call.h"

namespace bellmax {
namespace {

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
        need(p.k >= 1 && p.k <= p.y.count - (p.without[q] >= 0) && p.without[q] < p.y.count, "there are fewer neighbours");
    }
    static const NeighborsKernels<S> best = BELLMAX_BEST(neighbors_kernels<S>());
    return run(best.search, p, nearest, indices, cells);
}

}  // namespace

PyMethodDef series_methods[] = {method<dtw_neighbors<float>, dtw_neighbors<double>>("dtw_neighbors"), {}};

}  // namespace bellmax
