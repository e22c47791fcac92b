// The calls of step.h: what changes from step to step.

#include "layer_calls.h"

// The keys and values [first, first + length) that a cache holds, the last of them still to be written.
bool held_from(PyObject* list, Step& s) {
    const int64_t pieces = PyList_Check(list) ? PyList_Size(list) : 0;
    if (pieces < 1 || pieces > 2) return wrong("held must be a list of one or two tuples");
    for (; s.pieces < pieces; ++s.pieces) {
        PyObject* tuple = PyList_GetItem(list, s.pieces);
        const Fields<Group_Held> f(tuple, "held");
        View k, v;
        if (!f || !view_of(f[Group_Held::k], "held", k) || !optional_view_of(f[Group_Held::v], "held", v)) return false;
        const int64_t first = f.whole(Group_Held::first), length = f.whole(Group_Held::length);
        if (PyErr_Occurred()) return false;
        auto fit = [&](const View& held, int64_t width) {
            return held.dims == 4 && held.kind == (int)s.dtype && held.is(0, s.batch) && held.is(1, s.kv_heads) && length >= 1 &&
                   first >= 0 && first <= held.size[2] - length && held.is(3, width) && held.is_dense_from(3);
        };
        if (!fit(k, s.key_dim) || (s.latent.rank ? (bool)v : !fit(v, s.value_dim))) return wrong("step: sizes that do not go together");
        Piece& p = s.cache[s.pieces];
        const int64_t size = kItemSize[k.kind];
        p.k = k.at + first * k.stride[2] * size, p.k_batch = k.stride[0], p.k_head = k.stride[1], p.k_token = k.stride[2];
        p.v = p.k, p.v_batch = p.k_batch, p.v_head = p.k_head, p.v_token = p.k_token;  // the first columns of a latent
        if (v) p.v = v.at + first * v.stride[2] * size, p.v_batch = v.stride[0], p.v_head = v.stride[1], p.v_token = v.stride[2];
        p.length = length;
    }
    return true;
}

// The keys and values of the context, whose rows may each serve several rows of x. Without them the step
// ends before the attention to them.
bool memory_from(PyObject* tuple, Step& s) {
    CrossHeads& c = s.cross;
    if (tuple == Py_None) {
        if (c.q.weight) s.network = Network{}, s.experts = nullptr;
        return true;
    }
    const Fields<Group_Held> f(tuple, "memory");
    View k, v;
    if (!f || !view_of(f[Group_Held::k], "memory", k) || !view_of(f[Group_Held::v], "memory", v)) return false;
    const int64_t first = f.whole(Group_Held::first), length = f.whole(Group_Held::length);
    if (PyErr_Occurred()) return false;
    auto fit = [&](const View& held, int64_t width) {
        return held.dims == 4 && held.kind == (int)s.dtype && held.size[0] >= 1 && s.batch % held.size[0] == 0 &&
               held.is(1, c.kv_heads) && length >= 1 && first >= 0 && first <= held.size[2] - length && held.is(3, width) &&
               held.is_dense_from(3);
    };
    if (!c.q.weight || !fit(k, c.key_dim) || !fit(v, c.value_dim) || !v.is(0, k.size[0]))
        return wrong("memory: sizes that do not go together");
    Piece& p = c.memory;
    const int64_t size = kItemSize[k.kind];
    p.k = k.at + first * k.stride[2] * size, p.k_batch = k.stride[0], p.k_head = k.stride[1], p.k_token = k.stride[2];
    p.v = v.at + first * v.stride[2] * size, p.v_batch = v.stride[0], p.v_head = v.stride[1], p.v_token = v.stride[2];
    p.length = length, c.shared = s.batch / k.size[0];
    return true;
}

bool distances_from(PyObject* tensor, Step& s) {
    if (tensor == Py_None) return true;
    View view;
    if (!view_of(tensor, "by_distance", view)) return false;
    if (view.kind != kOfFloat32 || view.dims != 2 || !view.is(0, s.heads) || view.size[1] % 2 == 0 || !view.is_dense_from(0) || s.slopes)
        return wrong("by_distance: sizes that do not go together");
    s.by_distance = (const float*)view.at, s.farthest = view.size[1] / 2;
    return true;
}

// Looks at the chosen experts, and at no others.
class Asking : public AskExperts {
  public:
    Asking(const LayerData& data, Unlocked& unlocked) : AskExperts{ask}, data_(data), unlocked_(unlocked) {}

  private:
    static bool ask(AskExperts& asked, const int64_t* chosen, int64_t count) {
        const Asking& self = static_cast<Asking&>(asked);
        return self.unlocked_.locked([&] {
            for (int64_t i = 0; i < count; ++i)
                if (!is_as_it_was(self.data_.guards[chosen[i]])) return false;
            return true;
        });
    }
    const LayerData& data_;
    Unlocked& unlocked_;
};

// step(...) -> the last part that was computed, of layers/described.py: 0 where the layer is no longer as it was
// described, and less than the network where an expert is not.
PyObject* step(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = Call_step;
    const Arguments<A> a("step", args, count);
    if (!a.code) return nullptr;
    if (Py_TYPE(a[A::layer]) != layer_type) return PyErr_SetString(PyExc_TypeError, "layer must be what layer() returned"), nullptr;
    const LayerObject* layer = (const LayerObject*)a[A::layer];
    if (!layer->data || !is_as_it_was(layer->data->guard)) return PyLong_FromLong(0);
    Step s = layer->data->step;
    View x, cos, sin;
    if (!view_of(a[A::x], "x", x) || !pair_of(a[A::rotation], "rotation", cos, sin)) return nullptr;
    if (x.dims != 3 || x.kind != (int)s.dtype || !x.is(1, 1) || !x.is_dense_from(0) || x.size[0] < 1 || x.size[0] > kMostRows ||
        !x.is(2, s.embed_dim)) {
        PyErr_Format(PyExc_ValueError, "step takes one token of up to %d batch rows, of the layer's size and dtype", kMostRows);
        return nullptr;
    }
    s.batch = x.size[0], s.x = x.at;
    auto is_row = [&](const View& table) {
        int64_t numbers = 1;
        for (int d = 0; d < table.dims; ++d) numbers *= table.size[d];
        return table.kind == x.kind && numbers == s.rotary && table.is_dense_from(0);
    };
    if (s.rotary ? !is_row(cos) || !is_row(sin) : (bool)cos) return wrong("rotation: sizes that do not go together");
    s.cos = cos.at, s.sin = sin.at;
    s.position = a.whole(A::position);
    if (PyErr_Occurred() || !held_from(a[A::held], s) || !distances_from(a[A::by_distance], s) || !memory_from(a[A::memory], s))
        return nullptr;
    s.y = made_for(a[A::y], "y", s.batch * s.embed_dim, x.kind);
    const Room<char> room(step_bytes(s));
    if (PyErr_Occurred()) return nullptr;
    if (!(s.room = room.get())) return PyErr_NoMemory();
    Outcome outcome;
    {
        Unlocked unlocked;
        Asking asking(*layer->data, unlocked);
        s.ask = &asking;
        outcome = a.code->step(s, a.threads);
    }
    if (outcome == Outcome::no_memory) return PyErr_NoMemory();
    const bool whole = outcome == Outcome::done && (s.network.up.weight || s.experts);
    return PyLong_FromLong(whole ? 3 : s.cross.memory.length ? 2 : 1);
}

// Products for each head of x [rows, H, in] with weights [H, in, out] (summed) or [H, out, in].
PyObject* head_product(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = Call_head_product;
    const Arguments<A> a("head_product", args, count);
    View x, weight;
    if (!a.code || !view_of(a[A::x], "x", x) || !view_of(a[A::weight], "weight", weight)) return nullptr;
    HeadProduct p{};
    p.summed = a.whole(A::summed) != 0;
    if (PyErr_Occurred()) return nullptr;
    if (x.dims != 3 || x.kind > kOfFloat16 || !x.is_dense_from(2) || x.size[0] < 1 || x.size[0] > kMostRows || weight.dims != 3 ||
        weight.kind != x.kind || !weight.is_dense_from(1) || !weight.is(0, x.size[1]) || !weight.is(p.summed ? 1 : 2, x.size[2])) {
        PyErr_Format(PyExc_ValueError, "x must be [rows, H, in] of up to %d rows and weight [H, in, out] or [H, out, in] of its dtype", kMostRows);
        return nullptr;
    }
    p.dtype = (Dtype)x.kind, p.rows = x.size[0], p.heads = x.size[1], p.in_features = x.size[2];
    p.out_features = weight.size[p.summed ? 2 : 1];
    p.x = x.at, p.x_row = x.stride[0], p.x_head = x.stride[1], p.weight = weight.at, p.weight_head = weight.stride[0];
    p.y = made_for(a[A::y], "y", p.rows * p.heads * p.out_features, x.kind);
    p.y_row = p.heads * p.out_features, p.y_head = p.out_features;
    if (PyErr_Occurred()) return nullptr;
    const Room<float> wide(p.rows * p.heads * p.in_features);
    if (!(p.wide = wide.get())) return PyErr_NoMemory();
    const Unlocked unlocked;
    a.code->head_product(p, a.threads);
    Py_RETURN_NONE;
}
