// Stored graphs, with one tail an edge or any number of them.
#include "../hyper/hyper.h"

#include <limits>
#include <numeric>

#include "call.h"

namespace bellmax {
namespace {

using std::int32_t;

template <class S>
const HyperKernels<S>& kernels() {
    static const HyperKernels<S> best = BELLMAX_BEST(hyper_kernels<S>());
    return best;
}

// Integers of the index.
struct Integers {
    const int32_t* data;
    int64_t size;

    explicit Integers(Call& call) {
        const Tensor found = call.tensor();
        data = Call::array<const int32_t>({any_size}, found);
        size = found.shape[0];
    }

    // As offsets, which must ascend from 0 to `total`: the most that lies between two.
    int64_t most_between(int64_t total) const {
        need(size >= 1 && data[0] == 0 && data[size - 1] == total, "the index does not fit together");
        int32_t most = 0, all_bits = 0;  // of 4 bytes and without a branch, so that the loop is vectorized
        for (int64_t n = 0; n + 1 < size; ++n) {
            const int32_t between = int32_t(std::uint32_t(data[n + 1]) - std::uint32_t(data[n]));
            most = std::max(most, between);
            all_bits |= between | data[n];  // negative if one of them is; if no offset is, nothing wraps around
        }
        need(all_bits >= 0, "the index does not fit together");
        return most;
    }
};

// The nodes and their groups.
void set_nodes(Hypergraph& graph, const Integers& offset, const Integers& group, int64_t edges) {
    graph.num_nodes = offset.size - 1;
    graph.num_edges = edges;
    graph.num_groups = group.size - 1;
    need(graph.num_nodes >= 1 && graph.num_groups >= 1, "the index does not fit together");
    graph.most_edges = offset.most_between(edges);
    group.most_between(graph.num_nodes);
    bool even = true;
    for (int64_t g = 0; g < graph.num_groups; ++g) {
        for (int64_t i = group.data[g] + 1; i < group.data[g + 1]; ++i) {
            even &= offset.data[i + 1] - offset.data[i] == offset.data[i] - offset.data[i - 1];
        }
    }
    need(even, "the nodes of a group do not fit together");
    graph.offset = offset.data;
    graph.group = group.data;
}

// The terms of forms, or None three times.
void read_terms(Call& call, Hypergraph& graph) {
    if (call.skips_none()) return call.skip(2);
    const Integers term_offset(call), entry(call);
    const Tensor coefficient = call.tensor();
    const double* const numbers = Call::array<const double>({any_size}, coefficient);
    const bool all_are_1 = coefficient.shape[0] == 0;
    need(term_offset.size >= 1, "the index does not fit together");
    need(all_are_1 || coefficient.shape[0] == entry.size, "the index does not fit together");
    graph.num_forms = term_offset.size - 1;
    graph.num_terms = entry.size;
    graph.term_offset = term_offset.data;
    graph.entry = entry.data;
    graph.coefficient = all_are_1 ? nullptr : numbers;
}

// The index is offset, tail, edge, group; of a hypergraph, tail_offset; if edges share weights, theirs; if weights are
// sums, term_offset, entry and coefficient; None for the rest.
constexpr int index_parts = 9;

Hypergraph read_graph(Call& call, int64_t weights) {
    const Integers offset(call), tail(call), edge(call), group(call);
    Hypergraph graph{};
    set_nodes(graph, offset, group, edge.size);
    graph.num_weights = graph.num_forms = weights;
    graph.tail = tail.data;
    graph.edge = graph.weight = edge.data;
    if (call.skips_none()) {
        need(tail.size == edge.size, "the index does not fit together");
    } else {
        const Integers tail_offset(call);
        need(tail_offset.size == edge.size + 1, "the index does not fit together");
        tail_offset.most_between(tail.size);
        graph.tail_offset = tail_offset.data;
    }
    if (call.skips_none()) {
        need(weights == edge.size, "theta does not fit the graph");
    } else {
        const Integers weight(call);
        need(weight.size == edge.size, "the index does not fit together");
        graph.weight = weight.data;
    }
    read_terms(call, graph);
    return graph;
}

template <class S>
struct HyperCall : HyperProblem<S> {
    explicit HyperCall(Call& call) : HyperProblem<S>{} {
        Call index = call.split(index_parts + 3);
        const Tensor theta = call.tensor();
        this->theta = Call::array<const S>({any_size, any_size}, theta);
        this->batch = theta.shape[0];
        this->graph = read_graph(index, theta.shape[1]);
        this->omega = index.omega();
        this->threads = threads_for(this->batch * this->graph.num_edges, int(index.integer()));
    }

    template <class T>
    T* take_tape(Call& call) const {
        return call.array<T>({this->batch, 2, this->graph.num_nodes + room_on_tape});
    }
    template <class T>
    T* by_weight(Call& call) const {
        return call.array<T>({this->batch, this->graph.num_weights});
    }
    template <class T>
    T* by_edge(Call& call) const {
        return call.array<T>({this->batch, this->graph.num_edges});
    }
};

// With the tape that forward wrote.
template <class S>
struct TapedHyperCall : HyperCall<S> {
    explicit TapedHyperCall(Call& call) : HyperCall<S>(call) {
        this->tape = this->template take_tape<const double>(call);
    }
};

template <class S>
bool forward(Call& call) {
    const HyperCall<S> p(call);
    S* const value = call.array<S>({p.batch});
    return run(kernels<S>().forward, p, value, p.template take_tape<double>(call));
}

template <class S>
bool backward(Call& call) {
    const TapedHyperCall<S> p(call);
    const auto seed = call.vector<S>(p.batch);
    return run(kernels<S>().backward, p, seed.data(), p.template by_weight<S>(call));
}

template <class S>
bool hessian(Call& call) {
    const TapedHyperCall<S> p(call);
    const auto seed = call.vector<S>(p.batch);
    const S* const z = p.template by_weight<const S>(call);
    return run(kernels<S>().hessian, p, seed.data(), z, p.template by_weight<S>(call));
}

template <class S>
bool log_transitions(Call& call) {
    const TapedHyperCall<S> p(call);
    return run(kernels<S>().log_transitions, p, p.template by_edge<S>(call));
}

template <class S>
bool log_transitions_jvp(Call& call) {
    const TapedHyperCall<S> p(call);
    const S* const z = p.template by_weight<const S>(call);
    return run(kernels<S>().log_transitions_jvp, p, z, p.template by_edge<S>(call));
}

template <class S>
bool log_transitions_vjp(Call& call) {
    const TapedHyperCall<S> p(call);
    const S* const cotangent = p.template by_edge<const S>(call);
    return run(kernels<S>().log_transitions_vjp, p, cotangent, p.template by_weight<S>(call));
}

template <class S>
bool sample(Call& call) {
    const TapedHyperCall<S> p(call);
    const Tensor uniforms = call.tensor();
    const double* const numbers = Call::array<const double>({p.batch, any_size, any_size}, uniforms);
    const int64_t draws = uniforms.shape[1], choices = uniforms.shape[2];
    S* const counts = call.array<S>({p.batch, draws, p.graph.num_edges});
    need(run(kernels<S>().sample, p, draws, choices, numbers, counts),
         "a path has more choices than there are uniforms");
    return true;
}

template <class S>
bool topk(Call& call) {
    const HyperCall<S> p(call);
    const Tensor scores = call.tensor();
    S* const best = Call::array<S>({p.batch, any_size}, scores);
    const int64_t k = scores.shape[1];
    need(k >= 1, "k is at least 1");
    return run(kernels<S>().topk, p, k, best, call.array<S>({p.batch, k, p.graph.num_edges}));
}

template <class S>
bool max_marginals(Call& call) {
    const HyperCall<S> p(call);
    return run(kernels<S>().max_marginals, p, p.template by_weight<S>(call));
}

// Numbers from 0 to below a limit, of a tensor with these sizes.
const int64_t* numbers_below(int64_t limit, std::initializer_list<int64_t> shape, const Tensor& tensor) {
    const int64_t* const numbers = Call::array<const int64_t>(shape, tensor);
    std::uint64_t most = 0;  // negative numbers become large
    for (int64_t n = 0; n < tensor.size(); ++n) most = std::max(most, std::uint64_t(numbers[n]));
    need(tensor.size() == 0 || most < std::uint64_t(limit), "a number is out of range");
    return numbers;
}

// Nodes and edges have numbers of 4 bytes.
int64_t checked_count(int64_t count) {
    need(count < std::numeric_limits<int32_t>::max(), "there are too many nodes or edges");
    return count;
}

bool find_levels(Call& call) {
    const Tensor pairs = call.tensor(), level = call.tensor();
    const int64_t num_pairs = checked_count(pairs.shape[0]), num_nodes = checked_count(level.shape[0]);
    const int64_t* const numbers = numbers_below(num_nodes, {any_size, 2}, pairs);
    return run(levels, numbers, num_pairs, Call::array<int64_t>({any_size}, level), num_nodes);
}

bool find_reachable(Call& call) {
    const Tensor pairs = call.tensor();
    const bool is_reversed = call.integer() != 0;
    const int64_t source = call.integer();
    const Tensor reached = call.tensor();
    const int64_t num_pairs = checked_count(pairs.shape[0]), num_nodes = checked_count(reached.shape[0]);
    need(source >= 0 && source < num_nodes, "a number is out of range");
    const int64_t* const numbers = numbers_below(num_nodes, {any_size, 2}, pairs);
    return run(reachable, numbers, num_pairs, is_reversed, source, Call::array<bool>({any_size}, reached), num_nodes);
}

// Head, tail and level, and arity or None; then the arrays to be written, the last of them only if there is an arity.
bool sort_edges(Call& call) {
    const Tensor head = call.tensor(), tail = call.tensor(), level = call.tensor();
    const int64_t edges = checked_count(head.shape[0]), nodes = checked_count(level.shape[0]);
    const int64_t tails = checked_count(tail.shape[0]);
    UnsortedGraph graph{nodes, edges, numbers_below(nodes, {any_size}, head), numbers_below(nodes, {any_size}, tail),
                        numbers_below(nodes + 1, {any_size}, level), nullptr};
    if (call.skips_none()) {
        need(tails == edges, "the shapes of tensors do not fit together");
    } else {
        graph.arity = numbers_below(tails + 1, {edges}, call.tensor());
        const int64_t sum = std::accumulate(graph.arity, graph.arity + edges, int64_t(0));
        need(sum == tails, "arity does not add up to the number of tails");
    }
    SortedGraph sorted{};
    sorted.offset = call.array<int32_t>({nodes + 1});
    sorted.tail = call.array<int32_t>({tails});
    sorted.edge = call.array<int32_t>({edges});
    sorted.begins_group = call.array<bool>({nodes});
    if (graph.arity) sorted.tail_offset = call.array<int32_t>({edges + 1});
    return run(sort_graph, graph, sorted);
}

#define SWEEP(name) method<name<float>, name<double>>("dag_" #name)

}  // namespace

PyMethodDef hyper_methods[] = {SWEEP(forward),
                              SWEEP(backward),
                              SWEEP(hessian),
                              SWEEP(log_transitions),
                              SWEEP(log_transitions_jvp),
                              SWEEP(log_transitions_vjp),
                              SWEEP(sample),
                              SWEEP(topk),
                              SWEEP(max_marginals),
                              method<find_levels>("dag_levels"),
                              method<find_reachable>("dag_reachable"),
                              method<sort_edges>("dag_sort"),
                              {}};

}  // namespace bellmax
