// The kernels of a chain: which sweeps, of which sequences.
#include <atomic>

#include "../hyper/trellis.h"
#include "../omega/list.h"
#include "chain.h"
#include "exp.h"
#include "omegas.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

// The number of sequences, of `count`, that should share the lanes of vectors: none, all, or those that fill them.
template <class S>
int64_t across(const ScoresProblem<S>& problem, int64_t count) {
    constexpr int64_t width = lanes_of<S>;
    const auto share = [](int64_t whole, int64_t parts) { return (whole + parts - 1) / parts; };
    const int64_t threads = std::max(problem.threads, 1), along = share(problem.states, width) * width;
    const double reduction = is_dense(problem) ? 1.25 : 1.6;  // along, vectors are reduced to numbers: measured
    const auto cost = [&](int64_t number) {
        return double(share(share(number, width), threads) * width * problem.states) +
               reduction * double(share(count - number, threads) * along);
    };
    const int64_t full = count / width * width, best = cost(full) < cost(0) ? full : 0;
    return cost(count) <= cost(best) ? count : best;
}

// For the sequences for which is_chosen(b). Lengths must be exact in single precision, and long rows are not transposed.
template <class S, class Choice>
Plan plan(const ScoresProblem<S>& problem, Choice is_chosen) {
    std::vector<int64_t> chosen;
    for (int64_t b = 0; b < problem.batch; ++b) {
        if (is_chosen(b)) chosen.push_back(b);
    }
    std::stable_sort(chosen.begin(), chosen.end(),
                     [&](int64_t a, int64_t b) { return problem.lengths[a] > problem.lengths[b]; });
    return {chosen, problem.states < 3 * lanes_of<S> && problem.steps < 1 << 24 ? across(problem, chosen.size()) : 0};
}

// Whether the sums of exponentials can be products of matrices.
template <class S>
bool in_exp_space(const ScoresProblem<S>& problem) {
    return problem.omega.is_sum && !is_dense(problem) && problem.transition_step == 0;
}

template <class S>
ChainSweeps<S> sweeps_of(const ScoresProblem<S>& problem) {
    return omega::with<S>(problem.omega, [](auto omega) { return chain_sweeps<S, decltype(omega)>(); });
}

template <class S>
bool forward(const ScoresProblem<S>& problem, S* value, S* tape) {
    std::vector<std::uint8_t> is_left(std::size_t(problem.batch), !in_exp_space(problem));
    const bool good = !in_exp_space(problem) || product_kernels<S>().forward(problem, value, tape, is_left.data());
    const Plan left = plan(problem, [&](int64_t b) { return is_left[std::size_t(b)] != 0; });
    return (left.sequences.empty() || sweeps_of(problem).forward(problem, left, value, tape)) && good;
}

// Whether a sequence was solved in log space.
template <class S>
bool in_log_space(const ScoresProblem<S>& problem, int64_t b) {
    return !in_exp_space(problem) || tape_mark(problem, b) == 0;
}

// Zeros in what is added up, not written, or in all.
template <class S>
void clear(const ScoresProblem<S>& p, const Scores<S>& out, bool all) {
    const auto zero = [](S* data, int64_t size) { std::fill_n(data, std::max<int64_t>(size, 0), S(0)); };
    const int64_t square = p.states * p.states, transitions = (p.transition_batch ? p.batch : 1) * square;
    if (is_dense(p)) return all ? zero(out.transitions, transitions * p.steps) : void();
    if (all) zero(out.emissions, p.batch * p.steps * p.states);
    if (all || !p.transition_step) zero(out.transitions, transitions * (p.transition_step ? p.steps - 1 : 1));
    zero(out.start, (p.start_batch ? p.batch : 1) * p.states);
    zero(out.end, (p.end_batch ? p.batch : 1) * p.states);
}

// Runs the sweep for the sequences that were solved in log space, and adds up what the threads have.
template <class S>
void sweep_back(const ScoresProblem<S>& problem, typename ChainSweeps<S>::Back sweep, const S* seed,
                const Scores<const S>& z, const Scores<S>& out) {
    const Plan left = plan(problem, [&](int64_t b) { return in_log_space(problem, b); });
    if (left.sequences.empty()) return;
    const std::size_t states = is_dense(problem) ? 0 : std::size_t(problem.states);
    const std::vector<double> none(states), square(states * states);
    std::vector<Totals> totals(std::size_t(std::max(problem.threads, 1)), {square, none, none});
    sweep(problem, left, seed, z, out, totals.data());
    const auto deliver = [](const std::vector<double>& from, bool is_shared, S* to) {
        for (std::size_t k = 0; k < from.size() && is_shared; ++k) to[k] += S(from[k]);
    };
    for (const Totals& own : totals) {
        deliver(own.transitions, problem.transition_batch == 0 && problem.transition_step == 0, out.transitions);
        deliver(own.start, problem.start_batch == 0, out.start);
        deliver(own.end, problem.end_batch == 0, out.end);
    }
}

template <class S>
void backward(const ScoresProblem<S>& problem, const S* seed, const Scores<S>& gradient) {
    clear(problem, gradient, false);
    if (in_exp_space(problem)) product_kernels<S>().backward(problem, seed, gradient);
    sweep_back(problem, sweeps_of(problem).backward, seed, {}, gradient);
}

template <class S>
void hessian(const ScoresProblem<S>& problem, const S* seed, const Scores<const S>& z, const Scores<S>& product) {
    const auto sweep = sweeps_of(problem).hessian;
    clear(problem, product, !sweep);
    if (in_exp_space(problem)) product_kernels<S>().hessian(problem, seed, z, product);
    if (sweep) sweep_back(problem, sweep, seed, z, product);
}

// A copy of the tape for sampling, where doubles (mark 2) become values in log space.
template <class S>
Array<S> without_doubles(const ScoresProblem<S>& problem) {
    const int64_t numbers = (problem.steps + 1) * problem.states;
    auto tape = scratch<S>(problem.batch * 2 * numbers);
    std::copy_n(problem.tape, problem.batch * 2 * numbers, tape.get());
    for (int64_t b = 0; b < problem.batch; ++b) {
        if (tape_mark(problem, b) != 2) continue;
        S* const values = &tape[tape_place(problem, b)];
        const S* const from = problem.tape + tape_place(problem, b);
        for (int64_t k = 0; k < numbers; ++k) values[k] = S(log2_of(load_vector<double>(from + 2 * k)));
        values[0] = 0;
    }
    return tape;
}

template <class S>
void draw(ScoresProblem<S> problem, int64_t draws, const double* uniforms, int64_t* sequences) {
    Array<S> tape;
    for (int64_t b = 0; b < problem.batch && in_exp_space(problem) && !tape; ++b) {
        if (tape_mark(problem, b) == 2) tape = without_doubles(problem);
    }
    if (tape) problem.tape = tape.get();
    sample<S>(problem, in_log_space<S>, draws, uniforms, sequences);
}

// The best sequence of one member of the batch, from the tape of the hard max.
template <class S>
void follow_best(const Trellis<S>& trellis, S score, int64_t* sequence) {
    if (trellis.length == 0 || score == -infinity<S>) return;
    int64_t state = -1;
    S top = -infinity<S>;
    for (int64_t i = 0; i < trellis.states; ++i) {
        const S sum = trellis.values(trellis.length)[i] + trellis.end()[i];
        if (sum > top) top = sum, state = i;
    }
    for (int64_t n = trellis.length - 1; n >= 0; --n) {
        sequence[trellis.step(n)] = state;
        state = int64_t(trellis.thresholds(n + 1)[state]);
    }
}

// The best sequences, by the hard max.
template <class S>
bool best(ScoresProblem<S> problem, S* scores, int64_t* sequences) {
    const auto tape = scratch<S>(problem.batch * 2 * (problem.steps + 1) * problem.states);
    problem.tape = tape.get();
    const Plan all = plan(problem, [](int64_t) { return true; });
    if (!chain_sweeps<S, omega::Hard<S>>().forward(problem, all, scores, tape.get())) return false;
    std::fill_n(sequences, problem.batch * problem.steps, int64_t(-1));
    for (int64_t b : all.sequences) follow_best(Trellis<S>(problem, b), scores[b], sequences + b * problem.steps);
    return true;
}

template <class S>
bool best_or_topk(const ScoresProblem<S>& problem, int64_t k, S* scores, int64_t* sequences) {
    return k == 1 ? best(problem, scores, sequences) : topk<S>(problem, k, scores, sequences);
}

}  // namespace

template <class S>
ChainKernels<S> chain_kernels() {
    return {forward<S>, backward<S>, hessian<S>, log_transitions<S>, log_transitions_jvp<S>, log_transitions_vjp<S>,
            [](const ScoresProblem<S>& problem, int64_t draws, const double* uniforms, int64_t* sequences) {
                draw<S>(problem, draws, uniforms, sequences);
            },
            best_or_topk<S>, max_marginals<S>, node_values<S>};
}

template ChainKernels<float> chain_kernels<float>();
template ChainKernels<double> chain_kernels<double>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
