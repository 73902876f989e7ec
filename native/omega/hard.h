// Ω = 0: the maximum itself.
#pragma once

#include "omega.h"

namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace omega {

template <class R>
struct Hard : General<R> {
    static constexpr bool by_slot = true;

    explicit Hard(const OmegaParameters&) {}
    R at_vertex() const { return 0; }

    template <class V>
    void weigh(V r, V, V& q, V& s) const {
        q = r == V{} ? V{} + R(1) : V{};
        s = V{};
    }
    template <class V>
    V slope(V) const {
        return V{};
    }
    template <class V>
    V log_q(V r, V) const {
        return r;
    }
    template <class V>
    V log_slope(V, V) const {
        return V{};
    }
};

}  // namespace omega
}  // namespace BELLMAX_ARCH
}  // namespace bellmax
