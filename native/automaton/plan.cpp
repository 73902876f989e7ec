#include "plan.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

namespace bellmax::BELLMAX_ARCH::automata {
namespace {

struct Arc {
    int32_t source, target, label, number;
};

// The numbers 0 … n − 1, sorted by keys from 0 to most; of equal keys in the order in which they were.
template <class Key>
std::vector<int32_t> sorted(const std::vector<int32_t>& order, int64_t most, Key key) {
    std::vector<int32_t> next(std::size_t(most) + 2), result(order.size());
    for (const int32_t n : order) ++next[std::size_t(key(n)) + 1];
    std::partial_sum(next.begin(), next.end(), next.begin());
    for (const int32_t n : order) result[std::size_t(next[std::size_t(key(n))]++)] = n;
    return result;
}

std::vector<int32_t> counted(int64_t size) {
    std::vector<int32_t> all(static_cast<std::size_t>(size));
    std::iota(all.begin(), all.end(), 0);
    return all;
}

// One automaton, its states by place.
struct Sorted {
    std::vector<Arc> arcs;  // by target and kind, as a plan has them
    std::vector<int32_t> begin, middle, state_at, place_of, used;
    int32_t depth;
};

std::vector<Arc> read_arcs(const int32_t* from, int64_t count, int64_t states, int64_t labels) {
    std::vector<Arc> arcs;
    arcs.reserve(std::size_t(count));
    for (int64_t a = 0; a < count; ++a, from += 3) {
        if (from[0] == -1) continue;
        const bool exists = from[0] >= 0 && from[0] < states && from[1] >= 0 && from[1] < states;
        if (!exists || from[2] < -1 || from[2] >= labels) throw std::invalid_argument("an arc is out of range");
        arcs.push_back({from[0], from[1], from[2], int32_t(a)});
    }
    return arcs;
}

// The length of the longest chain of ε-arcs into each state.
std::vector<int32_t> depths(const std::vector<Arc>& arcs, int64_t states) {
    std::vector<int32_t> depth(static_cast<std::size_t>(states)), waits(depth), ready;
    std::vector<int32_t> empty;
    for (std::size_t a = 0; a < arcs.size(); ++a) {
        if (arcs[a].label < 0) empty.push_back(int32_t(a)), ++waits[std::size_t(arcs[a].target)];
    }
    if (empty.empty()) return depth;
    const auto source = [&](int32_t a) { return arcs[std::size_t(a)].source; };
    empty = sorted(empty, states, source);
    std::vector<int32_t> first(std::size_t(states) + 1);
    for (const int32_t a : empty) ++first[std::size_t(source(a)) + 1];
    std::partial_sum(first.begin(), first.end(), first.begin());
    for (int64_t s = 0; s < states; ++s) {
        if (!waits[std::size_t(s)]) ready.push_back(int32_t(s));
    }
    for (std::size_t n = 0; n < ready.size(); ++n) {
        const std::size_t s = std::size_t(ready[n]);
        for (int32_t k = first[s]; k < first[s + 1]; ++k) {
            const std::size_t target = std::size_t(arcs[std::size_t(empty[std::size_t(k)])].target);
            depth[target] = std::max(depth[target], depth[s] + 1);
            if (!--waits[target]) ready.push_back(int32_t(target));
        }
    }
    if (int64_t(ready.size()) < states) throw std::invalid_argument("arcs without a label form a cycle");
    return depth;
}

// `by_degree`: of equal depth, states with fewer edges come first, so that several automata have states of like degree side by side.
Sorted sort(const int32_t* from, int64_t count, int64_t states, int64_t labels, bool by_label, bool by_degree) {
    Sorted result{};
    const std::vector<Arc> arcs = read_arcs(from, count, states, labels);
    const std::vector<int32_t> depth = depths(arcs, states);
    result.depth = *std::max_element(depth.begin(), depth.end());
    result.state_at = counted(states);
    if (by_degree) {
        std::vector<int32_t> degree(static_cast<std::size_t>(states));
        for (const Arc& arc : arcs) ++degree[std::size_t(arc.target)];
        result.state_at = sorted(result.state_at, count, [&](int32_t s) { return degree[std::size_t(s)]; });
    }
    result.state_at = sorted(result.state_at, states, [&](int32_t s) { return depth[std::size_t(s)]; });
    result.place_of.resize(std::size_t(states));
    for (int64_t p = 0; p < states; ++p) result.place_of[std::size_t(result.state_at[std::size_t(p)])] = int32_t(p);

    std::vector<int32_t> row(static_cast<std::size_t>(labels), -1), order = counted(int64_t(arcs.size()));
    for (const Arc& arc : arcs) {
        if (arc.label >= 0) row[std::size_t(arc.label)] = 0;
    }
    for (int64_t v = 0; v < labels; ++v) {
        if (row[std::size_t(v)] < 0) continue;
        row[std::size_t(v)] = int32_t(result.used.size());
        result.used.push_back(int32_t(v));
    }
    const auto at = [&](int32_t n) -> const Arc& { return arcs[std::size_t(n)]; };
    if (by_label) order = sorted(order, labels, [&](int32_t n) { return at(n).label + 1; });
    const auto place = [&](int32_t state) { return result.place_of[std::size_t(state)]; };
    const auto key = [&](int32_t n) { return 2 * int64_t(place(at(n).target)) + (at(n).label < 0); };
    order = sorted(order, 2 * states, key);
    std::vector<int32_t> bounds(static_cast<std::size_t>(2 * states + 1));
    for (const int32_t n : order) {
        ++bounds[std::size_t(key(n)) + 1];
        const Arc& arc = at(n);
        result.arcs.push_back({place(arc.source), place(arc.target), arc.label < 0 ? -1 : row[std::size_t(arc.label)],
                               arc.number});
    }
    std::partial_sum(bounds.begin(), bounds.end(), bounds.begin());
    for (std::size_t k = 0; k < bounds.size(); ++k) (k % 2 ? result.middle : result.begin).push_back(bounds[k]);
    return result;
}

}  // namespace

Plan plan_of(const int32_t* const* automata, int count, int64_t arcs, int64_t states, int64_t labels, bool by_label) {
    std::vector<Sorted> parts;
    for (int l = 0; l < count; ++l) parts.push_back(sort(automata[l], arcs, states, labels, by_label, count > 1));
    Plan plan{};
    plan.copies = count;
    plan.states = states;
    std::size_t rows = 0;
    for (const Sorted& part : parts) {
        rows = std::max(rows, part.used.size());
        plan.depth = std::max<int64_t>(plan.depth, part.depth);
    }
    plan.labels = int64_t(rows) + 1;
    for (std::size_t r = 0; r <= rows; ++r) {
        for (const Sorted& part : parts) plan.used.push_back(r < part.used.size() ? part.used[r] : -1);
    }
    for (int64_t p = 0; p < states; ++p) {
        for (const Sorted& part : parts) plan.state_at.push_back(part.state_at[std::size_t(p)]);
        for (const Sorted& part : parts) plan.place_of.push_back(part.place_of[std::size_t(p)]);
    }
    const auto fill = [&](std::size_t p, bool is_empty) {
        int32_t most = 0;
        const auto from = [&](const Sorted& part) { return is_empty ? part.middle[p] : part.begin[p]; };
        const auto to = [&](const Sorted& part) { return is_empty ? part.begin[p + 1] : part.middle[p]; };
        for (const Sorted& part : parts) most = std::max(most, to(part) - from(part));
        for (int32_t k = 0; k < most; ++k) {
            for (const Sorted& part : parts) {
                const bool exists = from(part) + k < to(part);
                const Arc arc = exists ? part.arcs[std::size_t(from(part) + k)] : Arc{0, 0, int32_t(rows), -1};
                plan.source.push_back(arc.source);
                plan.label.push_back(arc.label);
                plan.arc.push_back(arc.number);
            }
        }
        plan.edges += most;
    };
    for (std::size_t p = 0; p < std::size_t(states); ++p) {
        plan.begin.push_back(int32_t(plan.edges));
        fill(p, false);
        plan.middle.push_back(int32_t(plan.edges));
        fill(p, true);
        plan.most_edges = std::max<int64_t>(plan.most_edges, plan.edges - plan.begin.back());
    }
    plan.begin.push_back(int32_t(plan.edges));
    return plan;
}

}  // namespace bellmax::BELLMAX_ARCH::automata
