// The interface for the binding: walks of T emitting arcs through a labelled graph, an automaton.
//
// A node (t, s) is a state s after t frames. A path starts in a state with the score start[s], takes an emitting arc for
// each frame t, which pays log_probs[t, label] + arcs[a], and any ε-arcs in between, which pay arcs[a], and ends in a
// state with the score final[s]. The edges into a node are the start edge or the emitting arcs in their order, and
// then the ε-arcs in theirs; those into the end are in the order of the states.
#pragma once

#include <cstdint>

#include "../omega/omega.h"

namespace bellmax {

// Arrays of a batch, one for each score: the scores, a direction or gradients. A shared array has one entry for all.
template <class T>
struct AutomatonArrays {
    struct Batched {
        T* data;
        std::int64_t size;  // of one member
        bool is_shared;

        T* of(std::int64_t member) const { return data + (is_shared ? 0 : member * size); }
    };
    Batched log_probs;     // (steps, labels)
    Batched arcs;          // (arcs)
    Batched start, final;  // (states)
};

// The tape is (batch, size). It has a row for each frame from 0 to `steps` if there is room, else for each n-th frame, from
// which the sweeps compute the frames in between again. The layout of a row is in frames.h.
template <class S>
struct AutomatonProblem {
    std::int64_t batch, steps, labels, arcs, states;
    int threads;
    OmegaParameters omega;
    AutomatonArrays<const S> theta;
    const std::int64_t* lengths;     // from 0 to steps
    const std::int32_t* descriptor;  // (batch or 1, arcs, 3): source, target, label; −1 for ε, and in rows without an arc
    bool is_shared;                  // one automaton for all members
    double* tape;                    // only forward writes it; null if only the value is wanted
    std::int64_t tape_size, width;   // of one member, and of a row
    std::int64_t frames_per_row;

    const std::int32_t* automaton(std::int64_t member) const {
        return descriptor + (is_shared ? 0 : member * arcs * 3);
    }
    double* row(std::int64_t member, std::int64_t frame) const {
        const std::int64_t number = frames_per_row == 1 ? frame : frame / frames_per_row;  // a division takes long
        return tape + member * tape_size + number * width;
    }
};

template <class S>
struct AutomatonKernels {
    // False if a score is NaN or +∞, or if the value overflows. Every kernel throws std::invalid_argument for an arc
    // with a state or a label that does not exist, and for a cycle of ε-arcs.
    bool (*forward)(const AutomatonProblem<S>&, S* value);
    void (*backward)(const AutomatonProblem<S>&, const S* seed, const AutomatonArrays<S>& gradients);
    void (*hessian)(const AutomatonProblem<S>&, const S* seed, const AutomatonArrays<const S>& z,
                    const AutomatonArrays<S>& products);
    // (batch, draws, longest): the arcs of each path, then −1.
    void (*sample)(const AutomatonProblem<S>&, std::int64_t draws, std::int64_t choices, const double* uniforms,
                   std::int64_t longest, std::int64_t* paths);
    // The same for the k best paths, and their scores (batch, k).
    bool (*topk)(const AutomatonProblem<S>&, std::int64_t k, S* scores, std::int64_t longest, std::int64_t* paths);
};

BELLMAX_KERNELS(template <class S> AutomatonKernels<S> automaton_kernels())

}  // namespace bellmax
