// What goes along a chain node by node, in double: drawing sequences, the k best, log q and its derivatives.
#pragma once

#include "../base/memory.h"
#include "../base/threads.h"
#include "../node.h"
#include "../omega/list.h"
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

// The edges into one node of a sequence after another: q, s and a direction y, in whole vectors.
template <class S, class Omega>
class Visit {
    using V = Vec<double>;
    static constexpr int W = lanes_of<double>;

    Omega omega;
    bool in_log_space;
    int64_t cells;
    Array<double> x, q, s, slope;
    V base, tau;
    double total;  // Σ q, with which it is to be divided

    V relative(int64_t k) const {
        if constexpr (Omega::by_slot) {
            return V{0, 1, 2, 3} + double(k) == tau ? V{} : V{} - infinity<double>;
        } else {
            return load<double>(&x[k]) - base;
        }
    }
    void find_slopes() {
        for (int64_t k = 0; k < cells; k += W) store<double>(&slope[k], omega.log_slope(relative(k), tau));
    }

public:
    const Walk<S> walk;
    Array<double> y;

    Visit(const ScoresProblem<S>& problem, int64_t b, const Omega& by, bool log_space)
        : omega(by),
          in_log_space(log_space),
          cells((problem.states + W - 1) / W * W),
          x(filled<double>(cells, -infinity<double>)),
          q(run()),
          s(run()),
          slope(run()),
          walk(problem, b),
          y(run()) {}

    // Room for a number an edge.
    Array<double> run() const { return zeros<double>(cells); }

    // The n-th step's edges into state i; after the last step those into the end.
    void enter(int64_t n, int64_t i) {
        const S *const v = walk.values(n), *const into = n < walk.length ? walk.into(n, i) : nullptr;
        double top = -infinity<double>, slot = -1;
        for (int64_t p = 0; p < walk.states; ++p) {
            const double value = in_log_space ? double(v[p]) : double(log2_of(v[p]));
            x[p] = Omega::unit * (into ? double(into[p]) : walk.of_end(p)) + value;
            if (x[p] > top) top = x[p], slot = double(p);
        }
        base = broadcast(top > -infinity<double> ? top : 0.0);
        if constexpr (Omega::by_slot) {
            tau = broadcast(slot);
        } else if constexpr (Omega::is_sum) {
            tau = V{};  // the sum of what is weighed so tells it
        } else {
            V unused;
            omega.solve(omega::Row<double>{x.get(), cells}, base, tau, unused);
            if (top == -infinity<double>) tau = V{};
        }
        V sum{};
        for (int64_t k = 0; k < cells; k += W) {
            V edge_q, edge_s;
            omega.weigh(relative(k), tau, edge_q, edge_s);
            store<double>(&q[k], edge_q);
            store<double>(&s[k], edge_s);
            sum += edge_q;
        }
        total = sum_lanes<double>(sum)[0];
        if (Omega::is_sum && total > 0) tau = broadcast(log2_of(total));
    }

    int64_t draw(double uniform) const { return node::draw(q.get(), walk.states, total, uniform); }

    void log_q(double* to) const {
        for (int64_t k = 0; k < cells; k += W) store<double>(to + k, omega.log_q(relative(k), tau));
    }

    // Along y: the change of the value, and y becomes that of log q, slope∘(y − ⟨s, y⟩/Σs).
    double push() {
        find_slopes();
        double sum_qy = 0, sum_sy = 0, sum_s = 0;
        for (int64_t p = 0; p < walk.states; ++p) {
            if (s[p] > 0) sum_qy += q[p] * y[p], sum_sy += s[p] * y[p], sum_s += s[p];
        }
        const double mean = sum_s > 0 ? sum_sy / sum_s : 0;
        for (int64_t p = 0; p < walk.states; ++p) y[p] = slope[p] > 0 ? slope[p] * (y[p] - mean) : 0;
        return total > 0 ? sum_qy / total : 0;
    }

    // The transpose: from what log q has in y to what the scores have, d = slope∘y less s Σd/Σs, and with it their part
    // of the mass of the node.
    void pull(double mass) {
        find_slopes();
        double sum_d = 0, sum_s = 0;
        for (int64_t p = 0; p < walk.states; ++p) {
            y[p] = slope[p] > 0 ? slope[p] * y[p] : 0;
            sum_d += y[p];
            sum_s += s[p];
        }
        const double mean = sum_s > 0 ? sum_d / sum_s : 0, share = total > 0 ? mass / total : 0;
        for (int64_t p = 0; p < walk.states; ++p) y[p] += q[p] * share - s[p] * mean;
    }
};

// --- drawing

template <class S, class Omega>
void sample_one(Visit<S, Omega>& visit, const double* uniform, int64_t* y) {
    const Walk<S>& walk = visit.walk;
    std::fill_n(y, walk.problem.steps, int64_t(-1));
    for (int64_t n = walk.length, state = 0; n > 0; --n) {
        visit.enter(n, state);
        state = visit.draw(uniform[walk.step(n - 1)]);
        if (state < 0) return;
        y[walk.step(n - 1)] = state;
    }
}

// --- log q of a dense chain. What belongs to the edge from a state to the end counts with the edges into that state at
// the last step, and the first nodes have an edge from state 0 alone.

template <class S, class Omega>
void log_transitions_of(Visit<S, Omega>& visit, S* out) {
    const Walk<S>& walk = visit.walk;
    const int64_t states = walk.states;
    const auto last = visit.run(), row = visit.run();
    visit.enter(walk.length, 0);
    visit.log_q(last.get());
    for (int64_t n = 0; n < walk.length; ++n) {
        for (int64_t i = 0; i < states; ++i) {
            if (n == 0) {
                std::fill_n(row.get(), states, -infinity<double>);
                if (walk.into(0, i)[0] > -infinity<S>) row[0] = 0;
            } else {
                visit.enter(n, i);
                visit.log_q(row.get());
            }
            const double more = n + 1 == walk.length ? last[i] : 0;
            for (int64_t p = 0; p < states; ++p) out[walk.place(n, i) + p] = S(row[p] + more);
        }
    }
}

template <class S, class Omega>
void log_transitions_jvp_of(Visit<S, Omega>& visit, const S* z, S* out) {
    const Walk<S>& walk = visit.walk;
    const int64_t states = walk.states;
    const auto& y = visit.y;
    auto before = visit.run(), after = visit.run();  // the changes of values
    for (int64_t n = 0; n < walk.length; ++n) {
        for (int64_t i = 0; i < states; ++i) {
            const int64_t row = walk.place(n, i);
            if (n == 0) {
                after[i] = walk.into(0, i)[0] > -infinity<S> ? double(z[row]) : 0;
                std::fill_n(out + row, states, S(0));
                continue;
            }
            visit.enter(n, i);
            for (int64_t p = 0; p < states; ++p) y[p] = double(z[row + p]) + before[p];
            after[i] = visit.push();
            for (int64_t p = 0; p < states; ++p) out[row + p] = S(y[p]);
        }
        std::swap(before, after);
    }
    visit.enter(walk.length, 0);
    std::copy_n(before.get(), states, y.get());
    visit.push();
    for (int64_t i = 0; i < states; ++i) {
        S* const row = out + walk.place(walk.length - 1, i);
        for (int64_t p = 0; p < states; ++p) row[p] += S(y[i]);
    }
}

template <class S, class Omega>
void log_transitions_vjp_of(Visit<S, Omega>& visit, const S* cotangent, S* out) {
    const Walk<S>& walk = visit.walk;
    const int64_t states = walk.states;
    const auto& y = visit.y;
    auto mass = visit.run(), before = visit.run();
    visit.enter(walk.length, 0);
    for (int64_t i = 0; i < states; ++i) {
        const S* const row = cotangent + walk.place(walk.length - 1, i);
        y[i] = 0;
        for (int64_t p = 0; p < (walk.length == 1 ? 1 : states); ++p) y[i] += double(row[p]);
    }
    visit.pull(0);
    std::copy_n(y.get(), states, mass.get());
    for (int64_t n = walk.length - 1; n >= 0; --n) {
        std::fill_n(before.get(), states, 0.0);
        for (int64_t i = 0; i < states; ++i) {
            const int64_t row = walk.place(n, i);
            if (n == 0) {
                std::fill_n(out + row, states, S(0));
                out[row] = S(mass[i]);
                continue;
            }
            visit.enter(n, i);
            for (int64_t p = 0; p < states; ++p) y[p] = double(cotangent[row + p]);
            visit.pull(mass[i]);
            for (int64_t p = 0; p < states; ++p) before[p] += y[p], out[row + p] = S(y[p]);
        }
        std::swap(mass, before);
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
        for (int64_t n = 0; n < walk.length; ++n) step(n);
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
