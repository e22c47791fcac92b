// Checks that a tensor may be read by address, and describes it. No other file of this module
// reads a tensor's address.
//
// A tensor is plain if it is exactly a Tensor or a Parameter, on the CPU, of a dtype in kKinds, strided,
// not a negated view (a conjugated one is complex), and if its storage is large enough for its shape and
// strides. Subclasses (DTensor, FakeTensor, wrappers) have no memory or other values in it.
#pragma once

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../common/types.h"

namespace polyhead {

enum Kind { kOfFloat32, kOfBFloat16, kOfFloat16, kOfInt64, kOfBool, kOfUint8, kKinds };

struct View {
    char* at = nullptr;  // null where there was none
    int kind = -1;
    int dims = 0;
    int64_t size[4] = {}, stride[4] = {};
    explicit operator bool() const { return dims > 0; }
    // Stride of a dimension that may be broadcast.
    int64_t step(int d) const { return size[d] == 1 ? 0 : stride[d]; }
    bool is_dense_from(int first) const {
        int64_t next = 1;
        for (int d = dims - 1; d >= first; next *= size[d--])
            if (size[d] != 1 && stride[d] != next) return false;
        return true;
    }
    bool is(int d, int64_t n) const { return size[d] == n; }
    bool is_vector(int64_t n) const { return dims == 1 && is(0, n) && is_dense_from(0); }
    int64_t numbers() const {
        int64_t count = 1;
        for (int d = 0; d < dims; ++d) count *= size[d];
        return count;
    }
    bool is_or_one(int d, int64_t n) const { return size[d] == n || size[d] == 1; }
};

// DLPack's C interface, version 1 (dlpack.h): what a tensor's memory is, without making objects of Python.
struct DLTensor {
    void* data;
    int32_t device_type, device_id, dims;
    uint8_t code, bits;
    uint16_t lanes;
    const int64_t *shape, *strides;
    uint64_t byte_offset;
};
struct DLExchange {
    uint32_t major, minor;
    void* older;
    void (*others[3])();
    int (*tensor)(void* object, DLTensor* out);
};

// Objects of torch, looked up once.
struct Torch {
    PyObject *tensor, *parameter, *kinds[kKinds];
    PyObject *data_ptr, *stride, *is_contiguous, *is_neg, *storage, *storage_offset, *nbytes;
    PyObject *shape, *dtype, *is_cpu, *bytes;
    const DLExchange* exchange;  // null before torch has it
    PyObject* not_plain;         // polyhead.errors.NotPlainError
};
inline Torch torch_{};

constexpr const char* kKindNames[] = {"float32", "bfloat16", "float16", "int64", "bool", "uint8"};
constexpr int kItemSize[] = {4, 2, 2, 8, 1, 1};

// True on success.
inline bool find_torch() {
    Torch& t = torch_;
    PyObject* torch = PyImport_ImportModule("torch");
    PyObject* nn = PyImport_ImportModule("torch.nn");
    if (!torch || !nn) return false;
    t.tensor = PyObject_GetAttrString(torch, "Tensor");
    t.parameter = PyObject_GetAttrString(nn, "Parameter");
    PyObject* storage = PyObject_GetAttrString(torch, "UntypedStorage");
    if (!t.tensor || !t.parameter || !storage) return false;
    for (int i = 0; i < kKinds; ++i)
        if (!(t.kinds[i] = PyObject_GetAttrString(torch, kKindNames[i]))) return false;
    t.data_ptr = PyObject_GetAttrString(t.tensor, "data_ptr");
    t.stride = PyObject_GetAttrString(t.tensor, "stride");
    t.is_contiguous = PyObject_GetAttrString(t.tensor, "is_contiguous");
    t.is_neg = PyObject_GetAttrString(t.tensor, "is_neg");
    t.storage = PyObject_GetAttrString(t.tensor, "untyped_storage");
    t.storage_offset = PyObject_GetAttrString(t.tensor, "storage_offset");
    t.nbytes = PyObject_GetAttrString(storage, "nbytes");
    t.shape = PyUnicode_InternFromString("shape");
    t.dtype = PyUnicode_InternFromString("dtype");
    t.is_cpu = PyUnicode_InternFromString("is_cpu");
    t.bytes = PyUnicode_InternFromString("nbytes");
    PyObject* capsule = PyObject_GetAttrString(t.tensor, "__dlpack_c_exchange_api__");
    if (!capsule) PyErr_Clear();
    t.exchange = capsule ? (const DLExchange*)PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr;
    if (t.exchange && (t.exchange->major != 1 || !t.exchange->tensor)) t.exchange = nullptr;
    Py_XDECREF(capsule);
    PyErr_Clear();  // another kind of capsule
    Py_DECREF(storage);
    Py_DECREF(nn);
    Py_DECREF(torch);
    if (PyErr_Occurred()) return false;
    PyObject* errors = PyImport_ImportModule("polyhead.errors");
    t.not_plain = errors ? PyObject_GetAttrString(errors, "NotPlainError") : nullptr;
    Py_XDECREF(errors);
    return t.not_plain;
}

inline PyObject* call(PyObject* method, PyObject* self) {
    return PyObject_CallFunctionObjArgs(method, self, nullptr);
}

inline bool is_true(PyObject* found) {
    const bool yes = found == Py_True;
    Py_XDECREF(found);
    return yes;
}

inline int64_t as_int64(PyObject* found) {
    const int64_t n = found ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    return n;
}

// Why a tensor's memory is not its value: the kind of tensor, written to `words`, or null if it is plain.
inline const char* unsupported_kind(PyObject* x, char* words, size_t size) {
    if ((PyObject*)Py_TYPE(x) != torch_.tensor && (PyObject*)Py_TYPE(x) != torch_.parameter) {
        PyObject* name = PyType_GetName(Py_TYPE(x));
        const char* text = name ? PyUnicode_AsUTF8AndSize(name, nullptr) : "object without a name";
        PyOS_snprintf(words, size, "a %.100s", text ? text : "object");
        Py_XDECREF(name);
        return words;
    }
    if (!is_true(PyObject_GetAttr(x, torch_.is_cpu))) return "a tensor on another device than the CPU";
    if (is_true(call(torch_.is_neg, x))) return "a negated view";
    return nullptr;
}

inline bool refuse(const char* name, const char* why) {
    PyErr_Format(torch_.not_plain, "%s must be a plain tensor in memory: got %s", name, why);
    return false;
}

inline bool sizes_of(PyObject* tuple, int dims, int64_t* to) {
    if (!tuple) return false;
    for (int d = 0; d < dims; ++d) to[d] = PyLong_AsLongLong(PyTuple_GetItem(tuple, d));
    return true;
}

// Elements that a tensor's storage needs for its shape and strides; −1 if no storage can hold them.
inline int64_t reach_of(const View& v, int64_t offset) {
    int64_t last = offset, part;
    for (int d = 0; d < v.dims; ++d) {
        if (v.size[d] == 0) return 0;
        if (v.size[d] < 0 || v.stride[d] < 0 || __builtin_mul_overflow(v.size[d] - 1, v.stride[d], &part) ||
            __builtin_add_overflow(last, part, &last))
            return -1;
    }
    return __builtin_add_overflow(last, 1, &last) ? -1 : last;
}

// Looks at a tensor; on failure an exception is set, and v is empty.
inline bool view_of(PyObject* x, const char* name, View& v) {
    char words[128];
    if (const char* why = unsupported_kind(x, words, sizeof words)) return refuse(name, why);
    PyObject* dtype = PyObject_GetAttr(x, torch_.dtype);
    while (++v.kind < kKinds && torch_.kinds[v.kind] != dtype) {}
    Py_XDECREF(dtype);
    PyObject* shape = PyObject_GetAttr(x, torch_.shape);
    const Py_ssize_t dims = shape ? PyTuple_Size(shape) : 0;
    View found = v;
    bool good = shape && dims >= 1 && dims <= 4;
    if (good) {
        found.dims = (int)dims;
        sizes_of(shape, found.dims, found.size);
        PyObject* is_dense = call(torch_.is_contiguous, x);  // takes a fifth of the time of stride()
        if (is_dense == Py_True) {
            uint64_t next = 1;  // may wrap where there are no numbers
            for (int d = found.dims - 1; d >= 0; next *= (uint64_t)found.size[d--]) found.stride[d] = (int64_t)next;
        } else {
            PyObject* stride = is_dense ? call(torch_.stride, x) : nullptr;
            good = sizes_of(stride, found.dims, found.stride);
            Py_XDECREF(stride);
        }
        Py_XDECREF(is_dense);
    }
    Py_XDECREF(shape);
    const int64_t offset = good ? as_int64(call(torch_.storage_offset, x)) : 0;
    PyObject* storage = good ? call(torch_.storage, x) : nullptr;
    const int64_t bytes = storage ? as_int64(call(torch_.nbytes, storage)) : -1;
    Py_XDECREF(storage);
    if (storage) {
        PyObject* address = call(torch_.data_ptr, x);
        found.at = address ? (char*)PyLong_AsVoidPtr(address) : nullptr;
        Py_XDECREF(address);
    }
    if (PyErr_Occurred()) {  // layouts without strides or storage
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return false;
        PyErr_Clear();
        return refuse(name, "a tensor without memory of its own");
    }
    if (!good) return refuse(name, "a tensor of no or more than four dimensions");
    if (v.kind == kKinds) return refuse(name, "a tensor of a dtype that native code does not read");
    const int64_t reach = reach_of(found, offset);
    if (reach < 0 || reach > bytes / kItemSize[v.kind]) {
        PyErr_Format(torch_.not_plain,
                     "the storage of %s holds %lld bytes, its shape and strides need %lld: was it resized?", name,
                     (long long)bytes, (long long)(reach < 0 ? INT64_MAX : reach * kItemSize[v.kind]));
        return false;
    }
    if (reach && !found.at) return refuse(name, "a tensor without memory of its own");
    v = found;
    return true;
}

// Whether a tensor that was checked is still as it was; an exception counts as no.
inline bool is_still(PyObject* x, const View& view) {
    constexpr uint8_t kCodes[] = {2, 4, 2, 0, 6, 1};  // of DLPack, by kind
    if ((PyObject*)Py_TYPE(x) != torch_.tensor && (PyObject*)Py_TYPE(x) != torch_.parameter) return false;
    if (!torch_.exchange) {
        View now;
        return view_of(x, "a weight", now) && !__builtin_memcmp(&now, &view, sizeof view);
    }
    DLTensor t;
    if (torch_.exchange->tensor(x, &t) != 0) return false;
    bool same = (char*)t.data + t.byte_offset == view.at && t.device_type == 1 && t.dims == view.dims &&
                t.code == kCodes[view.kind] && t.bits == 8 * kItemSize[view.kind] && t.lanes == 1;
    for (int d = 0; same && d < view.dims; ++d)
        same = t.shape[d] == view.size[d] && (t.strides[d] == view.stride[d] || view.size[d] == 1);
    return same && !is_true(call(torch_.is_neg, x));
}

// The address of a tensor that the caller has just made for `count` results, without gaps.
inline char* output_ptr(PyObject* x, const char* name, int64_t count, int kind) {
    if ((PyObject*)Py_TYPE(x) != torch_.tensor) {
        refuse(name, "a subclass");
        return nullptr;
    }
    const int64_t bytes = as_int64(PyObject_GetAttr(x, torch_.bytes));
    PyObject* address = call(torch_.data_ptr, x);
    char* at = address ? (char*)PyLong_AsVoidPtr(address) : nullptr;
    Py_XDECREF(address);
    if (PyErr_Occurred()) return nullptr;
    if (bytes != count * kItemSize[kind] || (bytes && !at))
        PyErr_Format(PyExc_ValueError, "%s must have room for %lld numbers", name, (long long)count);
    return at;
}

}  // namespace polyhead
