// The module's function for heads with a state: recurrence/recur.h computes it.
#pragma once

#include "arguments.h"
#include "interface.h"

namespace polyhead {

// x as rows [B, heads, T, size] of which `heads` are read; false: an exception is set.
inline bool head_rows_from(PyObject* x, const char* name, int64_t heads, View& v, HeadRows& rows) {
    if (!view_of(x, name, v)) return false;
    if (v.dims == 4 && v.kind <= kOfFloat16 && v.is_dense_from(3) && v.size[1] > 0 && heads % v.size[1] == 0) {
        rows = {v.at, heads / v.size[1], v.stride[0], v.stride[1], v.stride[2]};
        return true;
    }
    PyErr_Format(PyExc_ValueError, "%s must be [B, heads, T, size] of floating point, heads a divisor of the state's, its rows without gaps", name);
    return false;
}

// recur(...): the state [B, H, K, V] in place, out [B, H, T, V].
inline PyObject* recur(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::recur;
    const Arguments<A> a("recur", args, count);
    View state, q, k, v, decay, beta, real;
    if (!a.code || !view_of(a[A::state], "state", state)) return nullptr;
    if (state.dims != 4 || state.kind != kOfFloat32 || !state.is_dense_from(0))
        return wrong("state must be [B, H, K, V] float32, without gaps");
    Recurrence r{};
    const int64_t B = r.batch = state.size[0], H = r.heads = state.size[1];
    r.key_dim = state.size[2], r.value_dim = state.size[3];
    if (!head_rows_from(a[A::q], "q", H, q, r.q) || !head_rows_from(a[A::k], "k", H, k, r.k) ||
        !head_rows_from(a[A::v], "v", H, v, r.v) || !optional_view_of(a[A::decay], "decay", decay) ||
        !optional_view_of(a[A::beta], "beta", beta) || !optional_view_of(a[A::real], "real", real))
        return nullptr;
    const int64_t T = r.tokens = q.size[2];
    const auto matches = [&](const View& x) { return x.is(0, B) && x.is(2, T) && x.kind == q.kind; };
    if (!matches(q) || !matches(k) || !matches(v)) return wrong("q, k and v must share batch, tokens and dtype");
    if (!q.is(3, r.key_dim) || !k.is(3, r.key_dim) || !v.is(3, r.value_dim))
        return wrong("q and k must have the key size of the state, v its value size");
    r.dtype = (Dtype)q.kind;
    if (decay) {
        if (decay.dims != 4 || decay.kind != kOfFloat32 || !decay.is_or_one(0, B) || !decay.is(1, H) || !decay.is(2, T) ||
            !decay.is_or_one(3, r.key_dim) || !decay.is_dense_from(3))
            return wrong("decay must be [B or 1, H, T, 1 or K] float32, the last dimension without gaps");
        r.decay = (const float*)decay.at;
        r.decay_batch = decay.step(0), r.decay_head = decay.step(1), r.decay_token = decay.step(2);
        r.decay_by_key = decay.size[3] > 1;
    }
    if (beta) {
        if (beta.dims != 3 || beta.kind != kOfFloat32 || !beta.is(0, B) || !beta.is(1, H) || !beta.is(2, T))
            return wrong("beta must be [B, H, T] float32");
        r.beta = (const float*)beta.at;
        r.beta_batch = beta.stride[0], r.beta_head = beta.stride[1], r.beta_token = beta.stride[2];
    }
    if (real) {
        if (real.dims != 2 || real.kind != kOfBool || !real.is(0, B) || !real.is(1, T)) return wrong("real must be [B, T] bool");
        r.real = (const uint8_t*)real.at, r.real_batch = real.stride[0], r.real_token = real.stride[1];
    }
    r.scale = a.as_float(A::scale);
    r.delta = a.as_int64(A::delta) != 0;
    r.state = (float*)state.at;
    r.out = output_ptr(a[A::out], "out", B * H * T * r.value_dim, q.kind);
    if (PyErr_Occurred()) return nullptr;
    const int64_t numbers = a.threads * kScratchRows * r.key_dim;
    const Scratch scratch(numbers * sizeof(float));
    if (scratch) r.scratch = scratch.arena().take<float>(numbers);
    return run(scratch, [&] { a.code->recur(r, a.threads); });
}

}  // namespace polyhead
