// Chains: dense, from scores, and of two states; the scores of labels.
#include "../steps/chain.h"
#include "../steps/labels.h"
#include "../steps/pair.h"
#include "call.h"

namespace bellmax {
namespace {

template <class S>
const ChainKernels<S>& kernels() {
    static const ChainKernels<S> best = BELLMAX_BEST(chain_kernels<S>());
    return best;
}

template <class S>
const PairKernels<S>& pair() {
    static const PairKernels<S> best = BELLMAX_BEST(pair_kernels<S>());
    return best;
}

// The steps that sequences go through, and Ω: lengths or None, a mask or None, the name, the parameters, the threads.
class Index {
    Call call;
    std::vector<int64_t> all, steps;

    void read(const bool* mask, const int64_t* lengths, int64_t batch, int64_t total) {
        steps.resize(std::size_t(batch * total));
        bool has_holes = false;
        for (int64_t b = 0; b < batch; ++b) {
            int64_t n = 0;
            for (int64_t t = 0; t < total; ++t) {
                if (!mask[b * total + t]) continue;
                has_holes |= t != n;
                steps[std::size_t(b * total + n++)] = t;
            }
            need(n == lengths[b], "the mask does not fit the lengths");
        }
        if (!has_holes) steps.clear();
    }

public:
    explicit Index(Call& whole) : call(whole.split(5)) {}

    template <class S>
    void set(ScoresProblem<S>& p, int64_t batch, int64_t numbers) {
        if (call.skips_none()) {
            all.assign(std::size_t(batch), p.steps);
            p.lengths = all.data();
        } else {
            p.lengths = call.array<const int64_t>({batch});
        }
        for (int64_t b = 0; b < batch; ++b)
            need(p.lengths[b] >= 0 && p.lengths[b] <= p.steps, "a length is out of range");
        if (!call.skips_none()) read(call.array<const bool>({batch, p.steps}), p.lengths, batch, p.steps);
        p.kept = steps.empty() ? nullptr : steps.data();
        p.omega = call.omega();
        p.threads = threads_for(numbers, int(call.integer()));
    }
};

// The potentials of a chain, and what is like them.
template <class S>
struct Dense : ScoresProblem<S> {
    Index index;

    explicit Dense(Call& call) : ScoresProblem<S>{}, index(call) {
        const Tensor theta = call.tensor();
        this->batch = theta.shape[0];
        this->steps = theta.shape[1];
        this->states = theta.shape[2];
        this->transition_step = this->states * this->states;
        this->transition_batch = this->steps * this->transition_step;
        this->scores.transitions = Call::array<const S>({any_size, any_size, this->states, this->states}, theta);
        index.set(*this, this->batch, theta.size());
    }

    template <class T>
    Scores<T> like(Call& call) const {
        return {nullptr, call.array<T>({this->batch, this->steps, this->states, this->states}), nullptr, nullptr};
    }
};

// Emissions (batch, steps, states); transitions (1 or batch, states, states), or for each step (1 or batch, steps − 1,
// states, states); start and end (1 or batch, states).
template <class S>
struct Scored : ScoresProblem<S> {
    Index index;
    Tensor transitions;

    explicit Scored(Call& call) : ScoresProblem<S>{}, index(call) {
        const Tensor emissions = call.tensor();
        transitions = call.tensor();
        const Tensor start = call.tensor(), end = call.tensor();
        this->scores.emissions = Call::array<const S>({any_size, any_size, any_size}, emissions);
        this->batch = emissions.shape[0];
        this->steps = emissions.shape[1];
        this->states = emissions.shape[2];
        const int64_t states = this->states, places = transitions.dims == 4 ? std::max<int64_t>(this->steps - 1, 0) : 1;
        for (const Tensor& shared : {transitions, start, end}) {
            need(shared.dims > 0 && one_or(shared.shape[0], this->batch), "a score does not fit the emissions");
        }
        this->scores.transitions = transitions.dims == 4
                                       ? Call::array<const S>({any_size, places, states, states}, transitions)
                                       : Call::array<const S>({any_size, states, states}, transitions);
        this->scores.start = Call::array<const S>({any_size, states}, start);
        this->scores.end = Call::array<const S>({any_size, states}, end);
        this->transition_batch = stride(transitions, places * states * states);
        this->transition_step = places == 1 ? 0 : states * states;  // of one step, there are no transitions to share
        this->start_batch = stride(start, states);
        this->end_batch = stride(end, states);
        index.set(*this, this->batch, emissions.size() * states);
    }

    static int64_t stride(const Tensor& tensor, int64_t numbers) { return tensor.shape[0] == 1 ? 0 : numbers; }

    template <class T>
    Scores<T> like(Call& call) const {
        T* const emissions = call.array<T>({this->batch, this->steps, this->states});
        const int64_t* const as = transitions.shape;
        T* const between =
            transitions.dims == 4 ? call.array<T>({as[0], as[1], as[2], as[3]}) : call.array<T>({as[0], as[1], as[2]});
        T* const start = call.array<T>({this->start_batch ? this->batch : 1, this->states});
        return {emissions, between, start, call.array<T>({this->end_batch ? this->batch : 1, this->states})};
    }

    bool shares_all() const {
        return !this->transition_batch && !this->transition_step && !this->start_batch && !this->end_batch;
    }
};

// With the tape that forward wrote.
template <class S, class Chain>
struct TapedChain : Chain {
    explicit TapedChain(Call& call) : Chain(call) {
        this->tape = call.array<const S>({this->batch, 2, this->steps + 1, this->states});
    }
};

template <class S, class Chain>
bool forward(Call& call) {
    const Chain p(call);
    S* const value = call.array<S>({p.batch});
    const Tensor given = call.tensor();
    const bool has_tape = given.dims == 4 && given.shape[2] > 0;  // else only the value is wanted
    S* const tape = has_tape ? Call::array<S>({p.batch, 2, p.steps + 1, p.states}, given) : nullptr;
    return run(kernels<S>().forward, p, value, tape);
}

template <class S, class Chain>
bool backward(Call& call) {
    const TapedChain<S, Chain> p(call);
    const auto seed = call.vector<S>(p.batch);
    return run(kernels<S>().backward, p, seed.data(), p.template like<S>(call));
}

template <class S, class Chain>
bool hessian(Call& call) {
    const TapedChain<S, Chain> p(call);
    const auto seed = call.vector<S>(p.batch);
    const auto z = p.template like<const S>(call);
    return run(kernels<S>().hessian, p, seed.data(), z, p.template like<S>(call));
}

template <class S, class Chain>
bool sample(Call& call) {
    const TapedChain<S, Chain> p(call);
    const Tensor uniforms = call.tensor();
    int64_t* const sequences = call.array<int64_t>({p.batch, any_size, p.steps});
    const int64_t draws = uniforms.shape[1];
    return run(kernels<S>().sample, p, draws, Call::array<const double>({p.batch, draws, p.steps}, uniforms),
               sequences);
}

template <class S, class Chain>
bool topk(Call& call) {
    const Chain p(call);
    const Tensor scores = call.tensor();
    const int64_t k = scores.shape[1];
    int64_t* const sequences = call.array<int64_t>({p.batch, k, p.steps});
    return run(kernels<S>().topk, p, k, Call::array<S>({p.batch, any_size}, scores), sequences);
}

template <class S, class Chain>
bool max_marginals(Call& call) {
    const Chain p(call);
    return run(kernels<S>().max_marginals, p, call.array<S>({p.batch, p.steps, p.states, p.states}));
}

template <class S, class Chain>
bool node_values(Call& call) {
    const Chain p(call);
    return run(kernels<S>().node_values, p, call.array<S>({p.batch, p.steps, p.states}));
}

template <class S>
bool log_transitions(Call& call) {
    const TapedChain<S, Dense<S>> p(call);
    return run(kernels<S>().log_transitions, p, p.template like<S>(call).transitions);
}

// The derivative of log q along a direction, or the other way.
template <class S, bool forwards>
bool log_transitions_product(Call& call) {
    const TapedChain<S, Dense<S>> p(call);
    const auto z = p.template like<const S>(call);
    const auto kernel = forwards ? kernels<S>().log_transitions_jvp : kernels<S>().log_transitions_vjp;
    return run(kernel, p, z.transitions, p.template like<S>(call).transitions);
}

template <class S>
bool score(Call& call) {
    const Scored<S> p(call);
    const int64_t* const labels = call.array<const int64_t>({p.batch, p.steps});
    S* const scores = call.array<S>({p.batch});
    return run(score_labels<S>, p, labels, call.integer(), scores);
}

template <class S>
bool subtract(Call& call) {
    const Scored<S> p(call);
    const int64_t* const labels = call.array<const int64_t>({p.batch, p.steps});
    const auto seed = call.vector<S>(p.batch);
    return run(subtract_labels<S>, p, labels, seed.data(), p.template like<S>(call));
}

template <class S>
void need_pair(const ScoresProblem<S>& p) {
    need(p.omega.is_sum || p.omega.is_quadratic, "negentropy or l2 is needed");
    need(p.states == 2, "two states are needed");
}

template <class S>
bool marginals(Call& call) {
    const Scored<S> p(call);
    need_pair(p);
    need(p.shares_all(), "shared scores are needed");
    return run(pair<S>().marginals, p, call.array<S>({p.batch, p.steps, 2}));
}

template <class S>
bool marginals_vjp(Call& call) {
    const Scored<S> p(call);
    need_pair(p);
    need(p.shares_all(), "shared scores are needed");
    const S* const cotangent = call.array<const S>({p.batch, p.steps, 2});
    return run(pair<S>().marginals_vjp, p, cotangent, p.template like<S>(call));
}

// Scores (queries, keys), transitions (2, 2); at the end, the scale, and of how many rows of queries, which share their
// keys, the lengths and the mask are.
template <class S>
struct Attention : AttentionProblem<S> {
    Index index;

    explicit Attention(Call& call) : AttentionProblem<S>{}, index(call) {
        Call options = call.split(2);
        auto& chain = this->chain;
        const Tensor scores = call.tensor();
        this->scores = Call::array<const S>({any_size, any_size}, scores);
        chain.batch = scores.shape[0];
        chain.steps = scores.shape[1];
        chain.states = 2;
        chain.scores.transitions = call.array<const S>({2, 2});
        this->scale = S(options.number());
        const int64_t rows = options.integer();
        need(rows > 0 && chain.batch % rows == 0, "the queries do not fit the lengths");
        this->sharing = chain.batch / rows;
        index.set(chain, rows, scores.size());
        need_pair(chain);
    }

    template <class T>
    T* like_scores(Call& call) const {
        return call.array<T>({this->chain.batch, this->chain.steps});
    }
};

template <class S>
bool weights(Call& call) {
    const Attention<S> p(call);
    S* const found = p.template like_scores<S>(call);
    return run(pair<S>().weights, p, found, call.array<S>({p.chain.batch}));
}

template <class S>
bool weights_vjp(Call& call) {
    const Attention<S> p(call);
    const S* const found = p.template like_scores<const S>(call);
    const S* const totals = call.array<const S>({p.chain.batch});
    const S* const cotangent = p.template like_scores<const S>(call);
    S* const to_scores = p.template like_scores<S>(call);
    return run(pair<S>().weights_vjp, p, found, totals, cotangent, to_scores, call.array<S>({2, 2}));
}

#define BOTH(name, binding) method<binding<float>, binding<double>>(name)
#define SWEEP(prefix, name, Chain) method<name<float, Chain<float>>, name<double, Chain<double>>>(prefix #name)
#define SWEEPS(prefix, Chain)                                                                     \
    SWEEP(prefix, forward, Chain), SWEEP(prefix, backward, Chain), SWEEP(prefix, hessian, Chain), \
        SWEEP(prefix, sample, Chain), SWEEP(prefix, topk, Chain), SWEEP(prefix, max_marginals, Chain), \
        SWEEP(prefix, node_values, Chain)

}  // namespace

PyMethodDef steps_methods[] = {
    SWEEPS("chain_", Dense),
    SWEEPS("scored_chain_", Scored),
    BOTH("chain_log_transitions", log_transitions),
    method<log_transitions_product<float, true>, log_transitions_product<double, true>>("chain_log_transitions_jvp"),
    method<log_transitions_product<float, false>, log_transitions_product<double, false>>("chain_log_transitions_vjp"),
    BOTH("scored_chain_score", score),
    BOTH("scored_chain_subtract", subtract),
    BOTH("two_states_marginals", marginals),
    BOTH("two_states_marginals_vjp", marginals_vjp),
    BOTH("two_states_weights", weights),
    BOTH("two_states_weights_vjp", weights_vjp),
    {}};

}  // namespace bellmax
