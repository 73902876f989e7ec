// The sweeps of a chain over the threads.
#pragma once

#include <atomic>

#include "omegas.h"
#include "sweeps.h"

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
        // Long rows need not be transposed, nor short vectors filled. Lengths must be exact in single precision.
        across = width == 8 && problem.states < 3 * width && across_cost <= along_cost && problem.steps < 1 << 24;
        size = across ? width : 1;
        units = share(count, size);
    }
};

// Runs body(unit, slot) over the threads.
template <class Omega, class S, class Body>
void for_units(const ScoresProblem<S>& problem, const std::vector<int64_t>& chosen, Body body) {
    const Plan<S> plan(problem, lanes_of<typename Omega::Real>, chosen);
    parallel_for(plan.units, problem.threads, [&](int64_t n, int slot) {
        const int64_t* const first = plan.sequences.data() + n * plan.size;
        const int64_t count = std::min<int64_t>(plan.size, int64_t(plan.sequences.size()) - n * plan.size);
        if constexpr (lanes_of<typename Omega::Real> == 8) {
            if (plan.across) {
                Unit<S, Omega, true> unit(problem, first, count);
                return body(unit, slot);
            }
        }
        Unit<S, Omega, false> unit(problem, first, count);
        body(unit, slot);
    });
}

template <class S, class Omega>
bool ChainSweeps<S, Omega>::forward(const ScoresProblem<S>& problem, const std::vector<int64_t>& chosen, S* value, S* tape) {
    std::atomic<bool> sound{true};
    for_units<Omega>(problem, chosen, [&](auto& unit, int) {
        Forward<std::decay_t<decltype(unit)>> sweep(unit, tape);
        for (int64_t n = 0; n < unit.lanes.longest; ++n) sweep.step(n);
        if (!sweep.finish(value, tape)) sound = false;
    });
    return sound;
}

// Runs body(unit, totals of its thread), and adds the totals up.
template <class Omega, class S, class Body>
void for_gradients(const ScoresProblem<S>& problem, const std::vector<int64_t>& chosen, const Scores<S>& out, Body body) {
    const std::size_t states = is_dense(problem) ? 0 : std::size_t(problem.states);
    const std::vector<double> none(states);
    const Totals zero{std::vector<double>(states * states), none, none};
    std::vector<Totals> totals(std::size_t(std::max(problem.threads, 1)), zero);
    for_units<Omega>(problem, chosen, [&](auto& unit, int slot) { body(unit, totals[std::size_t(slot)]); });
    const auto deliver = [](const std::vector<double>& from, bool is_shared, S* to) {
        for (std::size_t k = 0; k < from.size() && is_shared; ++k) to[k] += S(from[k]);
    };
    for (const Totals& own : totals) {
        deliver(own.transitions, problem.transition_batch == 0 && problem.transition_step == 0, out.transitions);
        deliver(own.start, problem.start_batch == 0, out.start);
        deliver(own.end, problem.end_batch == 0, out.end);
    }
}

// Zeros: nothing bends where the maximum is hard.
template <class S>
void clear_all(const ScoresProblem<S>& problem, const Scores<S>& out) {
    const int64_t nodes = problem.batch * problem.steps * problem.states;
    if (is_dense(problem)) {
        std::fill_n(out.transitions, nodes * problem.states, S(0));
        return;
    }
    std::fill_n(out.emissions, nodes, S(0));
    const int64_t transitions = std::max<int64_t>(problem.steps - 1, 0) * problem.transition_step;
    if (transitions) std::fill_n(out.transitions, problem.batch * transitions, S(0));
}

template <class S, class Omega>
void ChainSweeps<S, Omega>::backward(const ScoresProblem<S>& problem, const std::vector<int64_t>& chosen, const S* seed,
                                     const Scores<S>& gradient) {
    for_gradients<Omega>(problem, chosen, gradient, [&](auto& unit, Totals& totals) {
        using U = std::decay_t<decltype(unit)>;
        Sink<U> sink(unit, gradient, totals);
        Visits<U> visits(unit, seed);
        sweep_back(unit, sink, visits);
    });
}

template <class S, class Omega>
void ChainSweeps<S, Omega>::hessian(const ScoresProblem<S>& problem, const std::vector<int64_t>& chosen, const S* seed,
                                    const Scores<const S>& z, const Scores<S>& product) {
    if constexpr (Omega::by_slot) return clear_all(problem, product);
    for_gradients<Omega>(problem, chosen, product, [&](auto& unit, Totals& totals) {
        using U = std::decay_t<decltype(unit)>;
        Sink<U> sink(unit, product, totals);
        Tangent<U> tangent(unit, z);
        for (int64_t n = 0; n < unit.lanes.longest; ++n) tangent.step(n);
        End<U> end(unit, tangent.tape.last_values().get());
        Flow<U> flow(unit, tangent, end, seed);
        sweep_back(unit, sink, flow);
    });
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
