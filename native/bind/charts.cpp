// Trees over sentences: as spans_* and as arcs_*.
#include "../hyper/charts.h"

#include "call.h"

namespace bellmax {
namespace {

struct SpanChart {
    template <class S>
    static ChartKernels<S> kernels() {
        return BELLMAX_BEST(span_kernels<S>());
    }
};
struct ArcChart {
    template <class S>
    static ChartKernels<S> kernels() {
        return BELLMAX_BEST(arc_kernels<S>());
    }
};

// Calls end with the lengths, whether the root has one modifier, and the number of threads.
template <class S>
struct ChartCall : ChartProblem<S> {
    explicit ChartCall(Call& call) : ChartProblem<S>{} {
        Call rest = call.split(3);
        const Tensor theta = call.tensor();
        this->theta = Call::array<const S>({any_size, any_size, any_size}, theta);
        this->batch = theta.shape[0];
        this->places = theta.shape[1];
        need(theta.shape[2] == this->places && this->places >= 1, "theta does not fit a chart");
        this->lengths = rest.array<const int64_t>({this->batch});
        for (int64_t n = 0; n < this->batch; ++n) {
            need(this->lengths[n] >= 1 && this->lengths[n] <= this->places,
                 "lengths are from 1 to the places of theta");
        }
        this->single_root = rest.integer() != 0;
        this->threads = threads_for(this->batch * this->places * this->places * this->places / 8, int(rest.integer()));
    }
    template <class T>
    T* scores(Call& call) const {
        return call.array<T>({this->batch, this->places, this->places});
    }
};

template <class Model, class S>
bool forward(Call& call) {
    const ChartCall<S> p(call);
    S* const value = call.array<S>({p.batch});
    const auto forward = Model::template kernels<S>().forward;
    if (call.skips_none()) return run(forward, p, value, static_cast<S*>(nullptr), 0);
    const Tensor expected = call.tensor();  // a tree at the beginning of each row
    S* const trees = Call::array<S>({p.batch, any_size}, expected);
    need(expected.shape[1] >= p.places * p.places, "expected does not fit a chart");
    return run(forward, p, value, trees, expected.shape[1]);
}

template <class Model, class S>
bool hessian(Call& call) {
    const ChartCall<S> p(call);
    const auto seed = call.vector<S>(p.batch);
    const S* const z = p.template scores<const S>(call);
    return run(Model::template kernels<S>().hessian, p, seed.data(), z, p.template scores<S>(call));
}

#define SWEEP(name, prefix, Model) method<name<Model, float>, name<Model, double>>(prefix #name)

}  // namespace

PyMethodDef chart_methods[] = {SWEEP(forward, "spans_", SpanChart), SWEEP(hessian, "spans_", SpanChart),
                               SWEEP(forward, "arcs_", ArcChart), SWEEP(hessian, "arcs_", ArcChart), {}};

}  // namespace bellmax
