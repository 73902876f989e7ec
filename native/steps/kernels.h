// The sweeps of a chain over the threads.
#pragma once

#include <atomic>

#include "../base/threads.h"
#include "sweeps.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {

// Runs body(maxima of a unit, slot) over the threads.
template <class Omega, class S, class Body>
void for_units(const ScoresProblem<S>& problem, const Plan& plan, Body body) {
    using Real = typename Omega::Real;
    constexpr int64_t width = lanes_of<Real>;
    const int64_t* const sequences = plan.sequences.data();
    const int64_t across = width == 8 ? plan.across : 0, units = (across + width - 1) / width;
    const auto run = [&](auto unit, int slot) { body(Maxima<decltype(unit), Omega>(unit), slot); };
    parallel_for(units + int64_t(plan.sequences.size()) - across, problem.threads, [&](int64_t n, int slot) {
        if constexpr (width == 8) {
            const int64_t first = n * width, number = std::min(width, across - first);
            if (n < units) return run(Unit<S, Real, true>(problem, sequences + first, number), slot);
        }
        run(Unit<S, Real, false>(problem, sequences + across + n - units, 1), slot);
    });
}

// body(n) for the steps of a unit, until an interrupt.
template <class U, class Body>
void for_steps(const U& unit, Body body) {
    Pace pace;
    for (int64_t n = 0; n < unit.lanes.longest; ++n) {
        pace.spend(unit.cells * unit.states);
        body(n);
    }
}

template <class Omega, class S>
bool forward(const ScoresProblem<S>& problem, const Plan& plan, S* value, S* tape) {
    std::atomic<bool> sound{true};
    for_units<Omega>(problem, plan, [&](const auto& maxima, int) {
        Forward<std::decay_t<decltype(maxima)>> sweep(maxima, tape);
        for_steps(maxima.unit, [&](int64_t n) { sweep.step(n); });
        if (!sweep.finish(value, tape)) sound = false;
    });
    return sound;
}

// Along z, if so.
template <bool along, class M, class S>
void sweep_back(const M& maxima, const S* seeds, const Scores<const S>& z, const Scores<S>& out, Totals& totals) {
    using U = typename M::Unit;
    U& unit = maxima.unit;
    Sink<U> sink(unit, out, totals);
    if (!unit.lanes.longest) return;
    Tape<U> tape(unit);
    const End<M> end(maxima, tape.last().get());
    typename U::V seed{};
    for (int l = 0; l < U::W; ++l) {
        const int lane = U::across ? l : 0;
        if (unit.lanes.length[lane]) seed[l] = typename U::Real(seeds[unit.lanes.sequence[lane]]);
    }
    const auto run = [&](Tangent<M>* tangent, const typename U::Real* q_dot) {
        Backward<M, along> sweep(maxima, tape, tangent, sink, end.q.get(), q_dot, seed);
        for_steps(unit, [&](int64_t n) { sweep.step(unit.lanes.longest - 1 - n); });
    };
    if constexpr (along) {
        Tangent<M> tangent(maxima, tape, z);
        for_steps(unit, [&](int64_t n) { tangent.step(n); });
        run(&tangent, end.change(tangent.last().get()).get());
    } else {
        run(nullptr, end.q.get());
    }
    sink.finish();
}

template <class Omega, bool along, class S>
void backward(const ScoresProblem<S>& problem, const Plan& plan, const S* seed, const Scores<const S>& z,
              const Scores<S>& out, Totals* of_threads) {
    for_units<Omega>(problem, plan, [&](const auto& maxima, int slot) {
        sweep_back<along>(maxima, seed, z, out, of_threads[slot]);
    });
}

template <class S, class Omega>
ChainSweeps<S> chain_sweeps() {
    if constexpr (Omega::by_slot) {
        return {forward<Omega, S>, backward<Omega, false, S>, nullptr};  // nothing bends where the maximum is hard
    } else {
        return {forward<Omega, S>, backward<Omega, false, S>, backward<Omega, true, S>};
    }
}

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
