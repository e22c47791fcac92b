// Feed-forward networks and the choice of experts: their tuples read, and their calls.
#pragma once

#include "products.h"

#include <initializer_list>

namespace polyhead {

inline Activation activation_from(int64_t number) {
    if (number < 0 || number > kXielu) wrong("an unknown activation");
    return (Activation)number;
}

// A network of rows of `inputs` numbers; of its output only that `down` gives it.
inline bool network_from(PyObject* tuple, const char* name, int kind, int64_t inputs, Network& n) {
    using F = tuples::Network;
    const Fields<F> f(tuple, name);
    if (!f) return false;
    n.activation = activation_from(f.as_int64(F::activation));
    n.clamp = f.as_float(F::clamp), n.offset = f.as_float(F::offset);
    View above, below;
    if (PyErr_Occurred() || !pair_of(f[F::alphas], "alphas", above, below)) return false;
    auto is_number = [&](const View& v) { return v.kind == kind && v.is_vector(1); };
    if (n.activation == kXielu ? !above || !is_number(above) || !is_number(below) : (bool)above)
        return wrong("alphas must be two tensors [1] of the weights' dtype, for xielu");
    n.alpha_p = above.at, n.alpha_n = below.at;
    if (PyErr_Occurred() || !weight_from(f[F::up], "up", kind, inputs, n.up) ||
        !weight_from(f[F::down], "down", kind, n.up.out_features, n.down) ||
        (f[F::gate] != Py_None && !weight_from(f[F::gate], "gate", kind, inputs, n.gate)))
        return false;
    if (n.gate.weight && n.gate.out_features != n.up.out_features) return wrong("gate and up must be alike");
    return n.clamp >= 0 || wrong("clamp must be at least 0");
}

inline bool routing_from(PyObject* tuple, int kind, int64_t inputs, Routing& r) {
    using F = tuples::Routing;
    const Fields<F> f(tuple, "routing");
    View bias;
    if (!f || !weight_from(f[F::router], "router", kind, inputs, r.router) ||
        !optional_view_of(f[F::choice_bias], "choice_bias", bias) ||
        (f[F::shared_gate] != Py_None && !weight_from(f[F::shared_gate], "shared_gate", kind, inputs, r.shared_gate)))
        return false;
    const int64_t X = r.router.out_features, scoring = f.as_int64(F::scoring);
    r.visited = f.as_int64(F::visited), r.scoring = (Scoring)scoring, r.normalise = f[F::normalise] == Py_True;
    r.scale = f.as_float(F::scale), r.jitter = f.as_float(F::jitter), r.best_two = f[F::best_two] == Py_True;
    r.groups = f.as_int64(F::groups), r.groups_per_token = f.as_int64(F::groups_per_token);
    r.choice_bias = bias.at, r.fp32_bias = bias && bias.kind == kOfFloat32;
    if (PyErr_Occurred()) return false;
    if (X < 1 || X > 1 << 20 || scoring < 0 || scoring > kSparseMixer || r.groups < 1 || X % r.groups || r.groups_per_token < 1 ||
        r.groups_per_token > r.groups || r.visited < 1 || r.visited > X / r.groups * r.groups_per_token ||
        (r.best_two && X / r.groups < 2) || (r.shared_gate.weight && r.shared_gate.out_features != 1) ||
        (bias && (!bias.is_vector(X) || (bias.kind != kOfFloat32 && bias.kind != kind))))
        return wrong("routing: numbers that do not go together");
    return true;
}

inline PyObject* feed_forward(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::feed_forward;
    const Arguments<A> a("feed_forward", args, count);
    View x;
    if (!a.code || !rows_of(a[A::x], x)) return nullptr;
    GemmNetwork f{};
    Gemm& p = f.in;
    p.dtype = (Dtype)x.kind, p.x = x.at, p.x_stride = x.stride[0], p.rows = x.size[0], p.in_features = x.size[1];
    if (p.rows < 1) return wrong("feed_forward takes rows: got none");
    if (!network_from(a[A::network], "network", x.kind, p.in_features, f.network)) return nullptr;
    p.y_stride = f.network.down.out_features;
    p.y = output_ptr(a[A::y], "y", p.rows * p.y_stride, x.kind);
    if (PyErr_Occurred()) return nullptr;
    const Network& n = f.network;
    WeightKinds kinds;
    for (const LinearWeight* each : {&n.gate, &n.up, &n.down}) kinds.add(*each);
    const bool gemv = needs_gemv(p, kinds, a[A::batch_invariant] == Py_True);
    p.scratch = scratch_of(f);
    const int64_t numbers = gemv ? kMaxGemvRows * (p.in_features + n.up.out_features) : p.scratch.numbers(a.threads);
    const Scratch scratch(numbers * sizeof(float));
    p.scratch.at = scratch.arena().take<float>(numbers);
    return run(scratch, [&] {
        if (!gemv) return a.code->gemm_network(f, a.threads);
        float* fp32 = p.scratch.at;
        in_gemv_batches(p, [&](int64_t rows, const char* x, char* y) {
            a.code->widen(p.dtype, x, p.x_stride, rows, p.in_features, fp32);
            a.code->feed_forward(FeedForward{p.dtype, fp32, rows, p.in_features, n, fp32 + rows * p.in_features, y}, a.threads);
        });
    });
}

// Which experts rows of x visit, and how much each counts.
inline PyObject* route(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::route;
    const Arguments<A> a("route", args, count);
    View x;
    if (!a.code || !rows_of(a[A::x], x)) return nullptr;
    Route r{};
    r.dtype = (Dtype)x.kind, r.rows = x.size[0], r.in_features = x.size[1];
    if (r.rows < 1 || r.rows > kMaxGemvRows) {
        PyErr_Format(PyExc_ValueError, "route takes up to %d rows", kMaxGemvRows);
        return nullptr;
    }
    if (!routing_from(a[A::routing], x.kind, r.in_features, r.by)) return nullptr;
    const int64_t each = r.by.visited + (r.by.shared_gate.weight ? 1 : 0);
    r.weights = (float*)output_ptr(a[A::weights], "weights", r.rows * each, kOfFloat32);
    r.chosen = (int64_t*)output_ptr(a[A::chosen], "chosen", r.rows * r.by.visited, kOfInt64);
    if (PyErr_Occurred()) return nullptr;
    const int64_t bytes = up_to(r.rows * r.in_features * sizeof(float), 64);
    const Scratch scratch(bytes + route_bytes(r.by, r.rows));
    r.arena = scratch.arena();
    float* fp32 = r.arena.take<float>(r.rows * r.in_features);
    r.x = fp32;
    return run(scratch, [&] {
        a.code->widen(r.dtype, x.at, x.stride[0], r.rows, r.in_features, fp32);
        a.code->route(r, a.threads);
    });
}

}  // namespace polyhead
