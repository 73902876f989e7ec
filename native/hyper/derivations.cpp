#include "derivations.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "../base/memory.h"
#include "../base/threads.h"
#include "../node.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

using std::int32_t;
using std::int64_t;

struct Tails {
    const int32_t* first;
    int64_t count;
};

Tails tails_of(const Hypergraph& graph, int64_t slot) {
    if (!graph.tail_offset) return {graph.tail + slot, 1};
    return {graph.tail + graph.tail_offset[slot], graph.tail_offset[slot + 1] - graph.tail_offset[slot]};
}

bool is_start(const Hypergraph& graph, int64_t node) { return node == 0 && !graph.tail_offset; }

// One row of the batch, seen from a node: the probabilities of the edges into it.
template <class S, class Omega>
class Chances {
    const Hypergraph& graph;
    const Omega& omega;
    const S* theta;
    const double *value, *base, *tau;
    Array<double> q;

public:
    Chances(const HyperProblem<S>& problem, const Omega& own, int64_t row)
        : graph(problem.graph),
          omega(own),
          theta(problem.theta + row * graph.num_weights),
          value(problem.tape + row * 3 * graph.num_nodes),
          base(value + graph.num_nodes),
          tau(base + graph.num_nodes),
          q(scratch<double>(graph.most_edges)) {}

    bool can_reach(int64_t node) const { return value[node] > -infinity<double>; }

    // The slot that a uniform number chooses.
    int64_t draw(int64_t node, double uniform) {
        const int64_t begin = graph.offset[node], edges = graph.offset[node + 1] - begin;
        double sum = 0, s;
        for (int64_t k = 0; k < edges; ++k) {
            double x = node::unit<Omega> * double(theta[graph.weight[begin + k]]);
            const Tails tails = tails_of(graph, begin + k);
            for (int64_t t = 0; t < tails.count; ++t) x += value[tails.first[t]];
            const double chosen = tau[node] == double(k) ? 0.0 : -infinity<double>;
            omega.weigh(Omega::by_slot ? chosen : x - base[node], tau[node], q[k], s);
            sum += q[k];
        }
        return begin + node::draw(q.get(), edges, sum, uniform);
    }
};

// The node to go on with lies on top: first tails first.
template <class Item>
void push_tails(std::vector<Item>& open, const Tails& tails, const int32_t* ranks) {
    for (int64_t t = tails.count - 1; t >= 0; --t) open.push_back({tails.first[t], ranks ? ranks[t] : 0});
}

struct Open {
    int32_t node, rank;  // rank: of the k best
};

// --- the k best

// How a derivation begins: the slot of an edge, and where the ranks of its tails are kept.
struct Way {
    int64_t slot, ranks;
};

// The k best derivations of every node of one row.
template <class S>
class Best {
    const Hypergraph& graph;
    const S* theta;
    int64_t k;
    Array<double> scores;    // (nodes, k)
    Array<int64_t> slot_of;  // (nodes, k)
    Array<int32_t> ranks;    // (nodes, k, most tails)
    std::vector<Way> ways;  // of the node at hand
    std::vector<int32_t> tried;

    // A choice of ranks for the tails of an edge.
    struct Choice {
        double score;
        int64_t ranks;  // in `tried`
        int64_t free;   // tails from here on may take a worse rank: so each choice comes from one other alone
    };
    std::vector<Choice> heap;

public:
    Best(const Hypergraph& of, const S* weights, int64_t count)
        : graph(of),
          theta(weights),
          k(count),
          scores(filled<double>(of.num_nodes * count, -infinity<double>)),
          slot_of(zeros<int64_t>(of.num_nodes * count)),
          ranks(zeros<int32_t>(of.num_nodes * count * of.most_tails)),
          ways(std::size_t(count)) {
        for (int64_t node = 0; node < graph.num_nodes; ++node) {
            if (is_start(graph, node)) {
                scores[0] = 0;
            } else {
                solve(node);
            }
        }
    }

    double score(int64_t rank) const { return scores[(graph.num_nodes - 1) * k + rank]; }

    // Counts the edges of the root's derivation of a rank.
    void trace(int64_t rank, std::vector<Open>& open, S* counts) const {
        open.assign(1, {int32_t(graph.num_nodes - 1), int32_t(rank)});
        while (!open.empty()) {
            const Open at = open.back();
            open.pop_back();
            if (is_start(graph, at.node)) continue;
            const int64_t place = at.node * k + at.rank;
            counts[graph.edge[slot_of[place]]] += 1;
            push_tails(open, tails_of(graph, slot_of[place]), ranks.get() + place * graph.most_tails);
        }
    }

private:
    void solve(int64_t node) {
        double* const list = &scores[node * k];
        tried.clear();
        for (int64_t slot = graph.offset[node]; slot < graph.offset[node + 1]; ++slot) enter(slot, list);
        for (int64_t n = 0; n < k && list[n] > -infinity<double>; ++n) {
            slot_of[node * k + n] = ways[n].slot;
            std::copy_n(tried.begin() + ways[n].ranks, tails_of(graph, ways[n].slot).count,
                        ranks.get() + (node * k + n) * graph.most_tails);
        }
    }

    // Enters the choices of ranks for an edge's tails into the list, best first, until one is too low.
    void enter(int64_t slot, double* list) {
        const Tails tails = tails_of(graph, slot);
        const double weight = double(theta[graph.weight[slot]]);
        heap.clear();
        tried.resize(tried.size() + std::size_t(tails.count), 0);
        push(tails, weight, int64_t(tried.size()) - tails.count, 0);
        while (!heap.empty()) {
            std::pop_heap(heap.begin(), heap.end(), [this, &tails](const auto& a, const auto& b) { return after(a, b, tails); });
            const Choice best = heap.back();
            heap.pop_back();
            if (!node::insert(list, ways.data(), k, best.score, Way{slot, best.ranks})) return;
            for (int64_t t = best.free; t < tails.count; ++t) {
                if (tried[best.ranks + t] + 1 >= k) continue;
                const int64_t place = int64_t(tried.size());
                for (int64_t n = 0; n < tails.count; ++n) tried.push_back(tried[best.ranks + n]);
                ++tried[place + t];
                push(tails, weight, place, t);
            }
        }
    }

    void push(const Tails& tails, double weight, int64_t place, int64_t free) {
        double score = weight;
        for (int64_t t = 0; t < tails.count; ++t) score += scores[tails.first[t] * k + tried[place + t]];
        if (score == -infinity<double>) return;
        heap.push_back({score, place, free});
        std::push_heap(heap.begin(), heap.end(), [this, &tails](const auto& a, const auto& b) { return after(a, b, tails); });
    }

    // Of equal scores, the one with better ranks of the first tails comes first.
    bool after(const Choice& a, const Choice& b, const Tails& tails) const {
        if (a.score != b.score) return a.score < b.score;
        const auto own = tried.begin() + a.ranks, others = tried.begin() + b.ranks;
        return std::lexicographical_compare(others, others + tails.count, own, own + tails.count);
    }
};

}  // namespace

template <class S>
bool sample(const HyperProblem<S>& problem, int64_t draws, int64_t choices, const double* uniforms, S* counts) {
    const Hypergraph& graph = problem.graph;
    std::atomic<bool> enough{true};
    omega::with<double>(problem.omega, [&](const auto& omega) {
        parallel_for(draws * problem.batch, problem.threads, [&](int64_t n, int) {
            Chances chances(problem, omega, n / draws);
            const double *uniform = uniforms + n * choices, *const last = uniform + choices;
            S* const count = counts + n * graph.num_edges;
            std::fill_n(count, graph.num_edges, S(0));
            std::vector<Open> open;
            if (chances.can_reach(graph.num_nodes - 1)) open.push_back({int32_t(graph.num_nodes - 1), 0});
            while (!open.empty()) {
                const int32_t node = open.back().node;
                open.pop_back();
                if (is_start(graph, node)) continue;
                if (uniform == last) {
                    enough = false;
                    return;
                }
                const int64_t slot = chances.draw(node, *uniform++);
                count[graph.edge[slot]] += 1;
                push_tails(open, tails_of(graph, slot), nullptr);
            }
        });
    });
    return enough;
}

template <class S>
bool topk(const HyperProblem<S>& problem, int64_t k, S* scores, S* counts) {
    const Hypergraph& graph = problem.graph;
    for (int64_t n = 0; n < problem.batch * graph.num_weights; ++n) {
        if (!(problem.theta[n] < infinity<S>)) return false;
    }
    parallel_for(problem.batch, problem.threads, [&](int64_t row, int) {
        const Best<S> best(graph, problem.theta + row * graph.num_weights, k);
        std::vector<Open> open;
        for (int64_t n = 0; n < k; ++n) {
            S* const count = counts + (row * k + n) * graph.num_edges;
            std::fill_n(count, graph.num_edges, S(0));
            scores[row * k + n] = S(best.score(n));
            if (best.score(n) > -infinity<double>) best.trace(n, open, count);
        }
    });
    return true;
}

template bool sample<float>(const HyperProblem<float>&, int64_t, int64_t, const double*, float*);
template bool sample<double>(const HyperProblem<double>&, int64_t, int64_t, const double*, double*);
template bool topk<float>(const HyperProblem<float>&, int64_t, float*, float*);
template bool topk<double>(const HyperProblem<double>&, int64_t, double*, double*);

}  // namespace bellmax::BELLMAX_ARCH
