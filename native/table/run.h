// Which nodes a lattice is swept with, and how a batch of lattices is shared among threads.
#pragma once

#include "sweeps.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace table_engine {

// Calls action(P) with the nodes to sweep with, as an empty pointer: in float, for scores and an Ω that have some, or
// in double. False if there are none.
template <class T, class Action>
bool with_nodes(const Frame& frame, bool in_float, Action action) {
    const double alpha = frame.omega.alpha;
    if (!in_float) {
        action(static_cast<Values<AnyOmega>*>(nullptr));
    } else if (frame.is_double || (alpha != 1 && alpha != 2)) {
        return false;
    } else if (alpha == 1) {
        action(static_cast<Products*>(nullptr));
    } else {
        action(static_cast<Parts<omega::SquaredL2<float>>*>(nullptr));
    }
    return true;
}

// What the first number of a tape says: whether nodes are in float.
inline bool is_in_float(const Frame& frame) { return frame.tape[0] == 1; }

// The value of a lattice, with nodes in float if they can hold it; false if there are bad scores.
template <class T>
bool solve(const T& program, const Frame& frame, double& value) {
    Seen seen;
    bool done = false;
    const auto run = [&](auto* nodes) {
        const Sweeps<std::remove_pointer_t<decltype(nodes)>, T> sweeps(program, frame, frame.tape);
        seen = {};
        value = sweeps.forward(seen);
        done = sweeps.can_take(seen.greatest);
    };
    const bool in_float = with_nodes<T>(frame, true, run) && done;
    if (!in_float) with_nodes<T>(frame, false, run);
    if (frame.tape) frame.tape[0] = in_float;
    return !seen.bad;
}

// The gradients of scores or, with a direction, their change along it.
template <class T>
void differentiate(const T& program, const Frame& frame, double seed, const Array2* out) {
    with_nodes<T>(frame, is_in_float(frame), [&](auto* nodes) {
        using P = std::remove_pointer_t<decltype(nodes)>;
        if (!frame.z) return Sweeps<P, T>(program, frame, true).backward(seed, out);
        // But for products in double, which are compiled once.
        using Nodes = std::conditional_t<std::is_same_v<P, Products>, P, Values<AnyOmega>>;
        const Sweeps<WithDots<Nodes>, T> sweeps(program, frame, true);
        Seen unused;
        sweeps.forward(unused);
        sweeps.backward(seed, out);
    });
}

// Paths, from their ends on: see Sweeps.
template <class T>
void draw(const T& program, const Frame& frame, int64_t draws, int64_t count, const double* uniforms,
          const Visit& visit) {
    with_nodes<T>(frame, is_in_float(frame), [&](auto* nodes) {
        Sweeps<std::remove_pointer_t<decltype(nodes)>, T>(program, frame, true).sample(draws, count, uniforms, visit);
    });
}

// body(b, threads) for every lattice: a thread for each if there are enough, else all threads for one after the other.
template <class Body>
void for_lattices(int64_t batch, int threads, Body body) {
    if (batch >= threads) {
        take_turns(
            batch, threads, [] { return 0; }, [&](int64_t b, int) { body(b, 1); });
    } else {
        for (int64_t b = 0; b < batch; ++b) body(b, threads);
    }
}

}  // namespace table_engine
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
