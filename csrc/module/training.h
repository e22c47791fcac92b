// The module's functions for layers in training: training/elementwise.h computes them.
#pragma once

#include "attention.h"
#include "networks.h"

namespace polyhead {

// Numbers of floating point without gaps, and how many.
inline bool elements_of(PyObject* x, const char* name, View& v, int64_t& count) {
    if (!view_of(x, name, v)) return false;
    count = v.numbers();
    if (v.kind <= kOfFloat16 && v.is_dense_from(0)) return true;
    PyErr_Format(PyExc_ValueError, "%s must be of floating point, without gaps", name);
    return false;
}

// As many of the same dtype.
inline const char* alike(PyObject* x, const char* name, const View& first, int64_t count) {
    View v;
    int64_t number;
    if (!elements_of(x, name, v, number)) return nullptr;
    if (number == count && v.kind == first.kind) return v.at;
    PyErr_Format(PyExc_ValueError, "%s must be as many numbers of the same dtype as the first", name);
    return nullptr;
}

// Reads gate and up; an exception may be set.
inline Gated gated_from(PyObject* gate, PyObject* up, int64_t activation) {
    View v;
    Gated g{};
    if (!elements_of(gate, "gate", v, g.count)) return g;
    g.dtype = (Dtype)v.kind, g.gate = v.at, g.up = alike(up, "up", v, g.count);
    g.activation = activation_from(activation);
    if (g.activation >= kRelu2) wrong("an activation without a derivative here");
    return g;
}

inline PyObject* gated(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::gated;
    const Arguments<A> a("gated", args, count);
    if (!a.code) return nullptr;
    Gated g = gated_from(a[A::gate], a[A::up], a.as_int64(A::activation));
    if (PyErr_Occurred()) return nullptr;
    g.y = output_ptr(a[A::y], "y", g.count, (int)g.dtype);
    return run([&] { a.code->gated(g, a.threads); });
}

inline PyObject* gated_gradients(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::gated_gradients;
    const Arguments<A> a("gated_gradients", args, count);
    if (!a.code) return nullptr;
    Gated g = gated_from(a[A::gate], a[A::up], a.as_int64(A::activation));
    if (PyErr_Occurred()) return nullptr;
    View of_gate;
    of_gate.kind = (int)g.dtype;
    g.grad = alike(a[A::grad], "grad", of_gate, g.count);
    if (PyErr_Occurred()) return nullptr;
    g.grad_gate = output_ptr(a[A::grad_gate], "grad_gate", g.count, (int)g.dtype);
    g.grad_up = output_ptr(a[A::grad_up], "grad_up", g.count, (int)g.dtype);
    return run([&] { a.code->gated(g, a.threads); });
}

inline PyObject* dropped(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::dropped;
    const Arguments<A> a("dropped", args, count);
    View x, plus;
    Elements e{};
    if (!a.code || !elements_of(a[A::x], "x", x, e.count) || !dropout_from(a[A::dropout], e.dropout)) return nullptr;
    e.dtype = (Dtype)x.kind, e.x = x.at;
    if (a[A::plus] != Py_None) {
        int64_t number;
        if (!elements_of(a[A::plus], "plus", plus, number)) return nullptr;
        e.plus = plus.at, e.fp32_plus = plus.kind != x.kind;
        if (number != e.count || (e.fp32_plus && plus.kind != kOfFloat32))
            return wrong("plus must be as many numbers as x, of its dtype or float32");
    }
    e.y = output_ptr(a[A::y], "y", e.count, e.fp32_plus ? (int)kOfFloat32 : x.kind);
    return run([&] { a.code->dropped(e, a.threads); });
}

inline PyObject* norm_gradients(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::norm_gradients;
    const Arguments<A> a("norm_gradients", args, count);
    View x;
    NormWeight n{};
    if (!a.code || !rows_of(a[A::x], x) || !norm_from(a[A::norm], "norm", x.kind, x.size[1], n)) return nullptr;
    if (n.centred || n.heads > 1) return wrong("gradients of norms that are centred, or of every head, are torch's");
    const int64_t rows = x.size[0], dim = x.size[1];
    NormGradients g{};
    g.norm = Norm{(Dtype)x.kind, x.at, rows, dim, x.stride[0], n.weight, n.eps, n.offset, nullptr, nullptr, false, 1};
    g.grad = alike(a[A::grad], "grad", x, rows * dim);
    if (PyErr_Occurred()) return nullptr;
    g.grad_x = output_ptr(a[A::grad_x], "grad_x", rows * dim, x.kind);
    g.grad_weight = (float*)output_ptr(a[A::grad_weight], "grad_weight", dim, kOfFloat32);
    const int64_t numbers = norm_splits(rows) * dim;
    const Scratch scratch(numbers * sizeof(float));
    g.scratch = scratch.arena().take<float>(numbers);
    return run(scratch, [&] {
        __builtin_memset(g.scratch, 0, numbers * sizeof(float));
        a.code->norm_gradients(g, a.threads);
    });
}

}  // namespace polyhead
