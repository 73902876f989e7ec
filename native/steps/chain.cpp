// The kernels of a chain: which sweeps, of which sequences.
#include <atomic>

#include "chain.h"
#include "exp.h"
#include "omegas.h"
#include "walks.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

// The sequences for which `is_chosen(b)`.
template <class S, class Choice>
std::vector<int64_t> choose(const ScoresProblem<S>& problem, Choice is_chosen) {
    std::vector<int64_t> chosen;
    for (int64_t b = 0; b < problem.batch; ++b) {
        if (is_chosen(b)) chosen.push_back(b);
    }
    return chosen;
}

// Whether the sums of exponentials can be products of matrices.
template <class S>
bool in_exp_space(const ScoresProblem<S>& problem) {
    return problem.omega.alpha == 1 && !is_dense(problem) && problem.transition_step == 0;
}

template <class S>
bool forward_of(const ScoresProblem<S>& problem, const std::vector<int64_t>& chosen, S* value, S* tape) {
    return omega::with<S>(problem.omega, [&](auto omega) {
        return ChainSweeps<S, decltype(omega)>::forward(problem, chosen, value, tape);
    });
}

template <class S>
bool forward(const ScoresProblem<S>& problem, S* value, S* tape) {
    std::vector<std::uint8_t> is_left(std::size_t(problem.batch), !in_exp_space(problem));
    const bool good = !in_exp_space(problem) || product_kernels<S>().forward(problem, value, tape, is_left.data());
    const auto left = choose(problem, [&](int64_t b) { return is_left[std::size_t(b)] != 0; });
    return (left.empty() || forward_of(problem, left, value, tape)) && good;
}

// The sequences that were solved in log space.
template <class S>
bool in_log_space(const ScoresProblem<S>& problem, int64_t b) {
    return !in_exp_space(problem) || problem.tape[(2 * b + 1) * (problem.steps + 1) * problem.states] != 1;
}
template <class S>
std::vector<int64_t> all_in_log_space(const ScoresProblem<S>& problem) {
    return choose(problem, [&](int64_t b) { return in_log_space(problem, b); });
}

// What is added up, not written.
template <class S>
void zero_sums(const ScoresProblem<S>& problem, const Scores<S>& out) {
    if (is_dense(problem)) return;
    const int64_t states = problem.states, batch = problem.batch;
    const auto zero = [](S* data, int64_t size) { std::fill_n(data, size, S(0)); };
    if (!problem.transition_step) zero(out.transitions, (problem.transition_batch ? batch : 1) * states * states);
    zero(out.start, (problem.start_batch ? batch : 1) * states);
    zero(out.end, (problem.end_batch ? batch : 1) * states);
}

template <class S>
void backward(const ScoresProblem<S>& problem, const S* seed, const Scores<S>& gradient) {
    zero_sums(problem, gradient);
    if (in_exp_space(problem)) product_kernels<S>().backward(problem, seed, gradient);
    const auto left = all_in_log_space(problem);
    if (left.empty()) return;
    omega::with<S>(problem.omega, [&](auto omega) {
        ChainSweeps<S, decltype(omega)>::backward(problem, left, seed, gradient);
    });
}

template <class S>
void hessian(const ScoresProblem<S>& problem, const S* seed, const Scores<const S>& z, const Scores<S>& product) {
    zero_sums(problem, product);
    if (in_exp_space(problem)) product_kernels<S>().hessian(problem, seed, z, product);
    const auto left = all_in_log_space(problem);
    if (left.empty()) return;
    omega::with<S>(problem.omega, [&](auto omega) {
        ChainSweeps<S, decltype(omega)>::hessian(problem, left, seed, z, product);
    });
}

template <class S>
void log_transitions(const ScoresProblem<S>& problem, S* log_q) {
    omega::with<S>(problem.omega, [&](auto omega) { ChainLogs<S, decltype(omega)>::log_transitions(problem, log_q); });
}

template <class S>
void log_transitions_jvp(const ScoresProblem<S>& problem, const S* z, S* product) {
    omega::with<S>(problem.omega, [&](auto omega) {
        ChainLogs<S, decltype(omega)>::log_transitions_jvp(problem, z, product);
    });
}

template <class S>
void log_transitions_vjp(const ScoresProblem<S>& problem, const S* cotangent, S* product) {
    omega::with<S>(problem.omega, [&](auto omega) {
        ChainLogs<S, decltype(omega)>::log_transitions_vjp(problem, cotangent, product);
    });
}

template <class S>
void sample(const ScoresProblem<S>& problem, int64_t draws, const double* uniforms, int64_t* sequences) {
    omega::with<S>(problem.omega, [&](auto omega) {
        parallel_for(problem.batch, problem.threads, [&](int64_t b, int) {
            Sampler<S, decltype(omega)> sampler(problem, b, omega, in_log_space(problem, b));
            for (int64_t n = b * draws; n < (b + 1) * draws; ++n) {
                sampler.run(uniforms + n * problem.steps, sequences + n * problem.steps);
            }
        });
    });
}

// The best sequences, by the hard max.
template <class S>
bool best(ScoresProblem<S> problem, S* scores, int64_t* sequences) {
    problem.omega = {infinity<double>, 0};
    const auto tape = scratch<S>(problem.batch * 2 * (problem.steps + 1) * problem.states);
    problem.tape = tape.get();
    if (!forward_of(problem, choose(problem, [](int64_t) { return true; }), scores, tape.get())) return false;
    for (int64_t b = 0; b < problem.batch; ++b) follow_best(problem, b, scores[b], sequences + b * problem.steps);
    return true;
}

template <class S>
bool topk(const ScoresProblem<S>& problem, int64_t k, S* scores, int64_t* sequences) {
    if (k == 1) return best(problem, scores, sequences);
    std::atomic<bool> sound{true};
    parallel_for(problem.batch, problem.threads, [&](int64_t b, int) {
        if (!Best<S>(problem, b, k).run(scores + b * k, sequences + b * k * problem.steps)) sound = false;
    });
    return sound;
}

}  // namespace

template <class S>
ChainKernels<S> chain_kernels() {
    return {forward<S>, backward<S>, hessian<S>, log_transitions<S>, log_transitions_jvp<S>, log_transitions_vjp<S>,
            sample<S>,  topk<S>};
}

template ChainKernels<float> chain_kernels<float>();
template ChainKernels<double> chain_kernels<double>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
