// The binding: checks sizes, picks the instruction set, releases the GIL. It knows no mathematics.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <stdexcept>
#include <string>

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
    need(int64_t(tape.shape(0)) == p.batch && int64_t(tape.shape(1)) == tape_rows(p.omega) &&
             int64_t(tape.shape(2)) == p.graph.num_nodes,
         "the tape does not fit theta");
    p.tape = tape.data();
}

template <class S, class Array>
void need_like(const Problem<S>& p, const Array& array) {
    need(int64_t(array.shape(0)) == p.batch && int64_t(array.shape(1)) == p.graph.num_edges, "an array is not like theta");
}

#define GRAPH const Index &offset, const Index &parent, const Index &edge, double alpha, double vertex, int threads
#define PROBLEM problem(theta, offset, parent, edge, alpha, vertex, threads)

template <class S>
void bind(nb::module_& m) {
    m.def("dag_forward", [](const Theta<S>& theta, const Out<S, 1>& value, const Out<double, 3>& tape, GRAPH) {
        auto p = PROBLEM;
        set_tape(p, Tape(tape));
        need(int64_t(value.shape(0)) == p.batch, "the value does not fit theta");
        nb::gil_scoped_release release;
        dag<S>().forward(p, value.data(), tape.data());
    });
    m.def("dag_backward", [](const Theta<S>& theta, const Tape& tape, const Out<S, 2>& out, GRAPH) {
        auto p = PROBLEM;
        set_tape(p, tape);
        need_like(p, out);
        nb::gil_scoped_release release;
        dag<S>().backward(p, out.data());
    });
    m.def("dag_log_transitions", [](const Theta<S>& theta, const Tape& tape, const Out<S, 2>& out, GRAPH) {
        auto p = PROBLEM;
        set_tape(p, tape);
        need_like(p, out);
        nb::gil_scoped_release release;
        dag<S>().log_transitions(p, out.data());
    });
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
}
