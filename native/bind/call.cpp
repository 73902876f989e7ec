#include "call.h"

#include <cstring>
#include <new>

namespace bellmax {
namespace {

// An object of Python that this function owns, null if it could not be had.
class Owned {
    PyObject* object;

public:
    explicit Owned(PyObject* own) : object(own) {}
    Owned(const Owned&) = delete;
    ~Owned() { Py_XDECREF(object); }
    PyObject* get() const { return object; }
};

PyObject* dtype(Kind kind) {
    static const std::vector<PyObject*> all = [] {
        std::vector<PyObject*> found;
        const Owned torch(PyImport_ImportModule("torch"));
        for (const char* name : {"float32", "float64", "int32", "int64", "bool"}) {
            found.push_back(torch.get() ? PyObject_GetAttrString(torch.get(), name) : nullptr);
        }
        return found;
    }();
    return all[std::size_t(kind)];
}

// Names of attributes are made once: that halves the time of reading a tensor.
struct Names {
    PyObject* const dtype = PyUnicode_InternFromString("dtype");
    PyObject* const shape = PyUnicode_InternFromString("shape");
    PyObject* const stride = PyUnicode_InternFromString("stride");
    PyObject* const is_cpu = PyUnicode_InternFromString("is_cpu");
    PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
    PyObject* const data_ptr = PyUnicode_InternFromString("data_ptr");
};

const Names& names() {
    static const Names all;
    return all;
}

PyObject* result_of(PyObject* source, PyObject* method) { return PyObject_CallMethodObjArgs(source, method, nullptr); }

bool kind_of(PyObject* source, Kind& kind) {
    const Owned own(PyObject_GetAttr(source, names().dtype));
    for (int k = 0; own.get() && k <= int(Kind::boolean); ++k) {
        kind = Kind(k);
        if (own.get() == dtype(kind)) return true;
    }
    PyErr_Clear();
    return false;
}

void needs_type(bool condition) {
    if (!condition) throw WrongType();
}

// A tensor as DLPack describes it, and the functions by which torch (2.10 and later) exchanges tensors. The layout
// follows version 1 of DLPack.
struct Exchanged {
    void* numbers;
    std::int32_t device, device_id, dims;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    const int64_t *shape, *strides;
    std::uint64_t offset;
};

struct Exchange {
    std::uint32_t major, minor;
    const void* previous;
    void* other[3];
    int (*describe)(PyObject* source, Exchanged* result);
};

class Torch {
    const Owned torch{PyImport_ImportModule("torch")};
    const Owned type{torch.get() ? PyObject_GetAttrString(torch.get(), "Tensor") : nullptr};

public:
    const Exchange* exchange = nullptr;

    Torch() {
        const Owned capsule(type.get() ? PyObject_GetAttrString(type.get(), "__dlpack_c_exchange_api__") : nullptr);
        const void* const found = capsule.get() ? PyCapsule_GetPointer(capsule.get(), "dlpack_exchange_api") : nullptr;
        exchange = static_cast<const Exchange*>(found);
        if (exchange && (exchange->major != 1 || !exchange->describe)) exchange = nullptr;
        PyErr_Clear();
    }
    bool is_tensor(PyObject* source) const {
        return PyType_IsSubtype(Py_TYPE(source), reinterpret_cast<PyTypeObject*>(type.get()));
    }
};

const Torch& torch() {
    static const Torch& one = *new Torch;  // never destroyed: Python may have ended before
    return one;
}

Kind kind_of(const Exchanged& tensor) {
    constexpr int integer = 0, floating = 2, boolean = 6;
    const bool is_wide = tensor.bits == 64;
    needs_type(tensor.lanes == 1 && (is_wide || tensor.bits == (tensor.code == boolean ? 8 : 32)));
    switch (tensor.code) {
        case floating: return is_wide ? Kind::float64 : Kind::float32;
        case integer: return is_wide ? Kind::int64 : Kind::int32;
        case boolean: return Kind::boolean;
        default: throw WrongType();
    }
}

Tensor by_exchange(PyObject* source) {
    Exchanged tensor{};
    needs_type(torch().is_tensor(source) && torch().exchange->describe(source, &tensor) == 0);
    constexpr int on_cpu = 1;
    needs_type(tensor.device == on_cpu && tensor.dims <= Tensor::most_dims);
    Tensor found{kind_of(tensor), tensor.dims, {}, {}, static_cast<char*>(tensor.numbers) + tensor.offset};
    std::copy(tensor.shape, tensor.shape + tensor.dims, found.shape);
    std::copy(tensor.strides, tensor.strides + tensor.dims, found.strides);
    return found;
}

void copy_sizes(const Owned& sizes, int64_t* to) {
    needs_type(sizes.get());
    for (Py_ssize_t d = 0; d < PyTuple_Size(sizes.get()); ++d)
        to[d] = PyLong_AsLongLong(PyTuple_GetItem(sizes.get(), d));
}

Tensor by_attributes(PyObject* source) {
    Tensor found{};
    needs_type(kind_of(source, found.kind) && Owned(PyObject_GetAttr(source, names().is_cpu)).get() == Py_True);
    const Owned shape(PyObject_GetAttr(source, names().shape));
    found.dims = shape.get() ? int(PyTuple_Size(shape.get())) : -1;
    needs_type(found.dims >= 0 && found.dims <= Tensor::most_dims);
    copy_sizes(shape, found.shape);
    copy_sizes(Owned(result_of(source, names().stride)), found.strides);
    const Owned address(result_of(source, names().data_ptr));
    needs_type(address.get());
    found.numbers = PyLong_AsVoidPtr(address.get());
    return found;
}

// A tensor with any strides. A negative view is refused: its memory holds other values.
Tensor strided(PyObject* source) {
    Tensor found = torch().exchange ? by_exchange(source) : by_attributes(source);
    needs_type(Owned(result_of(source, names().is_neg)).get() == Py_False);
    static int64_t nowhere;
    if (!found.numbers && found.size() == 0) found.numbers = &nowhere;  // null stands for what was not given
    needs_type(found.numbers);
    return found;
}

bool is_contiguous(const Tensor& tensor) {
    int64_t step = 1;
    for (int d = tensor.dims - 1; d >= 0; step *= tensor.shape[d--]) {
        if (tensor.strides[d] != step && tensor.shape[d] != 1) return tensor.size() == 0;
    }
    return true;
}

template <class From, class To>
std::vector<To> copied(const Tensor& from) {
    std::vector<To> numbers(std::size_t(from.shape[0]));
    const From* const source = static_cast<const From*>(from.numbers);
    for (int64_t n = 0; n < from.shape[0]; ++n) numbers[std::size_t(n)] = To(source[n * from.strides[0]]);
    return numbers;
}

}  // namespace

bool is_main_thread() {
    static const unsigned long main_thread = [] {
        const Owned threading(PyImport_ImportModule("threading"));
        const Owned thread(threading.get() ? PyObject_CallMethod(threading.get(), "main_thread", nullptr) : nullptr);
        const Owned ident(thread.get() ? PyObject_GetAttrString(thread.get(), "ident") : nullptr);
        const unsigned long number = ident.get() ? PyLong_AsUnsignedLong(ident.get()) : 0;
        PyErr_Clear();
        return number;
    }();
    return PyThread_get_thread_ident() == main_thread;
}

void read_python() {
    is_main_thread();
    torch();
    names();
    dtype(Kind::boolean);
}

Tensor Call::tensor_of(PyObject* source) {
    const Tensor found = strided(source);
    needs_type(is_contiguous(found));
    return found;
}

template <class T>
std::vector<T> Call::vector(int64_t size) {
    const Tensor found = strided(take());
    need(found.dims == 1 && found.shape[0] == size, "the shapes of tensors do not fit together");
    needs_type(found.kind == Kind::float32 || found.kind == Kind::float64);
    return found.kind == Kind::float32 ? copied<float, T>(found) : copied<double, T>(found);
}
template std::vector<float> Call::vector(int64_t);
template std::vector<double> Call::vector(int64_t);

PyObject* Call::take() {
    needs_type(next < last);
    return *next++;
}

void* Call::pointer(const char* capsule_name) {
    void* const found = PyCapsule_GetPointer(take(), capsule_name);
    needs_type(found);
    return found;
}

Call Call::split(int count) {
    needs_type(last - next >= count);
    last -= count;
    return {last, last + count};
}

bool Call::skips_none() {
    const bool is_none = next < last && *next == Py_None;
    next += is_none;
    return is_none;
}

bool Call::is_double(PyObject* const* from, PyObject* const* to) {
    for (PyObject* const* at = from; at < to; ++at) {
        Kind kind;
        if (*at != Py_None && kind_of(*at, kind) && kind <= Kind::float64) return kind == Kind::float64;
    }
    return false;
}

int64_t Call::integer() {
    const int64_t number = PyLong_AsLongLong(take());
    needs_type(!PyErr_Occurred());
    return number;
}

double Call::number() {
    const double number = PyFloat_AsDouble(take());
    needs_type(!PyErr_Occurred());
    return number;
}

const char* Call::text() {
    const char* const text = PyUnicode_AsUTF8AndSize(take(), nullptr);
    needs_type(text);
    return text;
}

std::vector<PyObject*> Call::list() {
    PyObject* const source = take();
    const bool is_list = PyList_Check(source);
    needs_type(is_list || PyTuple_Check(source));
    const Py_ssize_t size = PySequence_Size(source);
    std::vector<PyObject*> all;
    for (Py_ssize_t n = 0; n < size; ++n)
        all.push_back(is_list ? PyList_GetItem(source, n) : PyTuple_GetItem(source, n));
    return all;
}

std::vector<double> Call::numbers() {
    std::vector<double> all;
    for (PyObject* const source : list()) all.push_back(PyFloat_AsDouble(source));
    needs_type(!PyErr_Occurred());
    return all;
}

std::vector<int64_t> Call::integers() {
    char* bytes = nullptr;
    Py_ssize_t size = 0;
    needs_type(PyBytes_AsStringAndSize(take(), &bytes, &size) == 0 && size % Py_ssize_t(sizeof(int64_t)) == 0);
    std::vector<int64_t> all(std::size_t(size) / sizeof(int64_t));
    std::memcpy(all.data(), bytes, std::size_t(size));
    return all;
}

OmegaParameters Call::omega() {
    const char* const name = text();
    const auto parameters = numbers();
    OmegaParameters found{};
    need(omega::find(name, parameters.data(), parameters.size(), found), "there is no such omega");
    return found;
}

Tensor Call::tensor() { return tensor_of(take()); }

namespace {

// Runs an action that returns an object; exceptions become Python exceptions.
template <class Action>
PyObject* guarded(Action action) noexcept {
    try {
        return action();
    } catch (const Interrupted&) {  // the exception of the signal's handler is set
    } catch (const WrongType&) {
        PyErr_SetString(PyExc_TypeError, "bellmax kernels: an argument has the wrong type");
    } catch (const std::invalid_argument& error) {
        PyErr_Format(PyExc_ValueError, "bellmax kernels: %s", error.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

}  // namespace

PyObject* answer(Binding for_float, Binding for_double, PyObject* const* arguments, Py_ssize_t count) noexcept {
    return guarded([=] {
        Call call(arguments, arguments + count);
        const bool is_double = for_float != for_double && call.is_double();  // a failed look costs more than a tensor
        return PyBool_FromLong((is_double ? for_double : for_float)(call));
    });
}

PyObject* answer(Maker make, PyObject* const* arguments, Py_ssize_t count) noexcept {
    return guarded([=] {
        Call call(arguments, arguments + count);
        return make(call);
    });
}

}  // namespace bellmax
