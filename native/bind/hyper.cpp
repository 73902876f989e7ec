// The binding of the sweeps of stored graphs: as dag_* for one tail an edge, as hyper_* for any number of them.
#include "../hyper/hyper.h"

#include <optional>
#include <string>

#include "common.h"

namespace nb = nanobind;

namespace bellmax {
namespace {

template <class S>
const HyperKernels<S>& kernels() {
    static const HyperKernels<S> best = BELLMAX_BEST(hyper_kernels<S>());
    return best;
}

using Index = In<std::int32_t, 1>;
using Tape = In<double, 3>;

// The most that lies between two offsets, which must ascend from 0 to `total`.
int64_t most_between(const Index& offset, int64_t total) {
    const int64_t count = offset.shape(0) - 1;
    need(count >= 0 && offset.data()[0] == 0 && offset.data()[count] == total, "the index does not fit together");
    int64_t most = 0, least = 0;
    for (int64_t n = 0; n < count; ++n) {
        const int64_t between = int64_t(offset.data()[n + 1]) - offset.data()[n];
        most = std::max(most, between);
        least = std::min(least, between);
    }
    need(least == 0, "the index does not fit together");
    return most;
}

// The nodes and their groups.
Hypergraph nodes_of(const Index& offset, const Index& group, int64_t edges) {
    const int64_t nodes = offset.shape(0) - 1, groups = group.shape(0) - 1;
    need(nodes >= 1 && groups >= 1, "the index does not fit together");
    const int64_t most = most_between(offset, edges);
    most_between(group, nodes);
    const std::int32_t *const at = offset.data(), *const bound = group.data();
    bool even = true;
    for (int64_t g = 0; g < groups; ++g) {
        for (int64_t i = bound[g] + 1; i < bound[g + 1]; ++i) even &= at[i + 1] - at[i] == at[i] - at[i - 1];
    }
    need(even, "the nodes of a group do not fit together");
    Hypergraph graph{};
    graph.num_nodes = nodes;
    graph.num_edges = edges;
    graph.num_groups = groups;
    graph.most_edges = most;
    graph.offset = at;
    graph.group = bound;
    return graph;
}

Hypergraph dag(int64_t weights, const Index& offset, const Index& parent, const Index& edge, const Index& group) {
    Hypergraph graph = nodes_of(offset, group, parent.shape(0));
    need(edge.shape(0) == graph.num_edges, "the index does not fit together");
    need(weights == graph.num_edges, "theta does not fit the graph");
    graph.num_weights = weights;
    graph.most_tails = 1;
    graph.tail = parent.data();
    graph.edge = graph.weight = edge.data();
    return graph;
}

// Without `weight`, each edge has its own.
Hypergraph hypergraph(int64_t weights, const Index& offset, const Index& tail_offset, const Index& tail, const Index& edge,
                      const Index& group, const std::optional<Index>& weight) {
    Hypergraph graph = nodes_of(offset, group, edge.shape(0));
    need(tail_offset.shape(0) == graph.num_edges + 1 && (!weight || weight->shape(0) == graph.num_edges),
         "the index does not fit together");
    need(weight || weights == graph.num_edges, "theta does not fit the graph");
    graph.num_weights = weights;
    graph.most_tails = most_between(tail_offset, tail.shape(0));
    graph.tail_offset = tail_offset.data();
    graph.tail = tail.data();
    graph.edge = edge.data();
    graph.weight = weight ? weight->data() : edge.data();
    return graph;
}

template <class S>
HyperProblem<S> problem(const Hypergraph& graph, const In<S, 2>& theta, OMEGA) {
    const int64_t batch = theta.shape(0);
    return {graph, omega_of(omega, parameters), batch, threads_for(batch * graph.num_edges, threads), theta.data(), nullptr};
}

template <class S, class T>
void set_tape(HyperProblem<S>& p, const T& tape) {
    need(tape.shape(0) == p.batch && tape.shape(1) == 2 && tape.shape(2) == p.graph.num_nodes + room_on_tape,
         "the tape does not fit theta");
    p.tape = tape.data();
}

// Whether an array has `numbers` for each row.
template <class S, class Array>
void need_rows(const HyperProblem<S>& p, const Array& array, int64_t numbers) {
    need(array.shape(0) == p.batch && int64_t(array.size()) == p.batch * numbers, "an array does not fit theta");
    if constexpr (!std::is_const_v<typename Array::Scalar>) prefer_large_pages(array.data(), int64_t(array.nbytes()));
}

template <class S, class Array>
void need_derivations(const HyperProblem<S>& p, const Array& counts, int64_t each) {
    need(counts.shape(0) == p.batch && counts.shape(1) == each && counts.shape(2) == p.graph.num_edges,
         "an array for paths does not fit");
}

#define PROBLEM auto p = problem(graph(theta.shape(1), index...), theta, omega, parameters, threads)
#define INDEX const Parts &...index, OMEGA

// graph(number of weights, index...) makes the graph of the integers that come last.
template <class S, class... Parts>
void bind_sweeps(nb::module_& m, const std::string& prefix, Hypergraph (*graph)(int64_t, const Parts&...)) {
    const auto define = [&](const char* name, auto function) { m.def((prefix + name).c_str(), function); };
    define("forward", [graph](const In<S, 2>& theta, const Out<S, 1>& value, const Out<double, 3>& tape, INDEX) {
        PROBLEM;
        set_tape(p, tape);
        need_rows(p, value, 1);
        nb::gil_scoped_release release;
        return kernels<S>().forward(p, value.data(), tape.data());
    });
    define("backward", [graph](const In<S, 2>& theta, const Tape& tape, const In<S, 1>& seed, const Out<S, 2>& out, INDEX) {
        PROBLEM;
        set_tape(p, tape);
        need_rows(p, seed, 1);
        need_rows(p, out, p.graph.num_weights);
        nb::gil_scoped_release release;
        kernels<S>().backward(p, seed.data(), out.data());
    });
    define("hessian", [graph](const In<S, 2>& theta, const Tape& tape, const In<S, 1>& seed, const In<S, 2>& z,
                              const Out<S, 2>& out, INDEX) {
        PROBLEM;
        set_tape(p, tape);
        need_rows(p, seed, 1);
        need_rows(p, z, p.graph.num_weights);
        need_rows(p, out, p.graph.num_weights);
        nb::gil_scoped_release release;
        kernels<S>().hessian(p, seed.data(), z.data(), out.data());
    });
    define("log_transitions", [graph](const In<S, 2>& theta, const Tape& tape, const Out<S, 2>& out, INDEX) {
        PROBLEM;
        set_tape(p, tape);
        need_rows(p, out, p.graph.num_edges);
        nb::gil_scoped_release release;
        kernels<S>().log_transitions(p, out.data());
    });
    define("log_transitions_jvp",
           [graph](const In<S, 2>& theta, const Tape& tape, const In<S, 2>& z, const Out<S, 2>& out, INDEX) {
               PROBLEM;
               set_tape(p, tape);
               need_rows(p, z, p.graph.num_weights);
               need_rows(p, out, p.graph.num_edges);
               nb::gil_scoped_release release;
               kernels<S>().log_transitions_jvp(p, z.data(), out.data());
           });
    define("log_transitions_vjp",
           [graph](const In<S, 2>& theta, const Tape& tape, const In<S, 2>& cotangent, const Out<S, 2>& out, INDEX) {
               PROBLEM;
               set_tape(p, tape);
               need_rows(p, cotangent, p.graph.num_edges);
               need_rows(p, out, p.graph.num_weights);
               nb::gil_scoped_release release;
               kernels<S>().log_transitions_vjp(p, cotangent.data(), out.data());
           });
}

// Single derivations.
template <class S, class... Parts>
void bind_derivations(nb::module_& m, const std::string& prefix, Hypergraph (*graph)(int64_t, const Parts&...)) {
    m.def((prefix + "sample").c_str(), [graph](const In<S, 2>& theta, const Tape& tape, const In<double, 3>& uniforms,
                                               const Out<S, 3>& counts, INDEX) {
        PROBLEM;
        set_tape(p, tape);
        need(uniforms.shape(0) == p.batch, "the uniforms do not fit theta");
        need_derivations(p, counts, uniforms.shape(1));
        nb::gil_scoped_release release;
        need(kernels<S>().sample(p, uniforms.shape(1), uniforms.shape(2), uniforms.data(), counts.data()),
             "a path has more choices than there are uniforms");
    });
    m.def((prefix + "topk").c_str(),
          [graph](const In<S, 2>& theta, const Out<S, 2>& scores, const Out<S, 3>& counts, INDEX) {
              PROBLEM;
              need(scores.shape(0) == p.batch && scores.shape(1) >= 1, "the scores do not fit theta");
              need_derivations(p, counts, scores.shape(1));
              nb::gil_scoped_release release;
              return kernels<S>().topk(p, scores.shape(1), scores.data(), counts.data());
          });
}

#undef PROBLEM
#undef INDEX

template <class S>
void bind_structures(nb::module_& m) {
    bind_sweeps<S>(m, "dag_", dag);
    bind_derivations<S>(m, "dag_", dag);
    bind_sweeps<S>(m, "hyper_", hypergraph);
    bind_derivations<S>(m, "hyper_", hypergraph);
}

}  // namespace

void bind_hyper(nb::module_& m) {
    m.def("dag_levels", [](const In<int64_t, 2>& pairs, const Out<int64_t, 1>& level) {
        need(pairs.shape(1) == 2, "pairs must have two columns");
        for (int64_t n = 0; n < 2 * pairs.shape(0); ++n) {
            need(pairs.data()[n] >= 0 && pairs.data()[n] < level.shape(0), "a pair names no node");
        }
        nb::gil_scoped_release release;
        levels(pairs.data(), pairs.shape(0), level.data(), level.shape(0));
    });
    bind_structures<float>(m);
    bind_structures<double>(m);
}

}  // namespace bellmax
