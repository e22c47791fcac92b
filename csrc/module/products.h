// Products with weights, weights unpacked, norms and rotations.
#pragma once

#include "weights.h"

namespace polyhead {

// Calls of(rows, x, y) for up to kMaxGemvRows rows at a time.
template <class Of> void in_gemv_batches(const Gemm& p, const Of& of) {
    const int64_t size = p.dtype == kFloat32 ? 4 : 2;
    for (int64_t m = 0; m < p.rows; m += kMaxGemvRows)
        of(p.rows - m < kMaxGemvRows ? p.rows - m : kMaxGemvRows, (const char*)p.x + m * p.x_stride * size, (char*)p.y + m * p.y_stride * size);
}

// Whether products are a GEMV: of few rows, of weights of which only some take x in 8 bits, and where rows get the bits that
// they have alone only among few: bfloat16 that meets blocks beside numbers, of which few rows multiply blocks in float32
// and numbers in pairs. Otherwise GEMM multiplies all as GEMV does, or all in pairs or by tiles.
inline bool needs_gemv(Gemm& p, const WeightKinds& kinds, bool batch_invariant) {
    p.pairs = !batch_invariant || !kinds.blocks, p.any_order = !batch_invariant;
    return p.rows <= kMaxGemvRows || (kinds.int8 && kinds.not_int8) || (batch_invariant && kinds.blocks && kinds.numbers && p.dtype == kBFloat16);
}

// GEMV of a few rows at a time, which are widened to float32 in scratch memory.
inline void gemv_in_turns(const Code& code, const Gemm& p, int threads) {
    float* fp32 = p.scratch.at;
    in_gemv_batches(p, [&](int64_t rows, const char* x, char* y) {
        code.widen(p.dtype, x, p.x_stride, rows, p.in_features, fp32);
        Gemv part{p.dtype, fp32, rows, p.in_features, {}, p.count, y, p.y_stride};
        for (int i = 0; i < p.count; ++i) part.weights[i] = p.weights[i];
        code.gemv(part, threads);
    });
}

inline PyObject* product(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::product;
    const Arguments<A> a("product", args, count);
    View x;
    if (!a.code || !rows_of(a[A::x], x)) return nullptr;
    PyObject* weights = a[A::weights];
    const Py_ssize_t number = PySequence_Size(weights);
    if (x.size[0] < 1 || number < 1 || number > kMaxWeights) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "product takes 1 to %d weights, and rows", kMaxWeights);
        return nullptr;
    }
    Gemm p{};
    p.dtype = (Dtype)x.kind, p.x = x.at, p.x_stride = x.stride[0], p.rows = x.size[0], p.in_features = x.size[1];
    for (; p.count < number; ++p.count) {
        PyObject* pair = PySequence_GetItem(weights, p.count);
        const bool good = weight_from(pair, "a weight", x.kind, p.in_features, p.weights[p.count]);
        Py_XDECREF(pair);  // the caller's sequence holds it
        if (!good) return nullptr;
        p.y_stride += p.weights[p.count].out_features;
    }
    p.y = output_ptr(a[A::y], "y", p.rows * p.y_stride, x.kind);
    if (PyErr_Occurred()) return nullptr;
    WeightKinds kinds;
    for (int i = 0; i < p.count; ++i) kinds.add(p.weights[i]);
    const bool gemv = needs_gemv(p, kinds, a[A::batch_invariant] == Py_True);
    p.scratch = scratch_of(p);
    const int64_t numbers = gemv ? kMaxGemvRows * p.in_features : p.scratch.numbers(a.threads);
    const Scratch scratch(numbers * sizeof(float));
    p.scratch.at = scratch.arena().take<float>(numbers);
    return run(scratch, [&] { gemv ? gemv_in_turns(*a.code, p, a.threads) : a.code->gemm(p, a.threads); });
}

// y [rows, columns] = a [rows, K] · b [K, columns], or what y holds plus that; each of a and b dense along either dimension,
// b without gaps.
inline PyObject* matmul(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::matmul;
    const Arguments<A> a("matmul", args, count);
    View left, right;
    if (!a.code || !view_of(a[A::a], "a", left) || !view_of(a[A::b], "b", right)) return nullptr;
    auto flipped = [](View v) {
        std::swap(v.size[0], v.size[1]), std::swap(v.stride[0], v.stride[1]);
        return v;
    };
    if (left.dims != 2 || left.kind > kOfFloat16 || !(left.is_dense_from(1) || flipped(left).is_dense_from(1)) || left.size[0] <= kMaxStepRows) {
        PyErr_Format(PyExc_ValueError, "a must be more than %d rows of floating point, without gaps between its rows or its columns", kMaxStepRows);
        return nullptr;
    }
    if (right.dims != 2 || right.kind != left.kind || right.size[0] != left.size[1] || !(right.is_dense_from(0) || flipped(right).is_dense_from(0)))
        return wrong("b must be [columns of a, N] in the dtype of a, without gaps");
    Gemm p{};
    p.dtype = (Dtype)left.kind, p.pairs = p.any_order = true, p.add = a[A::add] == Py_True;
    p.x_transposed = !left.is_dense_from(1), p.x = left.at, p.x_stride = left.stride[p.x_transposed ? 1 : 0];
    p.rows = left.size[0], p.in_features = left.size[1], p.y_stride = right.size[1], p.count = 1;
    p.weights[0] = LinearWeight{right.at, nullptr, right.size[1], 0, 0, false, {}, right.is_dense_from(0)};
    View y;
    if (!view_of(a[A::y], "y", y)) return nullptr;
    if (y.dims != 2 || y.kind != left.kind || !y.is(0, p.rows) || !y.is(1, p.y_stride) || !y.is_dense_from(0))
        return wrong("y must be [rows of a, columns of b] in their dtype, without gaps");
    p.y = (void*)y.at;
    p.scratch = scratch_of(p);
    const int64_t panel = panel_numbers(kMostOuterPart);
    if (p.scratch.panel_numbers > panel) p.scratch.panel_numbers = panel;
    const int64_t numbers = p.scratch.numbers(a.threads);
    const Scratch scratch(numbers * sizeof(float));
    p.scratch.at = scratch.arena().take<float>(numbers);
    return run(scratch, [&] { a.code->gemm(p, a.threads); });
}

// The numbers of rows of blocks, in the dtype of y.
inline PyObject* unpack(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::unpack;
    const Arguments<A> a("unpack", args, count);
    View y;
    if (!a.code || !view_of(a[A::y], "y", y)) return nullptr;
    if (y.dims != 2 || y.kind > kOfFloat16 || !y.is_dense_from(0)) return wrong("y must be floating-point [rows, numbers], without gaps");
    Unpacked u{(Dtype)y.kind, {}, y.size[1], y.at};
    if (!blocks_from(a[A::blocks], y.size[0], u.numbers, u.from)) return nullptr;
    return run([&] { a.code->unpack(u, a.threads); });
}

inline PyObject* norm(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::norm;
    const Arguments<A> a("norm", args, count);
    View x;
    NormWeight n{};
    if (!a.code || !rows_of(a[A::x], x) || !norm_from(a[A::weight], "norm", x.kind, x.size[1], n)) return nullptr;
    void* y = output_ptr(a[A::y], "y", x.size[0] * x.size[1], x.kind);
    return run([&] { a.code->norm(Norm{(Dtype)x.kind, x.at, x.size[0], x.size[1], x.stride[0], n.weight, n.eps, n.offset, y, n.bias, n.centred, n.heads}, a.threads); });
}

inline PyObject* rotate(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::rotate;
    const Arguments<A> a("rotate", args, count);
    View x, cos, sin;
    if (!a.code || !view_of(a[A::x], "x", x) || !view_of(a[A::cos], "cos", cos) || !view_of(a[A::sin], "sin", sin))
        return nullptr;
    auto is_table = [&](const View& v) { return v.kind == x.kind && v.is_dense_from(0) && v.numbers() == x.size[1] * x.size[3]; };
    if (x.dims != 4 || x.kind > kOfFloat16 || !x.is_dense_from(3) || !is_table(cos) || !is_table(sin))
        return wrong("x must be [B, T, N, D], its last dimension without gaps, and cos and sin T · D numbers of its dtype");
    Rotation r{};
    r.dtype = (Dtype)x.kind, r.x = x.at;
    r.batch = x.size[0], r.tokens = x.size[1], r.heads = x.size[2], r.dim = x.size[3];
    r.x_batch = x.stride[0], r.x_token = x.stride[1], r.x_head = x.stride[2];
    r.cos = cos.at, r.sin = sin.at;
    r.y = output_ptr(a[A::y], "y", r.batch * r.tokens * r.heads * r.dim, x.kind);
    return run([&] { a.code->rotate(r, a.threads); });
}

// Products for each head of x [rows, H, in] with weights [H, in, out] (summed) or [H, out, in].
inline PyObject* head_product(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::head_product;
    const Arguments<A> a("head_product", args, count);
    View x, weight;
    if (!a.code || !view_of(a[A::x], "x", x) || !view_of(a[A::weight], "weight", weight)) return nullptr;
    HeadProduct p{};
    p.summed = a.as_int64(A::summed) != 0;
    if (PyErr_Occurred()) return nullptr;
    if (x.dims != 3 || x.kind > kOfFloat16 || !x.is_dense_from(2) || x.size[0] < 1 || x.size[0] > kMaxGemvRows || weight.dims != 3 ||
        weight.kind != x.kind || !weight.is_dense_from(1) || !weight.is(0, x.size[1]) || !weight.is(p.summed ? 1 : 2, x.size[2])) {
        PyErr_Format(PyExc_ValueError, "x must be [rows, H, in] of up to %d rows and weight [H, in, out] or [H, out, in] of its dtype", kMaxGemvRows);
        return nullptr;
    }
    p.dtype = (Dtype)x.kind, p.rows = x.size[0], p.heads = x.size[1], p.in_features = x.size[2];
    p.out_features = weight.size[p.summed ? 2 : 1];
    p.x = x.at, p.x_row = x.stride[0], p.x_head = x.stride[1], p.weight = weight.at, p.weight_head = weight.stride[0];
    p.y = output_ptr(a[A::y], "y", p.rows * p.heads * p.out_features, x.kind);
    p.y_row = p.heads * p.out_features, p.y_head = p.out_features;
    if (PyErr_Occurred()) return nullptr;
    const int64_t numbers = p.rows * p.heads * p.in_features;
    const Scratch scratch(numbers * sizeof(float));
    p.fp32 = scratch.arena().take<float>(numbers);
    return run(scratch, [&] { a.code->head_product(p, a.threads); });
}

}  // namespace polyhead
