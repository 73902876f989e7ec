// The binding of what chains have beside their sweeps: two states, attention, labels.
#include "chains.h"
#include "../steps/labels.h"
#include "../steps/pair.h"

namespace nb = nanobind;

namespace bellmax {
namespace {

template <class S>
const PairKernels<S>& pair() {
    static const PairKernels<S> kernels = BELLMAX_BEST(pair_kernels<S>());
    return kernels;
}

template <class S>
void bind_labels(nb::module_& m) {
    m.def("scored_chain_score", [](SCORES, const In<int64_t, 2>& labels, const Out<S, 1>& scores, int64_t ignored,
                                   INDEX) {
        SCORES_PROBLEM;
        need(int64_t(labels.shape(0)) == p.batch && int64_t(labels.shape(1)) == p.steps, "labels do not fit");
        need_batch(p, int64_t(scores.shape(0)));
        nb::gil_scoped_release release;
        return score_labels(p, labels.data(), ignored, scores.data());
    });
    m.def("scored_chain_subtract", [](SCORES, const In<int64_t, 2>& labels, const In<S, 1>& seed,
                                      const Out<S, 3>& to_emissions, const Transitions<S>& to_transitions,
                                      const Out<S, 2>& to_start, const Out<S, 2>& to_end, INDEX) {
        SCORES_PROBLEM;
        need(int64_t(labels.shape(0)) == p.batch && int64_t(labels.shape(1)) == p.steps, "labels do not fit");
        need_batch(p, int64_t(seed.shape(0)));
        const auto out = like_scores<S>(p, transitions, to_emissions, to_transitions, to_start, to_end);
        nb::gil_scoped_release release;
        subtract_labels(p, labels.data(), seed.data(), out);
    });
}

template <class S>
void need_pair(const ScoresProblem<S>& p) {
    need(p.states == 2 && !p.transition_batch && !p.transition_step && !p.start_batch && !p.end_batch,
         "two states and shared scores are needed");
    need(p.omega.alpha == 1 || p.omega.alpha == 2, "negentropy or l2 is needed");
}

// The lengths and the mask are of the rows of queries that share their keys.
template <class S>
AttentionProblem<S> attention_problem(const In<S, 2>& scores, const In<S, 2>& transitions, double scale,
                                      int64_t rows, const Kept& kept, OMEGA) {
    const int64_t batch = int64_t(scores.shape(0));
    const OmegaParameters by_name = omega_of(omega, parameters);
    need(rows > 0 && batch % rows == 0, "the queries do not fit the lengths");
    need(transitions.shape(0) == 2 && transitions.shape(1) == 2, "transitions are (2, 2)");
    need(by_name.alpha == 1 || by_name.alpha == 2, "negentropy or l2 is needed");
    const Scores<const S> shared{nullptr, transitions.data(), nullptr, nullptr};
    const ScoresProblem<S> chain{batch, int64_t(scores.shape(1)), 2, kept.lengths, kept.data(), 0, 0, 0, 0, by_name,
                                 threads_for(int64_t(scores.size()), threads), shared, nullptr};
    return {chain, scores.data(), S(scale), batch / rows};
}

#define ATTENTION const In<S, 2> &scores, const In<S, 2> &transitions
#define ATTENTION_PROBLEM                                                                        \
    const Kept kept(lengths, mask, rows, int64_t(scores.shape(1)));                              \
    const auto p = attention_problem(scores, transitions, scale, rows, kept, omega, parameters, threads)

template <class S, class A, class B>
void need_sequences(const AttentionProblem<S>& p, const A& each, const B& totals) {
    need(int64_t(each.shape(0)) == p.chain.batch && int64_t(each.shape(1)) == p.chain.steps &&
             int64_t(totals.shape(0)) == p.chain.batch,
         "an array is not like the scores");
}

template <class S>
void bind_pair(nb::module_& m) {
    m.def("two_states_marginals", [](SCORES, const Out<S, 3>& marginals, INDEX) {
        SCORES_PROBLEM;
        need_pair(p);
        like_scores<const S>(p, transitions, Emissions<S>(marginals), transitions, start, end);
        nb::gil_scoped_release release;
        return pair<S>().marginals(p, marginals.data());
    });
    m.def("two_states_marginals_vjp", [](SCORES, const Emissions<S>& cotangent, const Out<S, 3>& to_emissions,
                                         const Transitions<S>& to_transitions, const Out<S, 2>& to_start,
                                         const Out<S, 2>& to_end, INDEX) {
        SCORES_PROBLEM;
        need_pair(p);
        like_scores<const S>(p, transitions, cotangent, transitions, start, end);
        const auto out = like_scores<S>(p, transitions, to_emissions, to_transitions, to_start, to_end);
        nb::gil_scoped_release release;
        pair<S>().marginals_vjp(p, cotangent.data(), out);
    });
    m.def("two_states_weights", [](ATTENTION, const Out<S, 2>& weights, const Out<S, 1>& totals, double scale,
                                   int64_t rows, INDEX) {
        ATTENTION_PROBLEM;
        need_sequences(p, weights, totals);
        nb::gil_scoped_release release;
        return pair<S>().weights(p, weights.data(), totals.data());
    });
    m.def("two_states_weights_vjp", [](ATTENTION, const In<S, 2>& weights, const In<S, 1>& totals,
                                       const In<S, 2>& cotangent, const Out<S, 2>& to_scores,
                                       const Out<S, 2>& to_transitions, double scale, int64_t rows, INDEX) {
        ATTENTION_PROBLEM;
        need_sequences(p, weights, totals);
        need_sequences(p, cotangent, totals);
        need_sequences(p, to_scores, totals);
        need(to_transitions.shape(0) == 2 && to_transitions.shape(1) == 2, "transitions are (2, 2)");
        nb::gil_scoped_release release;
        pair<S>().weights_vjp(p, weights.data(), totals.data(), cotangent.data(), to_scores.data(),
                              to_transitions.data());
    });
}

}  // namespace

void bind_engines(nb::module_& m) {
    bind_labels<float>(m);
    bind_labels<double>(m);
    bind_pair<float>(m);
    bind_pair<double>(m);
}

}  // namespace bellmax
