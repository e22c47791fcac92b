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

// feed_forward(code, threads, dtype, activation, x, x_stride, rows, in_features, y,
//              gate or 0, its bias or 0, up, bias, hidden_features, down, bias, out_features)
PyObject* feed_forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count);
    const Code* code = code_at(a.whole());
    if (!code) return nullptr;
    const int threads = (int)a.whole();
    FeedForward f{};
    f.dtype = (Dtype)a.whole(), f.activation = (Activation)a.whole();
    const void* x = a.address<void>();
    const int64_t x_stride = a.whole();
    f.rows = a.whole(), f.in_features = a.whole();
    f.y = a.address<void>();
    f.gate.weight = a.address<void>(), f.gate.bias = a.address<void>();
    f.up.weight = a.address<void>(), f.up.bias = a.address<void>();
    f.gate.out_features = f.up.out_features = a.whole();
    f.down.weight = a.address<void>(), f.down.bias = a.address<void>(), f.down.out_features = a.whole();
    if (a.failed()) return nullptr;
    if (a.more() || f.rows < 1 || f.rows > kMostRows || threads < 1) {
        PyErr_Format(PyExc_ValueError, "feed_forward takes up to %d rows", kMostRows);
        return nullptr;
    }
    PyThreadState* state = PyEval_SaveThread();
    std::vector<float> room(f.rows * (f.in_features + f.up.out_features));
    code->widen(f.dtype, x, x_stride, f.rows, f.in_features, room.data());
    f.x = room.data();
    f.hidden = room.data() + f.rows * f.in_features;
    code->feed_forward(f, threads);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

// norm(code, threads, dtype, x, x_stride, rows, dim, weight, eps, offset, y)
PyObject* norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count);
    const Code* code = code_at(a.whole());
    if (!code) return nullptr;
    const int threads = (int)a.whole();
    Norm p{};
    p.dtype = (Dtype)a.whole();
    p.x = a.address<void>(), p.x_stride = a.whole(), p.rows = a.whole(), p.dim = a.whole();
    p.weight = a.address<void>(), p.eps = a.real(), p.offset = a.real(), p.y = a.address<void>();
    if (a.failed()) return nullptr;
    PyThreadState* state = PyEval_SaveThread();
    code->norm(p, threads < 1 ? 1 : threads);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

// rotate(code, threads, dtype, x, batch, tokens, heads, dim, its 3 strides, cos, sin, y)
PyObject* rotate(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count);
    const Code* code = code_at(a.whole());
    if (!code) return nullptr;
    const int threads = (int)a.whole();
    Rotation r{};
    r.dtype = (Dtype)a.whole();
    r.x = a.address<void>(), r.batch = a.whole(), r.tokens = a.whole(), r.heads = a.whole();
    r.dim = a.whole(), r.x_batch = a.whole(), r.x_token = a.whole(), r.x_head = a.whole();
    r.cos = a.address<void>(), r.sin = a.address<void>(), r.y = a.address<void>();
    if (a.failed()) return nullptr;
    PyThreadState* state = PyEval_SaveThread();
    code->rotate(r, threads < 1 ? 1 : threads);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

// dtype, batch, heads, kv_heads, queries, key_dim, value_dim, scale, softcap,
// q, its 3 strides, out, its 3 strides, lse, low, high, bounds_batch,
// keep, its 3 strides, slopes, by_distance, farthest, q_positions, q_positions_batch, bias, its 4 strides,
// then for every piece: k, 3 strides, v, 3 strides, pages, their stride, page length, skipped, length, position, positions, their stride
Attention attention_from(Arguments& a) {
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
    c.slopes = a.address<float>(), c.by_distance = a.address<float>(), c.farthest = a.whole();
    c.q_positions = a.address<int64_t>(), c.q_positions_batch = a.whole();
    c.bias = a.address<float>(), c.bias_batch = a.whole(), c.bias_head = a.whole();
    c.bias_query = a.whole(), c.bias_key = a.whole();
    while (a.more() && c.count < kMostPieces) {
        Piece& p = c.pieces[c.count++];
        p.k = a.address<char>(), p.k_batch = a.whole(), p.k_head = a.whole(), p.k_token = a.whole();
        p.v = a.address<char>(), p.v_batch = a.whole(), p.v_head = a.whole(), p.v_token = a.whole();
        p.pages = a.address<int64_t>(), p.pages_batch = a.whole(), p.page_length = a.whole();
        p.skipped = a.whole(), p.length = a.whole(), p.position = a.whole();
        p.positions = a.address<int64_t>(), p.positions_batch = a.whole();
        c.keys += p.length;
    }
    if (!a.failed() && (a.more() || c.kv_heads < 1 || c.heads % c.kv_heads || c.key_dim < 1 || c.value_dim < 1))
        PyErr_SetString(PyExc_ValueError, "attention: sizes that do not go together");
    return c;
}

// attend(code, threads, then what attention_from reads)
PyObject* attend(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count);
    const Code* code = code_at(a.whole());
    if (!code) return nullptr;
    const int threads = (int)a.whole();
    const Attention c = attention_from(a);
    if (a.failed()) return nullptr;
    PyThreadState* state = PyEval_SaveThread();
    code->attend(c, threads < 1 ? 1 : threads);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

// gradients(code, threads, grad_out, its 3 strides, grad_lse, grad_q, grad_k, grad_v,
//           grad_bias or 0, its 4 strides, then what attention_from reads)
PyObject* gradients(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count);
    const Code* code = code_at(a.whole());
    if (!code) return nullptr;
    const int threads = (int)a.whole();
    Gradients g{};
    g.grad_out = a.address<char>(), g.grad_batch = a.whole(), g.grad_head = a.whole();
    g.grad_query = a.whole(), g.grad_lse = a.address<float>();
    g.grad_q = a.address<char>(), g.grad_k = a.address<char>(), g.grad_v = a.address<char>();
    g.grad_bias = a.address<float>(), g.bias_batch = a.whole(), g.bias_head = a.whole();
    g.bias_query = a.whole(), g.bias_key = a.whole();
    g.call = attention_from(a);
    if (a.failed()) return nullptr;
    if (g.call.count != 1 || g.call.pieces[0].pages || !g.call.lse) {
        PyErr_SetString(PyExc_ValueError, "gradients takes keys in one piece, and lse");
        return nullptr;
    }
    PyThreadState* state = PyEval_SaveThread();
    code->gradients(g, threads < 1 ? 1 : threads);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    {"codes", codes, METH_NOARGS, "[(name, runs here)] in the order of preference."},
    {"product", (PyCFunction)(void (*)())product, METH_FASTCALL, "Few rows of x times weights."},
    {"feed_forward", (PyCFunction)(void (*)())feed_forward, METH_FASTCALL, "A feed-forward network of few rows."},
    {"norm", (PyCFunction)(void (*)())norm, METH_FASTCALL, "RMS norm of rows."},
    {"rotate", (PyCFunction)(void (*)())rotate, METH_FASTCALL, "Rotary positions."},
    {"attend", (PyCFunction)(void (*)())attend, METH_FASTCALL, "Attention, forward."},
    {"gradients", (PyCFunction)(void (*)())gradients, METH_FASTCALL, "Attention, backward."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_native", nullptr, 0, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&kModule); }
