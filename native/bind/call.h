// A call from Python: its arguments, and the way from a name to a kernel.
//
// Only the stable part of Python's interface is used, so that one library serves all versions.
#pragma once

#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <type_traits>
#include <vector>

#include "../base/memory.h"
#include "../base/threads.h"
#include "../omega/list.h"

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

enum class Kind { float32, float64, int32, int64, boolean };

template <class T>
constexpr Kind kind_of() {
    using Value = std::remove_const_t<T>;
    if constexpr (std::is_same_v<Value, float>) return Kind::float32;
    if constexpr (std::is_same_v<Value, double>) return Kind::float64;
    if constexpr (std::is_same_v<Value, std::int32_t>) return Kind::int32;
    if constexpr (std::is_same_v<Value, bool>) return Kind::boolean;
    return Kind::int64;
}

// A tensor of torch, contiguous and on the CPU.
struct Tensor {
    static constexpr int most_dims = 4;
    Kind kind;
    int dims;
    int64_t shape[most_dims], strides[most_dims];
    void* numbers;

    int64_t size() const {
        int64_t all = 1;
        for (int d = 0; d < dims; ++d) all *= shape[d];
        return all;
    }
};

constexpr int64_t any_size = -1;  // in a shape: whatever the tensor has there

// An argument of another type than a kernel takes: a TypeError. A number or a size that does not fit: a ValueError.
struct WrongType {};

inline void need(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

// Whether a tensor has the wanted size, or 1, which stands for all.
inline bool one_or(int64_t size, int64_t wanted) { return size == 1 || size == wanted; }

// A thread has to have this many numbers to read, or waking it takes longer than the work.
inline int threads_for(int64_t numbers, int threads) {
    constexpr int64_t worthwhile = 1 << 13;
    return int(std::max<int64_t>(1, std::min<int64_t>(threads, numbers / worthwhile)));
}

// The arguments that are still to be read, from the first on.
class Call {
    PyObject* const* next;
    PyObject* const* last;

    PyObject* take();
    void* pointer(const char* capsule_name);

public:
    Call(PyObject* const* from, PyObject* const* to) : next(from), last(to) {}

    // The last `count` arguments, which are read on their own.
    Call split(int count);
    // Whether the next argument is None, which is passed over then.
    bool skips_none();
    // True if the first tensor of floats or doubles is of doubles.
    bool is_double() const { return is_double(next, last); }
    static bool is_double(PyObject* const* from, PyObject* const* to);

    // Passes over the next arguments.
    void skip(int count) { next += count; }
    // The object that capsule_of() made.
    template <class T>
    const T& capsule() {
        return *static_cast<const T*>(pointer(T::name));
    }

    int64_t integer();
    double number();
    const char* text();
    std::vector<double> numbers();
    // The integers of 8 bytes in an object of bytes.
    std::vector<int64_t> integers();
    std::vector<PyObject*> list();
    // The name of an Ω, and its parameters.
    OmegaParameters omega();

    Tensor tensor();
    static Tensor tensor_of(PyObject* source);
    // A copy of a tensor (size,) with any stride, such as the gradient of a sum.
    template <class T>
    std::vector<T> vector(int64_t size);
    // A tensor of that type and shape. If T is not const, it will be written, and large pages are requested.
    template <class T>
    T* array(std::initializer_list<int64_t> shape) {
        return array<T>(shape, tensor());
    }
    template <class T>
    static T* array(std::initializer_list<int64_t> shape, const Tensor& found) {
        if (found.kind != kind_of<T>()) throw WrongType();
        bool fits = int64_t(shape.size()) == found.dims;
        int d = 0;
        for (const int64_t size : shape) fits = fits && (size == any_size || size == found.shape[d]), ++d;
        need(fits, "the shapes of tensors do not fit together");
        if constexpr (!std::is_const_v<T>) prefer_large_pages(found.numbers, found.size() * int64_t(sizeof(T)));
        return static_cast<T*>(found.numbers);
    }
};

// True on the thread on which Python handles signals.
bool is_main_thread();

// Looks up everything that calls need of Python. In a call it could deadlock: whoever initializes a static object runs
// Python, which may hand the GIL to a thread that waits for this object.
void read_python();

// Other threads of Python may run in the meantime. If a signal arrives, its handler runs; if that raises an exception,
// as for Ctrl-C, the kernel stops and the exception is set.
class WithoutPython final : InterruptCheck {
    const bool handles_signals = is_main_thread();
    PyThreadState* state = PyEval_SaveThread();

    bool poll() override {
        // On another thread there is nothing to handle, and taking the lock while Python exits ends the thread.
        if (!handles_signals) return false;
        PyEval_RestoreThread(state);
        const bool has_raised = PyErr_CheckSignals() != 0;
        state = PyEval_SaveThread();
        return has_raised;
    }

public:
    ~WithoutPython() override { PyEval_RestoreThread(state); }
};

// Runs a kernel. A binding ends with this; most kernels say whether they could, which is the result of the call.
template <class Kernel, class... Arguments>
bool run(Kernel kernel, Arguments&&... arguments) {
    const WithoutPython without_python;
    if constexpr (std::is_same_v<decltype(kernel(arguments...)), bool>) return kernel(arguments...);
    kernel(arguments...);
    return true;
}

// A binding reads its arguments, checks their sizes and runs a kernel.
using Binding = bool (*)(Call&);

// Calls the first binding, or the second if the numbers are doubles; exceptions become Python exceptions.
PyObject* answer(Binding for_float, Binding for_double, PyObject* const* arguments, Py_ssize_t count) noexcept;

// The same for a function that makes an object of Python.
using Maker = PyObject* (*)(Call&);
PyObject* answer(Maker, PyObject* const* arguments, Py_ssize_t count) noexcept;

// An object of C++ that Python passes to later calls.
template <class T>
PyObject* capsule_of(std::unique_ptr<T> object) {
    PyObject* const capsule = PyCapsule_New(object.get(), T::name, [](PyObject* own) {
        delete static_cast<T*>(PyCapsule_GetPointer(own, T::name));
    });
    if (capsule) object.release();
    return capsule;
}

template <Maker make>
PyMethodDef maker(const char* name) {
    PyObject* (*const function)(PyObject*, PyObject* const*, Py_ssize_t) =
        [](PyObject*, PyObject* const* arguments, Py_ssize_t count) { return answer(make, arguments, count); };
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

template <Binding for_float, Binding for_double = for_float>
PyMethodDef method(const char* name) {
    PyObject* (*const function)(PyObject*, PyObject* const*, Py_ssize_t) = [](PyObject*, PyObject* const* arguments,
                                                                              Py_ssize_t count) {
        return answer(for_float, for_double, arguments, count);
    };
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

// The bindings of each family; the last has no name.
extern PyMethodDef steps_methods[], lattice_methods[], hyper_methods[], chart_methods[], segment_methods[],
    series_methods[], automaton_methods[];

}  // namespace bellmax
