// Segmentations scored by emissions and durations: as segments_*.
#include "../segments/segments.h"

#include "call.h"

namespace bellmax {
namespace {

template <class S>
const SegmentKernels<S>& kernels() {
    static const SegmentKernels<S> best = BELLMAX_BEST(segment_kernels<S>());
    return best;
}

// Calls end with the lengths, Ω and the number of threads.
template <class S>
struct CallProblem : SegmentProblem<S> {
    explicit CallProblem(Call& call) : SegmentProblem<S>{} {
        Call rest = call.split(4);
        const Tensor emissions = call.tensor(), durations = call.tensor();
        need(emissions.dims == 3 && durations.dims == 3, "emissions and durations have three dimensions");
        this->batch = emissions.shape[0];
        this->steps = emissions.shape[1];
        this->labels = emissions.shape[2];
        this->longest = durations.shape[1];
        need(this->steps >= 1 && this->labels >= 1 && this->longest >= 1, "scores have no entries");
        this->width = (this->labels + label_lanes - 1) / label_lanes * label_lanes;
        this->theta = arrays<const S>(call, emissions, durations, false);
        this->lengths = rest.array<const int64_t>({this->batch});
        for (int64_t n = 0; n < this->batch; ++n) {
            need(this->lengths[n] >= 1 && this->lengths[n] <= this->steps, "lengths are from 1 to the number of steps");
        }
        this->omega = rest.omega();
        this->threads = threads_for(this->batch * this->steps * this->longest * this->labels, int(rest.integer()));
    }

    // The arrays of a direction or of gradients; the gradients of shared scores are not summed.
    template <class T>
    SegmentArrays<T> read_arrays(Call& call, bool is_whole) const {
        const Tensor emissions = call.tensor(), durations = call.tensor();
        return arrays<T>(call, emissions, durations, is_whole);
    }

    void read_tape(Call& call) { this->tape = call.array<double>({this->batch, 4, this->steps, this->width}); }

private:
    template <class T>
    SegmentArrays<T> arrays(Call& call, const Tensor& emissions, const Tensor& durations, bool is_whole) const {
        const int64_t labels = this->labels;
        const auto array = [&](std::initializer_list<int64_t> shape, const Tensor& found, bool may_share) {
            T* const data = Call::array<T>(shape, found);
            const bool is_shared = may_share && found.shape[0] == 1;
            need(is_shared || found.shape[0] == this->batch, "the batch sizes of tensors do not fit together");
            const int64_t size = found.size() / std::max<int64_t>(found.shape[0], 1);
            return typename SegmentArrays<T>::Batched{data, size, is_shared};
        };
        SegmentArrays<T> all{};
        all.emissions = array({any_size, this->steps, labels}, emissions, false);
        all.durations = array({any_size, this->longest, labels}, durations, !is_whole);
        all.transitions = array({any_size, labels, labels}, call.tensor(), !is_whole);
        all.start = array({any_size, labels}, call.tensor(), !is_whole);
        all.end = array({any_size, labels}, call.tensor(), !is_whole);
        if (!call.skips_none()) {
            all.last_durations = array({any_size, this->longest, labels}, call.tensor(), !is_whole);
        }
        return all;
    }
};

template <class S>
bool forward(Call& call) {
    CallProblem<S> p(call);
    S* const value = call.array<S>({p.batch});
    p.read_tape(call);
    return run(kernels<S>().forward, p, value);
}

template <class S>
bool backward(Call& call) {
    CallProblem<S> p(call);
    p.read_tape(call);
    const auto seed = call.vector<S>(p.batch);
    return run(kernels<S>().backward, p, seed.data(), p.template read_arrays<S>(call, true));
}

template <class S>
bool hessian(Call& call) {
    CallProblem<S> p(call);
    p.read_tape(call);
    const auto seed = call.vector<S>(p.batch);
    const auto z = p.template read_arrays<const S>(call, false);
    return run(kernels<S>().hessian, p, seed.data(), z, p.template read_arrays<S>(call, true));
}

template <class S>
bool sample(Call& call) {
    CallProblem<S> p(call);
    p.read_tape(call);
    const Tensor uniforms = call.tensor();
    const double* const numbers = Call::array<const double>({p.batch, any_size, any_size}, uniforms);
    const int64_t draws = uniforms.shape[1], choices = uniforms.shape[2];
    need(choices >= 2 * p.steps + 1, "a path has more choices than there are uniforms");
    return run(kernels<S>().sample, p, draws, choices, numbers, call.array<int64_t>({p.batch, draws, p.steps}));
}

#define SWEEP(name) method<name<float>, name<double>>("segments_" #name)

}  // namespace

PyMethodDef segment_methods[] = {SWEEP(forward), SWEEP(backward), SWEEP(hessian), SWEEP(sample), {}};

}  // namespace bellmax
