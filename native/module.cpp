// The binding: checks sizes, picks the instruction set, releases the GIL. It knows no mathematics.
#include "base/functions.h"
#include "bind/common.h"
#include "bind/families.h"

namespace {

using namespace bellmax;

template <class S>
void bind_functions(nanobind::module_& m) {
    const auto bind = [&m](const char* name, auto function) {
        m.def(name, [function](const In<S, 1>& x, const Out<S, 1>& y) {
            need(x.shape(0) == y.shape(0), "lengths differ");
            function(x.data(), y.data(), x.shape(0));
        });
    };
    const FunctionKernels<S> kernels = BELLMAX_BEST(function_kernels<S>());
    bind("exp2", kernels.exp2);
    bind("log2", kernels.log2);
}

}  // namespace

NB_MODULE(_native, m) {
    m.def("instructions", [] { return has_avx2() ? "avx2" : "baseline"; });
    bind_functions<float>(m);
    bind_functions<double>(m);
    bind_steps(m);
    bind_engines(m);
    bind_lattice(m);
    bind_hyper(m);
}
