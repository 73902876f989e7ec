// Single derivations: drawn, the k best, and the best one that uses each edge. And the values of the nodes of a chain.
#include <atomic>
#include <utility>
#include <vector>

#include "outside.h"
#include "trellis.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

// A stored graph and the weights of one row, with the interface of Trellis.
template <class S>
struct StoredGraph {
    const Hypergraph& graph;
    const S* theta;

    int64_t num_nodes() const { return graph.num_nodes; }
    // True if node 0 is the start of all paths, where a derivation ends.
    bool has_start() const { return !graph.tail_offset; }
    bool is_decided(int64_t node) const { return node == 0 && has_start(); }

    struct Edges {
        const Hypergraph* graph;
        const S* theta;
        int64_t slot, count;

        double weight(int64_t k) const {
            const int32_t number = graph->weight[slot + k];
            if (!graph->term_offset) return double(theta[number]);
            return sum_of_form<1>(*graph, number, [&](int64_t n) { return PerRow<1>{double(theta[n])}; }).own;
        }
        double of_head() const { return 0; }
        int64_t num_tails(int64_t k) const {
            return graph->tail_offset ? graph->tail_offset[slot + k + 1] - graph->tail_offset[slot + k] : 1;
        }
        int64_t tail(int64_t k, int64_t t) const {
            return graph->tail[graph->tail_offset ? graph->tail_offset[slot + k] + t : slot + k];
        }
    };
    Edges into(int64_t node) const {
        need_sound(graph, node, 1);
        return {&graph, theta, graph.offset[node], graph.offset[node + 1] - graph.offset[node]};
    }
};

// --- drawing

// Derivations that are drawn together. Each has a next node, and tails that it leaves for later.
class Draws {
    std::vector<int64_t> node;                // of each draw, −1 after its last
    std::vector<std::vector<int64_t>> later;  // the next one last; empty if no edge has several tails
    std::vector<int32_t> column;              // of each node
    std::vector<int64_t> first, next;         // the first draw at a column, and the draw after each; −1 at the end

public:
    std::vector<int64_t> nodes;  // the next nodes without repetition, a column for each

    Draws(int64_t count, int64_t num_nodes)
        : node(std::size_t(count), num_nodes - 1), column(std::size_t(num_nodes), -1), next(node.size()) {}

    // Finds the columns. False if all draws are complete.
    bool advance() {
        for (const int64_t own : nodes) column[std::size_t(own)] = -1;
        nodes.clear();
        first.clear();
        for (std::size_t d = 0; d < node.size(); ++d) {
            if (node[d] < 0) continue;
            int32_t& own = column[std::size_t(node[d])];
            if (own < 0) {
                own = int32_t(nodes.size());
                nodes.push_back(node[d]);
                first.push_back(-1);
            }
            next[d] = std::exchange(first[std::size_t(own)], int64_t(d));
        }
        return !nodes.empty();
    }

    // body(draw) for the draws at a column; it may stop the draw or let it enter tails.
    template <class Body>
    void for_draws(int64_t c, Body body) const {
        for (int64_t d = first[std::size_t(c)]; d >= 0; d = next[std::size_t(d)]) body(d);
    }
    void stop(int64_t draw) { node[std::size_t(draw)] = -1; }

    // First tails first.
    template <class Graph>
    void enter_tails(int64_t draw, const Graph& graph, const typename Graph::Edges& edges, int64_t k) {
        const int64_t count = edges.num_tails(k);
        if (count > 1) {
            later.resize(node.size());
            for (int64_t t = count - 1; t > 0; --t) later[std::size_t(draw)].push_back(edges.tail(k, t));
        }
        int64_t& own = node[std::size_t(draw)];
        own = count ? edges.tail(k, 0) : -1;
        if (count && !graph.is_decided(own)) return;
        own = -1;
        if (later.empty() || later[std::size_t(draw)].empty()) return;
        own = later[std::size_t(draw)].back();
        later[std::size_t(draw)].pop_back();
    }
};

// Draws derivations in rounds. In each round, every derivation chooses an edge into its next node by
// uniform(draw, round); a node that several derivations have reached is weighed once. Calls visit(draw, round, node, k)
// for the k-th edge into a node. If no edge into the root has mass, derivations are empty.
template <class AnySweep, class Graph, class Uniform, class Visit>
void draw(const AnySweep& sweep, const Graph& graph, int64_t count, Uniform uniform, Visit visit) {
    Draws draws(count, graph.num_nodes());
    Pace pace;
    for (int64_t round = 0; draws.advance(); ++round) {
        const int64_t num_nodes = int64_t(draws.nodes.size());
        for (int64_t begin = 0; begin < num_nodes; begin += most_columns) {
            const int64_t columns = std::min(most_columns, num_nodes - begin);
            const int64_t* const nodes = &draws.nodes[std::size_t(begin)];
            const node::Matrix matrix = sweep.weigh_nodes(nodes, columns);
            pace.spend(matrix.size() + count);
            for (int64_t c = 0; c < columns; ++c) {
                const auto edges = graph.into(nodes[c]);
                const double* const q = &sweep.q[c];
                double sum = 0;
                for (int64_t k = 0; k < edges.count; ++k) sum += q[k * matrix.columns];
                draws.for_draws(begin + c, [&](int64_t d) {
                    const int64_t k = node::draw(q, edges.count, sum, uniform(d, round), matrix.columns);
                    if (k < 0 && round == 0) return draws.stop(d);
                    visit(d, round, nodes[c], std::max<int64_t>(k, 0));
                    draws.enter_tails(d, graph, edges, std::max<int64_t>(k, 0));
                });
            }
        }
    }
}

// body(row, first draw, number of draws) over the threads. The draws of a row are shared out if there are more threads
// than rows.
template <class Body>
void for_blocks(int64_t batch, int64_t draws, int threads, Body body) {
    const int64_t blocks = batch < threads ? std::min<int64_t>(threads, draws) : 1;
    parallel_for(batch * blocks, threads, [&](int64_t n, int) {
        const int64_t first = n % blocks * draws / blocks;
        body(n / blocks, first, (n % blocks + 1) * draws / blocks - first);
    });
}

// --- the k best

// How a derivation begins: an edge into its node, and the rank of the derivation of its tail. If the edge does not have
// one tail, `ranks` is an offset in the list of ranks.
struct Way {
    std::uint32_t edge, ranks;
};

// A way that is tried. Only tails from `free` on may take a worse derivation, so that each way is tried once.
struct Trial {
    double score;
    int64_t ranks, free;
};

// The k best derivations of every node.
template <class Graph>
class Best {
    const Graph& graph;
    const int64_t k;
    const Array<double> scores = filled<double>(graph.num_nodes() * k, -infinity<double>);  // (nodes, k)
    const Array<Way> ways = scratch<Way>(graph.num_nodes() * k);                            // (nodes, k)
    std::vector<int32_t> ranks, tried;  // of the ways that are kept, and of those tried for the node at hand
    std::vector<Trial> heap;

public:
    bool is_sound = true;  // false if a weight is +∞ or NaN

    Best(const Graph& of, int64_t count) : graph(of), k(count) {
        if (graph.has_start()) scores[0] = 0;
        Pace pace;
        for (int64_t node = graph.has_start() ? 1 : 0; node < graph.num_nodes(); ++node) {
            const auto edges = graph.into(node);
            pace.spend(k * edges.count);
            solve(edges, &scores[node * k], &ways[node * k]);
        }
    }

    double score(int64_t rank) const { return scores[(graph.num_nodes() - 1) * k + rank]; }

    // Calls visit(node, edge) for the edges of the derivation of the root that has this rank.
    template <class Visit>
    void follow(int64_t rank, Visit visit) const {
        struct Item {
            int64_t node, rank;
        };
        std::vector<Item> open{{graph.num_nodes() - 1, rank}};
        while (!open.empty()) {
            const Item item = open.back();
            open.pop_back();
            if (graph.is_decided(item.node)) continue;
            const Way& way = ways[item.node * k + item.rank];
            const auto edges = graph.into(item.node);
            const int64_t num_tails = edges.num_tails(way.edge);
            visit(item.node, way.edge);
            for (int64_t t = num_tails - 1; t >= 0; --t) {
                const int64_t tail_rank = num_tails == 1 ? int64_t(way.ranks) : ranks[std::size_t(way.ranks + t)];
                open.push_back({edges.tail(way.edge, t), tail_rank});
            }
        }
    }

private:
    using Edges = typename Graph::Edges;

    void solve(const Edges& edges, double* best, Way* best_ways) {
        tried.clear();
        for (int64_t edge = 0; edge < edges.count; ++edge) {
            const double weight = edges.weight(edge);
            is_sound &= weight + edges.of_head() < infinity<double>;
            edges.num_tails(edge) == 1 ? enter_one(edges, edge, weight, best, best_ways)
                                       : enter(edges, edge, weight, best, best_ways);
        }
        if (tried.empty()) return;
        for (int64_t n = 0; n < k && best[n] > -infinity<double>; ++n) {
            const int64_t num_tails = edges.num_tails(best_ways[n].edge);
            if (num_tails == 1) continue;
            const auto own = tried.begin() + best_ways[n].ranks;
            best_ways[n].ranks = std::uint32_t(ranks.size());
            ranks.insert(ranks.end(), own, own + num_tails);
        }
        if (std::max(ranks.size(), tried.size()) > std::numeric_limits<std::uint32_t>::max()) {
            throw std::length_error("k is too large for this graph");
        }
    }

    // Enters the ways that begin with an edge into the list of its head, best first, until one is too low.
    void enter_one(const Edges& edges, int64_t edge, double weight, double* best, Way* best_ways) const {
        const double* const of_tail = &scores[edges.tail(edge, 0) * k];
        for (int64_t rank = 0; rank < k; ++rank) {
            const double score = weight + of_tail[rank] + edges.of_head();
            if (!node::insert(best, best_ways, k, score, Way{std::uint32_t(edge), std::uint32_t(rank)})) return;
        }
    }

    // The same for an edge with any number of tails.
    void enter(const Edges& edges, int64_t edge, double weight, double* best, Way* best_ways) {
        const int64_t num_tails = edges.num_tails(edge);
        // Of equal scores, the one with better ranks of the first tails comes first.
        const auto after = [&](const Trial& a, const Trial& b) {
            const auto own = tried.begin() + a.ranks, others = tried.begin() + b.ranks;
            if (a.score != b.score) return a.score < b.score;
            return std::lexicographical_compare(others, others + num_tails, own, own + num_tails);
        };
        const auto push = [&](int64_t place, int64_t free) {
            double score = 0;  // added up as in the forward sweep, so that ties are broken alike
            for (int64_t t = 0; t < num_tails; ++t) {
                score += scores[edges.tail(edge, t) * k + tried[std::size_t(place + t)]];
            }
            score += weight;
            if (score == -infinity<double>) return;
            heap.push_back({score, place, free});
            std::push_heap(heap.begin(), heap.end(), after);
        };
        heap.clear();
        tried.resize(tried.size() + std::size_t(num_tails), 0);
        push(int64_t(tried.size()) - num_tails, 0);
        while (!heap.empty()) {  // at most k are inserted, and each adds as many as the edge has tails
            std::pop_heap(heap.begin(), heap.end(), after);
            const Trial trial = heap.back();
            heap.pop_back();
            const Way way{std::uint32_t(edge), std::uint32_t(trial.ranks)};
            if (!node::insert(best, best_ways, k, trial.score, way)) return;
            for (int64_t t = trial.free; t < num_tails; ++t) {
                if (tried[std::size_t(trial.ranks + t)] + 1 >= k) continue;
                const int64_t place = int64_t(tried.size());
                for (int64_t n = 0; n < num_tails; ++n) tried.push_back(tried[std::size_t(trial.ranks + n)] + (n == t));
                push(place, t);
            }
        }
    }
};

// Computes the values `now` of the n-th step, in Ω's unit, from the values of the step before. False if a score is +∞ or
// NaN. There is room for `most_columns` more values, and in x for as many columns of edges.
template <class S>
bool solve_layer(const Trellis<S>& trellis, int64_t n, const node::Kernels& omega, const double* before, double* now,
                 double* x) {
    bool is_sound = true;
    double threshold[most_columns], emission[most_columns];
    for (int64_t first = 0; first < trellis.states; first += most_columns) {
        const int64_t count = std::min(most_columns, trellis.states - first);
        const node::Matrix matrix{trellis.edges_into(n), whole_vectors(count)};
        std::fill_n(x, matrix.size(), -infinity<double>);
        for (int64_t i = 0; i < count; ++i) {
            const auto edges = trellis.into(trellis.first_of(n) + first + i);
            emission[i] = omega.unit * edges.of_head();
            for (int64_t k = 0; k < edges.count; ++k) {
                x[k * matrix.columns + i] = omega.unit * edges.weight(k) + before[k];
            }
        }
        is_sound &= omega.solve(matrix, x, now + first, threshold);
        for (int64_t i = 0; i < count; ++i) now[first + i] += emission[i];
    }
    return is_sound;
}

}  // namespace

template <class S>
bool sample(const HyperProblem<S>& problem, int64_t draws, int64_t choices, const double* uniforms, S* counts) {
    const Hypergraph& graph = problem.graph;
    const std::unique_ptr<node::Kernels> omega = node::kernels(problem.omega, sizeof(S) == 4);
    std::atomic<bool> enough{true};
    for_blocks(problem.batch, draws, problem.threads, [&](int64_t row, int64_t first, int64_t count) {
        const Sweep<S> sweep(problem, *omega, nullptr, row, 1);
        const double* const own_uniforms = uniforms + (row * draws + first) * choices;
        S* const own_counts = counts + (row * draws + first) * graph.num_edges;
        std::fill_n(own_counts, count * graph.num_edges, S(0));
        const auto uniform = [&](int64_t d, int64_t round) {
            if (round >= choices) enough = false;
            return round < choices ? own_uniforms[d * choices + round] : 0;
        };
        draw(sweep, StoredGraph<S>{graph, nullptr}, count, uniform, [&](int64_t d, int64_t, int64_t node, int64_t k) {
            own_counts[d * graph.num_edges + graph.edge[graph.offset[node] + k]] += 1;
        });
    });
    return enough;
}

template <class S>
bool topk(const HyperProblem<S>& problem, int64_t k, S* scores, S* counts) {
    const Hypergraph& graph = problem.graph;
    std::atomic<bool> is_sound{true};
    parallel_for(problem.batch, problem.threads, [&](int64_t row, int) {
        const StoredGraph<S> own{graph, problem.theta + row * graph.num_weights};
        const Best<StoredGraph<S>> best(own, k);
        if (!best.is_sound) is_sound = false;
        for (int64_t n = 0; n < k; ++n) {
            S* const count = counts + (row * k + n) * graph.num_edges;
            std::fill_n(count, graph.num_edges, S(0));
            scores[row * k + n] = S(best.score(n));
            if (best.score(n) == -infinity<double>) continue;
            best.follow(n, [&](int64_t node, int64_t edge) { count[graph.edge[graph.offset[node] + edge]] += 1; });
        }
    });
    return is_sound;
}

template <class S>
bool max_marginals(const HyperProblem<S>& problem, S* by_weight) {
    const Hypergraph& graph = problem.graph;
    std::atomic<bool> is_sound{true};
    std::fill_n(by_weight, problem.batch * graph.num_weights, -infinity<S>);
    parallel_for(problem.batch, problem.threads, [&](int64_t row, int) {
        S* const best = by_weight + row * graph.num_weights;
        const StoredGraph<S> own{graph, problem.theta + row * graph.num_weights};
        const bool sound = visit_best_through(own, [&](const auto&, int64_t node, int64_t k, double score) {
            const int32_t number = graph.weight[graph.offset[node] + k];
            const auto raise = [&](int64_t n, double) { best[n] = std::max(best[n], S(score)); };
            graph.term_offset ? for_terms(graph, number, raise) : raise(number, 1);
        });
        if (!sound) is_sound = false;
    });
    return is_sound;
}

// --- chains: the k-th edge into a node means that the previous state is k

template <class S>
void sample(const ScoresProblem<S>& problem, bool (*in_log_space)(const ScoresProblem<S>&, int64_t), int64_t draws,
            const double* uniforms, int64_t* sequences) {
    const std::unique_ptr<node::Kernels> omega = node::kernels(problem.omega, false);
    for_blocks(problem.batch, draws, problem.threads, [&](int64_t b, int64_t first, int64_t count) {
        const int64_t length = problem.lengths[b], begin = (b * draws + first) * problem.steps;
        std::fill_n(sequences + begin, count * problem.steps, int64_t(-1));
        if (!length) return;
        const TrellisSweep<S> sweep(problem, b, *omega, in_log_space(problem, b));
        const auto place = [&](int64_t d, int64_t round) {
            return begin + d * problem.steps + sweep.graph.step(length - 1 - round);
        };
        const auto uniform = [&](int64_t d, int64_t round) { return uniforms[place(d, round)]; };
        draw(sweep, sweep.graph, count, uniform, [&](int64_t d, int64_t round, int64_t, int64_t state) {
            sequences[place(d, round)] = state;
        });
    });
}

template <class S>
bool topk(const ScoresProblem<S>& problem, int64_t k, S* scores, int64_t* sequences) {
    std::atomic<bool> is_sound{true};
    std::fill_n(sequences, problem.batch * k * problem.steps, int64_t(-1));
    parallel_for(problem.batch, problem.threads, [&](int64_t b, int) {
        const Trellis<S> trellis(problem, b);
        const Best<Trellis<S>> best(trellis, k);
        if (!best.is_sound) is_sound = false;
        for (int64_t rank = 0; rank < k; ++rank) {
            int64_t* const sequence = sequences + (b * k + rank) * problem.steps;
            scores[b * k + rank] = S(best.score(rank));
            if (best.score(rank) == -infinity<double> || !trellis.length) continue;
            best.follow(rank, [&](int64_t node, int64_t state) {
                sequence[trellis.step(trellis.layer(node) - 1)] = state;
            });
        }
    });
    return is_sound;
}

template <class S>
bool max_marginals(const ScoresProblem<S>& problem, S* by_edge) {
    std::atomic<bool> is_sound{true};
    const int64_t states = problem.states;
    std::fill_n(by_edge, problem.batch * problem.steps * states * states, -infinity<S>);
    parallel_for(problem.batch, problem.threads, [&](int64_t b, int) {
        const Trellis<S> trellis(problem, b);
        if (!trellis.length) return;
        const bool sound = visit_best_through(trellis, [&](const auto&, int64_t node, int64_t k, double score) {
            if (node == trellis.num_nodes() - 1) return;
            const int64_t n = trellis.layer(node), state = node - trellis.first_of(n);
            by_edge[((b * problem.steps + trellis.step(n)) * states + state) * states + k] = S(score);
        });
        if (!sound) is_sound = false;
    });
    return is_sound;
}

template <class S>
bool node_values(const ScoresProblem<S>& problem, S* values) {
    const std::unique_ptr<node::Kernels> omega = node::kernels(problem.omega, false);
    const int64_t states = problem.states;
    std::atomic<bool> is_sound{true};
    std::fill_n(values, problem.batch * problem.steps * states, -infinity<S>);
    parallel_for(problem.batch, problem.threads, [&](int64_t b, int) {
        const Trellis<S> trellis(problem, b);
        const auto x = scratch<double>(states * most_columns);
        auto before = zeros<double>(states + most_columns), now = zeros<double>(states + most_columns);
        Pace pace;
        for (int64_t n = 0; n < trellis.length; ++n) {
            pace.spend(states * states);
            if (!solve_layer(trellis, n, *omega, before.get(), now.get(), x.get())) is_sound = false;
            S* const to = values + (b * problem.steps + trellis.step(n)) * states;
            for (int64_t i = 0; i < states; ++i) {
                to[i] = S(now[i] / omega->unit);
                if (!(to[i] < infinity<S>)) is_sound = false;
            }
            std::swap(before, now);
        }
    });
    return is_sound;
}

template bool sample<float>(const HyperProblem<float>&, int64_t, int64_t, const double*, float*);
template bool sample<double>(const HyperProblem<double>&, int64_t, int64_t, const double*, double*);
template bool topk<float>(const HyperProblem<float>&, int64_t, float*, float*);
template bool topk<double>(const HyperProblem<double>&, int64_t, double*, double*);
template void sample<float>(const ScoresProblem<float>&, bool (*)(const ScoresProblem<float>&, int64_t), int64_t,
                            const double*, int64_t*);
template void sample<double>(const ScoresProblem<double>&, bool (*)(const ScoresProblem<double>&, int64_t), int64_t,
                             const double*, int64_t*);
template bool max_marginals<float>(const HyperProblem<float>&, float*);
template bool max_marginals<double>(const HyperProblem<double>&, double*);
template bool max_marginals<float>(const ScoresProblem<float>&, float*);
template bool max_marginals<double>(const ScoresProblem<double>&, double*);
template bool node_values<float>(const ScoresProblem<float>&, float*);
template bool node_values<double>(const ScoresProblem<double>&, double*);
template bool topk<float>(const ScoresProblem<float>&, int64_t, float*, int64_t*);
template bool topk<double>(const ScoresProblem<double>&, int64_t, double*, int64_t*);

}  // namespace bellmax::BELLMAX_ARCH
