// What goes along a chain node by node, in double: drawing sequences, the k best, log q and its derivatives.
#pragma once

#include <algorithm>

#include "../base/memory.h"
#include "../base/threads.h"
#include "../node.h"
#include "problem.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

using std::int64_t;

// One sequence, state by state.
template <class S>
struct Walk {
    const ScoresProblem<S>& problem;
    int64_t b, states, length;
    bool dense;

    Walk(const ScoresProblem<S>& of, int64_t sequence)
        : problem(of), b(sequence), states(of.states), length(of.lengths[sequence]), dense(is_dense(of)) {}

    int64_t step(int64_t n) const { return visited(problem, b, n); }

    // Where in the transitions the edges into state i at the n-th step are.
    int64_t place(int64_t n, int64_t i) const {
        return b * problem.transition_batch + (step(n) - !dense) * problem.transition_step + i * states;
    }
    // Their scores; the first step has one edge into a state.
    const S* into(int64_t n, int64_t i) const {
        if (!dense && n == 0) return problem.scores.start + b * problem.start_batch + i;
        return problem.scores.transitions + place(n, i);
    }
    double of_state(int64_t n, int64_t i) const {
        return dense ? 0 : double(problem.scores.emissions[(b * problem.steps + step(n)) * states + i]);
    }
    double of_end(int64_t i) const { return dense ? 0 : double(problem.scores.end[b * problem.end_batch + i]); }

    // After n steps.
    const S* values(int64_t n) const { return problem.tape + (2 * b * (problem.steps + 1) + n) * states; }
    const S* thresholds(int64_t n) const { return values(n + problem.steps + 1); }
};

// The edges into several nodes of a step, those into a node in a column (node.h).
template <class S>
class Visit {
public:
    static constexpr int64_t most = 16;  // nodes at once

private:
    const node::Kernels& omega;
    const bool in_log_space;
    const Walk<S>& walk;
    double threshold[most];
    Pace pace;

    Array<double> run() const { return zeros<double>(walk.states * most); }

public:
    node::Matrix matrix;
    Array<double> x, q, s, y;
    double of_nodes[most];

    Visit(const Walk<S>& along, const node::Kernels& by, bool log_space)
        : omega(by), in_log_space(log_space), walk(along), matrix{walk.states, 0}, x(run()), q(run()), s(run()), y(run()) {}

    // The n-th step's edges into `count` states; after the last step those into the end.
    void enter(int64_t n, const int64_t* states, int64_t count) {
        const S* const v = walk.values(n);
        double value[most];
        pace.spend(walk.states * count);
        const bool is_hard = walk.problem.omega.by_slot;
        matrix.columns = (count + 3) / 4 * 4;
        std::fill_n(x.get(), matrix.size(), -infinity<double>);
        for (int64_t c = 0; c < count; ++c) {
            const S* const into = n < walk.length ? walk.into(n, states[c]) : nullptr;
            for (int64_t p = 0; p < walk.states; ++p) {
                const S own = into ? into[p] : S(walk.of_end(p));
                const double before = in_log_space ? double(v[p]) : double(log2_of(v[p]));
                // The hard max adds as its forward sweep does, so that rounded ties break alike.
                x[p * matrix.columns + c] = is_hard ? double(S(own + v[p])) : omega.unit * double(own) + before;
            }
        }
        omega.solve(matrix, x.get(), value, threshold);
    }

    // body(the first of them) for the states of a step, several at a time; each has a column from there on.
    template <class Body>
    void for_states(int64_t n, Body body) {
        int64_t states[most];
        for (int64_t first = 0; first < walk.states; first += most) {
            const int64_t count = std::min(most, walk.states - first);
            for (int64_t c = 0; c < count; ++c) states[c] = first + c;
            enter(n, states, count);
            body(first);
        }
    }
    void enter_end() {
        const int64_t none = 0;
        enter(walk.length, &none, 1);
    }

    void weigh() const { omega.weigh(matrix, x.get(), threshold, q.get(), s.get()); }
    void log_q() const { omega.log_q(matrix, x.get(), threshold, y.get()); }

    // Along y: of_nodes is the change of the value, and y becomes that of log q.
    void push() {
        double mean[most];
        weigh();
        node::change(matrix, q.get(), s.get(), y.get(), of_nodes, mean);
        omega.log_slope(matrix, x.get(), threshold, q.get());
        node::along(matrix, q.get(), y.get(), mean, nullptr, s.get());
        std::swap(y, s);
    }

    // The transpose: from what log q has in y to what the scores have, and with it their part of the mass of_nodes.
    void pull() const {
        weigh();
        omega.log_slope(matrix, x.get(), threshold, x.get());
        node::log_q_vjp(matrix, x.get(), s.get(), y.get());
        node::share(matrix, q.get(), of_nodes, true, y.get());
    }

    // y, of the edges of a step from state `first` on, is read from or written to what is like the potentials.
    void read(const S* numbers, int64_t n, int64_t first) {
        each(n, first, [&](int64_t at, double& own) { own = double(numbers[at]); });
    }
    void write(S* numbers, int64_t n, int64_t first) {
        each(n, first, [&](int64_t at, double& own) { numbers[at] = S(own); });
    }

private:
    template <class Body>
    void each(int64_t n, int64_t first, Body body) {
        for (int64_t c = 0; c < matrix.columns && first + c < walk.states; ++c) {
            for (int64_t p = 0; p < walk.states; ++p) body(walk.place(n, first + c) + p, y[p * matrix.columns + c]);
        }
    }
};

// --- drawing

// Sequences (draws, steps), step by step: those in one state are drawn from the same q.
template <class S>
void draw(const Walk<S>& walk, Visit<S>& visit, int64_t draws, const double* uniforms, int64_t* sequences) {
    const int64_t steps = walk.problem.steps;
    const auto at = zeros<int64_t>(draws), states = zeros<int64_t>(walk.states), column = zeros<int64_t>(walk.states);
    std::fill_n(sequences, draws * steps, int64_t(-1));
    for (int64_t n = walk.length; n > 0; --n) {
        const int64_t step = walk.step(n - 1);
        int64_t count = 0;
        std::fill_n(column.get(), walk.states, int64_t(-1));
        for (int64_t d = 0; d < draws; ++d) {
            if (at[d] < 0 || column[at[d]] >= 0) continue;
            column[at[d]] = count;
            states[count++] = at[d];
        }
        for (int64_t first = 0; first < count; first += visit.most) {
            visit.enter(n, &states[first], std::min(visit.most, count - first));
            visit.weigh();
            for (int64_t d = 0; d < draws; ++d) {
                const int64_t own = at[d] < 0 ? -1 : column[at[d]] - first;
                if (own < 0 || own >= visit.most) continue;
                sequences[d * steps + step] = node::draw(&visit.q[own], visit.matrix, uniforms[d * steps + step]);
            }
        }
        for (int64_t d = 0; d < draws; ++d) at[d] = sequences[d * steps + step];
    }
}

// --- log q of a dense chain. What belongs to the edge from a state to the end counts with the edges into that state at
// the last step, and the first nodes have an edge from state 0 alone.

// Adds what visit.y has for the edges into the end.
template <class S>
void add_end(const Walk<S>& walk, const Visit<S>& visit, S* out) {
    for (int64_t i = 0; i < walk.states; ++i) {
        S* const row = out + walk.place(walk.length - 1, i);
        for (int64_t p = 0; p < walk.states; ++p) row[p] += S(visit.y[i * visit.matrix.columns]);
    }
}

template <class S>
void log_transitions_of(const Walk<S>& walk, Visit<S>& visit, S* out) {
    for (int64_t i = 0; i < walk.states; ++i) {
        S* const row = out + walk.place(0, i);
        std::fill_n(row, walk.states, -infinity<S>);
        if (walk.into(0, i)[0] > -infinity<S>) row[0] = 0;
    }
    for (int64_t n = 1; n < walk.length; ++n) {
        visit.for_states(n, [&](int64_t first) {
            visit.log_q();
            visit.write(out, n, first);
        });
    }
    visit.enter_end();
    visit.log_q();
    add_end(walk, visit, out);
}

template <class S>
void log_transitions_jvp_of(const Walk<S>& walk, Visit<S>& visit, const S* z, S* out) {
    const int64_t states = walk.states;
    auto before = zeros<double>(states), after = zeros<double>(states);  // the changes of values
    for (int64_t i = 0; i < states; ++i) {
        before[i] = walk.into(0, i)[0] > -infinity<S> ? double(z[walk.place(0, i)]) : 0;
        std::fill_n(out + walk.place(0, i), states, S(0));
    }
    const auto add_before = [&] {
        for (int64_t k = 0; k < visit.matrix.size(); ++k) visit.y[k] += before[k / visit.matrix.columns];
    };
    for (int64_t n = 1; n < walk.length; ++n) {
        visit.for_states(n, [&](int64_t first) {
            visit.read(z, n, first);
            add_before();
            visit.push();
            visit.write(out, n, first);
            std::copy_n(visit.of_nodes, std::min(visit.most, states - first), &after[first]);
        });
        std::swap(before, after);
    }
    visit.enter_end();
    std::fill_n(visit.y.get(), visit.matrix.size(), 0.0);
    add_before();
    visit.push();
    add_end(walk, visit, out);
}

template <class S>
void log_transitions_vjp_of(const Walk<S>& walk, Visit<S>& visit, const S* cotangent, S* out) {
    const int64_t states = walk.states;
    auto mass = zeros<double>(states), before = zeros<double>(states);
    visit.enter_end();
    std::fill_n(visit.y.get(), visit.matrix.size(), 0.0);
    std::fill_n(visit.of_nodes, visit.most, 0.0);
    for (int64_t i = 0; i < states; ++i) {
        const S* const row = cotangent + walk.place(walk.length - 1, i);
        double& sum = visit.y[i * visit.matrix.columns];
        for (int64_t p = 0; p < (walk.length == 1 ? 1 : states); ++p) sum += double(row[p]);
    }
    visit.pull();
    for (int64_t i = 0; i < states; ++i) mass[i] = visit.y[i * visit.matrix.columns];
    for (int64_t n = walk.length - 1; n > 0; --n) {
        std::fill_n(before.get(), states, 0.0);
        visit.for_states(n, [&](int64_t first) {
            const int64_t columns = visit.matrix.columns, count = std::min(visit.most, states - first);
            visit.read(cotangent, n, first);
            std::copy_n(&mass[first], count, visit.of_nodes);
            visit.pull();
            visit.write(out, n, first);
            for (int64_t p = 0; p < states; ++p) {
                for (int64_t c = 0; c < count; ++c) before[p] += visit.y[p * columns + c];
            }
        });
        std::swap(mass, before);
    }
    for (int64_t i = 0; i < states; ++i) {
        std::fill_n(out + walk.place(0, i), states, S(0));
        out[walk.place(0, i)] = S(mass[i]);
    }
}

// --- the k best

// The k best sequences of one member of the batch.
template <class S>
class Best {
    const Walk<S> walk;
    int64_t k, row;
    // The k best ways into each state: scores at this step and at the one before, and where each came from, as
    // state · k + rank.
    Array<double> now, before;
    Array<int64_t> origin;
    bool sound = true;

    void step(int64_t n) {
        std::swap(now, before);
        std::fill_n(now.get(), row, -infinity<double>);
        for (int64_t i = 0; i < walk.states; ++i) {
            const S* const weights = walk.into(n, i);
            const double own = walk.of_state(n, i);
            sound &= own < infinity<double> && walk.of_end(i) < infinity<double>;
            double* const best = &now[i * k];
            for (int64_t p = 0; p < (n == 0 ? 1 : walk.states); ++p) {
                sound &= weights[p] < infinity<S>;
                for (int64_t rank = 0; rank < k; ++rank) {
                    const double score = double(weights[p]) + before[p * k + rank] + own;
                    if (!node::insert(best, &origin[n * row + i * k], k, score, p * k + rank)) break;
                }
            }
        }
    }

public:
    Best(const ScoresProblem<S>& problem, int64_t b, int64_t count)
        : walk(problem, b),
          k(count),
          row(problem.states * count),
          now(filled<double>(row, -infinity<double>)),
          before(scratch<double>(row)),
          origin(zeros<int64_t>((walk.length + 1) * row)) {
        now[0] = 0;
    }

    // Whether all scores were below +∞ and not NaN.
    bool run(S* scores, int64_t* sequences) {
        Pace pace;
        for (int64_t n = 0; n < walk.length; ++n) {
            pace.spend(walk.states * row);
            step(n);
        }
        const auto end = filled<double>(k, -infinity<double>);
        const auto end_origin = zeros<int64_t>(k);
        for (int64_t n = 0; n < row; ++n) {
            const double score = walk.length ? now[n] + walk.of_end(n / k) : now[n];
            node::insert(end.get(), end_origin.get(), k, score, n);
        }
        for (int64_t rank = 0; rank < k; ++rank) {
            int64_t* const y = sequences + rank * walk.problem.steps;
            scores[rank] = S(end[rank]);
            std::fill_n(y, walk.problem.steps, int64_t(-1));
            if (end[rank] == -infinity<double>) continue;
            int64_t place = end_origin[rank];
            for (int64_t n = walk.length - 1; n >= 0; --n) {
                y[walk.step(n)] = place / k;
                place = origin[n * row + place];
            }
        }
        return sound;
    }
};

// The best sequence of one member of the batch, from the tape of the hard max.
template <class S>
void follow_best(const Walk<S>& walk, S score, int64_t* y) {
    std::fill_n(y, walk.problem.steps, int64_t(-1));
    if (walk.length == 0 || score == -infinity<S>) return;
    int64_t state = -1;
    S top = -infinity<S>;
    for (int64_t p = 0; p < walk.states; ++p) {
        const S end = walk.values(walk.length)[p] + S(walk.of_end(p));
        if (end > top) top = end, state = p;
    }
    for (int64_t n = walk.length - 1; n >= 0; --n) {
        y[walk.step(n)] = state;
        state = int64_t(walk.thresholds(n + 1)[state]);
    }
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
