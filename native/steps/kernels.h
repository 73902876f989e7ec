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
        across = problem.states < 2 * width && across_cost <= along_cost && problem.steps < 1 << 24;
        size = across ? width : count >= 2 * threads ? 2 : 1;
        units = share(count, size);
    }
};

// Runs a job, made of a unit and the arguments, from its first to its last step. Two units take turns: one is computed while
// the other waits for the last numbers of its step.
template <class Job, class U, class... Arguments>
void run_jobs(U& unit, U* other, Arguments&... arguments) {
    Job job(unit, arguments...);
    if (other) {
        Job second(*other, arguments...);
        for (int64_t n = 0; n < std::max(job.steps(), second.steps()); ++n) {
            if (n < job.steps()) job.step(n);
            if (n < second.steps()) second.step(n);
        }
        second.finish();
    } else {
        for (int64_t n = 0; n < job.steps(); ++n) job.step(n);
    }
    job.finish();
}

// The sequences for which `is_chosen(b)`.
template <class S, class Choice>
std::vector<int64_t> choose(const ScoresProblem<S>& problem, Choice is_chosen) {
    std::vector<int64_t> chosen;
    for (int64_t b = 0; b < problem.batch; ++b) {
        if (is_chosen(b)) chosen.push_back(b);
    }
    return chosen;
}

// Runs body(unit, other unit or none, slot) over the threads.
template <class S, class Body>
void for_units(const ScoresProblem<S>& problem, const std::vector<int64_t>& chosen, Body body) {
    omega::with<S>(problem.omega, [&](auto omega) {
        using Omega = decltype(omega);
        const Plan<S> plan(problem, lanes_of<typename Omega::Real>, chosen);
        parallel_for(plan.units, problem.threads, [&](int64_t n, int slot) {
            const int64_t* const first = plan.sequences.data() + n * plan.size;
            const int64_t count = std::min<int64_t>(plan.size, int64_t(plan.sequences.size()) - n * plan.size);
            if (plan.across) {
                using U = Unit<S, Omega, true>;
                U unit(problem, first, count);
                body(unit, static_cast<U*>(nullptr), slot);
            } else {
                using U = Unit<S, Omega, false>;
                U unit(problem, first, 1);
                std::optional<U> other;
                if (count > 1) other.emplace(problem, first + 1, 1);
                body(unit, other ? &*other : nullptr, slot);
            }
        });
    });
}

template <class U>
class ForwardJob {
    using S = typename U::Number;
    U& unit;
    Forward<U> sweep;
    S *value, *tape;
    std::atomic<bool>& sound;

public:
    ForwardJob(U& of, S* to_value, S* to_tape, std::atomic<bool>& is_sound)
        : unit(of), sweep(of, to_tape), value(to_value), tape(to_tape), sound(is_sound) {}
    int64_t steps() const { return unit.lanes.longest; }
    void step(int64_t n) { sweep.step(n); }
    void finish() {
        if (!sweep.finish(value, tape)) sound = false;
    }
};

template <class S>
bool forward_of(const ScoresProblem<S>& problem, S* value, S* tape, const std::vector<int64_t>& chosen) {
    std::atomic<bool> sound{true};
    for_units(problem, chosen, [&](auto& unit, auto* other, int) {
        run_jobs<ForwardJob<std::decay_t<decltype(unit)>>>(unit, other, value, tape, sound);
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

// Runs body(unit, other unit or none, totals of its thread) for the sequences in log space, and adds the totals up.
template <class S, class Body>
void for_gradients(const ScoresProblem<S>& problem, const Scores<S>& out, Body body) {
    const auto chosen = choose(problem, [&](int64_t b) { return in_log_space(problem, b); });
    if (chosen.empty()) return;
    const std::size_t states = is_dense(problem) ? 0 : std::size_t(problem.states);
    const std::vector<double> none(states);
    std::vector<Totals> totals(std::size_t(std::max(problem.threads, 1)), Totals{std::vector<double>(states * states), none, none});
    for_units(problem, chosen,
              [&](auto& unit, auto* other, int slot) { body(unit, other, totals[std::size_t(slot)]); });
    const auto deliver = [](const std::vector<double>& from, bool is_shared, S* to) {
        for (std::size_t k = 0; k < from.size() && is_shared; ++k) to[k] += S(from[k]);
    };
    for (const Totals& own : totals) {
        deliver(own.transitions, problem.transition_batch == 0 && problem.transition_step == 0, out.transitions);
        deliver(own.start, problem.start_batch == 0, out.start);
        deliver(own.end, problem.end_batch == 0, out.end);
    }
}

template <class U>
class BackwardJob {
    using S = typename U::Number;
    U& unit;
    Sink<U> sink;
    Visits<U> visits;
    Back<U, Visits<U>> sweep;

public:
    BackwardJob(U& of, const S* seed, const Scores<S>& gradient, Totals& totals)
        : unit(of), sink(of, gradient, totals), visits(of, seed), sweep(of, sink, visits) {}
    int64_t steps() const { return unit.lanes.longest; }
    void step(int64_t n) { sweep.step(steps() - 1 - n); }
    void finish() { sink.finish(); }
};

template <class S>
void backward(const ScoresProblem<S>& problem, const S* seed, const Scores<S>& gradient) {
    zero_sums(problem, gradient);
    if (in_exp_space(problem)) product_kernels<S>().backward(problem, seed, gradient);
    for_gradients(problem, gradient, [&](auto& unit, auto* other, Totals& totals) {
        run_jobs<BackwardJob<std::decay_t<decltype(unit)>>>(unit, other, seed, gradient, totals);
    });
}

// The tangent sweep forward, then the one back.
template <class U>
class HessianJob {
    using S = typename U::Number;
    U& unit;
    const S* seed;
    Sink<U> sink;
    Tangent<U> tangent;
    std::optional<Flow<U>> flow;
    std::optional<Back<U, Flow<U>>> sweep;

public:
    HessianJob(U& of, const S* seeds, const Scores<const S>& z, const Scores<S>& product, Totals& totals)
        : unit(of), seed(seeds), sink(of, product, totals), tangent(of, z) {}
    int64_t steps() const { return 2 * unit.lanes.longest; }
    void step(int64_t n) {
        const int64_t longest = unit.lanes.longest;
        if (n < longest) return tangent.step(n);
        if (n == longest) {
            End<U> end(unit, tangent.tape.last_values().get());
            flow.emplace(unit, tangent, end, seed);
            sweep.emplace(unit, sink, *flow);
        }
        sweep->step(2 * longest - 1 - n);
    }
    void finish() { sink.finish(); }
};

template <class S>
void hessian(const ScoresProblem<S>& problem, const S* seed, const Scores<const S>& z, const Scores<S>& product) {
    zero_sums(problem, product);
    if (in_exp_space(problem)) product_kernels<S>().hessian(problem, seed, z, product);
    for_gradients(problem, product, [&](auto& unit, auto* other, Totals& totals) {
        run_jobs<HessianJob<std::decay_t<decltype(unit)>>>(unit, other, seed, z, product, totals);
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
        Back<U, Pull<U>> sweep(unit, sink, pull);
        for (int64_t n = unit.lanes.longest - 1; n >= 0; --n) sweep.step(n);
        sink.finish();
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
