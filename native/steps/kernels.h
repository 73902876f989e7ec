// The kernels of a chain: sweeps of units of work over the threads.
#pragma once

#include <atomic>

#include "../chain.h"
#include "../products.h"
#include "logs.h"
#include "walks.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// Sequences that are solved here, the longest first, in units for threads.
template <class S>
struct Plan {
    std::vector<int64_t> sequences;
    bool across;
    int64_t size, units;

    // `width` is the number of lanes.
    Plan(const ScoresProblem<S>& problem, int width, std::vector<int64_t> chosen) : sequences(std::move(chosen)) {
        std::stable_sort(sequences.begin(), sequences.end(),
                         [&](int64_t a, int64_t b) { return problem.lengths[a] > problem.lengths[b]; });
        const int64_t count = int64_t(sequences.size()), threads = std::max(problem.threads, 1);
        const auto share = [](int64_t whole, int64_t parts) { return (whole + parts - 1) / parts; };
        const int64_t across_cost = share(share(count, width), threads) * width * problem.states;
        const int64_t along_cost = share(count, threads) * share(problem.states, width) * width;
        // Long rows need not be transposed. Lengths must be exact in single precision.
        across = problem.states < 3 * width && across_cost <= along_cost && problem.steps < 1 << 24;
        size = across ? width : 1;
        units = share(count, size);
    }
};

// The sequences for which `is_chosen(b)`.
template <class S, class Choice>
std::vector<int64_t> choose(const ScoresProblem<S>& problem, Choice is_chosen) {
    std::vector<int64_t> chosen;
    for (int64_t b = 0; b < problem.batch; ++b) {
        if (is_chosen(b)) chosen.push_back(b);
    }
    return chosen;
}

// Runs body(unit, slot) over the threads.
template <class S, class Body>
void for_units(const ScoresProblem<S>& problem, const std::vector<int64_t>& chosen, Body body) {
    omega::with<S>(problem.omega, [&](auto omega) {
        using Omega = decltype(omega);
        const Plan<S> plan(problem, lanes_of<typename Omega::Real>, chosen);
        parallel_for(plan.units, problem.threads, [&](int64_t n, int slot) {
            const int64_t* const first = plan.sequences.data() + n * plan.size;
            const int64_t count = std::min<int64_t>(plan.size, int64_t(plan.sequences.size()) - n * plan.size);
            if (plan.across) {
                Unit<S, Omega, true> unit(problem, first, count);
                body(unit, slot);
            } else {
                Unit<S, Omega, false> unit(problem, first, count);
                body(unit, slot);
            }
        });
    });
}

template <class S>
bool forward_of(const ScoresProblem<S>& problem, S* value, S* tape, const std::vector<int64_t>& chosen) {
    std::atomic<bool> sound{true};
    for_units(problem, chosen, [&](auto& unit, int) {
        Forward<std::decay_t<decltype(unit)>> sweep(unit, tape);
        for (int64_t n = 0; n < unit.lanes.longest; ++n) sweep.step(n);
        if (!sweep.finish(value, tape)) sound = false;
    });
    return sound;
}

// Whether the sums of exponentials can be products of matrices.
template <class S>
bool in_exp_space(const ScoresProblem<S>& problem) {
    return problem.omega.alpha == 1 && !is_dense(problem) && problem.transition_step == 0;
}

template <class S>
bool forward(const ScoresProblem<S>& problem, S* value, S* tape) {
    std::vector<std::uint8_t> is_left(std::size_t(problem.batch), 1);
    const bool good = !in_exp_space(problem) || product_kernels<S>().forward(problem, value, tape, is_left.data());
    return forward_of(problem, value, tape, choose(problem, [&](int64_t b) { return is_left[std::size_t(b)] != 0; })) && good;
}

// Whether sequence b was solved in log space.
template <class S>
bool in_log_space(const ScoresProblem<S>& problem, int64_t b) {
    return !in_exp_space(problem) || problem.tape[(2 * b + 1) * (problem.steps + 1) * problem.states] != 1;
}

template <class S>
void zero_sums(const ScoresProblem<S>& problem, const Scores<S>& out) {
    if (is_dense(problem)) return;
    const int64_t states = problem.states, batch = problem.batch;
    const auto zero = [](S* data, int64_t size) { std::fill_n(data, size, S(0)); };
    if (!problem.transition_step) zero(out.transitions, (problem.transition_batch ? batch : 1) * states * states);
    zero(out.start, (problem.start_batch ? batch : 1) * states);
    zero(out.end, (problem.end_batch ? batch : 1) * states);
}

// Runs body(unit, totals of its thread) for the sequences in log space, and adds the totals up.
template <class S, class Body>
void for_gradients(const ScoresProblem<S>& problem, const Scores<S>& out, Body body) {
    const auto chosen = choose(problem, [&](int64_t b) { return in_log_space(problem, b); });
    if (chosen.empty()) return;
    const std::size_t states = is_dense(problem) ? 0 : std::size_t(problem.states);
    const std::vector<double> none(states);
    std::vector<Totals> totals(std::size_t(std::max(problem.threads, 1)), Totals{std::vector<double>(states * states), none, none});
    for_units(problem, chosen,
              [&](auto& unit, int slot) { body(unit, totals[std::size_t(slot)]); });
    const auto deliver = [](const std::vector<double>& from, bool is_shared, S* to) {
        for (std::size_t k = 0; k < from.size() && is_shared; ++k) to[k] += S(from[k]);
    };
    for (const Totals& own : totals) {
        deliver(own.transitions, problem.transition_batch == 0 && problem.transition_step == 0, out.transitions);
        deliver(own.start, problem.start_batch == 0, out.start);
        deliver(own.end, problem.end_batch == 0, out.end);
    }
}

template <class U, class Rule>
void sweep_back(U& unit, Sink<U>& sink, Rule& rule) {
    Back<U, Rule> sweep(unit, sink, rule);
    for (int64_t n = unit.lanes.longest - 1; n >= 0; --n) sweep.step(n);
    sink.finish();
}

template <class S>
void backward(const ScoresProblem<S>& problem, const S* seed, const Scores<S>& gradient) {
    zero_sums(problem, gradient);
    if (in_exp_space(problem)) product_kernels<S>().backward(problem, seed, gradient);
    for_gradients(problem, gradient, [&](auto& unit, Totals& totals) {
        using U = std::decay_t<decltype(unit)>;
        Sink<U> sink(unit, gradient, totals);
        Visits<U> visits(unit, seed);
        sweep_back(unit, sink, visits);
    });
}

template <class S>
void hessian(const ScoresProblem<S>& problem, const S* seed, const Scores<const S>& z, const Scores<S>& product) {
    zero_sums(problem, product);
    if (in_exp_space(problem)) product_kernels<S>().hessian(problem, seed, z, product);
    for_gradients(problem, product, [&](auto& unit, Totals& totals) {
        using U = std::decay_t<decltype(unit)>;
        Sink<U> sink(unit, product, totals);
        Tangent<U> tangent(unit, z);
        for (int64_t n = 0; n < unit.lanes.longest; ++n) tangent.step(n);
        End<U> end(unit, tangent.tape.last_values().get());
        Flow<U> flow(unit, tangent, end, seed);
        sweep_back(unit, sink, flow);
    });
}

// Runs body(dense sequence, where its results go) over the threads.
template <class S, class Body>
void for_sequences(const ScoresProblem<S>& problem, S* out, Body body) {
    omega::with<S>(problem.omega, [&](auto omega) {
        parallel_for(problem.batch, problem.threads, [&](int64_t b, int) {
            using U = Unit<S, decltype(omega), false>;
            U unit(problem, &b, 1);
            const Scores<S> scores{nullptr, out, nullptr, nullptr};
            Totals unused;
            Sink<U> sink(unit, scores, unused);
            if (unit.lanes.longest) body(unit, sink);
        });
    });
}

template <class S>
void log_transitions(const ScoresProblem<S>& problem, S* log_q) {
    for_sequences(problem, log_q, [](auto& unit, auto& sink) { log_transitions_of(unit, sink); });
}

template <class S>
void log_transitions_jvp(const ScoresProblem<S>& problem, const S* z, S* product) {
    for_sequences(problem, product, [&](auto& unit, auto& sink) { log_transitions_jvp_of(unit, z, sink); });
}

template <class S>
void log_transitions_vjp(const ScoresProblem<S>& problem, const S* cotangent, S* product) {
    for_sequences(problem, product, [&](auto& unit, auto& sink) {
        using U = std::decay_t<decltype(unit)>;
        Pull<U> pull(unit, cotangent);
        sweep_back(unit, sink, pull);
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

template <class S>
bool topk(const ScoresProblem<S>& problem, int64_t k, S* scores, int64_t* sequences) {
    if (k == 1) {
        ScoresProblem<S> hard = problem;
        hard.omega = {infinity<double>, 0};
        const auto tape = scratch<S>(problem.batch * 2 * (problem.steps + 1) * problem.states);
        hard.tape = tape.get();
        if (!forward_of(hard, scores, tape.get(), choose(problem, [](int64_t) { return true; }))) return false;
        for (int64_t b = 0; b < problem.batch; ++b) follow_best(hard, b, scores[b], sequences + b * problem.steps);
        return true;
    }
    std::atomic<bool> sound{true};
    parallel_for(problem.batch, problem.threads, [&](int64_t b, int) {
        if (!Best<S>(problem, b, k).run(scores + b * k, sequences + b * k * problem.steps)) sound = false;
    });
    return sound;
}

template <class S>
ChainKernels<S> chain_kernels() {
    return {forward<S>, backward<S>, hessian<S>, log_transitions<S>, log_transitions_jvp<S>, log_transitions_vjp<S>,
            sample<S>,  topk<S>};
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
