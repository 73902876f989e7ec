#include "functions.h"


namespace bellmax {
inline namespace BELLMAX_ARCH {
namespace {

template <class S, class Function>
void apply(const S* x, S* y, std::int64_t count, Function function) {
    constexpr int W = lanes_of<S>;
    for (std::int64_t n = 0; n < count; n += W) {
        if (n + W <= count) {
            store<S>(y + n, function(load<S>(x + n)));
        } else {
            store_some<S, S>(y + n, function(load_some<S>(x + n, count - n)), count - n);
        }
    }
}

template <class S>
void exp2_each(const S* x, S* y, std::int64_t count) {
    apply(x, y, count, [](Vec<S> v) { return exp2_of(v); });
}

template <class S>
void log2_each(const S* x, S* y, std::int64_t count) {
    apply(x, y, count, [](Vec<S> v) { return log2_of(v); });
}

}  // namespace

template <class S>
FunctionKernels<S> function_kernels() {
    return {exp2_each<S>, log2_each<S>};
}
template FunctionKernels<float> function_kernels<float>();
template FunctionKernels<double> function_kernels<double>();

}  // namespace BELLMAX_ARCH
}  // namespace bellmax
