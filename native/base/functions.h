// The functions of math.h as the kernels have them, for tests of their accuracy.
#pragma once

#include <cstdint>

#include "math.h"

namespace bellmax {

template <class S>
struct FunctionKernels {
    void (*exp2)(const S* x, S* y, std::int64_t count);
    void (*log2)(const S* x, S* y, std::int64_t count);
};

BELLMAX_KERNELS(template <class S> FunctionKernels<S> function_kernels())

}  // namespace bellmax
