// The interface for the binding: segmentations of sequences whose segments are scored by emissions and durations.
//
// A segment of label k from step s to step t scores Σ emissions[s … t, k] + durations[t − s, k], or last_durations
// if t is the last step. A sweep adds up the emissions step by step whenever it needs them, so that no sweep stores a
// number for each segment.
#pragma once

#include <cstdint>

#include "../omega/omega.h"

namespace bellmax {

// Arrays of a batch, one for each score: the scores, a direction or gradients. A shared array has one entry for all.
template <class T>
struct SegmentArrays {
    struct Batched {
        T* data;
        std::int64_t size;  // of one sequence
        bool is_shared;

        T* of(std::int64_t member) const { return data + (is_shared ? 0 : member * size); }
    };
    Batched emissions;       // (steps, labels)
    Batched durations;       // (longest, labels)
    Batched transitions;     // (labels, labels): [current, previous]
    Batched start, end;      // (labels)
    Batched last_durations;  // (longest, labels); without data if `durations` also scores the last segment
};

// The tape is (batch, 4, steps, width): values and thresholds of the nodes before each step, then of the nodes after
// it (sequence.h). `width` is the number of labels, rounded up to a multiple of label_lanes.
constexpr std::int64_t label_lanes = 4;

template <class S>
struct SegmentProblem {
    std::int64_t batch, steps, longest, labels, width;
    int threads;
    OmegaParameters omega;
    SegmentArrays<const S> theta;
    const std::int64_t* lengths;  // from 1 to steps
    double* tape;                 // only forward writes it
};

template <class S>
struct SegmentKernels {
    // False if a score is NaN or +∞, or if the value overflows.
    bool (*forward)(const SegmentProblem<S>&, S* value);
    void (*backward)(const SegmentProblem<S>&, const S* seed, const SegmentArrays<S>& gradients);
    void (*hessian)(const SegmentProblem<S>&, const S* seed, const SegmentArrays<const S>& z,
                    const SegmentArrays<S>& products);
    // (batch, draws, steps): (duration − 1) · labels + label at the last step of each segment, −1 elsewhere.
    void (*sample)(const SegmentProblem<S>&, std::int64_t draws, std::int64_t choices, const double* uniforms,
                   std::int64_t* paths);
};

BELLMAX_KERNELS(template <class S> SegmentKernels<S> segment_kernels())

}  // namespace bellmax
