// What the bindings of chains share: lengths and masks, scores, tapes.
#pragma once

#include <optional>
#include <type_traits>
#include <vector>

#include "../steps/problem.h"
#include "common.h"

namespace bellmax {

template <class S>
using Tapes = In<S, 4>;
using Lengths = std::optional<In<int64_t, 1>>;
using Mask = std::optional<In<bool, 2>>;

// The steps that are kept: all without lengths, the first ones without a mask.
struct Kept {
    std::vector<int64_t> all, steps;
    const int64_t* lengths;

    Kept(const Lengths& given, const Mask& mask, int64_t batch, int64_t total) {
        if (!given) {
            all.assign(std::size_t(batch), total);
            lengths = all.data();
            return;
        }
        lengths = given->data();
        need(int64_t(given->shape(0)) == batch, "the index does not fit the scores");
        for (int64_t b = 0; b < batch; ++b) need(lengths[b] >= 0 && lengths[b] <= total, "a length is out of range");
        if (mask) read(*mask, batch, total);
    }

    void read(const In<bool, 2>& mask, int64_t batch, int64_t total) {
        need(int64_t(mask.shape(0)) == batch && int64_t(mask.shape(1)) == total, "the mask does not fit the scores");
        steps.resize(std::size_t(batch * total));
        bool has_holes = false;
        for (int64_t b = 0; b < batch; ++b) {
            int64_t n = 0;
            for (int64_t t = 0; t < total; ++t) {
                if (!mask.data()[b * total + t]) continue;
                has_holes |= t != n;
                steps[std::size_t(b * total + n++)] = t;
            }
            need(n == lengths[b], "the mask does not fit the lengths");
        }
        if (!has_holes) steps.clear();
    }

    const int64_t* data() const { return steps.empty() ? nullptr : steps.data(); }
};

template <class S>
void set_tape(ScoresProblem<S>& p, const Tapes<S>& tape) {
    need(int64_t(tape.shape(0)) == p.batch && int64_t(tape.shape(1)) == 2 &&
             int64_t(tape.shape(2)) == p.steps + 1 && int64_t(tape.shape(3)) == p.states,
         "the tape does not fit the scores");
    p.tape = tape.data();
}

template <class S>
void need_batch(const ScoresProblem<S>& p, int64_t size) {
    need(size == p.batch, "a number for each sequence is needed");
}

#define INDEX const Lengths &lengths, const Mask &mask, OMEGA

template <class S>
using Emissions = In<S, 3>;
template <class S>
using States = In<S, 2>;

// (1 or batch, states, states), or for each step (1 or batch, steps − 1, states, states).
template <class S>
using Transitions = TensorView<S, any_dims>;

// Whether a tensor has the wanted size, or 1, which stands for all.
inline bool one_or(std::size_t size, int64_t wanted) { return size == 1 || int64_t(size) == wanted; }

template <class S>
ScoresProblem<S> scores_problem(const Emissions<S>& emissions, const Transitions<const S>& transitions,
                                const States<S>& start, const States<S>& end, const Kept& kept, OMEGA) {
    const int64_t batch = int64_t(emissions.shape(0)), steps = int64_t(emissions.shape(1)),
                  states = int64_t(emissions.shape(2)), square = states * states;
    const std::size_t dims = transitions.ndim();
    need(dims == 3 || dims == 4, "the transitions do not fit the emissions");
    const int64_t places = dims == 4 ? int64_t(transitions.shape(1)) : 1;
    need(one_or(transitions.shape(0), batch) && (dims == 3 || places == std::max<int64_t>(steps - 1, 0)) &&
             int64_t(transitions.shape(dims - 2)) == states && int64_t(transitions.shape(dims - 1)) == states,
         "the transitions do not fit the emissions");
    need(one_or(start.shape(0), batch) && int64_t(start.shape(1)) == states && one_or(end.shape(0), batch) &&
             int64_t(end.shape(1)) == states,
         "start or end do not fit the emissions");
    const auto stride = [](std::size_t size, int64_t numbers) { return size == 1 ? int64_t(0) : numbers; };
    return {batch, steps, states, kept.lengths, kept.data(), stride(transitions.shape(0), places * square),
            places > 1 ? square : 0, stride(start.shape(0), states), stride(end.shape(0), states),
            omega_of(omega, parameters), threads_for(batch * steps * square, threads),
            {emissions.data(), transitions.data(), start.data(), end.data()}, nullptr};
}

#define SCORES \
    const Emissions<S> &emissions, const Transitions<const S> &transitions, const States<S> &start, const States<S> &end
#define SCORES_PROBLEM                                                                             \
    const Kept kept(lengths, mask, int64_t(emissions.shape(0)), int64_t(emissions.shape(1)));      \
    auto p = scores_problem(emissions, transitions, start, end, kept, omega, parameters, threads)

// The data of arrays of the scores' shapes.
template <class S, class Like, class E, class T, class V>
Scores<S> like_scores(const ScoresProblem<std::remove_const_t<S>>& p, const Like& like, const E& emissions,
                      const T& transitions, const V& start, const V& end) {
    need(int64_t(emissions.shape(0)) == p.batch && int64_t(emissions.shape(1)) == p.steps &&
             int64_t(emissions.shape(2)) == p.states,
         "an array is not like the emissions");
    need(transitions.ndim() == like.ndim(), "an array is not like the transitions");
    for (std::size_t d = 0; d < like.ndim(); ++d) {
        need(transitions.shape(d) == like.shape(d), "an array is not like the transitions");
    }
    need(int64_t(start.shape(0)) == (p.start_batch ? p.batch : 1) && int64_t(start.shape(1)) == p.states &&
             int64_t(end.shape(0)) == (p.end_batch ? p.batch : 1) && int64_t(end.shape(1)) == p.states,
         "an array is not like start or end");
    if constexpr (!std::is_const_v<S>) prefer_large_pages(emissions.data(), int64_t(emissions.nbytes()));
    if constexpr (!std::is_const_v<S>) prefer_large_pages(transitions.data(), int64_t(transitions.nbytes()));
    return {emissions.data(), transitions.data(), start.data(), end.data()};
}

}  // namespace bellmax
