// The Python module: plain numbers and addresses in, computed in place. Tensors, shapes and strides
// are checked by the Python side (polyhead/native), which is the only caller.

#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "native.h"

using namespace polyhead;

namespace {

const Code* const kCodes[] = {
#if defined(__x86_64__)
    &avx512_bf16_code, &avx512_code, &avx2_code,
#endif
    &portable_code,
};

// Whole numbers, floats and sequences of numbers, read one after the other.
class Arguments {
  public:
    Arguments(PyObject* const* args, Py_ssize_t count) : args_(args), left_(count) {}
    int64_t whole() {
        PyObject* next = take();
        return next ? PyLong_AsLongLong(next) : 0;
    }
    template <class T> T* address() { return reinterpret_cast<T*>(whole()); }
    float real() {
        PyObject* next = take();
        return next ? (float)PyFloat_AsDouble(next) : 0.0f;
    }
    bool more() const { return left_ > 0; }
    bool failed() const { return PyErr_Occurred() != nullptr; }

  private:
    PyObject* take() {
        if (left_ <= 0) {
            PyErr_SetString(PyExc_TypeError, "too few arguments");
            return nullptr;
        }
        --left_;
        return *args_++;
    }
    PyObject* const* args_;
    Py_ssize_t left_;
};

const Code* code_at(int64_t i) {
    const int64_t count = sizeof kCodes / sizeof *kCodes;
    if (i < 0 || i >= count || !kCodes[i]->runs_here()) {
        PyErr_Format(PyExc_ValueError, "no code %lld for this processor", (long long)i);
        return nullptr;
    }
    return kCodes[i];
}

// codes() -> [(name, runs here)] in the order of preference.
PyObject* codes(PyObject*, PyObject*) {
    PyObject* list = PyList_New(0);
    if (!list) return nullptr;
    for (const Code* code : kCodes) {
        PyObject* item = Py_BuildValue("(sN)", code->name, PyBool_FromLong(code->runs_here()));
        if (!item || PyList_Append(list, item) < 0) {
            Py_XDECREF(item);
            Py_DECREF(list);
            return nullptr;
        }
        Py_DECREF(item);
    }
    return list;
}

// product(code, threads, dtype, x, x_stride, rows, in_features, y, y_stride,
//         weight, bias, out_features, …)
PyObject* product(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count);
    const Code* code = code_at(a.whole());
    if (!code) return nullptr;
    const int threads = (int)a.whole();
    Product p{};
    p.dtype = (Dtype)a.whole();
    const void* x = a.address<void>();
    const int64_t x_stride = a.whole();
    p.rows = a.whole();
    p.in_features = a.whole();
    p.y = a.address<void>();
    p.y_stride = a.whole();
    while (a.more() && p.count < kMostFactors) {
        Factor& f = p.factors[p.count++];
        f.weight = a.address<void>();
        f.bias = a.address<void>();
        f.out_features = a.whole();
    }
    if (a.failed()) return nullptr;
    if (a.more() || p.rows < 1 || p.rows > kMostRows || threads < 1) {
        PyErr_Format(PyExc_ValueError, "product takes up to %d weights and %d rows", kMostFactors, kMostRows);
        return nullptr;
    }
    PyThreadState* state = PyEval_SaveThread();
    std::vector<float> wide(p.rows * p.in_features);
    code->widen(p.dtype, x, x_stride, p.rows, p.in_features, wide.data());
    p.x = wide.data();
    code->product(p, threads);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

// attend(code, threads, dtype, batch, heads, kv_heads, queries, key_dim, value_dim, scale, softcap,
//        q, its 3 strides, out, its 3 strides, lse, low, high, bounds_batch,
//        keep, its 3 strides, slopes, q_positions, q_positions_batch, bias, its 4 strides,
//        then for every piece: k, 3 strides, v, 3 strides, length, position, positions, their stride)
PyObject* attend(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count);
    const Code* code = code_at(a.whole());
    if (!code) return nullptr;
    const int threads = (int)a.whole();
    Attention c{};
    c.dtype = (Dtype)a.whole();
    c.batch = a.whole(), c.heads = a.whole(), c.kv_heads = a.whole(), c.queries = a.whole();
    c.key_dim = a.whole(), c.value_dim = a.whole();
    c.scale = a.real(), c.softcap = a.real();
    c.q = a.address<char>(), c.q_batch = a.whole(), c.q_head = a.whole(), c.q_token = a.whole();
    c.out = a.address<char>(), c.out_batch = a.whole(), c.out_head = a.whole(), c.out_query = a.whole();
    c.lse = a.address<float>();
    c.low = a.address<int64_t>(), c.high = a.address<int64_t>(), c.bounds_batch = a.whole();
    c.keep = a.address<uint8_t>(), c.keep_batch = a.whole(), c.keep_head = a.whole(), c.keep_query = a.whole();
    c.slopes = a.address<float>(), c.q_positions = a.address<int64_t>(), c.q_positions_batch = a.whole();
    c.bias = a.address<float>(), c.bias_batch = a.whole(), c.bias_head = a.whole();
    c.bias_query = a.whole(), c.bias_key = a.whole();
    while (a.more() && c.count < kMostPieces) {
        Piece& p = c.pieces[c.count++];
        p.k = a.address<char>(), p.k_batch = a.whole(), p.k_head = a.whole(), p.k_token = a.whole();
        p.v = a.address<char>(), p.v_batch = a.whole(), p.v_head = a.whole(), p.v_token = a.whole();
        p.length = a.whole(), p.position = a.whole();
        p.positions = a.address<int64_t>(), p.positions_batch = a.whole();
        c.keys += p.length;
    }
    if (a.failed()) return nullptr;
    if (a.more() || threads < 1 || c.kv_heads < 1 || c.heads % c.kv_heads || c.key_dim < 1 || c.value_dim < 1) {
        PyErr_SetString(PyExc_ValueError, "attend: sizes that do not go together");
        return nullptr;
    }
    PyThreadState* state = PyEval_SaveThread();
    code->attend(c, threads);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    {"codes", codes, METH_NOARGS, "[(name, runs here)] in the order of preference."},
    {"product", (PyCFunction)(void (*)())product, METH_FASTCALL, "Few rows of x times weights."},
    {"attend", (PyCFunction)(void (*)())attend, METH_FASTCALL, "Attention, forward."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_native", nullptr, 0, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&kModule); }
