// What walks along single paths of a chain: drawing sequences, and the k best.
#pragma once

#include "../base/threads.h"
#include "../node.h"
#include "unit.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// One sequence at a time, state by state.
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

// Draws the sequences of one member of the batch from the tape.
template <class S, class Omega>
class Sampler {
    using Real = typename Omega::Real;
    const Walk<S> walk;
    Omega omega;
    const S *values, *thresholds;
    bool in_log_space;
    Array<Real> q;

    // Draws one of the edges from the states after n steps, which have `weight`, into a node with a threshold, or NaN to find
    // it.
    template <class Weight>
    int64_t choose(int64_t n, Weight weight, Real tau, double uniform) {
        Real top = -infinity<Real>, slot = -1;
        for (int64_t p = 0; p < walk.states; ++p) {
            const Real v = Real(values[n * walk.states + p]);
            q[p] = Omega::unit * Real(weight(p)) + (in_log_space ? v : log2_of(v));
            if (q[p] > top) top = q[p], slot = Real(p);
        }
        const bool is_new = tau != tau;
        const Real from = is_new && top > -infinity<Real> ? top : Real(0);
        if constexpr (Omega::by_slot) {
            if (is_new) tau = slot;
        } else if (is_new) {
            Real unused;
            omega.solve(omega::Columns<Real, Real>{q.get(), 1, walk.states}, from, tau, unused);
        }
        double sum = 0;
        for (int64_t p = 0; p < walk.states; ++p) {
            Real r = q[p] - from, s;
            if constexpr (Omega::by_slot) r = Real(p) == tau ? Real(0) : -infinity<Real>;
            omega.weigh(r, tau, q[p], s);
            sum += double(q[p]);
        }
        return node::draw(q.get(), walk.states, sum, uniform);
    }

public:
    Sampler(const ScoresProblem<S>& problem, int64_t b, const Omega& by, bool log_space)
        : walk(problem, b),
          omega(by),
          values(problem.tape + 2 * b * (problem.steps + 1) * problem.states),
          thresholds(values + (problem.steps + 1) * problem.states),
          in_log_space(log_space),
          q(scratch<Real>(problem.states)) {}

    void run(const double* uniform, int64_t* y) {
        constexpr Real unknown = std::numeric_limits<Real>::quiet_NaN();
        std::fill(y, y + walk.problem.steps, int64_t(-1));
        if (walk.length == 0) return;
        const double last = uniform[walk.step(walk.length - 1)];
        int64_t state = choose(walk.length, [&](int64_t p) { return walk.of_end(p); }, unknown, last);
        for (int64_t n = walk.length - 1; state >= 0; --n) {
            y[walk.step(n)] = state;
            if (n == 0) break;
            const S* const scores = walk.into(n, state);
            const Real tau = in_log_space ? Real(thresholds[(n + 1) * walk.states + state]) : unknown;
            state = choose(n, [&](int64_t p) { return scores[p]; }, tau, uniform[walk.step(n - 1)]);
        }
    }
};

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
void follow_best(const ScoresProblem<S>& problem, int64_t b, S score, int64_t* y) {
    const Walk<S> walk(problem, b);
    const int64_t states = problem.states, plane = (problem.steps + 1) * states;
    const S* const own = problem.tape + 2 * b * plane;
    std::fill_n(y, problem.steps, int64_t(-1));
    if (walk.length == 0 || score == -infinity<S>) return;
    int64_t state = -1;
    S top = -infinity<S>;
    for (int64_t p = 0; p < states; ++p) {
        const S end = own[walk.length * states + p] + S(walk.of_end(p));
        if (end > top) top = end, state = p;
    }
    for (int64_t n = walk.length - 1; n >= 0; --n) {
        y[walk.step(n)] = state;
        state = int64_t(own[plane + (n + 1) * states + state]);
    }
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
