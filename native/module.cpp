// The module of Python: all kernels by name. It knows no mathematics.
#include "base/functions.h"
#include "bind/call.h"

namespace {

using namespace bellmax;

template <class S, bool is_log>
bool apply(Call& call) {
    const Tensor x = call.tensor();
    S* const y = call.array<S>({x.shape[0]});
    const FunctionKernels<S> kernels = BELLMAX_BEST(function_kernels<S>());
    return run(is_log ? kernels.log2 : kernels.exp2, Call::array<const S>({any_size}, x), y, x.shape[0]);
}

PyMethodDef functions[] = {method<apply<float, false>, apply<double, false>>("exp2"),
                           method<apply<float, true>, apply<double, true>>("log2"),
                           {}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() {
    PyObject* const module = PyModule_Create(&definition);
    if (!module) return nullptr;
    read_python();
    for (PyMethodDef* family :
         {functions, steps_methods, lattice_methods, hyper_methods, chart_methods, segment_methods, series_methods,
          automaton_methods}) {
        if (PyModule_AddFunctions(module, family)) return nullptr;
    }
    if (PyModule_AddStringConstant(module, "instructions", has_avx2() ? "avx2" : "baseline")) return nullptr;
    return module;
}
