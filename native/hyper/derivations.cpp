// Single derivations: drawn, and the k best.
#include <atomic>
#include <vector>

#include "sweep.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

struct Tails {
    const int32_t* first;
    int64_t count;
};

Tails tails_of(const Hypergraph& graph, int64_t slot) {
    if (!graph.tail_offset) return {graph.tail + slot, 1};
    return {graph.tail + graph.tail_offset[slot], graph.tail_offset[slot + 1] - graph.tail_offset[slot]};
}

// Counts the edges of a derivation of the root. choose(item) is the slot of the edge into a node that the derivation
// has, and the ranks of its tails among their derivations, or null. It ends because tails come before heads.
struct Item {
    int32_t node, rank;
};
struct Chosen {
    int64_t slot;
    const int32_t* ranks;
};

template <class S, class Choose>
void count_edges(const Hypergraph& graph, int32_t rank, S* counts, Choose choose) {
    std::vector<Item> open{{int32_t(graph.num_nodes - 1), rank}};
    while (!open.empty()) {
        const Item item = open.back();
        open.pop_back();
        if (item.node == 0 && !graph.tail_offset) continue;
        const Chosen chosen = choose(item);
        const Tails tails = tails_of(graph, chosen.slot);
        counts[graph.edge[chosen.slot]] += 1;
        // The one to go on with lies on top: first tails first.
        for (int64_t t = tails.count - 1; t >= 0; --t) {
            open.push_back({tails.first[t], chosen.ranks ? chosen.ranks[t] : 0});
        }
    }
}

// The slot of an edge into a node that a uniform number chooses: the first if no edge has mass.
template <class S>
int64_t draw(const Sweep<S>& sweep, int64_t node, double uniform) {
    const Tile tile = sweep.tile(node, 1);
    sweep.weigh(tile, false);
    return tile.slot + std::max<int64_t>(0, node::draw(sweep.q.get(), tile.matrix, uniform));
}

// --- the k best

// How a derivation begins: an edge, and where the ranks of its tails are. Tails from `free` on may take a worse one: so
// each way comes from one other alone.
struct Way {
    double score;
    int64_t slot, ranks, free;
};

// The k best derivations of every node of one row.
template <class S>
class Best {
    const Hypergraph& graph;
    const S* const theta;
    const int64_t k;
    const Array<double> scores = filled<double>(graph.num_nodes * k, -infinity<double>);  // (nodes, k)
    const Array<Way> ways = scratch<Way>(graph.num_nodes * k);                            // (nodes, k)
    std::vector<int32_t> ranks, tried;  // of the ways that are kept, and of those tried for the node at hand
    std::vector<Way> heap;

public:
    Best(const Hypergraph& of, const S* weights, int64_t count) : graph(of), theta(weights), k(count) {
        if (!graph.tail_offset) scores[0] = 0;
        Pace pace;
        for (int64_t node = graph.tail_offset ? 0 : 1; node < graph.num_nodes; ++node) {
            pace.spend(k * (graph.offset[node + 1] - graph.offset[node]));
            solve(node);
        }
    }

    double score(int64_t rank) const { return scores[(graph.num_nodes - 1) * k + rank]; }

    Chosen choose(Item item) const {
        const Way& way = ways[item.node * k + item.rank];
        return {way.slot, ranks.data() + way.ranks};
    }

private:
    void solve(int64_t node) {
        need_sound(graph, node, 1);
        tried.clear();
        for (int64_t slot = graph.offset[node]; slot < graph.offset[node + 1]; ++slot) enter(node, slot);
        for (int64_t n = node * k; n < (node + 1) * k && scores[n] > -infinity<double>; ++n) {
            const auto own = tried.begin() + ways[n].ranks;
            ways[n].ranks = int64_t(ranks.size());
            ranks.insert(ranks.end(), own, own + tails_of(graph, ways[n].slot).count);
        }
    }

    // Enters the ways that begin with an edge into the list of its head, best first, until one is too low.
    void enter(int64_t node, int64_t slot) {
        const Tails tails = tails_of(graph, slot);
        // Of equal scores, the one with better ranks of the first tails comes first.
        const auto after = [&](const Way& a, const Way& b) {
            const auto own = tried.begin() + a.ranks, others = tried.begin() + b.ranks;
            if (a.score != b.score) return a.score < b.score;
            return std::lexicographical_compare(others, others + tails.count, own, own + tails.count);
        };
        const auto push = [&](int64_t place, int64_t free) {
            double score = double(theta[graph.weight[slot]]);
            for (int64_t t = 0; t < tails.count; ++t) score += scores[tails.first[t] * k + tried[place + t]];
            if (score == -infinity<double>) return;
            heap.push_back({score, slot, place, free});
            std::push_heap(heap.begin(), heap.end(), after);
        };
        heap.clear();
        tried.resize(tried.size() + std::size_t(tails.count), 0);
        push(int64_t(tried.size()) - tails.count, 0);
        while (!heap.empty()) {  // at most k are inserted, and each adds as many as the edge has tails
            std::pop_heap(heap.begin(), heap.end(), after);
            const Way best = heap.back();
            heap.pop_back();
            if (!node::insert(&scores[node * k], &ways[node * k], k, best.score, best)) return;
            for (int64_t t = best.free; t < tails.count; ++t) {
                if (tried[best.ranks + t] + 1 >= k) continue;
                const int64_t place = int64_t(tried.size());
                for (int64_t n = 0; n < tails.count; ++n) tried.push_back(tried[best.ranks + n] + (n == t));
                push(place, t);
            }
        }
    }
};

}  // namespace

template <class S>
bool sample(const HyperProblem<S>& problem, int64_t draws, int64_t choices, const double* uniforms, S* counts) {
    const Hypergraph& graph = problem.graph;
    const std::unique_ptr<node::Kernels> omega = node::kernels(problem.omega, sizeof(S) == 4);
    std::atomic<bool> enough{true};
    parallel_for(draws * problem.batch, problem.threads, [&](int64_t n, int) {
        const Sweep<S> sweep(problem, *omega, nullptr, n / draws, 1);
        const double* const uniform = uniforms + n * choices;
        S* const count = counts + n * graph.num_edges;
        int64_t used = 0;
        std::fill_n(count, graph.num_edges, S(0));
        if (sweep.value[graph.num_nodes - 1] == -infinity<double>) return;
        count_edges(graph, 0, count, [&](Item item) {
            const double own = used < choices ? uniform[used] : 0;
            ++used;
            return Chosen{draw(sweep, item.node, own), nullptr};
        });
        if (used > choices) enough = false;
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
        for (int64_t n = 0; n < k; ++n) {
            S* const count = counts + (row * k + n) * graph.num_edges;
            std::fill_n(count, graph.num_edges, S(0));
            scores[row * k + n] = S(best.score(n));
            if (best.score(n) == -infinity<double>) continue;
            count_edges(graph, int32_t(n), count, [&](Item item) { return best.choose(item); });
        }
    });
    return true;
}

template bool sample<float>(const HyperProblem<float>&, int64_t, int64_t, const double*, float*);
template bool sample<double>(const HyperProblem<double>&, int64_t, int64_t, const double*, double*);
template bool topk<float>(const HyperProblem<float>&, int64_t, float*, float*);
template bool topk<double>(const HyperProblem<double>&, int64_t, double*, double*);

}  // namespace bellmax::BELLMAX_ARCH
