// Tensors of torch as arguments: contiguous, on the CPU, of a known type and number of dimensions.
//
// Their address and shape are asked for by name, which takes a third of the time of any exchange of arrays.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <type_traits>

namespace bellmax {

constexpr int any_dims = -1;
constexpr int most_dims = 4;

template <class T, int D>
class TensorView {
    T* numbers = nullptr;
    int dims = 0;
    std::int64_t sizes[most_dims] = {};

public:
    using Scalar = T;

    TensorView() = default;
    // A result that was just written, to be read.
    template <class U, std::enable_if_t<std::is_same_v<const U, T>, int> = 0>
    explicit TensorView(const TensorView<U, D>& other) : numbers(other.data()), dims(int(other.ndim())) {
        for (int d = 0; d < dims; ++d) sizes[d] = other.shape(std::size_t(d));
    }

    T* data() const { return numbers; }
    std::size_t ndim() const { return std::size_t(dims); }
    std::int64_t shape(std::size_t d) const { return sizes[d]; }
    std::size_t size() const {
        std::size_t all = 1;
        for (int d = 0; d < dims; ++d) all *= std::size_t(sizes[d]);
        return all;
    }
    std::size_t nbytes() const { return size() * sizeof(T); }

    // Whether `source` is such a tensor, which is then viewed.
    bool view(PyObject* source) noexcept;
};

namespace torch_names {

template <class T>
constexpr const char* dtype() {
    using Plain = std::remove_const_t<T>;
    if constexpr (std::is_same_v<Plain, float>) return "float32";
    if constexpr (std::is_same_v<Plain, double>) return "float64";
    if constexpr (std::is_same_v<Plain, bool>) return "bool";
    if constexpr (std::is_same_v<Plain, std::int32_t>) return "int32";
    return "int64";
}

// The dtype, which lives as long as the process.
template <class T>
PyObject* dtype_object() {
    static PyObject* const object = nanobind::object(nanobind::module_::import_("torch").attr(dtype<T>())).release().ptr();
    return object;
}

inline PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

inline bool is_true(PyObject* object) {
    const bool yes = object == Py_True;
    Py_XDECREF(object);
    return yes;
}

}  // namespace torch_names

template <class T, int D>
bool TensorView<T, D>::view(PyObject* source) noexcept {
    static PyObject* const data_ptr = torch_names::name("data_ptr");
    static PyObject* const is_contiguous = torch_names::name("is_contiguous");
    static PyObject* const is_neg = torch_names::name("is_neg");
    static PyObject* const is_cpu = torch_names::name("is_cpu");
    static PyObject* const dtype = torch_names::name("dtype");
    static PyObject* const shape = torch_names::name("shape");
    PyObject* const kind = PyObject_GetAttr(source, dtype);
    const bool is_kind = kind == torch_names::dtype_object<T>();
    Py_XDECREF(kind);
    if (!is_kind || !torch_names::is_true(PyObject_GetAttr(source, is_cpu)) ||
        !torch_names::is_true(PyObject_CallMethodObjArgs(source, is_contiguous, nullptr)) ||
        torch_names::is_true(PyObject_CallMethodObjArgs(source, is_neg, nullptr))) {
        PyErr_Clear();
        return false;
    }
    PyObject* const own = PyObject_GetAttr(source, shape);
    const Py_ssize_t count = own ? PyTuple_Size(own) : -1;
    const bool fits = D == any_dims ? count >= 0 && count <= most_dims : count == D;
    for (Py_ssize_t d = 0; fits && d < count; ++d) sizes[d] = PyLong_AsLongLong(PyTuple_GetItem(own, d));
    Py_XDECREF(own);
    PyObject* const address = fits ? PyObject_CallMethodObjArgs(source, data_ptr, nullptr) : nullptr;
    if (!address) {
        PyErr_Clear();
        return false;
    }
    dims = int(count);
    numbers = static_cast<T*>(PyLong_AsVoidPtr(address));
    Py_DECREF(address);
    static std::remove_const_t<T> nowhere[1] = {};
    if (!numbers && size() == 0) numbers = nowhere;  // null stands for a tensor that was not given
    return numbers;
}

}  // namespace bellmax

namespace nanobind::detail {

template <class T, int D>
struct type_caster<bellmax::TensorView<T, D>> {
    using View = bellmax::TensorView<T, D>;
    NB_TYPE_CASTER(View, const_name("torch.Tensor"))

    bool from_python(handle source, std::uint8_t, cleanup_list*) noexcept { return value.view(source.ptr()); }
};

}  // namespace nanobind::detail
