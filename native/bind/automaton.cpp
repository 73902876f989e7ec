// Walks through automata: as automaton_*.
#include "../automaton/automaton.h"

#include "call.h"

namespace bellmax {
namespace {

template <class S>
const AutomatonKernels<S>& kernels() {
    static const AutomatonKernels<S> best = BELLMAX_BEST(automaton_kernels<S>());
    return best;
}

// Calls end with the lengths, the arcs, Ω and the number of threads.
template <class S>
struct CallProblem : AutomatonProblem<S> {
    explicit CallProblem(Call& call) : AutomatonProblem<S>{} {
        Call rest = call.split(5);
        const Tensor log_probs = call.tensor(), arcs = call.tensor(), start = call.tensor(), final = call.tensor();
        need(log_probs.dims == 3 && arcs.dims == 2 && start.dims == 2, "scores have a wrong number of dimensions");
        this->batch = log_probs.shape[0];
        this->steps = log_probs.shape[1];
        this->labels = log_probs.shape[2];
        this->arcs = arcs.shape[1];
        this->states = start.shape[1];
        need(this->states >= 1, "there are no states");
        this->theta = {array<const S>(log_probs, this->labels, false), array<const S>(arcs, this->arcs, true),
                       array<const S>(start, this->states, true), array<const S>(final, this->states, true)};
        this->lengths = rest.array<const int64_t>({this->batch});
        for (int64_t n = 0; n < this->batch; ++n) {
            need(this->lengths[n] >= 0 && this->lengths[n] <= this->steps, "lengths are from 0 to the number of frames");
        }
        const Tensor descriptor = rest.tensor();
        this->descriptor = Call::array<const std::int32_t>({any_size, this->arcs, 3}, descriptor);
        this->is_shared = descriptor.shape[0] == 1;
        need(one_or(descriptor.shape[0], this->batch), "the batch sizes of tensors do not fit together");
        this->omega = rest.omega();
        this->threads = threads_for(this->batch * (this->steps + 1) * (this->arcs + this->states), int(rest.integer()));
    }

    // The arrays of a direction or of gradients; the gradients of shared scores are not summed.
    template <class T>
    AutomatonArrays<T> read_arrays(Call& call, bool may_share) const {
        const Tensor log_probs = call.tensor(), arcs = call.tensor(), start = call.tensor(), final = call.tensor();
        return {array<T>(log_probs, this->labels, false), array<T>(arcs, this->arcs, may_share),
                array<T>(start, this->states, may_share), array<T>(final, this->states, may_share)};
    }

    void read_tape(Call& call) {
        const Tensor tape = call.tensor();
        this->tape = Call::array<double>({this->batch, any_size}, tape);
        this->tape_size = tape.shape[1];
        this->width = (this->omega.is_sum ? 1 : 2) * this->states + 2;
        need(this->tape_size >= this->width, "the tape has the wrong size");
        const int64_t rows = this->tape_size / this->width;
        this->frames_per_row = (this->steps + rows) / rows;
    }

private:
    template <class T>
    typename AutomatonArrays<T>::Batched array(const Tensor& found, int64_t last, bool may_share) const {
        T* const data = found.dims == 3 ? Call::array<T>({any_size, this->steps, last}, found)
                                        : Call::array<T>({any_size, last}, found);
        const bool is_shared = may_share && found.shape[0] == 1;
        need(is_shared || found.shape[0] == this->batch, "the batch sizes of tensors do not fit together");
        return {data, found.size() / std::max<int64_t>(found.shape[0], 1), is_shared};
    }
};

template <class S>
bool value(Call& call) {
    CallProblem<S> p(call);
    p.frames_per_row = 1;
    return run(kernels<S>().forward, p, call.array<S>({p.batch}));
}

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
    return run(kernels<S>().backward, p, seed.data(), p.template read_arrays<S>(call, false));
}

template <class S>
bool hessian(Call& call) {
    CallProblem<S> p(call);
    p.read_tape(call);
    const auto seed = call.vector<S>(p.batch);
    const auto z = p.template read_arrays<const S>(call, true);
    return run(kernels<S>().hessian, p, seed.data(), z, p.template read_arrays<S>(call, false));
}

template <class S>
bool sample(Call& call) {
    CallProblem<S> p(call);
    p.read_tape(call);
    const Tensor uniforms = call.tensor(), paths = call.tensor();
    const double* const numbers = Call::array<const double>({p.batch, any_size, any_size}, uniforms);
    const int64_t draws = uniforms.shape[1], choices = uniforms.shape[2];
    int64_t* const to = Call::array<int64_t>({p.batch, draws, any_size}, paths);
    need(paths.shape[2] >= p.steps && choices >= paths.shape[2] + 2, "there is no room for a path");
    return run(kernels<S>().sample, p, draws, choices, numbers, paths.shape[2], to);
}

template <class S>
bool topk(Call& call) {
    CallProblem<S> p(call);
    const Tensor scores = call.tensor(), paths = call.tensor();
    S* const found = Call::array<S>({p.batch, any_size}, scores);
    const int64_t k = scores.shape[1];
    int64_t* const to = Call::array<int64_t>({p.batch, k, any_size}, paths);
    need(k >= 1 && paths.shape[2] >= p.steps, "there is no room for a path");
    return run(kernels<S>().topk, p, k, found, paths.shape[2], to);
}

#define SWEEP(name) method<name<float>, name<double>>("automaton_" #name)

}  // namespace

PyMethodDef automaton_methods[] = {SWEEP(value),  SWEEP(forward), SWEEP(backward), SWEEP(hessian),
                                   SWEEP(sample), SWEEP(topk),    {}};

}  // namespace bellmax
