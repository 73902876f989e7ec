// Chains: dense potentials, and scores.
#include "../steps/chain.h"

#include <type_traits>

#include "chains.h"
#include "families.h"

namespace nb = nanobind;

namespace bellmax {
namespace {

template <class S>
const ChainKernels<S>& chain() {
    static const ChainKernels<S> kernels = BELLMAX_BEST(chain_kernels<S>());
    return kernels;
}

template <class S>
using Potentials = In<S, 4>;

template <class S>
ScoresProblem<S> chain_problem(const Potentials<S>& theta, const Kept& kept, OMEGA) {
    need(theta.shape(2) == theta.shape(3), "theta does not fit together");
    const int64_t steps = int64_t(theta.shape(1)), states = int64_t(theta.shape(2)), square = states * states;
    return {int64_t(theta.shape(0)), steps, states, kept.lengths, kept.data(), steps * square, square, 0, 0,
            omega_of(omega, parameters), threads_for(int64_t(theta.size()), threads),
            {nullptr, theta.data(), nullptr, nullptr}, nullptr};
}

template <class S, class A>
void need_like(const ScoresProblem<S>& p, const A& array) {
    need(int64_t(array.shape(0)) == p.batch && int64_t(array.shape(1)) == p.steps && int64_t(array.shape(2)) == p.states &&
             int64_t(array.shape(3)) == p.states,
         "an array is not like theta");
    if constexpr (!std::is_const_v<typename A::Scalar>) prefer_large_pages(array.data(), int64_t(array.nbytes()));
}

template <class S>
void need_sequences(const ScoresProblem<S>& p, const In<double, 3>& uniforms, const Out<int64_t, 3>& sequences) {
    need(int64_t(uniforms.shape(0)) == p.batch && int64_t(uniforms.shape(2)) == p.steps, "the uniforms do not fit the scores");
    need(sequences.shape(0) == uniforms.shape(0) && sequences.shape(1) == uniforms.shape(1) &&
             sequences.shape(2) == uniforms.shape(2),
         "the sequences do not fit the uniforms");
}

template <class S>
void need_best(const ScoresProblem<S>& p, const Out<S, 2>& scores, const Out<int64_t, 3>& sequences) {
    need(int64_t(scores.shape(0)) == p.batch && int64_t(sequences.shape(0)) == p.batch &&
             sequences.shape(1) == scores.shape(1) && int64_t(sequences.shape(2)) == p.steps,
         "scores and sequences do not fit");
}

#define CHAIN_PROBLEM                                                                      \
    const Kept kept(lengths, mask, int64_t(theta.shape(0)), int64_t(theta.shape(1)));      \
    auto p = chain_problem(theta, kept, omega, parameters, threads)

template <class S>
void bind_chain(nb::module_& m) {
    m.def("chain_forward", [](const Potentials<S>& theta, const Out<S, 1>& value, const Out<S, 4>& tape, INDEX) {
        CHAIN_PROBLEM;
        const bool has_tape = tape.shape(2) > 0;  // else only the value is wanted
        if (has_tape) set_tape(p, Tapes<S>(tape));
        need_batch(p, int64_t(value.shape(0)));
        nb::gil_scoped_release release;
        return chain<S>().forward(p, value.data(), has_tape ? tape.data() : nullptr);
    });
    m.def("chain_backward",
          [](const Potentials<S>& theta, const Tapes<S>& tape, const In<S, 1>& seed, const Out<S, 4>& out, INDEX) {
              CHAIN_PROBLEM;
              set_tape(p, tape);
              need_like(p, out);
              need_batch(p, int64_t(seed.shape(0)));
              nb::gil_scoped_release release;
              chain<S>().backward(p, seed.data(), {nullptr, out.data(), nullptr, nullptr});
          });
    m.def("chain_hessian", [](const Potentials<S>& theta, const Tapes<S>& tape, const In<S, 1>& seed,
                              const Potentials<S>& z, const Out<S, 4>& out, INDEX) {
        CHAIN_PROBLEM;
        set_tape(p, tape);
        need_like(p, z);
        need_like(p, out);
        need_batch(p, int64_t(seed.shape(0)));
        nb::gil_scoped_release release;
        chain<S>().hessian(p, seed.data(), {nullptr, z.data(), nullptr, nullptr}, {nullptr, out.data(), nullptr, nullptr});
    });
    m.def("chain_log_transitions", [](const Potentials<S>& theta, const Tapes<S>& tape, const Out<S, 4>& out, INDEX) {
        CHAIN_PROBLEM;
        set_tape(p, tape);
        need_like(p, out);
        nb::gil_scoped_release release;
        chain<S>().log_transitions(p, out.data());
    });
    const auto along = [&m](const char* name, auto kernel) {
        m.def(name, [kernel](const Potentials<S>& theta, const Tapes<S>& tape, const Potentials<S>& z,
                             const Out<S, 4>& out, INDEX) {
            CHAIN_PROBLEM;
            set_tape(p, tape);
            need_like(p, z);
            need_like(p, out);
            nb::gil_scoped_release release;
            (chain<S>().*kernel)(p, z.data(), out.data());
        });
    };
    along("chain_log_transitions_jvp", &ChainKernels<S>::log_transitions_jvp);
    along("chain_log_transitions_vjp", &ChainKernels<S>::log_transitions_vjp);
    m.def("chain_sample", [](const Potentials<S>& theta, const Tapes<S>& tape, const In<double, 3>& uniforms,
                             const Out<int64_t, 3>& sequences, INDEX) {
        CHAIN_PROBLEM;
        set_tape(p, tape);
        need_sequences(p, uniforms, sequences);
        nb::gil_scoped_release release;
        chain<S>().sample(p, int64_t(uniforms.shape(1)), uniforms.data(), sequences.data());
    });
    m.def("chain_topk", [](const Potentials<S>& theta, const Out<S, 2>& scores, const Out<int64_t, 3>& sequences, INDEX) {
        CHAIN_PROBLEM;
        need_best(p, scores, sequences);
        nb::gil_scoped_release release;
        return chain<S>().topk(p, int64_t(scores.shape(1)), scores.data(), sequences.data());
    });
}

template <class S>
void bind_scores(nb::module_& m) {
    m.def("scored_chain_forward", [](SCORES, const Out<S, 1>& value, const Out<S, 4>& tape, INDEX) {
        SCORES_PROBLEM;
        const bool has_tape = tape.shape(2) > 0;  // else only the value is wanted
        if (has_tape) set_tape(p, Tapes<S>(tape));
        need_batch(p, int64_t(value.shape(0)));
        nb::gil_scoped_release release;
        return chain<S>().forward(p, value.data(), has_tape ? tape.data() : nullptr);
    });
    m.def("scored_chain_backward", [](SCORES, const Tapes<S>& tape, const In<S, 1>& seed, const Out<S, 3>& to_emissions,
                                const Transitions<S>& to_transitions, const Out<S, 2>& to_start, const Out<S, 2>& to_end, INDEX) {
        SCORES_PROBLEM;
        set_tape(p, tape);
        need_batch(p, int64_t(seed.shape(0)));
        const auto out = like_scores<S>(p, transitions, to_emissions, to_transitions, to_start, to_end);
        nb::gil_scoped_release release;
        chain<S>().backward(p, seed.data(), out);
    });
    m.def("scored_chain_hessian", [](SCORES, const Tapes<S>& tape, const In<S, 1>& seed, const Emissions<S>& z_emissions,
                               const Transitions<const S>& z_transitions, const States<S>& z_start, const States<S>& z_end,
                               const Out<S, 3>& to_emissions, const Transitions<S>& to_transitions, const Out<S, 2>& to_start,
                               const Out<S, 2>& to_end, INDEX) {
        SCORES_PROBLEM;
        set_tape(p, tape);
        need_batch(p, int64_t(seed.shape(0)));
        const auto z = like_scores<const S>(p, transitions, z_emissions, z_transitions, z_start, z_end);
        const auto out = like_scores<S>(p, transitions, to_emissions, to_transitions, to_start, to_end);
        nb::gil_scoped_release release;
        chain<S>().hessian(p, seed.data(), z, out);
    });
    m.def("scored_chain_sample",
          [](SCORES, const Tapes<S>& tape, const In<double, 3>& uniforms, const Out<int64_t, 3>& sequences, INDEX) {
              SCORES_PROBLEM;
              set_tape(p, tape);
              need_sequences(p, uniforms, sequences);
              nb::gil_scoped_release release;
              chain<S>().sample(p, int64_t(uniforms.shape(1)), uniforms.data(), sequences.data());
          });
    m.def("scored_chain_topk", [](SCORES, const Out<S, 2>& scores, const Out<int64_t, 3>& sequences, INDEX) {
        SCORES_PROBLEM;
        need_best(p, scores, sequences);
        nb::gil_scoped_release release;
        return chain<S>().topk(p, int64_t(scores.shape(1)), scores.data(), sequences.data());
    });
}

}  // namespace

void bind_steps(nb::module_& m) {
    bind_chain<float>(m);
    bind_chain<double>(m);
    bind_scores<float>(m);
    bind_scores<double>(m);
}

}  // namespace bellmax
