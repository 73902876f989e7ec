// The binding: checks sizes, picks the instruction set, releases the GIL. It knows no mathematics.
#include <limits>
#include <optional>
#include <type_traits>

#include "bind/common.h"
#include "bind/families.h"
#include "binary.h"
#include "chain.h"
#include "dag.h"
#include "labels.h"

namespace nb = nanobind;
using namespace bellmax;

namespace {

template <class S>
const DagKernels<S>& dag() {
    static const DagKernels<S> kernels = BELLMAX_BEST(dag_kernels<S>());
    return kernels;
}

template <class S>
const ChainKernels<S>& chain() {
    static const ChainKernels<S> kernels = BELLMAX_BEST(chain_kernels<S>());
    return kernels;
}

template <class S>
const BinaryKernels<S>& binary() {
    static const BinaryKernels<S> kernels = BELLMAX_BEST(binary_kernels<S>());
    return kernels;
}

template <class S>
using Theta = In<S, 2>;
using Index = In<int64_t, 1>;
using Tape = In<double, 3>;

template <class S>
Problem<S> problem(const Theta<S>& theta, const Index& offset, const Index& parent, const Index& edge,
                   OMEGA) {
    const int64_t edges = static_cast<int64_t>(parent.shape(0));
    need(offset.shape(0) >= 2 && edge.shape(0) == parent.shape(0), "the index does not fit together");
    need(theta.shape(1) == parent.shape(0), "theta does not fit the graph");
    const int64_t nodes = static_cast<int64_t>(offset.shape(0)) - 1;
    int64_t most = 0;
    for (int64_t i = 0; i < nodes; ++i) most = std::max(most, offset.data()[i + 1] - offset.data()[i]);
    const Graph graph{nodes, edges, most, offset.data(), parent.data(), edge.data()};
    const int64_t batch = int64_t(theta.shape(0));
    return {graph, omega_of(omega, parameters), batch, threads_for(batch * edges, threads), theta.data(), nullptr};
}

template <class S>
void set_tape(Problem<S>& p, const Tape& tape) {
    need(int64_t(tape.shape(0)) == p.batch && int64_t(tape.shape(1)) == 2 &&
             int64_t(tape.shape(2)) == p.graph.num_nodes,
         "the tape does not fit theta");
    p.tape = tape.data();
}

template <class S, class Array>
void need_like(const Problem<S>& p, const Array& array) {
    need(int64_t(array.shape(0)) == p.batch && int64_t(array.shape(1)) == p.graph.num_edges, "an array is not like theta");
}

// The last array, the groups, is for the reference backend.
#define GRAPH \
    const Index &offset, const Index &parent, const Index &edge, const Index &, OMEGA
#define PROBLEM problem(theta, offset, parent, edge, omega, parameters, threads)

template <class S>
void bind(nb::module_& m) {
    m.def("dag_forward", [](const Theta<S>& theta, const Out<S, 1>& value, const Out<double, 3>& tape, GRAPH) {
        auto p = PROBLEM;
        set_tape(p, Tape(tape));
        need(int64_t(value.shape(0)) == p.batch, "the value does not fit theta");
        nb::gil_scoped_release release;
        return dag<S>().forward(p, value.data(), tape.data());
    });
    const auto onto = [&m](const char* name, auto kernel) {
        m.def(name, [kernel](const Theta<S>& theta, const Tape& tape, const Out<S, 2>& out, GRAPH) {
            auto p = PROBLEM;
            set_tape(p, tape);
            need_like(p, out);
            nb::gil_scoped_release release;
            (dag<S>().*kernel)(p, out.data());
        });
    };
    m.def("dag_backward", [](const Theta<S>& theta, const Tape& tape, const In<S, 1>& seed, const Out<S, 2>& out, GRAPH) {
        auto p = PROBLEM;
        set_tape(p, tape);
        need_like(p, out);
        need(int64_t(seed.shape(0)) == p.batch, "the seed does not fit theta");
        nb::gil_scoped_release release;
        dag<S>().backward(p, seed.data(), out.data());
    });
    m.def("dag_hessian", [](const Theta<S>& theta, const Tape& tape, const In<S, 1>& seed, const Theta<S>& z,
                            const Out<S, 2>& out, GRAPH) {
        auto p = PROBLEM;
        set_tape(p, tape);
        need_like(p, z);
        need_like(p, out);
        need(int64_t(seed.shape(0)) == p.batch, "the seed does not fit theta");
        nb::gil_scoped_release release;
        dag<S>().hessian(p, seed.data(), z.data(), out.data());
    });
    onto("dag_log_transitions", &DagKernels<S>::log_transitions);
    const auto along = [&m](const char* name, auto kernel) {
        m.def(name, [kernel](const Theta<S>& theta, const Tape& tape, const Theta<S>& z, const Out<S, 2>& out, GRAPH) {
            auto p = PROBLEM;
            set_tape(p, tape);
            need_like(p, z);
            need_like(p, out);
            nb::gil_scoped_release release;
            (dag<S>().*kernel)(p, z.data(), out.data());
        });
    };
    along("dag_log_transitions_jvp", &DagKernels<S>::log_transitions_jvp);
    along("dag_log_transitions_vjp", &DagKernels<S>::log_transitions_vjp);
    m.def("dag_sample",
          [](const Theta<S>& theta, const Tape& tape, const In<double, 3>& uniforms, const Out<S, 3>& paths, GRAPH) {
              auto p = PROBLEM;
              set_tape(p, tape);
              need(int64_t(uniforms.shape(0)) == p.batch, "the uniforms do not fit theta");
              need(paths.shape(0) == uniforms.shape(0) && paths.shape(1) == uniforms.shape(1) &&
                       int64_t(paths.shape(2)) == p.graph.num_edges,
                   "the paths do not fit the uniforms");
              nb::gil_scoped_release release;
              need(dag<S>().sample(p, int64_t(uniforms.shape(1)), int64_t(uniforms.shape(2)), uniforms.data(), paths.data()),
                   "a path has more choices than there are uniforms");
          });
    m.def("dag_topk", [](const Theta<S>& theta, const Out<S, 2>& scores, const Out<S, 3>& paths, GRAPH) {
        const auto p = PROBLEM;
        need(int64_t(scores.shape(0)) == p.batch && int64_t(paths.shape(0)) == p.batch &&
                 paths.shape(1) == scores.shape(1) && int64_t(paths.shape(2)) == p.graph.num_edges,
             "scores and paths do not fit theta");
        nb::gil_scoped_release release;
        return dag<S>().topk(p, int64_t(scores.shape(1)), scores.data(), paths.data());
    });
    m.def("exp", [](const In<S, 1>& x, const Out<S, 1>& y) {
        need(x.shape(0) == y.shape(0), "lengths differ");
        for (int64_t i = 0; i < x.shape(0); ++i) y.data()[i] = exp_nonpositive(x.data()[i]);
    });
    m.def("log", [](const In<S, 1>& x, const Out<S, 1>& y) {
        need(x.shape(0) == y.shape(0), "lengths differ");
        for (int64_t i = 0; i < x.shape(0); ++i) y.data()[i] = log_positive(x.data()[i]);
    });
}

template <class S>
using Array = In<S, 4>;
template <class S>
using Potentials = Array<S>;
using Lengths = std::optional<In<int64_t, 1>>;
using Mask = std::optional<In<bool, 2>>;

// The steps that are kept: all without lengths, the first ones without a mask.
struct Kept {
    std::vector<int64_t> all, steps;
    const int64_t* lengths;

    Kept(const Lengths& given, const Mask& mask, int64_t batch, int64_t total) {
        if (!given) {
            all.assign(std::size_t(batch), total);
            lengths = all.data();
            return;
        }
        lengths = given->data();
        need(int64_t(given->shape(0)) == batch, "the index does not fit the scores");
        for (int64_t b = 0; b < batch; ++b) need(lengths[b] >= 0 && lengths[b] <= total, "a length is out of range");
        if (mask) read(*mask, batch, total);
    }

    void read(const In<bool, 2>& mask, int64_t batch, int64_t total) {
        need(int64_t(mask.shape(0)) == batch && int64_t(mask.shape(1)) == total, "the mask does not fit the scores");
        steps.resize(std::size_t(batch * total));
        bool has_holes = false;
        for (int64_t b = 0; b < batch; ++b) {
            int64_t n = 0;
            for (int64_t t = 0; t < total; ++t) {
                if (!mask.data()[b * total + t]) continue;
                has_holes |= t != n;
                steps[std::size_t(b * total + n++)] = t;
            }
            need(n == lengths[b], "the mask does not fit the lengths");
        }
        if (!has_holes) steps.clear();
    }

    const int64_t* data() const { return steps.empty() ? nullptr : steps.data(); }
};

template <class S>
ScoresProblem<S> chain_problem(const Potentials<S>& theta, const Kept& kept, OMEGA) {
    need(theta.shape(2) == theta.shape(3), "theta does not fit together");
    const int64_t steps = int64_t(theta.shape(1)), states = int64_t(theta.shape(2)), square = states * states;
    return {int64_t(theta.shape(0)), steps, states, kept.lengths, kept.data(), steps * square, square, 0, 0,
            omega_of(omega, parameters), threads_for(int64_t(theta.size()), threads),
            {nullptr, theta.data(), nullptr, nullptr}, nullptr};
}

template <class S>
void set_tape(ScoresProblem<S>& p, const Array<S>& tape) {
    need(int64_t(tape.shape(0)) == p.batch && int64_t(tape.shape(1)) == 2 &&
             int64_t(tape.shape(2)) == p.steps + 1 && int64_t(tape.shape(3)) == p.states,
         "the tape does not fit the scores");
    p.tape = tape.data();
}

template <class S, class A>
void need_like(const ScoresProblem<S>& p, const A& array) {
    need(int64_t(array.shape(0)) == p.batch && int64_t(array.shape(1)) == p.steps && int64_t(array.shape(2)) == p.states &&
             int64_t(array.shape(3)) == p.states,
         "an array is not like theta");
    if constexpr (!std::is_const_v<typename A::Scalar>) prefer_large_pages(array.data(), int64_t(array.nbytes()));
}

template <class S>
void need_batch(const ScoresProblem<S>& p, int64_t size) {
    need(size == p.batch, "a number for each sequence is needed");
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

#define INDEX const Lengths &lengths, const Mask &mask, OMEGA
#define CHAIN_PROBLEM                                                                      \
    const Kept kept(lengths, mask, int64_t(theta.shape(0)), int64_t(theta.shape(1)));      \
    auto p = chain_problem(theta, kept, omega, parameters, threads)

template <class S>
void bind_chain(nb::module_& m) {
    m.def("chain_forward", [](const Potentials<S>& theta, const Out<S, 1>& value, const Out<S, 4>& tape, INDEX) {
        CHAIN_PROBLEM;
        set_tape(p, Array<S>(tape));
        need_batch(p, int64_t(value.shape(0)));
        nb::gil_scoped_release release;
        return chain<S>().forward(p, value.data(), tape.data());
    });
    m.def("chain_backward",
          [](const Potentials<S>& theta, const Array<S>& tape, const In<S, 1>& seed, const Out<S, 4>& out, INDEX) {
              CHAIN_PROBLEM;
              set_tape(p, tape);
              need_like(p, out);
              need_batch(p, int64_t(seed.shape(0)));
              nb::gil_scoped_release release;
              chain<S>().backward(p, seed.data(), {nullptr, out.data(), nullptr, nullptr});
          });
    m.def("chain_hessian", [](const Potentials<S>& theta, const Array<S>& tape, const In<S, 1>& seed,
                              const Potentials<S>& z, const Out<S, 4>& out, INDEX) {
        CHAIN_PROBLEM;
        set_tape(p, tape);
        need_like(p, z);
        need_like(p, out);
        need_batch(p, int64_t(seed.shape(0)));
        nb::gil_scoped_release release;
        chain<S>().hessian(p, seed.data(), {nullptr, z.data(), nullptr, nullptr}, {nullptr, out.data(), nullptr, nullptr});
    });
    m.def("chain_log_transitions", [](const Potentials<S>& theta, const Array<S>& tape, const Out<S, 4>& out, INDEX) {
        CHAIN_PROBLEM;
        set_tape(p, tape);
        need_like(p, out);
        nb::gil_scoped_release release;
        chain<S>().log_transitions(p, out.data());
    });
    const auto along = [&m](const char* name, auto kernel) {
        m.def(name, [kernel](const Potentials<S>& theta, const Array<S>& tape, const Potentials<S>& z,
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
    m.def("chain_sample", [](const Potentials<S>& theta, const Array<S>& tape, const In<double, 3>& uniforms,
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
using Emissions = In<S, 3>;
template <class S>
using States = In<S, 2>;

// (1 or batch, states, states), or for each step (1 or batch, steps − 1, states, states).
template <class S>
using Transitions = TensorView<S, any_dims>;

// Whether a tensor has the wanted size, or 1, which stands for all.
bool one_or(std::size_t size, int64_t wanted) { return size == 1 || int64_t(size) == wanted; }

template <class S>
ScoresProblem<S> scores_problem(const Emissions<S>& emissions, const Transitions<const S>& transitions,
                                const States<S>& start, const States<S>& end, const Kept& kept, OMEGA) {
    const int64_t batch = int64_t(emissions.shape(0)), steps = int64_t(emissions.shape(1)),
                  states = int64_t(emissions.shape(2)), square = states * states;
    const std::size_t dims = transitions.ndim();
    need(dims == 3 || dims == 4, "the transitions do not fit the emissions");
    const int64_t places = dims == 4 ? int64_t(transitions.shape(1)) : 1;
    need(one_or(transitions.shape(0), batch) && (dims == 3 || places == std::max<int64_t>(steps - 1, 0)) &&
             int64_t(transitions.shape(dims - 2)) == states && int64_t(transitions.shape(dims - 1)) == states,
         "the transitions do not fit the emissions");
    need(one_or(start.shape(0), batch) && int64_t(start.shape(1)) == states && one_or(end.shape(0), batch) &&
             int64_t(end.shape(1)) == states,
         "start or end do not fit the emissions");
    const auto stride = [](std::size_t size, int64_t numbers) { return size == 1 ? int64_t(0) : numbers; };
    return {batch, steps, states, kept.lengths, kept.data(), stride(transitions.shape(0), places * square),
            places > 1 ? square : 0, stride(start.shape(0), states), stride(end.shape(0), states),
            omega_of(omega, parameters), threads_for(batch * steps * square, threads),
            {emissions.data(), transitions.data(), start.data(), end.data()}, nullptr};
}

#define SCORES \
    const Emissions<S> &emissions, const Transitions<const S> &transitions, const States<S> &start, const States<S> &end
#define SCORES_PROBLEM                                                                             \
    const Kept kept(lengths, mask, int64_t(emissions.shape(0)), int64_t(emissions.shape(1)));      \
    auto p = scores_problem(emissions, transitions, start, end, kept, omega, parameters, threads)

// The data of arrays of the scores' shapes.
template <class S, class Like, class E, class T, class V>
Scores<S> like_scores(const ScoresProblem<std::remove_const_t<S>>& p, const Like& like, const E& emissions,
                      const T& transitions, const V& start, const V& end) {
    need(int64_t(emissions.shape(0)) == p.batch && int64_t(emissions.shape(1)) == p.steps &&
             int64_t(emissions.shape(2)) == p.states,
         "an array is not like the emissions");
    need(transitions.ndim() == like.ndim(), "an array is not like the transitions");
    for (std::size_t d = 0; d < like.ndim(); ++d) {
        need(transitions.shape(d) == like.shape(d), "an array is not like the transitions");
    }
    need(int64_t(start.shape(0)) == (p.start_batch ? p.batch : 1) && int64_t(start.shape(1)) == p.states &&
             int64_t(end.shape(0)) == (p.end_batch ? p.batch : 1) && int64_t(end.shape(1)) == p.states,
         "an array is not like start or end");
    return {emissions.data(), transitions.data(), start.data(), end.data()};
}

template <class S>
void bind_scores(nb::module_& m) {
    m.def("scored_chain_forward", [](SCORES, const Out<S, 1>& value, const Out<S, 4>& tape, INDEX) {
        SCORES_PROBLEM;
        set_tape(p, Array<S>(tape));
        need_batch(p, int64_t(value.shape(0)));
        nb::gil_scoped_release release;
        return chain<S>().forward(p, value.data(), tape.data());
    });
    m.def("scored_chain_backward", [](SCORES, const Array<S>& tape, const In<S, 1>& seed, const Out<S, 3>& to_emissions,
                                const Transitions<S>& to_transitions, const Out<S, 2>& to_start, const Out<S, 2>& to_end, INDEX) {
        SCORES_PROBLEM;
        set_tape(p, tape);
        need_batch(p, int64_t(seed.shape(0)));
        const auto out = like_scores<S>(p, transitions, to_emissions, to_transitions, to_start, to_end);
        nb::gil_scoped_release release;
        chain<S>().backward(p, seed.data(), out);
    });
    m.def("scored_chain_hessian", [](SCORES, const Array<S>& tape, const In<S, 1>& seed, const Emissions<S>& z_emissions,
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
          [](SCORES, const Array<S>& tape, const In<double, 3>& uniforms, const Out<int64_t, 3>& sequences, INDEX) {
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
void need_binary(const ScoresProblem<S>& p) {
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
    const ScoresProblem<S> chain{batch, int64_t(scores.shape(1)), 2, kept.lengths, kept.data(), 0, 0, 0, 0, by_name,
                                 threads_for(int64_t(scores.size()), threads), {nullptr, transitions.data(), nullptr, nullptr}, nullptr};
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
void bind_binary(nb::module_& m) {
    m.def("two_states_marginals", [](SCORES, const Out<S, 3>& marginals, INDEX) {
        SCORES_PROBLEM;
        need_binary(p);
        like_scores<const S>(p, transitions, Emissions<S>(marginals), transitions, start, end);
        nb::gil_scoped_release release;
        return binary<S>().marginals(p, marginals.data());
    });
    m.def("two_states_marginals_vjp", [](SCORES, const Emissions<S>& cotangent, const Out<S, 3>& to_emissions,
                                     const Transitions<S>& to_transitions, const Out<S, 2>& to_start, const Out<S, 2>& to_end,
                                     INDEX) {
        SCORES_PROBLEM;
        need_binary(p);
        like_scores<const S>(p, transitions, cotangent, transitions, start, end);
        const auto out = like_scores<S>(p, transitions, to_emissions, to_transitions, to_start, to_end);
        nb::gil_scoped_release release;
        binary<S>().marginals_vjp(p, cotangent.data(), out);
    });
    m.def("two_states_weights", [](ATTENTION, const Out<S, 2>& weights, const Out<S, 1>& totals, double scale, int64_t rows, INDEX) {
        ATTENTION_PROBLEM;
        need_sequences(p, weights, totals);
        nb::gil_scoped_release release;
        return binary<S>().weights(p, weights.data(), totals.data());
    });
    m.def("two_states_weights_vjp", [](ATTENTION, const In<S, 2>& weights, const In<S, 1>& totals, const In<S, 2>& cotangent,
                                   const Out<S, 2>& to_scores, const Out<S, 2>& to_transitions, double scale, int64_t rows, INDEX) {
        ATTENTION_PROBLEM;
        need_sequences(p, weights, totals);
        need_sequences(p, cotangent, totals);
        need_sequences(p, to_scores, totals);
        need(to_transitions.shape(0) == 2 && to_transitions.shape(1) == 2, "transitions are (2, 2)");
        nb::gil_scoped_release release;
        binary<S>().weights_vjp(p, weights.data(), totals.data(), cotangent.data(), to_scores.data(), to_transitions.data());
    });
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("instructions", [] { return has_avx2() ? "avx2" : "baseline"; });
    m.def("dag_levels", [](const In<int64_t, 2>& pairs, const Out<int64_t, 1>& level) {
        need(pairs.shape(1) == 2, "pairs must have two columns");
        nb::gil_scoped_release release;
        dag_levels(pairs.data(), int64_t(pairs.shape(0)), level.data(), int64_t(level.shape(0)));
    });
    bind<float>(m);
    bind<double>(m);
    bind_chain<float>(m);
    bind_chain<double>(m);
    bind_scores<float>(m);
    bind_scores<double>(m);
    bind_labels<float>(m);
    bind_labels<double>(m);
    bind_binary<float>(m);
    bind_binary<double>(m);
    bind_lattice(m);
}
