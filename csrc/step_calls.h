// A layer as data: what step.h computes with, found out once. It holds as long as the modules that it was
// read from hold the same objects (facts), and its weights lie where they lay.

// A tensor that is read by address in every step, as the gate found it.
struct Weight {
    PyObject* tensor;   // borrowed: of what keeps the layer's data
    PyObject* storage;  // weak: memory that nobody else wants any more is given back
    View view;
    int64_t bytes;      // that the storage must hold
};

// The attribute of that name is the value (a class is compared without asking); or, without a name, the
// dict has these keys with these objects, in this order.
struct Fact {
    PyObject *thing, *name, *value;
    PyObject** entries;
    Py_ssize_t count;
};

struct LayerData {
    Step step{};
    Weight weights[48];
    int weight_count = 0;
    Fact* facts = nullptr;
    Py_ssize_t fact_count = 0;
    ~LayerData() {
        for (int i = 0; i < weight_count; ++i) Py_XDECREF(weights[i].storage);
        for (Py_ssize_t i = 0; i < fact_count; ++i) free(facts[i].entries);
        free(facts);
    }
};

struct LayerObject {
    PyObject_HEAD
    LayerData* data;
    PyObject* kept;  // the tuples that the data was read from
};

PyTypeObject* layer_type;

int layer_traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((LayerObject*)self)->kept);
    return 0;
}

int layer_clear(PyObject* self) {
    LayerObject* layer = (LayerObject*)self;
    delete layer->data;  // before what it points to
    layer->data = nullptr;
    Py_CLEAR(layer->kept);
    return 0;
}

void layer_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    layer_clear(self);
    PyObject_GC_Del(self);
    Py_DECREF(type);
}

PyType_Slot kLayerSlots[] = {
    {Py_tp_traverse, (void*)layer_traverse}, {Py_tp_clear, (void*)layer_clear}, {Py_tp_dealloc, (void*)layer_dealloc}, {0, nullptr},
};
PyType_Spec kLayerSpec = {"polyhead.native._native.Layer", sizeof(LayerObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, kLayerSlots};

// False: an exception is set.
bool remember_weight(LayerData& data, PyObject* tensor, const char* name) {
    if (tensor == Py_None) return true;
    if (data.weight_count == sizeof data.weights / sizeof *data.weights) return wrong("a layer of more weights than there are");
    View view;
    if (!view_of(tensor, name, view)) return false;
    const int64_t offset = whole(call(torch_.storage_offset, tensor));
    PyObject* storage = call(torch_.storage, tensor);
    PyObject* weak = storage ? PyWeakref_NewRef(storage, nullptr) : nullptr;
    Py_XDECREF(storage);
    if (!weak || PyErr_Occurred()) return Py_XDECREF(weak), false;
    data.weights[data.weight_count++] = Weight{tensor, weak, view, reach_of(view, offset) * kItemSize[view.kind]};
    return true;
}

// Whether a tensor is what the gate found it to be; what it raises is no.
bool is_still(const Weight& w) {
    PyObject* x = w.tensor;
    if ((PyObject*)Py_TYPE(x) != torch_.tensor && (PyObject*)Py_TYPE(x) != torch_.parameter) return false;
    PyObject* address = call(torch_.data_ptr, x);
    bool same = address && PyLong_AsVoidPtr(address) == w.view.at;
    Py_XDECREF(address);
    if (!same) return false;
    PyObject* dtype = PyObject_GetAttr(x, torch_.dtype);
    Py_XDECREF(dtype);
    if (dtype != torch_.kinds[w.view.kind]) return false;
    PyObject* shape = PyObject_GetAttr(x, torch_.shape);
    same = shape && PyTuple_Size(shape) == w.view.dims;
    for (int d = 0; same && d < w.view.dims; ++d) same = PyLong_AsLongLong(PyTuple_GetItem(shape, d)) == w.view.size[d];
    Py_XDECREF(shape);
    if (!same || !is_true(call(torch_.is_contiguous, x)) || is_true(call(torch_.is_neg, x))) return false;
    PyObject* storage = PyWeakref_GetObject(w.storage);
    return storage && storage != Py_None && whole(call(torch_.nbytes, storage)) >= w.bytes;
}

// A dict as it is now; false where there is no memory.
bool remember_fact(Fact& fact, PyObject* tuple) {
    fact = Fact{PyTuple_GetItem(tuple, 0), PyTuple_GetItem(tuple, 1), PyTuple_GetItem(tuple, 2), nullptr, 0};
    if (fact.name != Py_None) return true;
    fact.count = PyDict_Size(fact.value);
    fact.entries = (PyObject**)malloc((2 * fact.count + 1) * sizeof(PyObject*));
    if (!fact.entries) return PyErr_NoMemory(), false;
    Py_ssize_t at = 0, n = 0;
    for (PyObject *key, *value; n < 2 * fact.count && PyDict_Next(fact.value, &at, &key, &value);)
        fact.entries[n++] = key, fact.entries[n++] = value;
    return true;
}

bool is_fact(const Fact& fact) {
    if (fact.name == torch_.class_name) return (PyObject*)Py_TYPE(fact.thing) == fact.value;
    if (fact.name != Py_None) {
        PyObject* found = PyObject_GetAttr(fact.thing, fact.name);
        Py_XDECREF(found);  // who else holds it is asked for only if it is the one
        return found == fact.value;
    }
    if (PyDict_Size(fact.thing) != fact.count) return false;
    Py_ssize_t at = 0, n = 0;
    for (PyObject *key, *value; n < 2 * fact.count && PyDict_Next(fact.thing, &at, &key, &value); n += 2)
        if (key != fact.entries[n] || value != fact.entries[n + 1]) return false;
    return n == 2 * fact.count;
}

// Whether all is as it was; what is raised on the way is no.
bool is_as_it_was(const LayerData& data) {
    bool same = true;
    for (Py_ssize_t i = 0; same && i < data.fact_count; ++i) same = is_fact(data.facts[i]);
    for (int i = 0; same && i < data.weight_count; ++i) same = is_still(data.weights[i]);
    if (PyErr_Occurred()) PyErr_Clear(), same = false;
    return same;
}

bool facts_from(PyObject* tuple, LayerData& data) {
    const Py_ssize_t count = PyTuple_Check(tuple) ? PyTuple_Size(tuple) : -1;
    for (Py_ssize_t i = 0; i < count; ++i) {
        PyObject* fact = PyTuple_GetItem(tuple, i);
        const bool good = PyTuple_Check(fact) && PyTuple_Size(fact) == 3;
        if (!good || (PyTuple_GetItem(fact, 1) == Py_None && !(PyDict_Check(PyTuple_GetItem(fact, 0)) && PyDict_Check(PyTuple_GetItem(fact, 2)))))
            return PyErr_SetString(PyExc_TypeError, "a fact must be a thing, a name and a value, or a dict, None and a dict"), false;
    }
    if (count < 0) return PyErr_SetString(PyExc_TypeError, "facts must be a tuple"), false;
    data.facts = (Fact*)calloc(count + 1, sizeof(Fact));
    if (!data.facts) return PyErr_NoMemory(), false;
    for (; data.fact_count < count; ++data.fact_count)
        if (!remember_fact(data.facts[data.fact_count], PyTuple_GetItem(tuple, data.fact_count))) return false;
    return true;
}

constexpr int64_t kMostFeatures = 1 << 24;

bool heads_from(PyObject* tuple, Step& s) {
    using H = Group_Heads;
    const Fields<H> heads(tuple, "heads");
    if (!heads) return false;
    s.heads = heads.whole(H::heads), s.kv_heads = heads.whole(H::kv_heads);
    s.key_dim = heads.whole(H::key_dim), s.value_dim = heads.whole(H::value_dim);
    s.scale = heads.real(H::scale), s.softcap = heads.real(H::softcap);
    s.rotary = heads.whole(H::rotary), s.norm_place = (NormPlace)heads.whole(H::norm_place);
    if (PyErr_Occurred()) return false;
    if (s.norm_place < 0 || s.norm_place > kFullWidth || s.kv_heads < 1 || s.heads < 1 || s.heads > kMostFeatures ||
        s.heads % s.kv_heads || s.key_dim < 1 || s.key_dim > kMostFeatures || s.value_dim < 1 || s.value_dim > kMostFeatures ||
        s.rotary < 0 || s.rotary > s.key_dim || s.rotary % 2)
        return wrong("heads: sizes that do not go together");
    return true;
}

// Reads the tuples of a layer into its data; each method is false where an exception is set.
class LayerReader {
  public:
    LayerReader(LayerData& data, const Fields<Group_LayerWeights>& weights) : data_(data), weights_(weights) {}

    bool norm(PyObject* tuple, const char* name, int64_t features, NormWeight& to) {
        if (tuple == Py_None) return true;
        return norm_from(tuple, name, kind(), features, to) &&
               remember_weight(data_, PyTuple_GetItem(tuple, Group_NormWeight::weight), name) &&
               remember_weight(data_, PyTuple_GetItem(tuple, Group_NormWeight::bias), name);
    }
    bool norm(int field, int64_t features, NormWeight& to) { return norm(weights_[field], k_LayerWeights[field].name, features, to); }

    bool factor(PyObject* tuple, const char* name, int64_t inputs, int64_t outputs, Factor& to) {
        if (!factor_from(tuple, name, kind(), inputs, to)) return false;
        if (outputs && to.out_features != outputs) return wrong("a projection of another size");
        return remember_weight(data_, PyTuple_GetItem(tuple, Group_Weight::weight), name) &&
               remember_weight(data_, PyTuple_GetItem(tuple, Group_Weight::bias), name);
    }
    bool factor(int field, int64_t inputs, int64_t outputs, Factor& to) {
        return factor(weights_[field], k_LayerWeights[field].name, inputs, outputs, to);
    }

    bool heads() {
        using L = Group_LayerWeights;
        Step& s = data_.step;
        const int64_t E = s.embed_dim, D = s.key_dim, V = s.value_dim;
        const bool whole = s.norm_place == kFullWidth;
        return factor(L::q, E, s.heads * D, s.qkv[0]) && factor(L::k, E, s.kv_heads * D, s.qkv[1]) &&
               factor(L::v, E, s.kv_heads * V, s.qkv[2]) && norm(L::q_norm, whole ? s.heads * D : D, s.q_norm) &&
               norm(L::k_norm, whole ? s.kv_heads * D : D, s.k_norm) && factor(L::out, s.heads * V, E, s.out);
    }

    bool latent(PyObject* tuple) {
        using L = Group_LayerWeights;
        using F = Group_Latent;
        const Fields<F> f(tuple, "latent");
        if (!f) return false;
        Step& s = data_.step;
        LatentHeads& l = s.latent;
        l.rank = f.whole(F::rank), l.plain = f.whole(F::plain), l.rotated = f.whole(F::rotated), l.value = f.whole(F::value);
        View up;
        if (PyErr_Occurred() || !view_of(f[F::up], "up", up)) return false;
        const int64_t most = kMostFeatures, queries = s.heads * (l.plain + l.rotated);
        if (l.rank < 1 || l.plain < 0 || l.rotated < 1 || l.value < 1 || l.rank > most || l.plain > most || l.rotated > most ||
            l.value > most || s.kv_heads != 1 || s.key_dim != l.rank + l.rotated || s.value_dim != l.rank ||
            (s.rotary && s.rotary != l.rotated) || up.kind != kind() || up.dims != 2 || !up.is_dense_from(0) ||
            !up.is(0, s.heads * (l.plain + l.value)) || !up.is(1, l.rank))
            return wrong("latent: sizes that do not go together");
        l.up = up.at;
        if (!remember_weight(data_, f[F::up], "up") || !factor(L::q, s.embed_dim, f[F::q] == Py_None ? queries : 0, s.qkv[0]) ||
            !factor(L::k, s.embed_dim, s.key_dim, s.qkv[1]))
            return false;
        return (f[F::q] == Py_None || factor(f[F::q], "q", s.qkv[0].out_features, queries, l.q)) &&
               norm(f[F::q_norm], "q_norm", s.qkv[0].out_features, l.q_norm) && norm(f[F::norm], "norm", l.rank, l.norm) &&
               factor(L::out, s.heads * l.value, s.embed_dim, s.out);
    }

    bool rest() {
        using L = Group_LayerWeights;
        Step& s = data_.step;
        const int64_t E = s.embed_dim;
        return norm(L::attention_norm, E, s.attention_norm) && norm(L::attention_out_norm, E, s.attention_out_norm) &&
               norm(L::feed_forward_norm, E, s.feed_forward_norm) && norm(L::feed_forward_out_norm, E, s.feed_forward_out_norm) &&
               network() && slopes() && cross(weights_[L::cross]);
    }

  private:
    bool network() {
        using L = Group_LayerWeights;
        Step& s = data_.step;
        const int64_t E = s.embed_dim;
        if (weights_[L::up] == Py_None) return !s.parallel || wrong("a parallel layer without its network");
        return factor(L::up, E, 0, s.up) && factor(L::down, s.up.out_features, E, s.down) &&
               (weights_[L::gate] == Py_None || factor(L::gate, E, s.up.out_features, s.gate));
    }

    bool slopes() {
        PyObject* tensor = weights_[Group_LayerWeights::slopes];
        if (tensor == Py_None) return true;
        View view;
        if (!view_of(tensor, "slopes", view)) return false;
        if (view.kind != kOfFloat32 || view.dims != 1 || !view.is(0, data_.step.heads) || !view.is_dense_from(0))
            return wrong("slopes: sizes that do not go together");
        data_.step.slopes = (const float*)view.at;
        return remember_weight(data_, tensor, "slopes");
    }

    bool cross(PyObject* tuple) {
        using F = Group_Cross;
        if (tuple == Py_None) return true;
        const Fields<F> f(tuple, "cross");
        Step form{};
        if (!f || !heads_from(f[F::heads], form)) return false;
        Step& s = data_.step;
        if (s.parallel || form.rotary) return wrong("cross: a parallel layer, or one that rotates");
        CrossHeads& c = s.cross;
        c.heads = form.heads, c.kv_heads = form.kv_heads, c.key_dim = form.key_dim, c.value_dim = form.value_dim;
        c.scale = form.scale, c.softcap = form.softcap, c.full_width = form.norm_place == kFullWidth;
        const int64_t E = s.embed_dim, width = c.heads * c.key_dim;
        return norm(f[F::norm], "norm", E, c.norm) && factor(f[F::q], "q", E, width, c.q) &&
               norm(f[F::q_norm], "q_norm", c.full_width ? width : c.key_dim, c.q_norm) &&
               factor(f[F::out], "out", c.heads * c.value_dim, E, c.out) && norm(f[F::out_norm], "out_norm", E, c.out_norm);
    }

    int kind() const { return (int)data_.step.dtype; }
    LayerData& data_;
    const Fields<Group_LayerWeights>& weights_;
};

bool form_from(PyObject* tuple, Step& s) {
    using F = Group_LayerForm;
    const Fields<F> form(tuple, "form");
    if (!form || !heads_from(form[F::heads], s)) return false;
    s.embed_dim = form.whole(F::embed_dim), s.dtype = (Dtype)form.whole(F::dtype);
    s.activation = activation_from(form.whole(F::activation));
    s.parallel = (Parallel)form.whole(F::parallel), s.post = form[F::post] == Py_True;
    s.residual_scale = form.real(F::residual_scale);
    if (PyErr_Occurred()) return false;
    if (s.dtype < 0 || s.dtype > kFloat16 || s.parallel < 0 || s.parallel > kTwoNorms || s.embed_dim < 1 || s.embed_dim > kMostFeatures)
        return wrong("layer: sizes that do not go together");
    return true;
}

// layer(weights, form, facts) -> what step takes.
PyObject* layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = Call_layer;
    using L = Group_LayerWeights;
    if (count != A::size) return PyErr_Format(PyExc_TypeError, "layer takes %d arguments: got %zd", (int)A::size, count), nullptr;
    const Fields<L> weights(args[A::weights], "weights");
    if (!weights) return nullptr;
    LayerObject* made = PyObject_GC_New(LayerObject, layer_type);
    if (!made) return nullptr;
    made->kept = PyTuple_Pack(3, args[A::weights], args[A::form], args[A::facts]);
    made->data = new (std::nothrow) LayerData;
    PyObject_GC_Track((PyObject*)made);
    if (!made->data && !PyErr_Occurred()) PyErr_NoMemory();
    if (!PyErr_Occurred() && form_from(args[A::form], made->data->step) && facts_from(args[A::facts], *made->data)) {
        LayerReader reader(*made->data, weights);
        const bool good = weights[L::latent] == Py_None ? reader.heads() : reader.latent(weights[L::latent]);
        if (good && reader.rest()) return (PyObject*)made;
    }
    Py_DECREF(made);
    return nullptr;
}

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
        if (c.q.weight) s.up = Factor{};
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

// step(...) -> whether it was computed: False where the layer is no longer as it was described.
PyObject* step(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = Call_step;
    const Arguments<A> a("step", args, count);
    if (!a.code) return nullptr;
    if (Py_TYPE(a[A::layer]) != layer_type) return PyErr_SetString(PyExc_TypeError, "layer must be what layer() returned"), nullptr;
    const LayerObject* layer = (const LayerObject*)a[A::layer];
    if (!layer->data || !is_as_it_was(*layer->data)) Py_RETURN_FALSE;
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
        const Unlocked unlocked;
        outcome = a.code->step(s, a.threads);
    }
    if (outcome == Outcome::no_memory) return PyErr_NoMemory();
    Py_RETURN_TRUE;
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
