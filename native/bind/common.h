// What the bindings share: tensors as arguments, checks of sizes, the choice of the instruction set.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "../base/memory.h"
#include "../omega/list.h"
#include "tensor_view.h"

namespace bellmax {

using std::int64_t;

inline bool has_avx2() {
#ifdef BELLMAX_HAS_AVX2
    static const bool yes = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return yes;
#else
    return false;
#endif
}

#if defined(BELLMAX_HAS_AVX2) && defined(BELLMAX_HAS_BASELINE)
#define BELLMAX_BEST(kernels) (has_avx2() ? avx2::kernels : baseline::kernels)
#elif defined(BELLMAX_HAS_AVX2)
#define BELLMAX_BEST(kernels) avx2::kernels
#else
#define BELLMAX_BEST(kernels) baseline::kernels
#endif

template <class T, int D>
using In = TensorView<const T, D>;
template <class T, int D>
using Out = TensorView<T, D>;

inline void need(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(std::string("bellmax kernels: ") + what);
}

inline OmegaParameters omega_of(const char* name, const std::vector<double>& parameters) {
    OmegaParameters found{};
    need(omega::find(name, parameters.data(), parameters.size(), found), "no such omega");
    return found;
}

// A thread has to have this many numbers to read, or waking it takes longer than the work.
inline int threads_for(int64_t numbers, int threads) {
    constexpr int64_t worthwhile = 1 << 13;
    return int(std::max<int64_t>(1, std::min<int64_t>(threads, numbers / worthwhile)));
}

#define OMEGA const char *omega, const std::vector<double> &parameters, int threads

}  // namespace bellmax
