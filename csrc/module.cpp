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
    &avx512_amx_code, &avx512_bf16_code, &avx512_code, &avx2_code,
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
// then for every piece: k, 3 strides, v, 3 strides, pages, their stride, page length, skipped, length, position, positions, their stride, group
// and, unless group is 0: k bits, v bits, columns of a shared scale, and of k and of v: scale, zero, 3 strides
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
        Coding& g = p.coding;
        if ((g.group = a.whole())) {
            g.k_bits = a.whole(), g.v_bits = a.whole(), g.v_share = a.whole();
            g.k_scale = a.address<uint16_t>(), g.k_zero = a.address<uint16_t>();
            g.k_batch = a.whole(), g.k_head = a.whole(), g.k_unit = a.whole();
            g.v_scale = a.address<uint16_t>(), g.v_zero = a.address<uint16_t>();
            g.v_batch = a.whole(), g.v_head = a.whole(), g.v_unit = a.whole();
        }
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
    if (g.call.count != 1 || g.call.pieces[0].pages || g.call.pieces[0].coding.group || !g.call.lse) {
        PyErr_SetString(PyExc_ValueError, "gradients takes keys in one piece, and lse");
        return nullptr;
    }
    PyThreadState* state = PyEval_SaveThread();
    code->gradients(g, threads < 1 ? 1 : threads);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

// tile_sums(code, threads, weights, batch, rows, columns, first, entropy or 0, squares or 0,
//           most or 0, most_keys, row_batch, top or 0, top_keys, top_count, received or 0, its stride)
PyObject* tile_sums(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count);
    const Code* code = code_at(a.whole());
    if (!code) return nullptr;
    const int threads = (int)a.whole();
    Tile t{};
    t.weights = a.address<float>(), t.batch = a.whole(), t.rows = a.whole(), t.columns = a.whole();
    t.first = a.whole();
    t.entropy = a.address<float>(), t.squares = a.address<float>();
    t.most = a.address<float>(), t.most_keys = a.address<int64_t>(), t.row_batch = a.whole();
    t.top = a.address<float>(), t.top_keys = a.address<int64_t>(), t.top_count = a.whole();
    t.received = a.address<float>(), t.received_batch = a.whole();
    if (a.failed()) return nullptr;
    PyThreadState* state = PyEval_SaveThread();
    std::vector<float> room(t.received ? t.batch * ((t.rows + kTileRun - 1) / kTileRun) * t.columns : 0);
    t.room = room.data();
    code->tile_sums(t, threads < 1 ? 1 : threads);
    PyEval_RestoreThread(state);
    Py_RETURN_NONE;
}

NormWeight norm_from(Arguments& a) {
    NormWeight n{};
    n.weight = a.address<void>(), n.eps = a.real(), n.offset = a.real();
    return n;
}

Factor factor_from(Arguments& a) {
    Factor f{};
    f.weight = a.address<void>(), f.bias = a.address<void>(), f.out_features = a.whole();
    return f;
}

// step(code, threads, dtype, batch, embed_dim, heads, kv_heads, key_dim, value_dim, scale, softcap,
//      activation, x, y, cos, sin, k held, its 3 strides, v held, its 3 strides, length,
//      then attention_norm, q, k, v, q_norm, k_norm, out, attention_out_norm, feed_forward_norm,
//      gate, up, down, feed_forward_out_norm: a norm is weight or 0, eps, offset; the others are
//      weight or 0, bias or 0, out_features)
PyObject* step(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments a(args, count);
    const Code* code = code_at(a.whole());
    if (!code) return nullptr;
    const int threads = (int)a.whole();
    Step s{};
    s.dtype = (Dtype)a.whole(), s.batch = a.whole(), s.embed_dim = a.whole();
    s.heads = a.whole(), s.kv_heads = a.whole(), s.key_dim = a.whole(), s.value_dim = a.whole();
    s.scale = a.real(), s.softcap = a.real(), s.activation = (Activation)a.whole();
    s.x = a.address<void>(), s.y = a.address<void>(), s.cos = a.address<void>(), s.sin = a.address<void>();
    Piece& p = s.cache;
    p.k = a.address<char>(), p.k_batch = a.whole(), p.k_head = a.whole(), p.k_token = a.whole();
    p.v = a.address<char>(), p.v_batch = a.whole(), p.v_head = a.whole(), p.v_token = a.whole();
    p.length = a.whole();
    s.attention_norm = norm_from(a);
    for (Factor& f : s.qkv) f = factor_from(a);
    s.q_norm = norm_from(a), s.k_norm = norm_from(a), s.out = factor_from(a);
    s.attention_out_norm = norm_from(a), s.feed_forward_norm = norm_from(a);
    s.gate = factor_from(a), s.up = factor_from(a), s.down = factor_from(a);
    s.feed_forward_out_norm = norm_from(a);
    if (a.failed()) return nullptr;
    if (a.more() || s.batch < 1 || s.batch > kMostRows || p.length < 1 || s.kv_heads < 1) {
        PyErr_Format(PyExc_ValueError, "step takes one token of up to %d batch rows", kMostRows);
        return nullptr;
    }
    PyThreadState* state = PyEval_SaveThread();
    std::vector<char> room(step_bytes(s) + 64);
    s.room = room.data() + 64 - (uintptr_t)room.data() % 64;
    code->step(s, threads < 1 ? 1 : threads);
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
    {"tile_sums", (PyCFunction)(void (*)())tile_sums, METH_FASTCALL, "Statistics of attention weights."},
    {"step", (PyCFunction)(void (*)())step, METH_FASTCALL, "One token of every batch row through a layer."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_native", nullptr, 0, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&kModule); }
