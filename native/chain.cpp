// The sweeps of a chain (Algorithms 3 and 4 of the paper, mended), in log space and for every Ω.
//
// The smoothed maxima of a group of W states are solved together: of W neighbouring states of one sequence, whose rows of
// scores are read vector by vector, or of the same state of W sequences ("across"), whose scores are transposed as they
// are read; whichever keeps lanes and threads busier.
#include "chain.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <type_traits>
#include <vector>

#include "lanes.h"
#include "regularizers.h"
#include "steps/exp.h"

namespace bellmax::BELLMAX_ARCH {
namespace {

template <class S>
bool is_dense(const ScoresProblem<S>& problem) {
    return problem.scores.emissions == nullptr;
}

// Numbers of the states, step by step: a vector for each group.
template <class T, class Real, bool across>
class Nodes {
    static constexpr int W = lanes_of<Real>;
    const Lanes<W>& lanes;
    Records records;
    T* base;
    std::optional<Stream<T, Real>> stream;
    std::unique_ptr<Real[]> cells;

    T* place(int64_t n) const {
        return base + (records.compact ? n : lanes.step(0, n)) * records.stride;
    }

public:
    Nodes(const Lanes<W>& of, T* data, const Records& layout) : lanes(of), records(layout), base(data) {
        if (!data) return;
        if (across) {
            stream.emplace(of, data, layout);
        } else {
            base += of.sequence[0] * layout.batch;
            cells = zeros<Real>(records.size + W);
        }
    }

    const Real* read(int64_t n) {
        if constexpr (across) {
            return stream->read(n);
        } else {
            const T* from = place(n);
            for (int64_t i = 0; i < records.size; ++i) cells[i] = Real(from[i]);
            return cells.get();
        }
    }

    Real* room(int64_t n) {
        if constexpr (across) {
            return stream->room(n);
        } else {
            return cells.get();
        }
    }

    void finish(int64_t n, bool ascending) {
        if constexpr (across) {
            stream->finish(n, ascending);
        } else {
            T* to = place(n);
            for (int64_t i = 0; i < records.size; ++i) to[i] = T(cells[i]);
        }
    }
};

// A vector of edges into a group: where it lies in a tile, which previous states it comes from, and, where the group is of
// neighbouring states, into which of them it leads.
struct Edge {
    int64_t at, previous;
    int row;
};

// Numbers of the edges, step by step and group by group.
template <class T, class Real, bool across>
class Edges {
    static constexpr int W = lanes_of<Real>;
    using V = Vec<Real>;
    const Lanes<W>& lanes;
    Records records;
    int64_t states;
    T* base;
    std::optional<Stream<T, Real>> stream;
    int64_t last = -1;  // the step before this one
    bool past_caches;
    T* rows = nullptr;  // of the group that was entered
    const Real* tile = nullptr;
    Real* room = nullptr;

    T* place(int64_t n, int64_t g) const {
        return base + (records.stride ? (lanes.step(0, n) - records.shift) * records.stride : 0) + g * W * states;
    }

    // What is read some rows later, here or at the next step, whether that lies before or behind.
    void prefetch(int64_t n, int64_t g) {
        const int64_t groups = (states + W - 1) / W, ahead = g + std::max<int64_t>(1, 256 / states);
        const int64_t next = n + (n < last ? -1 : 1);
        if (g + 1 == groups) last = n;
        if (ahead >= groups && (next < records.shift || next >= lanes.longest)) return;
        const T* from = place(ahead < groups ? n : next, ahead % groups);
        const int64_t numbers = std::min<int64_t>(W, states - ahead % groups * W) * states;
        for (int64_t k = 0; k < numbers; k += int64_t(64 / sizeof(T))) __builtin_prefetch(from + k);
    }

public:
    Edges(const Lanes<W>& of, T* data, const Records& layout, int64_t size, bool large = false)
        : lanes(of),
          records(layout),
          states(size),
          base(data + of.sequence[0] * layout.batch),
          past_caches(large && states % W == 0 && reinterpret_cast<std::uintptr_t>(data) % sizeof(V) == 0) {
        if (across) stream.emplace(of, data, layout);
    }

    void enter(int64_t n, int64_t g) {
        if constexpr (across) {
            tile = stream->read(records.stride ? n : records.shift) + g * states * W;
        } else {
            rows = place(n, g);
            if (records.stride) prefetch(n, g);
        }
    }

    V get(Edge e) const {
        if constexpr (across) {
            return load<Real>(tile + e.at);
        } else {
            const T* from = rows + e.row * states + e.previous;
            return e.previous + W <= states ? load_as<Real>(from) : load_some<Real>(from, states - e.previous);
        }
    }

    void enter_to_write(int64_t n, int64_t g) {
        if constexpr (across) {
            room = stream->room(n) + g * states * W;
        } else {
            rows = place(n, g);
        }
    }

    void put(Edge e, V v) {
        if constexpr (across) {
            store(room + e.at, v);
        } else {
            T* to = rows + e.row * states + e.previous;
            if (past_caches) {
                store_past_caches<T, Real>(to, v);
            } else if (e.previous + W <= states) {
                store_as<T, Real>(to, v);
            } else {
                store_some<T, Real>(to, v, states - e.previous);
            }
        }
    }

    void finish_step(int64_t n) {
        if constexpr (across) stream->finish(n);
    }
};

template <class S>
Records edge_records(const ScoresProblem<S>& problem) {
    const int64_t square = problem.states * problem.states;
    return {square, problem.transition_step, problem.transition_batch, is_dense(problem) ? 0 : 1};
}

template <class S>
Records node_records(const ScoresProblem<S>& problem) {
    return {problem.states, problem.states, problem.steps * problem.states};
}

// A row of the tape for each unmasked step, and one before the first.
template <class S>
Records tape_records(const ScoresProblem<S>& problem, int64_t more = 1) {
    return {problem.states, problem.states, 2 * (problem.steps + 1) * problem.states, 0, true, more};
}

// A unit of work: what is known of its sequences, and the row of scores that was loaded last.
template <class S, class Omega_, bool factored, bool across_>
struct Unit {
    using Omega = Omega_;
    using Real = typename Omega::Real;
    using V = Vec<Real>;
    static constexpr bool across = across_, is_factored = factored;
    static constexpr int W = lanes_of<Real>;
    // A number for each state: by lane, or the same for all.
    using Entry = std::conditional_t<across, V, Real>;

    const ScoresProblem<S>& problem;
    Omega omega;
    Lanes<W> lanes;
    int64_t states, groups, cells;
    Edges<const S, Real, across> edges;
    Nodes<const S, Real, across> emissions, values, thresholds;
    V length, iota;                      // iota: 0, 1, 2, …
    std::unique_ptr<Real[]> start, end;  // scores of the first and the last states
    int64_t padded;
    std::unique_ptr<Real[]> x;  // scores of the edges into the group that was loaded last
    V top;
    // Under negentropy most sums of exponentials need no maximum taken off: values are at most 0, and 0 among them. Then
    // thresholds count from 0, and scores are added up as they are used. Where that fails the threshold kept is NaN.
    static constexpr bool may_be_direct = std::is_same_v<Omega, Negentropy<S>>;
    bool direct = false;
    const Real* from_values = nullptr;
    // Sums up to here, and down to its inverse, have thresholds that keep their digits; exp(too_much) is beyond.
    static constexpr Real enough = sizeof(Real) == 4 ? Real(1e6) : Real(1e100), too_much = sizeof(Real) == 4 ? 80 : 600;

    Unit(const ScoresProblem<S>& of, const int64_t* sequences, int64_t count, const S* tape)
        : problem(of),
          omega(of.omega),
          lanes(of, sequences, across ? count : 1),
          states(of.states),
          groups(across ? states : (states + W - 1) / W),
          cells(groups * W),
          edges(lanes, of.scores.transitions, edge_records(of), states),
          emissions(lanes, of.scores.emissions, node_records(of)),
          values(lanes, tape, tape_records(of)),
          thresholds(lanes, tape + (of.steps + 1) * states, tape_records(of)),
          start(ends(of.scores.start, of.start_batch)),
          end(ends(of.scores.end, of.end_batch)),
          padded((states + W - 1) / W * W),
          x(scratch<Real>(tile())) {
        for (int l = 0; l < W; ++l) {
            length[l] = Real(across ? lanes.length[l] : lanes.length[0]);
            iota[l] = Real(l);
        }
    }

    // Numbers of edges into a group, filled up to whole vectors.
    int64_t tile() const { return across ? states * W : W * padded; }

    // States of a group.
    int rows(int64_t g) const { return across ? W : int(std::min<int64_t>(W, states - g * W)); }

    // Vectors of edges into a state, of which the first step has one.
    int64_t vectors(int64_t n) const { return n == 0 ? 1 : across ? states : padded / W; }
    Edge edge(int row, int64_t k) const { return {(across ? 0 : row * padded) + k * W, k * W, row}; }

    // For each row of group g, or once if rows are lanes, calls enter(row), and its result for every edge at step n; with
    // `rest`, for the edges that the first step does not have.
    template <class Enter>
    void for_edges(int64_t n, int64_t g, Enter enter, bool rest = false) const {
        const int64_t first = rest ? 1 : 0, end = vectors(rest ? 1 : n);
        const int count = across ? 1 : rows(g);
        for (int row = 0; row < count; ++row) {
            auto body = enter(row);
            for (int64_t k = first; k < end; ++k) body(edge(row, k));
        }
    }

    // What belongs to the states of a group, as the edges of a row see it.
    static V of_node(V group, int row) {
        if constexpr (across) {
            return group;
        } else {
            return broadcast<Real>(group[row]);
        }
    }

    // The previous states, by number.
    V numbers(Edge e) const { return across ? V{} + Real(e.previous / W) : iota + Real(e.previous); }

    // One number a state of every lane's sequence, from its own place.
    void gather(const S* const* lane, Real* to) const {
        if constexpr (across) {
            fetch<Real>(lane, states, to);
        } else {
            for (int64_t i = 0; i < states; ++i) to[i] = Real(lane[0][i]);
        }
    }

    std::unique_ptr<Real[]> ends(const S* data, int64_t batch) const {
        auto all = zeros<Real>(cells + W * W);
        if (factored) {
            const S* lane[W];
            for (int l = 0; l < W; ++l) lane[l] = data + lanes.sequence[l] * batch;
            gather(lane, all.get());
        }
        return all;
    }

    // Values that stand for no state are −∞.
    void pad(Real* v) const {
        if (!across) std::fill(v + states, v + padded, -infinity<Real>);
    }

    // Lanes whose sequence has a step n.
    auto active(int64_t n) const {
        return across ? length > V{} + Real(n) : V{} + Real(n < lanes.longest ? 1 : 0) > V{};
    }

    static Entry entry(const Real* vector, int64_t p) { return load_vector<Entry>(vector + p * (across ? W : 1)); }
    static void set_entry(Real* vector, int64_t p, Entry value) {
        std::memcpy(vector + p * (across ? W : 1), &value, sizeof value);
    }

    // Values before step n, from the tape.
    const Real* values_before(int64_t n) {
        if (n == 0) return nullptr;
        const Real* v = values.read(n);
        if constexpr (!across) pad(values.room(n));
        return v;
    }

    // Scores into group g at step n, where `before` are the values it starts from, and their maximum. Returns the first
    // best previous state for the hard max.
    V load_group(int64_t n, int64_t g, const Real* before, bool* sound = nullptr) {
        const V never = V{} - infinity<Real>;
        auto unsound = never > never;
        direct = false;
        V slot = V{} - Real(1);
        if (n == 0) {
            if constexpr (factored) {
                top = load<Real>(&start[g * W]);
            } else if constexpr (across) {
                edges.enter(0, g);
                top = edges.get(Edge{0, 0, 0});
            } else {
                edges.enter(0, g);
                top = never;
                for (int l = 0; l < rows(g); ++l) top[l] = edges.get(Edge{0, 0, l})[0];
            }
            unsound = !(top < V{} + infinity<Real>);
            slot = top > never ? V{} : slot;
            // Where a vector is of several previous states, there is an edge from the first of them alone.
            for_edges(0, g, [&](int row) {
                return [&, row](Edge e) { store(&x[e.at], across ? top : iota == V{} ? of_node(top, row) : never); };
            });
        } else {
            edges.enter(n, g);
            const int64_t end = vectors(n);
            const auto scan = [&](int row, V& best_slot) {
                V best = never, found = slot;
                auto bad = never > never;
                for (int64_t k = 0; k < end; ++k) {
                    const Edge e = edge(row, k);
                    const V weight = edges.get(e), score = weight + load<Real>(before + e.previous);
                    if (sound) bad |= !(weight < V{} + infinity<Real>);
                    if constexpr (Omega::by_slot) found = score > best ? numbers(e) : found;
                    best = greater<Real>(score, best);
                    store(&x[e.at], score);
                }
                unsound |= bad;
                best_slot = found;
                return best;
            };
            if constexpr (across) {
                top = scan(0, slot);
            } else {
                V best[W], slots[W];
                for (int l = 0; l < W; ++l) best[l] = never, slots[l] = slot;
                for (int l = 0; l < rows(g); ++l) best[l] = scan(l, slots[l]);
                transpose(best);
                top = best[0];
                for (int k = 1; k < W; ++k) top = greater<Real>(best[k], top);
                if constexpr (Omega::by_slot) {
                    // Of the places where the lanes have the greatest score, the first.
                    transpose(slots);
                    V place = V{} + infinity<Real>;
                    for (int k = 0; k < W; ++k) place = lesser<Real>(best[k] == top ? slots[k] : place, place);
                    slot = top > never ? place : slot;
                }
            }
        }
        if (sound && any(unsound & active(n))) *sound = false;
        return slot;
    }

    // log Σ exp of the scores into group g, which is value and threshold, if that can be had directly.
    template <class Mask>
    bool solve_directly(int64_t n, int64_t g, const Real* before, Mask now, V& result) {
        if (!may_be_direct || n == 0) return false;
        enter_directly(n, g, before);
        V sum{};
        sum_edges<1>(n, g, &sum, [&](int) {
            return [&](Edge e, V* of) {
                const V score = edges.get(e) + load<Real>(before + e.previous);
                of[0] += exp_nonpositive(lesser<Real>(score, V{} + too_much));
            };
        });
        if (any((!((sum > V{} + 1 / enough) & (sum < V{} + enough))) & now)) return false;
        result = log_positive(sum);
        return true;
    }

    void enter_directly(int64_t n, int64_t g, const Real* before) {
        edges.enter(n, g);
        direct = true;
        from_values = before;
        top = V{};
    }

    // Makes ready to weigh the edges into group g, whose threshold on the tape is τ; the threshold to weigh with.
    template <class Mask>
    V prepare(int64_t n, int64_t g, const Real* before, V tau, Mask now) {
        if (may_be_direct && n > 0 && !any((tau != tau) & now)) {
            enter_directly(n, g, before);
            return tau;
        }
        load_group(n, g, before);
        if constexpr (may_be_direct) solve(n, g, tau);
        return tau;
    }

    V shift() const { return top == V{} - infinity<Real> ? V{} : top; }

    // The smoothed maximum of the group that was loaded, and its threshold.
    V solve(int64_t n, int64_t g, V& tau) const {
        V above;
        if constexpr (across) {
            omega.solve(Columns<V, Real>{x.get(), W, n == 0 ? 1 : states}, shift(), tau, above);
        } else {
            omega.solve(Rows<Real>{x.get(), padded, n == 0 ? W : padded, rows(g)}, shift(), tau, above);
        }
        tau = top > V{} - infinity<Real> ? tau : V{};
        return top + above;
    }

    // Sums over the edges into group g, by state: what enter(row) returns adds to each of K.
    template <int K, class Enter>
    void sum_edges(int64_t n, int64_t g, V* totals, Enter enter) const {
        const int count = across ? 1 : rows(g);
        V sums[K][across ? 1 : W] = {};
        for (int row = 0; row < count; ++row) {
            auto term = enter(row);
            V own[K] = {};
            for (int64_t k = 0; k < vectors(n); ++k) term(edge(row, k), own);
            for (int k = 0; k < K; ++k) sums[k][row] = own[k];
        }
        for (int k = 0; k < K; ++k) {
            if constexpr (across) {
                totals[k] = sums[k][0];
            } else {
                totals[k] = Rows<Real>::sum_each(sums[k]);
            }
        }
    }

    // q and s of an edge into the group that was loaded; `from` is the shift() and τ the threshold of its row.
    void weigh(Edge e, V from, V tau, V& q, V& s) const { omega.weigh(relative(e, from, tau), tau, q, s); }

    // r of an edge into the group that was loaded, as the functions of Ω expect it.
    V relative(Edge e, V from, V tau) const {
        if constexpr (Omega::by_slot) {
            return tau == numbers(e) ? V{} : V{} - infinity<Real>;
        } else if (may_be_direct && direct) {
            return edges.get(e) + load<Real>(from_values + e.previous);
        } else {
            return load<Real>(&x[e.at]) - from;
        }
    }

    // The end node: scores, q and s of the edges into it, by entry, and its value relative to those before.
    struct End {
        std::unique_ptr<Real[]> scores, q, s;
        Entry top, tau, value;
    };

    // r of an edge into it, as the functions of Ω expect it.
    static Entry into_end(const End& node, int64_t p) {
        if constexpr (Omega::by_slot) {
            return node.tau == Entry{} + Real(p) ? Entry{} : Entry{} - infinity<Real>;
        } else {
            return entry(node.scores.get(), p) - node.top;
        }
    }

    // From the values v at the last step.
    End solve_end(const Real* v) const {
        const int64_t entries = cells + W;
        End node{scratch<Real>(entries), zeros<Real>(entries), zeros<Real>(entries), {}, {}, {}};
        Entry best = Entry{} - infinity<Real>, slot = Entry{} - Real(1);
        for (int64_t p = 0; p < states; ++p) {
            const Entry score = entry(v, p) + entry(end.get(), p);
            slot = score > best ? Entry{} + Real(p) : slot;
            best = score > best ? score : best;
            set_entry(node.scores.get(), p, score);
        }
        node.top = best == Entry{} - infinity<Real> ? Entry{} : best;
        if constexpr (Omega::by_slot) {
            node.tau = slot;
            node.value = best;
        } else {
            omega.solve(Columns<Entry, Real>{node.scores.get(), across ? W : 1, states}, node.top, node.tau, node.value);
            node.tau = best > Entry{} - infinity<Real> ? node.tau : Entry{};
            node.value += best;
        }
        Entry sum{};
        for (int64_t p = 0; p < states; ++p) {
            Entry edge_q, edge_s;
            omega.weigh(into_end(node, p), node.tau, edge_q, edge_s);
            sum += edge_q;
            set_entry(node.q.get(), p, edge_q);
            set_entry(node.s.get(), p, edge_s);
        }
        const Entry scale = sum > Entry{} ? 1 / sum : Entry{};
        for (int64_t p = 0; p < states; ++p) set_entry(node.q.get(), p, entry(node.q.get(), p) * scale);
        return node;
    }

    // Values after the last step of each sequence, from the tape.
    std::unique_ptr<Real[]> last_values() const {
        auto v = zeros<Real>(cells + W * W);
        const S* lane[W];
        const int64_t row = states, batch = 2 * (problem.steps + 1) * states;
        for (int l = 0; l < W; ++l) lane[l] = problem.tape + lanes.sequence[l] * batch + lanes.length[l] * row;
        gather(lane, v.get());
        return v;
    }

    // 1/Σ mass, or 0: the total is 1 but for rounding.
    V normaliser(const Real* mass) const {
        if constexpr (across) {
            V total{};
            for (int64_t p = 0; p < states; ++p) total += load<Real>(mass + p * W);
            return total > V{} ? 1 / total : V{};
        } else {
            double total = 0;
            for (int64_t p = 0; p < states; ++p) total += double(mass[p]);
            return broadcast(total > 0 ? Real(1 / total) : Real(0));
        }
    }
};

// The sequences that are solved here, the longest first, in units for threads.
template <class S>
struct Plan {
    std::vector<int64_t> sequences;
    bool across;
    int64_t size, units;

    // `chosen` says which sequences; lanes of one precision or the other.
    template <class Chosen>
    Plan(const ScoresProblem<S>& problem, int width, Chosen chosen) {
        for (int64_t b = 0; b < problem.batch; ++b) {
            if (chosen(b)) sequences.push_back(b);
        }
        std::stable_sort(sequences.begin(), sequences.end(),
                         [&](int64_t a, int64_t b) { return problem.lengths[a] > problem.lengths[b]; });
        const int64_t count = int64_t(sequences.size()), threads = problem.threads;
        const auto share = [](int64_t whole, int64_t parts) { return (whole + parts - 1) / parts; };
        const int64_t across_cost = share(share(count, width), threads) * width * problem.states;
        const int64_t along_cost = share(count, threads) * share(problem.states, width) * width;
        // At equal cost short rows are better transposed; long ones need not be.
        across = across_cost < along_cost || (across_cost == along_cost && problem.states <= 64);
        across &= problem.steps < 1 << 24;  // lengths must be exact in single precision
        size = across ? width : 1;
        units = share(count, size);
    }
};

// Runs body(unit of work, thread) over the threads.
template <class S, class Chosen, class Body>
void for_units(const ScoresProblem<S>& problem, const S* tape, Chosen chosen, Body body) {
    with_omega<S>(problem.omega, [&](auto omega) {
        using Omega = decltype(omega);
        const Plan<S> plan(problem, lanes_of<typename Omega::Real>, chosen);
        const auto run = [&](auto factored, auto across) {
            parallel_for(plan.units, problem.threads, [&](int64_t n) {
                const int64_t first = n * plan.size, count = std::min<int64_t>(plan.size, plan.sequences.size() - first);
                Unit<S, Omega, factored(), across()> unit(problem, &plan.sequences[first], count, tape);
                body(unit, this_thread());
            });
        };
        const auto either = [&](auto factored) {
            plan.across ? run(factored, std::true_type()) : run(factored, std::false_type());
        };
        is_dense(problem) ? either(std::false_type()) : either(std::true_type());
    });
}

template <class U, class S>
bool forward_unit(U& unit, S* value, S* tape) {
    using Real = typename U::Real;
    using V = typename U::V;
    using Entry = typename U::Entry;
    constexpr int W = U::W;
    const auto& problem = unit.problem;
    const auto& lanes = unit.lanes;
    const int64_t states = unit.states, cells = unit.cells, plane = (problem.steps + 1) * states;
    Nodes<S, Real, U::across> values(lanes, tape + states, tape_records(problem, 0));
    Nodes<S, Real, U::across> thresholds(lanes, tape + plane + states, tape_records(problem, 0));
    auto v = zeros<Real>(cells + W), next = zeros<Real>(cells + W);
    unit.pad(v.get());
    double offset[W] = {};
    bool sound = true;
    for (int64_t n = 0; n < lanes.longest; ++n) {
        const Real* bonus = unit.is_factored ? unit.emissions.read(n) : nullptr;
        Real* to_tau = thresholds.room(n);
        const auto now = unit.active(n);
        for (int64_t g = 0; g < unit.groups; ++g) {
            V tau, best;
            if (unit.solve_directly(n, g, v.get(), now, best)) {
                tau = best;
            } else {
                tau = unit.load_group(n, g, v.get(), &sound);
                best = unit.top;
                if constexpr (!U::Omega::by_slot) best = unit.solve(n, g, tau);
                if (U::may_be_direct && n > 0) tau = V{} + std::numeric_limits<Real>::quiet_NaN();
            }
            if (bonus) {
                const V own = load<Real>(bonus + g * W);
                sound &= !any((!(own < V{} + infinity<Real>)) & now);
                best += own;
            }
            store(to_tau + g * W, tau);
            store(&next[g * W], best);
        }
        Entry top = Entry{} - infinity<Real>;
        for (int64_t p = 0; p < states; ++p) {
            const Entry state = unit.entry(next.get(), p);
            top = state > top ? state : top;
        }
        Entry base = top == Entry{} - infinity<Real> ? Entry{} : top;
        Real* to_value = values.room(n);
        if constexpr (U::across) base = now ? base : Entry{};
        for (int64_t g = 0; g < unit.groups; ++g) {
            V after = load<Real>(&next[g * W]) - (V{} + base);
            if constexpr (U::across) after = now ? after : load<Real>(&v[g * W]);
            store(&v[g * W], after);
            store(to_value + g * W, after);
        }
        unit.pad(v.get());
        for (int l = 0; l < lanes.valid; ++l) offset[l] += double((V{} + base)[l]);
        values.finish(n, true);
        thresholds.finish(n, true);
    }
    const auto node = unit.solve_end(v.get());
    for (int l = 0; l < lanes.valid; ++l) {
        tape[lanes.sequence[l] * 2 * plane + plane] = 0;  // not in exp space
        for (int64_t p = 0; p < states && lanes.length[l] > 0; ++p) {
            sound &= unit.end[U::across ? p * W + l : p] < infinity<Real>;
        }
        value[lanes.sequence[l]] = lanes.length[l] ? S(offset[l] + double((V{} + node.value)[l])) : S(0);
    }
    return sound;
}

template <class S, class Chosen>
bool forward_where(const ScoresProblem<S>& problem, S* value, S* tape, Chosen chosen) {
    bool good = true;
    for_units(problem, tape, chosen, [&](auto& unit, int) {
        if (!forward_unit(unit, value, tape)) {
#pragma omp atomic write
            good = false;
        }
    });
    return good;
}

// Whether the sums of exponentials can be products of matrices.
template <class S>
bool in_exp_space(const ScoresProblem<S>& problem) {
    return problem.omega.alpha == 1 && !is_dense(problem) && problem.transition_step == 0;
}

template <class S>
bool forward(const ScoresProblem<S>& problem, S* value, S* tape) {
    std::vector<std::uint8_t> underflowed(problem.batch);
    bool good = true;
    if (in_exp_space(problem)) {
        good = product_kernels<S>().forward(problem, value, tape, underflowed.data());
        if (std::find(underflowed.begin(), underflowed.end(), 1) == underflowed.end()) return good;
    }
    std::unique_ptr<S[]> own;
    if (!tape) own = scratch<S>(2 * problem.batch * (problem.steps + 1) * problem.states), tape = own.get();
    if (!in_exp_space(problem)) return forward_where(problem, value, tape, [](int64_t) { return true; });
    return forward_where(problem, value, tape, [&](int64_t b) { return underflowed[b] != 0; }) && good;
}

// Whether sequence b was solved in log space.
template <class S>
bool in_log_space(const ScoresProblem<S>& problem, int64_t b) {
    return !in_exp_space(problem) || problem.tape[(2 * b + 1) * (problem.steps + 1) * problem.states] != 1;
}

// Zeros at masked steps.
template <class S, int W>
void clear_skipped(const Lanes<W>& lanes, S* data, int64_t size) {
    for (int l = 0; l < lanes.valid; ++l) {
        S* sequence = data + lanes.sequence[l] * lanes.steps * size;
        for (int64_t n = 0, t = 0; n <= lanes.length[l]; ++n) {
            const int64_t end = n < lanes.length[l] ? lanes.step(l, n) : lanes.steps;
            std::fill(sequence + t * size, sequence + end * size, S(0));
            t = end + 1;
        }
    }
}

// The contribution of a thread's sequences to the gradient of scores that the batch shares.
struct Totals {
    std::vector<double> transitions, start, end;
};

// Where a unit's results go: edges and states at every step, and the two ends.
template <class U, class S>
class Sink {
    using Real = typename U::Real;
    using V = typename U::V;
    static constexpr int W = U::W;

    const U& unit;
    const Scores<S>& out;
    Totals& totals;
    V seed;
    bool by_step;
    std::optional<Edges<S, Real, U::across>> edges;
    std::optional<Nodes<S, Real, U::across>> nodes;
    std::unique_ptr<Real[]> sums;

    // A number for each state, added to those of a sequence or to those of all.
    void add(const Real* mass, S* data, int64_t batch, std::vector<double>& total) const {
        for (int l = 0; l < unit.lanes.valid; ++l) {
            for (int64_t p = 0; p < unit.states; ++p) {
                const double part = double(mass[U::across ? p * W + l : p]) * double(seed[l]);
                if (batch) {
                    data[unit.lanes.sequence[l] * batch + p] += S(part);
                } else {
                    total[p] += part;
                }
            }
        }
    }

public:
    Sink(const U& of, const S* seeds, const Scores<S>& to, Totals& all)
        : unit(of), out(to), totals(all), by_step(of.problem.transition_step != 0) {
        const auto& lanes = unit.lanes;
        for (int l = 0; l < W; ++l) seed[l] = seeds ? Real(seeds[lanes.sequence[U::across ? l : 0]]) : Real(1);
        if (by_step) {
            const auto& p = unit.problem;
            constexpr int64_t cache = 16 << 20;
            const bool large = p.batch * p.steps * p.transition_step * int64_t(sizeof(S)) > cache;
            edges.emplace(lanes, out.transitions, edge_records(p), unit.states, large);
        } else {
            sums = zeros<Real>(unit.groups * unit.tile());
        }
        if (U::is_factored) nodes.emplace(lanes, out.emissions, node_records(unit.problem));
        U::is_factored ? clear_skipped(lanes, out.emissions, unit.states)
                       : clear_skipped(lanes, out.transitions, unit.states * unit.states);
    }

    // Stores the results of enter(row) for the edges into a group; the first step of scores has no edges.
    template <class Enter>
    void put_edges(int64_t n, int64_t g, Enter enter) {
        if (U::is_factored && n == 0) {
            unit.for_edges(n, g, enter);
        } else if (!by_step) {
            Real* to = &sums[g * unit.tile()];
            unit.for_edges(n, g, [&](int row) {
                return [this, to, each = enter(row)](Edge e) {
                    store(to + e.at, load<Real>(to + e.at) + each(e) * seed);
                };
            });
        } else {
            edges->enter_to_write(n, g);
            unit.for_edges(n, g, [&](int row) {
                return [this, each = enter(row)](Edge e) { edges->put(e, each(e) * seed); };
            });
            if (n == 0) put_zeros(n, g, true);
        }
    }

    void put_zeros(int64_t n, int64_t g, bool rest = false) {
        if (!by_step || (U::is_factored && n == 0)) return;
        edges->enter_to_write(n, g);
        unit.for_edges(n, g, [&](int) { return [this](Edge e) { edges->put(e, V{}); }; }, rest);
        if (n == 0 && !rest) put_zeros(n, g, true);
    }

    void put_node(int64_t n, int64_t g, V mass) {
        if (nodes) store(nodes->room(n) + g * W, mass * seed);
    }

    void finish_step(int64_t n) {
        if (by_step && !(U::is_factored && n == 0)) edges->finish_step(n);
        if (nodes) nodes->finish(n, false);
    }

    void put_start(const Real* mass) {
        if (U::is_factored) add(mass, out.start, unit.problem.start_batch, totals.start);
    }
    void put_end(const Real* mass) {
        if (U::is_factored) add(mass, out.end, unit.problem.end_batch, totals.end);
    }

    void finish() {
        finish_writes();
        if (by_step) return;
        const int64_t states = unit.states, batch = unit.problem.transition_batch;
        const auto add = [&](int64_t b, int64_t i, int64_t p, Real part) {
            if (batch) {
                out.transitions[b * batch + i * states + p] += S(part);
            } else {
                totals.transitions[i * states + p] += double(part);
            }
        };
        for (int64_t g = 0; g < unit.groups; ++g) {
            unit.for_edges(1, g, [&](int row) {
                return [&, row](Edge e) {
                    const Real* part = &sums[g * unit.tile() + e.at];
                    for (int l = 0; l < W; ++l) {
                        if (U::across && l < unit.lanes.valid) add(unit.lanes.sequence[l], g, e.previous / W, part[l]);
                        if (!U::across && e.previous + l < states) {
                            add(unit.lanes.sequence[0], g * W + row, e.previous + l, part[l]);
                        }
                    }
                };
            });
        }
    }
};

// Zeros what is added to, runs body(unit, totals of its thread) in log space, and adds the totals up.
template <class S, class Body>
void for_gradients(const ScoresProblem<S>& problem, const Scores<S>& out, Body body) {
    const int64_t states = problem.states;
    bool has_any = false;
    for (int64_t b = 0; b < problem.batch && !has_any; ++b) has_any = in_log_space(problem, b);
    if (!has_any) return;
    std::vector<Totals> totals(problem.threads);
    if (!is_dense(problem)) {
        const std::vector<double> none(states);
        for (Totals& own : totals) own = {std::vector<double>(states * states), none, none};
    }
    for_units(problem, problem.tape, [&](int64_t b) { return in_log_space(problem, b); },
              [&](auto& unit, int thread) { body(unit, totals[thread]); });
    const auto deliver = [](const std::vector<double>& from, int64_t batch, S* to) {
        for (std::size_t k = 0; k < from.size() && batch == 0; ++k) to[k] += S(from[k]);
    };
    for (const Totals& own : totals) {
        deliver(own.transitions, problem.transition_batch, out.transitions);
        deliver(own.start, problem.start_batch, out.start);
        deliver(own.end, problem.end_batch, out.end);
    }
}

template <class U, class S>
void backward_unit(U& unit, Sink<U, S>& sink) {
    using Real = typename U::Real;
    using V = typename U::V;
    constexpr int W = U::W;
    const int64_t cells = unit.cells;
    const auto last = unit.last_values();
    auto node = unit.solve_end(last.get());
    auto mass = std::move(node.q);
    for (int64_t g = 0; g < unit.groups; ++g) {
        store(&mass[g * W], unit.active(0) ? load<Real>(&mass[g * W]) : V{});
    }
    sink.put_end(mass.get());
    auto spread = scratch<Real>(cells);
    for (int64_t n = unit.lanes.longest - 1; n >= 0; --n) {
        const Real *before = unit.values_before(n), *tau = unit.thresholds.read(n + 1);
        const V scale = unit.normaliser(mass.get());
        const auto now = unit.active(n);
        std::fill(&spread[0], &spread[cells], Real(0));
        for (int64_t g = 0; g < unit.groups; ++g) {
            const V held = now ? load<Real>(&mass[g * W]) * scale : V{};
            sink.put_node(n, g, held);
            if (!any(held != V{})) {
                sink.put_zeros(n, g);
                continue;
            }
            const V threshold = unit.prepare(n, g, before, load<Real>(tau + g * W), now), from = unit.shift();
            sink.put_edges(n, g, [&, to = spread.get()](int row) {
                return [&unit, to, now, at = unit.of_node(held, row), top = unit.of_node(from, row),
                        tau = unit.of_node(threshold, row)](Edge e) {
                    V q, s;
                    unit.weigh(e, top, tau, q, s);
                    V part = q * at;
                    if constexpr (U::across) part = now ? part : V{};
                    store(to + e.previous, load<Real>(to + e.previous) + part);
                    return part;
                };
            });
        }
        if (n == 0) sink.put_start(mass.get());
        sink.finish_step(n);
        if constexpr (U::across) {
            for (int64_t g = 0; g < unit.groups; ++g) {
                store(&mass[g * W], now ? load<Real>(&spread[g * W]) : load<Real>(&mass[g * W]));
            }
        } else {
            std::swap(mass, spread);
        }
    }
    sink.finish();
}

template <class S>
void zero_sums(const ScoresProblem<S>& problem, const Scores<S>& out) {
    if (is_dense(problem)) return;
    const int64_t states = problem.states, square = states * states, batch = problem.batch;
    const int64_t by_step = problem.transition_step ? std::max<int64_t>(problem.steps - 1, 0) : 1;
    std::fill_n(out.transitions, (problem.transition_batch ? batch : 1) * by_step * square, S(0));
    std::fill_n(out.start, (problem.start_batch ? batch : 1) * states, S(0));
    std::fill_n(out.end, (problem.end_batch ? batch : 1) * states, S(0));
}

template <class S>
void backward(const ScoresProblem<S>& problem, const S* seed, const Scores<S>& gradient) {
    zero_sums(problem, gradient);
    if (in_exp_space(problem)) product_kernels<S>().backward(problem, seed, gradient);
    for_gradients(problem, gradient, [&](auto& unit, Totals& totals) {
        Sink<std::decay_t<decltype(unit)>, S> sink(unit, seed, gradient, totals);
        backward_unit(unit, sink);
    });
}

// The tangent forward sweep: v̇ before each step, relative to that of a best state, and for J y = s∘(y − mean) the mean
// ⟨s, y⟩/Σs of the edges into each state, relative to the same.
template <class U, class S>
struct Tangent {
    using Real = typename U::Real;
    using V = typename U::V;
    using Entry = typename U::Entry;
    static constexpr int W = U::W;

    U& unit;
    Edges<const S, Real, U::across> edges;
    Nodes<const S, Real, U::across> emissions;
    std::unique_ptr<Real[]> start, end;
    std::unique_ptr<Real[]> value, mean;
    typename U::End node;
    std::unique_ptr<Real[]> mass_dot;  // of the states, from the edges into the end
    std::unique_ptr<Real[]> end_y;
    Entry end_mean{};

    Tangent(U& of, const Scores<const S>& z)
        : unit(of),
          edges(of.lanes, z.transitions, edge_records(of.problem), of.states),
          emissions(of.lanes, z.emissions, node_records(of.problem)),
          start(of.ends(z.start, of.problem.start_batch)),
          end(of.ends(z.end, of.problem.end_batch)),
          value(zeros<Real>((of.lanes.longest + 1) * of.cells + W)),
          mean(scratch<Real>((of.lanes.longest + 1) * of.cells)),
          node(of.solve_end(of.last_values().get())),
          mass_dot(zeros<Real>(of.cells + W)),
          end_y(zeros<Real>(of.cells + W)) {
        const int64_t cells = unit.cells, states = unit.states;
        for (int64_t n = 0; n < unit.lanes.longest; ++n) {
            const Real *before = unit.values_before(n), *tau = unit.thresholds.read(n + 1);
            const Real *own = U::is_factored ? emissions.read(n) : nullptr, *old = &value[n * cells];
            Real* next = &value[(n + 1) * cells];
            const auto now = unit.active(n);
            for (int64_t g = 0; g < unit.groups; ++g) {
                const V threshold = unit.prepare(n, g, before, load<Real>(tau + g * W), now), from = unit.shift();
                enter(n, g);
                V sums[4] = {};
                unit.template sum_edges<4>(n, g, sums, [&](int row) {
                    return [&, top = unit.of_node(from, row), own_tau = unit.of_node(threshold, row)](Edge e, V* of) {
                        V q, s;
                        unit.weigh(e, top, own_tau, q, s);
                        const V y = s > V{} ? along(n, g, e) : V{};
                        of[0] += q;
                        of[1] += q * y;
                        of[2] += s;
                        of[3] += s * y;
                    };
                });
                V v_dot = sums[0] > V{} ? sums[1] / sums[0] : V{};
                if (own) v_dot += load<Real>(own + g * W);
                if constexpr (U::across) v_dot = now ? v_dot : load<Real>(old + g * W);
                store(next + g * W, v_dot);
                store(&mean[n * cells + g * W], sums[2] > V{} ? sums[3] / sums[2] : V{});
            }
            rebase(n, next, now);
        }
        finish(&value[unit.lanes.longest * cells], states);
    }

    void enter(int64_t n, int64_t g) {
        if (!U::is_factored || n > 0) edges.enter(n, g);
    }

    // y = z + v̇ along an edge into the group that was entered.
    V along(int64_t n, int64_t g, Edge e) const {
        if (n > 0) return edges.get(e) + load<Real>(&value[n * unit.cells + e.previous]);
        return U::is_factored ? unit.of_node(load<Real>(&start[g * W]), e.row) : edges.get(e);
    }

    template <class Mask>
    void rebase(int64_t n, Real* v_dot, Mask now) {
        const auto from = unit.values.read(n + 1);
        Entry base{};
        for (int64_t p = 0; p < unit.states; ++p) {
            base = unit.entry(from, p) == Entry{} ? unit.entry(v_dot, p) : base;
        }
        if constexpr (U::across) base = now ? base : Entry{};
        for (int64_t g = 0; g < unit.groups; ++g) store(v_dot + g * W, load<Real>(v_dot + g * W) - (V{} + base));
    }

    void finish(const Real* last, int64_t states) {
        Entry sum_sy{}, sum_s{};
        for (int64_t p = 0; p < states; ++p) {
            const Entry y = unit.entry(last, p) + unit.entry(end.get(), p), s = unit.entry(node.s.get(), p);
            unit.set_entry(end_y.get(), p, y);
            sum_sy += s > Entry{} ? s * y : Entry{};
            sum_s += s;
        }
        end_mean = sum_s > Entry{} ? sum_sy / sum_s : Entry{};
        for (int64_t p = 0; p < states; ++p) {
            const Entry y = unit.entry(end_y.get(), p), s = unit.entry(node.s.get(), p);
            unit.set_entry(mass_dot.get(), p, s > Entry{} ? s * (y - end_mean) : Entry{});
        }
    }
};

template <class U, class S>
void hessian_unit(U& unit, const Scores<const S>& z, Sink<U, S>& sink) {
    using Real = typename U::Real;
    using V = typename U::V;
    constexpr int W = U::W;
    const int64_t cells = unit.cells;
    Tangent<U, S> tangent(unit, z);
    auto &mass = tangent.node.q, &mass_dot = tangent.mass_dot;
    for (int64_t g = 0; g < unit.groups; ++g) {
        store(&mass[g * W], unit.active(0) ? load<Real>(&mass[g * W]) : V{});
        store(&mass_dot[g * W], unit.active(0) ? load<Real>(&mass_dot[g * W]) : V{});
    }
    sink.put_end(mass_dot.get());
    auto spread = scratch<Real>(cells), spread_dot = scratch<Real>(cells);
    for (int64_t n = unit.lanes.longest - 1; n >= 0; --n) {
        const Real *before = unit.values_before(n), *tau = unit.thresholds.read(n + 1);
        const V scale = unit.normaliser(mass.get());
        const auto now = unit.active(n);
        std::fill(&spread[0], &spread[cells], Real(0));
        std::fill(&spread_dot[0], &spread_dot[cells], Real(0));
        for (int64_t g = 0; g < unit.groups; ++g) {
            const V held = now ? load<Real>(&mass[g * W]) * scale : V{};
            const V held_dot = now ? load<Real>(&mass_dot[g * W]) : V{};
            sink.put_node(n, g, held_dot);
            if (!any((held != V{}) | (held_dot != V{}))) {
                sink.put_zeros(n, g);
                continue;
            }
            const V threshold = unit.prepare(n, g, before, load<Real>(tau + g * W), now), from = unit.shift();
            tangent.enter(n, g);
            const V mean = load<Real>(&tangent.mean[n * cells + g * W]);
            sink.put_edges(n, g, [&, to = spread.get(), to_dot = spread_dot.get()](int row) {
                return [&unit, &tangent, n, g, to, to_dot, now, at = unit.of_node(held, row),
                        at_dot = unit.of_node(held_dot, row), top = unit.of_node(from, row),
                        tau = unit.of_node(threshold, row), centre = unit.of_node(mean, row)](Edge e) {
                    V q, s;
                    unit.weigh(e, top, tau, q, s);
                    const V y = s > V{} ? tangent.along(n, g, e) - centre : V{};
                    V visits = q * at, part = s * y * at + q * at_dot;
                    if constexpr (U::across) part = now ? part : V{}, visits = now ? visits : V{};
                    store(to + e.previous, load<Real>(to + e.previous) + visits);
                    store(to_dot + e.previous, load<Real>(to_dot + e.previous) + part);
                    return part;
                };
            });
        }
        if (n == 0) sink.put_start(mass_dot.get());
        sink.finish_step(n);
        for (int64_t g = 0; g < unit.groups; ++g) {
            store(&mass[g * W], now ? load<Real>(&spread[g * W]) : load<Real>(&mass[g * W]));
            store(&mass_dot[g * W], now ? load<Real>(&spread_dot[g * W]) : load<Real>(&mass_dot[g * W]));
        }
    }
    sink.finish();
}

template <class S>
void hessian(const ScoresProblem<S>& problem, const S* seed, const Scores<const S>& z, const Scores<S>& product) {
    zero_sums(problem, product);
    if (in_exp_space(problem)) product_kernels<S>().hessian(problem, seed, z, product);
    for_gradients(problem, product, [&](auto& unit, Totals& totals) {
        Sink<std::decay_t<decltype(unit)>, S> sink(unit, seed, product, totals);
        hessian_unit(unit, z, sink);
    });
}

// Runs body(dense sequence) along its states over the threads.
template <class S, class Body>
void for_sequences(const ScoresProblem<S>& problem, Body body) {
    with_omega<S>(problem.omega, [&](auto omega) {
        parallel_for(problem.batch, problem.threads, [&](int64_t b) {
            Unit<S, decltype(omega), false, false> unit(problem, &b, 1, problem.tape);
            body(unit);
        });
    });
}

// Writes value(n, g, edge, r, τ) for every edge, and beyond(n, g, edge) where the first step has none. What belongs to the
// edge from a state to the end is counted in both with the edges into that state at the last step.
template <class U, class S, class Enter, class Value, class Beyond>
void write_edges(U& unit, S* out, Enter enter, Value value, Beyond beyond) {
    using Real = typename U::Real;
    using V = typename U::V;
    Edges<S, Real, false> edges(unit.lanes, out, edge_records(unit.problem), unit.states);
    clear_skipped(unit.lanes, out, unit.states * unit.states);
    for (int64_t n = 0; n < unit.lanes.longest; ++n) {
        const Real *before = unit.values_before(n), *taus = unit.thresholds.read(n + 1);
        for (int64_t g = 0; g < unit.groups; ++g) {
            const V tau = unit.prepare(n, g, before, load<Real>(taus + g * U::W), unit.active(n)), from = unit.shift();
            enter(n, g);
            edges.enter_to_write(n, g);
            const auto none = [&](int) { return [&](Edge e) { edges.put(e, beyond(n, g, e)); }; };
            if (n == 0) unit.for_edges(n, g, none, true);
            unit.for_edges(n, g, [&](int row) {
                return [&, top = unit.of_node(from, row), own = unit.of_node(tau, row)](Edge e) {
                    V result = value(n, g, e, unit.relative(e, top, own), own);
                    if (n == 0) result = unit.numbers(e) == V{} ? result : beyond(n, g, e);
                    edges.put(e, result);
                };
            });
        }
    }
}

template <class S>
void log_transitions(const ScoresProblem<S>& problem, S* log_q) {
    for_sequences(problem, [&](auto& unit) {
        using U = std::decay_t<decltype(unit)>;
        using Real = typename U::Real;
        using V = typename U::V;
        const auto node = unit.solve_end(unit.last_values().get());
        const auto into_end = zeros<Real>(unit.cells);
        for (int64_t p = 0; p < unit.states; ++p) into_end[p] = unit.omega.log_q(unit.into_end(node, p), node.tau);
        write_edges(
            unit, log_q, [](int64_t, int64_t) {},
            [&](int64_t n, int64_t g, Edge e, V r, V tau) {
                const V last = n + 1 == unit.lanes.longest ? load<Real>(&into_end[g * U::W]) : V{};
                return unit.omega.log_q(r, tau) + unit.of_node(last, e.row);
            },
            [](int64_t, int64_t, Edge) { return V{} - infinity<Real>; });
    });
}

template <class S>
void log_transitions_jvp(const ScoresProblem<S>& problem, const S* z, S* product) {
    for_sequences(problem, [&](auto& unit) {
        using U = std::decay_t<decltype(unit)>;
        using Real = typename U::Real;
        using V = typename U::V;
        Tangent<U, S> tangent(unit, {nullptr, z, nullptr, nullptr});
        const auto& node = tangent.node;
        const auto into_end = zeros<Real>(unit.cells);
        for (int64_t p = 0; p < unit.states; ++p) {
            const Real slope = unit.omega.log_slope(unit.into_end(node, p), node.tau);
            into_end[p] = slope > 0 ? slope * (tangent.end_y[p] - tangent.end_mean) : Real(0);
        }
        const auto last = [&](int64_t n, int64_t g, Edge e) {
            return unit.of_node(n + 1 == unit.lanes.longest ? load<Real>(&into_end[g * U::W]) : V{}, e.row);
        };
        write_edges(
            unit, product, [&](int64_t n, int64_t g) { tangent.enter(n, g); },
            [&](int64_t n, int64_t g, Edge e, V r, V tau) {
                const V slope = unit.omega.log_slope(r, tau);
                const V mean = unit.of_node(load<Real>(&tangent.mean[n * unit.cells + g * U::W]), e.row);
                return (slope > V{} ? slope * (tangent.along(n, g, e) - mean) : V{}) + last(n, g, e);
            },
            last);
    });
}

template <class S>
void log_transitions_vjp(const ScoresProblem<S>& problem, const S* cotangent, S* product) {
    for_sequences(problem, [&](auto& unit) {
        using U = std::decay_t<decltype(unit)>;
        using Real = typename U::Real;
        using V = typename U::V;
        constexpr int W = U::W;
        const int64_t states = unit.states, length = unit.lanes.longest, cells = unit.cells;
        clear_skipped(unit.lanes, product, states * states);
        if (length == 0) return;
        Edges<const S, Real, false> given(unit.lanes, cotangent, edge_records(problem), states);
        Edges<S, Real, false> out(unit.lanes, product, edge_records(problem), states);
        const auto c = [&](int64_t n, Edge e) {
            const V all = given.get(e);
            return n > 0 ? all : unit.numbers(e) == V{} ? all : V{};
        };
        // a = c/q^(α−1) − s Σ(c/q^(α−1))/Σs along the support: the transposed derivative of log q.
        const auto node = unit.solve_end(unit.last_values().get());
        auto mass = zeros<Real>(cells), spread = zeros<Real>(cells);
        for (int64_t g = 0; g < unit.groups; ++g) {
            given.enter(length - 1, g);
            V total{};
            unit.template sum_edges<1>(length - 1, g, &total, [&](int) {
                return [&](Edge e, V* of) { of[0] += c(length - 1, e); };
            });
            store(&mass[g * W], total);
        }
        Real sum_c = 0, sum_s = 0;
        for (int64_t p = 0; p < states; ++p) {
            const Real slope = unit.omega.log_slope(unit.into_end(node, p), node.tau);
            mass[p] = slope > 0 ? slope * mass[p] : Real(0);
            sum_c += mass[p];
            sum_s += node.s[p];
        }
        for (int64_t p = 0; p < states; ++p) mass[p] -= sum_s > 0 ? node.s[p] * sum_c / sum_s : Real(0);
        for (int64_t n = length - 1; n >= 0; --n) {
            const Real *before = unit.values_before(n), *taus = unit.thresholds.read(n + 1);
            std::fill(&spread[0], &spread[cells], Real(0));
            for (int64_t g = 0; g < unit.groups; ++g) {
                const V tau = unit.prepare(n, g, before, load<Real>(taus + g * W), unit.active(n));
                given.enter(n, g);
                const V from = unit.shift(), held = load<Real>(&mass[g * W]);
                // c/q^(α−1), q and s of an edge.
                const auto weigh = [&](Edge e, V& q, V& s) {
                    const V top = unit.of_node(from, e.row), own = unit.of_node(tau, e.row);
                    unit.weigh(e, top, own, q, s);
                    const V slope = unit.omega.log_slope(unit.relative(e, top, own), own);
                    return slope > V{} ? slope * c(n, e) : V{};
                };
                V totals[2] = {};
                unit.template sum_edges<2>(n, g, totals, [&](int) {
                    return [&](Edge e, V* of) {
                        V q, s;
                        of[0] += weigh(e, q, s);
                        of[1] += s;
                    };
                });
                const V mean = totals[1] > V{} ? totals[0] / totals[1] : V{};
                out.enter_to_write(n, g);
                if (n == 0) unit.for_edges(n, g, [&](int) { return [&](Edge e) { out.put(e, V{}); }; }, true);
                unit.for_edges(n, g, [&](int row) {
                    return [&, centre = unit.of_node(mean, row), at = unit.of_node(held, row)](Edge e) {
                        V q, s;
                        const V pulled = weigh(e, q, s), part = pulled - s * centre + q * at;
                        out.put(e, part);
                        store(&spread[e.previous], load<Real>(&spread[e.previous]) + part);
                    };
                });
            }
            std::swap(mass, spread);
        }
    });
}

// One sequence at a time, state by state, for what walks along single paths.
template <class S>
struct Walk {
    const ScoresProblem<S>& problem;
    int64_t b, states, length;
    bool dense;

    Walk(const ScoresProblem<S>& of, int64_t sequence)
        : problem(of), b(sequence), states(of.states), length(of.lengths[sequence]), dense(is_dense(of)) {}

    int64_t step(int64_t n) const { return problem.kept ? problem.kept[b * problem.steps + n] : n; }

    // Scores of the edges into state i at the n-th step, of which the first has one.
    const S* into(int64_t n, int64_t i) const {
        if (!dense && n == 0) return problem.scores.start + b * problem.start_batch + i;
        const int64_t place = (step(n) - !dense) * problem.transition_step;
        return problem.scores.transitions + b * problem.transition_batch + place + i * states;
    }
    double of_state(int64_t n, int64_t i) const {
        return dense ? 0 : double(problem.scores.emissions[(b * problem.steps + step(n)) * states + i]);
    }
    double of_end(int64_t i) const { return dense ? 0 : double(problem.scores.end[b * problem.end_batch + i]); }
};

// The first entry at which the running sum of q exceeds its share of the total; −1 if there is none.
template <class R>
int64_t draw(const R* q, int64_t states, double uniform) {
    double total = 0, sum = 0;
    for (int64_t p = 0; p < states; ++p) total += double(q[p]);
    int64_t chosen = -1;
    for (int64_t p = 0; p < states; ++p) {
        if (q[p] > 0) chosen = p;
        sum += double(q[p]);
        if (sum > uniform * total) break;
    }
    return chosen;
}

template <class S>
void sample(const ScoresProblem<S>& problem, int64_t draws, const double* uniforms, int64_t* sequences) {
    with_omega<S>(problem.omega, [&](auto omega) {
        using Omega = decltype(omega);
        using Real = typename Omega::Real;
        parallel_for(problem.batch, problem.threads, [&](int64_t b) {
            const Walk<S> walk(problem, b);
            const int64_t states = problem.states, plane = (problem.steps + 1) * states;
            const S* tape = problem.tape + 2 * b * plane;
            const bool log_space = in_log_space(problem, b);
            // Under negentropy thresholds are not of one kind, and q is made to sum to 1 as it is drawn from.
            const bool anew = std::is_same_v<Omega, Negentropy<S>>;
            const auto q = scratch<Real>(states);
            // q of the edges from the states after n steps, which have `weight`, into a node with threshold τ.
            const auto weigh = [&](int64_t n, auto weight, Real tau, bool solve) {
                Real top = -infinity<Real>, slot = -1;
                for (int64_t p = 0; p < states; ++p) {
                    const Real v = Real(tape[n * states + p]);
                    q[p] = weight(p) + (log_space ? v : log_positive(v));
                    if (q[p] > top) top = q[p], slot = Real(p);
                }
                if (top == -infinity<Real>) top = 0;
                if constexpr (Omega::by_slot) {
                    if (solve) tau = slot;
                } else {
                    Real unused;
                    if (solve) omega.solve(Columns<Real, Real>{q.get(), 1, states}, top, tau, unused);
                }
                for (int64_t p = 0; p < states; ++p) {
                    Real r = q[p] - top, s;
                    if constexpr (Omega::by_slot) r = Real(p) == tau ? Real(0) : -infinity<Real>;
                    omega.weigh(r, tau, q[p], s);
                }
            };
            for (int64_t n = b * draws; n < (b + 1) * draws; ++n) {
                int64_t* y = sequences + n * problem.steps;
                const double* uniform = uniforms + n * problem.steps;
                std::fill(y, y + problem.steps, int64_t(-1));
                if (walk.length == 0) continue;
                weigh(walk.length, [&](int64_t p) { return Real(walk.of_end(p)); }, Real(0), true);
                int64_t state = draw(q.get(), states, uniform[walk.step(walk.length - 1)]);
                for (int64_t k = walk.length - 1; state >= 0; --k) {
                    y[walk.step(k)] = state;
                    if (k == 0) break;
                    const S* scores = walk.into(k, state);
                    const Real tau = Real(tape[plane + (k + 1) * states + state]);
                    weigh(k, [&](int64_t p) { return Real(scores[p]); }, tau, anew);
                    state = draw(q.get(), states, uniform[walk.step(k - 1)]);
                }
            }
        });
    });
}

// Keeps the k greatest scores in descending order, the earlier first among equals, with what belongs to each.
void insert(double score, int64_t origin, double* best, int64_t* origins, int64_t k) {
    int64_t place = k - 1;
    for (; place > 0 && score > best[place - 1]; --place) {
        best[place] = best[place - 1];
        origins[place] = origins[place - 1];
    }
    best[place] = score;
    origins[place] = origin;
}

// The best sequence alone, by the hard max.
template <class S>
bool best_sequence(ScoresProblem<S> problem, S* scores, int64_t* sequences) {
    problem.omega = {infinity<double>, 0};
    const int64_t states = problem.states, plane = (problem.steps + 1) * states;
    const auto tape = scratch<S>(problem.batch * 2 * plane);
    const bool sound = forward_where(problem, scores, tape.get(), [](int64_t) { return true; });
    for (int64_t b = 0; b < problem.batch && sound; ++b) {
        const Walk<S> walk(problem, b);
        const S* own = &tape[2 * b * plane];
        int64_t* y = sequences + b * problem.steps;
        std::fill(y, y + problem.steps, int64_t(-1));
        if (walk.length == 0 || scores[b] == -infinity<S>) continue;
        int64_t state = -1;
        S top = -infinity<S>;
        for (int64_t p = 0; p < states; ++p) {
            const S score = own[walk.length * states + p] + S(walk.of_end(p));
            if (score > top) top = score, state = p;
        }
        for (int64_t n = walk.length - 1; n >= 0; --n) {
            y[walk.step(n)] = state;
            state = int64_t(own[plane + (n + 1) * states + state]);
        }
    }
    return sound;
}

template <class S>
bool topk(const ScoresProblem<S>& problem, int64_t k, S* scores, int64_t* sequences) {
    if (k == 1) return best_sequence(problem, scores, sequences);
    const int64_t states = problem.states, row = states * k;
    bool good = true;
    parallel_for(problem.batch, problem.threads, [&](int64_t b) {
        const Walk<S> walk(problem, b);
        const int64_t length = walk.length;
        // The k best ways into each state: scores of this step and the one before, and where each came from, as
        // state · k + rank.
        const auto now = scratch<double>(row), before = scratch<double>(row), end = scratch<double>(k);
        const auto origin = zeros<int64_t>((length + 1) * row), end_origin = zeros<int64_t>(k);
        for (int64_t n = 0; n < row; ++n) now[n] = n == 0 ? 0 : -infinity<double>;
        for (int64_t t = 0; t < length; ++t) {
            for (int64_t n = 0; n < row; ++n) before[n] = now[n], now[n] = -infinity<double>;
            for (int64_t i = 0; i < states; ++i) {
                const S* weights = walk.into(t, i);
                const double own = walk.of_state(t, i);
                bool sound = own < infinity<double> && walk.of_end(i) < infinity<double>;
                double* best = &now[i * k];
                for (int64_t p = 0; p < (t == 0 ? 1 : states); ++p) {
                    sound &= weights[p] < infinity<S>;
                    for (int64_t rank = 0; rank < k; ++rank) {
                        const double score = double(weights[p]) + before[p * k + rank] + own;
                        if (!(score > best[k - 1])) break;
                        insert(score, p * k + rank, best, &origin[t * row + i * k], k);
                    }
                }
                if (!sound) {
#pragma omp atomic write
                    good = false;
                }
            }
        }
        for (int64_t n = 0; n < k; ++n) end[n] = -infinity<double>;
        for (int64_t n = 0; n < row; ++n) {
            const double score = length ? now[n] + walk.of_end(n / k) : now[n];
            if (score > end[k - 1]) insert(score, n, &end[0], &end_origin[0], k);
        }
        for (int64_t n = 0; n < k; ++n) {
            int64_t* y = sequences + (b * k + n) * problem.steps;
            scores[b * k + n] = S(end[n]);
            for (int64_t t = 0; t < problem.steps; ++t) y[t] = -1;
            if (end[n] == -infinity<double>) continue;
            int64_t place = end_origin[n];
            for (int64_t t = length - 1; t >= 0; --t) {
                y[walk.step(t)] = place / k;
                place = origin[t * row + place];
            }
        }
    });
    return good;
}

}  // namespace

template <class S>
ChainKernels<S> chain_kernels() {
    return {forward<S>,
            backward<S>,
            hessian<S>,
            log_transitions<S>,
            log_transitions_jvp<S>,
            log_transitions_vjp<S>,
            sample<S>,
            topk<S>};
}

template ChainKernels<float> chain_kernels<float>();
template ChainKernels<double> chain_kernels<double>();

}  // namespace bellmax::BELLMAX_ARCH
