#include "outside.h"

#include <atomic>

#include "../hyper/outside.h"
#include "ends.h"
#include "slots.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace lattice {
namespace {

// One lattice as a graph that stores no edges, with the interface of Trellis (hyper/trellis.h).
//
// Node 0 is the start, node 1 + (i · columns + j) · states + state is a node of the lattice, and the root is the end.
class LatticeGraph {
    const LatticeProblem& p;
    const Region region;
    const SlotTerms terms;
    const SlotArrays scores;
    const EndList ends;

public:
    LatticeGraph(const SlotPlan& plan, int64_t b)
        : p(plan.p),
          region(p.lengths + 2 * b, p.band[b]),
          terms(plan, b),
          scores(terms, p.tensors, region, false),
          ends(p.ends, p.rows, p.columns) {}

    int64_t num_nodes() const { return 2 + p.rows * p.columns * p.states; }
    bool has_start() const { return true; }

    // A candidate of a node: a start, a move or, for the root, an end. `node` is where it comes from.
    struct Candidate {
        int slot;
        int64_t i, j, node;
    };
    struct Edges {
        const LatticeGraph& graph;
        bool is_root;
        int64_t count = 0;
        double score = 0;  // of the head
        Candidate list[most_moves + 1];

        Edges(const LatticeGraph& graph, bool is_root) : graph(graph), is_root(is_root) {}
        Candidate at(int64_t k) const { return is_root ? graph.end(k) : list[k]; }
        double weight(int64_t k) const {
            const Candidate own = at(k);
            return own.slot < 0 ? -infinity<double> : graph.score(own.slot, own.i, own.j);
        }
        double of_head() const { return score; }
        int64_t num_tails(int64_t) const { return 1; }
        int64_t tail(int64_t k, int64_t) const { return at(k).node; }
    };
    Edges into(int64_t node) const {
        Edges edges(*this, node == num_nodes() - 1);
        if (edges.is_root) {
            edges.count = ends.cells() * ends.count;
            return edges;
        }
        const int64_t cell = (node - 1) / p.states, i = cell / p.columns, j = cell % p.columns;
        const int state = int((node - 1) % p.states);
        if (!is_inside(i, j)) return edges;
        edges.score = score(state, i, j);
        if (starts(i, j) && (p.starts.states >> state & 1)) {
            edges.list[edges.count++] = {p.states + p.moves + state, i, j, 0};
        }
        for (int m = 0; m < p.moves; ++m) {
            const Move& move = p.table[m];
            if (move.to != state || !is_inside(i - move.di, j - move.dj)) continue;
            edges.list[edges.count++] = {p.states + m, i, j, number(i - move.di, j - move.dj, move.from)};
        }
        return edges;
    }

private:
    double score(int slot, int64_t i, int64_t j) const { return p.scale * scores.slots[slot].score(i, j); }
    int64_t number(int64_t i, int64_t j, int state) const { return 1 + (i * p.columns + j) * p.states + state; }
    bool is_inside(int64_t i, int64_t j) const {
        return i >= 0 && i < region.rows && j >= 0 && j < region.columns && region.inside(i, j);
    }
    bool starts(int64_t i, int64_t j) const {
        const Place place = p.starts.place;
        const bool by_row = place == Place::column || place == Place::anywhere;
        const bool by_column = place == Place::row || place == Place::anywhere;
        return (by_row || i == 0) && (by_column || j == 0);
    }
    // The k-th end; its slot is −1 if it is outside of the region.
    Candidate end(int64_t k) const {
        Candidate own{0, region.rows - 1, region.columns - 1, 0};
        int state;
        ends.find(k, own.i, own.j, state);
        own.slot = is_inside(own.i, own.j) ? 2 * p.states + p.moves + state : -1;
        own.node = own.slot < 0 ? 0 : number(own.i, own.j, state);
        return own;
    }
};

// The terms by which slots read the first score, by slot.
std::vector<std::vector<Term>> first_terms(const LatticeProblem& p, int64_t b) {
    std::vector<std::vector<Term>> terms(std::size_t(p.slots()));
    for (int n = 0; n < p.terms_count; ++n) {
        const SlotTerm& term = p.terms[n];
        if (term.is_mask || term.tensor != 0 || term.coefficient == 0) continue;
        terms[std::size_t(term.slot)].emplace_back(term, p.tensors[0], b, p.columns, 1);
    }
    return terms;
}

template <class S>
bool find_best(const SlotPlan& plan, int64_t b, S* best) {
    const LatticeProblem& p = plan.p;
    const LatticeGraph graph(plan, b);
    const auto terms = first_terms(p, b);
    const auto found = filled<double>(p.tensors[0].size(), -infinity<double>);
    const bool is_sound = visit_best_through(graph, [&](const auto& edges, int64_t node, int64_t k, double score) {
        if (score == -infinity<double>) return;
        const auto own = edges.at(k);
        for (const Term& term : terms[std::size_t(own.slot)]) term.raise(own.i, own.j, score, found.get());
        if (edges.is_root) return;
        for (const Term& term : terms[std::size_t((node - 1) % p.states)]) term.raise(own.i, own.j, score, found.get());
    });
    for (int64_t n = 0; n < p.tensors[0].size(); ++n) best[n] = S(p.scale * found[n]);
    return is_sound;
}

}  // namespace

bool max_marginals(const LatticeProblem& p, const TermTensor& out) {
    const SlotPlan plan(p);
    std::atomic<bool> is_sound{true};
    parallel_for(p.batch, p.threads, [&](int64_t b, int) {
        const int64_t place = b * out.size();
        const bool sound = p.is_double ? find_best(plan, b, static_cast<double*>(out.numbers) + place)
                                       : find_best(plan, b, static_cast<float*>(out.numbers) + place);
        if (!sound) is_sound = false;
    });
    return is_sound;
}

}  // namespace lattice
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
