// The binding: checks sizes, picks the instruction set, releases the GIL. It knows no mathematics.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "chain.h"
#include "dag.h"

namespace nb = nanobind;
using namespace bellmax;
using std::int64_t;

namespace {

bool has_avx2() {
#ifdef BELLMAX_HAS_AVX2
    static const bool yes = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return yes;
#else
    return false;
#endif
}

template <class S>
const DagKernels<S>& dag() {
#ifdef BELLMAX_HAS_AVX2
    static const DagKernels<S> kernels = has_avx2() ? avx2::dag_kernels<S>() : baseline::dag_kernels<S>();
#else
    static const DagKernels<S> kernels = baseline::dag_kernels<S>();
#endif
    return kernels;
}

template <class S>
const ChainKernels<S>& chain() {
#ifdef BELLMAX_HAS_AVX2
    static const ChainKernels<S> kernels = has_avx2() ? avx2::chain_kernels<S>() : baseline::chain_kernels<S>();
#else
    static const ChainKernels<S> kernels = baseline::chain_kernels<S>();
#endif
    return kernels;
}

template <class T, int D>
using In = nb::ndarray<const T, nb::ndim<D>, nb::c_contig, nb::device::cpu>;
template <class T, int D>
using Out = nb::ndarray<T, nb::ndim<D>, nb::c_contig, nb::device::cpu>;

void need(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(std::string("bellmax kernels: ") + what);
}

template <class S>
using Theta = In<S, 2>;
using Index = In<int64_t, 1>;
using Tape = In<double, 3>;

template <class S>
Problem<S> problem(const Theta<S>& theta, const Index& offset, const Index& parent, const Index& edge,
                   double alpha, double vertex, int threads) {
    const int64_t edges = static_cast<int64_t>(parent.shape(0));
    need(offset.shape(0) >= 2 && edge.shape(0) == parent.shape(0), "the index does not fit together");
    need(theta.shape(1) == parent.shape(0), "theta does not fit the graph");
    const int64_t nodes = static_cast<int64_t>(offset.shape(0)) - 1;
    int64_t most = 0;
    for (int64_t i = 0; i < nodes; ++i) most = std::max(most, offset.data()[i + 1] - offset.data()[i]);
    const Graph graph{nodes, edges, most, offset.data(), parent.data(), edge.data()};
    return {graph, {alpha, vertex}, static_cast<int64_t>(theta.shape(0)), threads, theta.data(), nullptr};
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
    const Index &offset, const Index &parent, const Index &edge, const Index &, double alpha, double vertex, int threads
#define PROBLEM problem(theta, offset, parent, edge, alpha, vertex, threads)

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
    onto("dag_backward", &DagKernels<S>::backward);
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
    along("dag_hessian", &DagKernels<S>::hessian);
    along("dag_log_transitions_jvp", &DagKernels<S>::log_transitions_jvp);
    along("dag_log_transitions_vjp", &DagKernels<S>::log_transitions_vjp);
    m.def("dag_sample",
          [](const Theta<S>& theta, const Tape& tape, const In<double, 3>& uniforms, const Out<S, 3>& paths, GRAPH) {
              auto p = PROBLEM;
              set_tape(p, tape);
              need(int64_t(uniforms.shape(0)) == p.batch && int64_t(uniforms.shape(2)) == p.graph.num_nodes,
                   "the uniforms do not fit theta");
              need(paths.shape(0) == uniforms.shape(0) && paths.shape(1) == uniforms.shape(1) &&
                       int64_t(paths.shape(2)) == p.graph.num_edges,
                   "the paths do not fit the uniforms");
              nb::gil_scoped_release release;
              dag<S>().sample(p, int64_t(uniforms.shape(1)), uniforms.data(), paths.data());
          });
    m.def("dag_topk", [](const Theta<S>& theta, const Out<S, 2>& scores, const Out<S, 3>& paths, GRAPH) {
        const auto p = PROBLEM;
        need(int64_t(scores.shape(0)) == p.batch && int64_t(paths.shape(0)) == p.batch &&
                 paths.shape(1) == scores.shape(1) && int64_t(paths.shape(2)) == p.graph.num_edges,
             "scores and paths do not fit theta");
        nb::gil_scoped_release release;
        dag<S>().topk(p, int64_t(scores.shape(1)), scores.data(), paths.data());
    });
    m.def("exp", [](const In<S, 1>& x, const Out<S, 1>& y) {
        need(x.shape(0) == y.shape(0), "lengths differ");
        for (std::size_t i = 0; i < x.shape(0); ++i) y.data()[i] = exp_nonpositive(x.data()[i]);
    });
    m.def("log", [](const In<S, 1>& x, const Out<S, 1>& y) {
        need(x.shape(0) == y.shape(0), "lengths differ");
        for (std::size_t i = 0; i < x.shape(0); ++i) y.data()[i] = log_positive(x.data()[i]);
    });
}

template <class S>
using Potentials = In<S, 4>;

template <class S>
ChainProblem<S> chain_problem(const Potentials<S>& theta, const Index& lengths, double alpha, double vertex, int threads) {
    need(lengths.shape(0) == theta.shape(0) && theta.shape(2) == theta.shape(3), "theta does not fit together");
    const int64_t steps = int64_t(theta.shape(1));
    for (std::size_t b = 0; b < lengths.shape(0); ++b) {
        need(lengths.data()[b] >= 0 && lengths.data()[b] <= steps, "a length is out of range");
    }
    return {int64_t(theta.shape(0)), steps, int64_t(theta.shape(2)), lengths.data(), {alpha, vertex}, threads, theta.data(),
            nullptr};
}

template <class S>
void set_tape(ChainProblem<S>& p, const In<double, 4>& tape) {
    need(int64_t(tape.shape(0)) == p.batch && int64_t(tape.shape(1)) == 2 &&
             int64_t(tape.shape(2)) == p.steps + 1 && int64_t(tape.shape(3)) == p.states,
         "the tape does not fit theta");
    p.tape = tape.data();
}

template <class S, class Array>
void need_like(const ChainProblem<S>& p, const Array& array) {
    need(int64_t(array.shape(0)) == p.batch && int64_t(array.shape(1)) == p.steps && int64_t(array.shape(2)) == p.states &&
             int64_t(array.shape(3)) == p.states,
         "an array is not like theta");
}

#define CHAIN const Index &lengths, double alpha, double vertex, int threads
#define CHAIN_PROBLEM chain_problem(theta, lengths, alpha, vertex, threads)

template <class S>
void bind_chain(nb::module_& m) {
    m.def("chain_forward", [](const Potentials<S>& theta, const Out<S, 1>& value, const Out<double, 4>& tape, CHAIN) {
        auto p = CHAIN_PROBLEM;
        set_tape(p, In<double, 4>(tape));
        need(int64_t(value.shape(0)) == p.batch, "the value does not fit theta");
        nb::gil_scoped_release release;
        return chain<S>().forward(p, value.data(), tape.data());
    });
    const auto onto = [&m](const char* name, auto kernel) {
        m.def(name, [kernel](const Potentials<S>& theta, const In<double, 4>& tape, const Out<S, 4>& out, CHAIN) {
            auto p = CHAIN_PROBLEM;
            set_tape(p, tape);
            need_like(p, out);
            nb::gil_scoped_release release;
            (chain<S>().*kernel)(p, out.data());
        });
    };
    onto("chain_backward", &ChainKernels<S>::backward);
    onto("chain_log_transitions", &ChainKernels<S>::log_transitions);
    const auto along = [&m](const char* name, auto kernel) {
        m.def(name, [kernel](const Potentials<S>& theta, const In<double, 4>& tape, const Potentials<S>& z,
                             const Out<S, 4>& out, CHAIN) {
            auto p = CHAIN_PROBLEM;
            set_tape(p, tape);
            need_like(p, z);
            need_like(p, out);
            nb::gil_scoped_release release;
            (chain<S>().*kernel)(p, z.data(), out.data());
        });
    };
    along("chain_hessian", &ChainKernels<S>::hessian);
    along("chain_log_transitions_jvp", &ChainKernels<S>::log_transitions_jvp);
    along("chain_log_transitions_vjp", &ChainKernels<S>::log_transitions_vjp);
    m.def("chain_sample", [](const Potentials<S>& theta, const In<double, 4>& tape, const In<double, 3>& uniforms,
                             const Out<int64_t, 3>& sequences, CHAIN) {
        auto p = CHAIN_PROBLEM;
        set_tape(p, tape);
        need(int64_t(uniforms.shape(0)) == p.batch && int64_t(uniforms.shape(2)) == p.steps,
             "the uniforms do not fit theta");
        need(sequences.shape(0) == uniforms.shape(0) && sequences.shape(1) == uniforms.shape(1) &&
                 sequences.shape(2) == uniforms.shape(2),
             "the sequences do not fit the uniforms");
        nb::gil_scoped_release release;
        chain<S>().sample(p, int64_t(uniforms.shape(1)), uniforms.data(), sequences.data());
    });
    m.def("chain_topk",
          [](const Potentials<S>& theta, const Out<S, 2>& scores, const Out<int64_t, 3>& sequences, CHAIN) {
              const auto p = CHAIN_PROBLEM;
              need(int64_t(scores.shape(0)) == p.batch && int64_t(sequences.shape(0)) == p.batch &&
                       sequences.shape(1) == scores.shape(1) && int64_t(sequences.shape(2)) == p.steps,
                   "scores and sequences do not fit theta");
              nb::gil_scoped_release release;
              chain<S>().topk(p, int64_t(scores.shape(1)), scores.data(), sequences.data());
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
}
