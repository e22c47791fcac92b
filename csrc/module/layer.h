// A layer as data: what decode/step.h computes with, found out once.
#pragma once

#include "guards.h"
#include "networks.h"

namespace polyhead {

struct LayerData {
    Step step{};
    Guard guard;
    Experts experts{};
    Network* networks = nullptr;  // of the experts, and what must hold for each
    Guard* guards = nullptr;
    mutable Known cache[2];     // keys and values of the cache, as the last step found them
    PyObject* kept = nullptr;  // a table that only this description reads
    ~LayerData() { delete[] networks, delete[] guards, Py_XDECREF(kept); }
};

inline int traverse(const LayerData& data, visitproc visit, void* arg) { return traverse(data.guard, visit, arg); }
inline PyTypeObject* layer_type;

constexpr int64_t kMostFeatures = 1 << 24;
constexpr int64_t kMaxBlockSize = 1 << 24;  // and the most blocks of a list

inline bool heads_from(PyObject* tuple, Step& s) {
    using H = tuples::Heads;
    const Fields<H> heads(tuple, "heads");
    if (!heads) return false;
    s.heads = heads.as_int64(H::heads), s.kv_heads = heads.as_int64(H::kv_heads);
    s.key_dim = heads.as_int64(H::key_dim), s.value_dim = heads.as_int64(H::value_dim);
    s.scale = heads.as_float(H::scale), s.softcap = heads.as_float(H::softcap);
    s.rotary = heads.as_int64(H::rotary), s.norm_place = (NormPlace)heads.as_int64(H::norm_place);
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
    LayerReader(LayerData& data, const Fields<tuples::LayerWeights>& weights) : data_(data), weights_(weights) {}

    bool norm(PyObject* tuple, const char* name, int64_t features, NormWeight& to) {
        if (tuple == Py_None) return true;
        return norm_from(tuple, name, kind(), features, to) && watch_tensor(PyTuple_GetItem(tuple, tuples::NormWeight::weight), name) &&
               watch_tensor(PyTuple_GetItem(tuple, tuples::NormWeight::bias), name);
    }

    bool factor(PyObject* tuple, const char* name, int64_t inputs, int64_t outputs, LinearWeight& to) {
        if (!weight_from(tuple, name, kind(), inputs, to)) return false;
        if (outputs && to.out_features != outputs) return wrong("a projection of another size");
        return watch_all(tuple, name, data_.guard);
    }
    bool heads() {
        using L = tuples::LayerWeights;
        Step& s = data_.step;
        const int64_t E = s.embed_dim, D = s.key_dim, V = s.value_dim;
        const bool whole = s.norm_place == kFullWidth;
        return factor(weights_[L::q], "q", E, s.heads * D, s.qkv[0]) &&
               factor(weights_[L::k], "k", E, s.kv_heads * D, s.qkv[1]) &&
               factor(weights_[L::v], "v", E, s.kv_heads * V, s.qkv[2]) &&
               norm(weights_[L::q_norm], "q_norm", whole ? s.heads * D : D, s.q_norm) &&
               norm(weights_[L::k_norm], "k_norm", whole ? s.kv_heads * D : D, s.k_norm) &&
               factor(weights_[L::out], "out", s.heads * V, E, s.out);
    }

    bool latent(PyObject* tuple) {
        using L = tuples::LayerWeights;
        using F = tuples::Latent;
        const Fields<F> f(tuple, "latent");
        if (!f) return false;
        Step& s = data_.step;
        LatentHeads& l = s.latent;
        l.rank = f.as_int64(F::rank), l.plain = f.as_int64(F::plain), l.rotated = f.as_int64(F::rotated), l.value = f.as_int64(F::value);
        View up;
        if (PyErr_Occurred() || !view_of(f[F::up], "up", up)) return false;
        const int64_t most = kMostFeatures, queries = s.heads * (l.plain + l.rotated);
        if (l.rank < 1 || l.plain < 0 || l.rotated < 1 || l.value < 1 || l.rank > most || l.plain > most || l.rotated > most ||
            l.value > most || s.kv_heads != 1 || s.key_dim != l.rank + l.rotated || s.value_dim != l.rank ||
            (s.rotary && s.rotary != l.rotated) || up.kind != kind() || up.dims != 2 || !up.is_dense_from(0) ||
            !up.is(0, s.heads * (l.plain + l.value)) || !up.is(1, l.rank))
            return wrong("latent: sizes that do not go together");
        l.up = up.at;
        if (!watch_tensor(f[F::up], "up") || !factor(weights_[L::q], "q", s.embed_dim, f[F::q] == Py_None ? queries : 0, s.qkv[0]) ||
            !factor(weights_[L::k], "k", s.embed_dim, s.key_dim, s.qkv[1]))
            return false;
        return (f[F::q] == Py_None || factor(f[F::q], "q", s.qkv[0].out_features, queries, l.q)) &&
               norm(f[F::q_norm], "q_norm", s.qkv[0].out_features, l.q_norm) && norm(f[F::norm], "norm", l.rank, l.norm) &&
               factor(weights_[L::out], "out", s.heads * l.value, s.embed_dim, s.out);
    }

    bool rest() {
        using L = tuples::LayerWeights;
        Step& s = data_.step;
        const int64_t E = s.embed_dim;
        return norm(weights_[L::attention_norm], "attention_norm", E, s.attention_norm) &&
               norm(weights_[L::attention_out_norm], "attention_out_norm", E, s.attention_out_norm) &&
               norm(weights_[L::feed_forward_norm], "feed_forward_norm", E, s.feed_forward_norm) &&
               norm(weights_[L::feed_forward_out_norm], "feed_forward_out_norm", E, s.feed_forward_out_norm) &&
               network() && slopes() && sinks() && temperatures() && cross(weights_[L::cross]);
    }

  private:
    bool watch_tensor(PyObject* tensor, const char* name) { return watch_weight(data_.guard, tensor, name); }

    // The tensors of a projection: the weight, its bias and its scales.
    static bool watch_all(PyObject* tuple, const char* name, Guard& guard) {
        if (tuple == Py_None) return true;
        PyObject* scales = PyTuple_GetItem(tuple, tuples::Weight::scales);
        return watch_weight(guard, PyTuple_GetItem(tuple, tuples::Weight::weight), name) &&
               watch_weight(guard, PyTuple_GetItem(tuple, tuples::Weight::bias), name) &&
               (scales == Py_None || (watch_weight(guard, PyTuple_GetItem(scales, tuples::Scales::scales), name) &&
                                      watch_weight(guard, PyTuple_GetItem(scales, tuples::Scales::zeros), name)));
    }

    bool network(PyObject* tuple, const char* name, Network& to, Guard& guard) {
        using F = tuples::Network;
        const int64_t E = data_.step.embed_dim;
        if (!network_from(tuple, name, kind(), E, to)) return false;
        if (to.down.out_features != E) return wrong("a network of another size");
        for (int field : {(int)F::gate, (int)F::up, (int)F::down})
            if (!watch_all(PyTuple_GetItem(tuple, field), name, guard)) return false;
        PyObject* alphas = PyTuple_GetItem(tuple, F::alphas);
        return alphas == Py_None || (watch_weight(guard, PyTuple_GetItem(alphas, 0), name) &&
                                     watch_weight(guard, PyTuple_GetItem(alphas, 1), name));
    }

    bool network() {
        using L = tuples::LayerWeights;
        Step& s = data_.step;
        PyObject *plain = weights_[L::network], *mixed = weights_[L::experts];
        if (s.parallel && plain == Py_None) return wrong("a parallel layer without its network");
        if (plain != Py_None) return mixed == Py_None ? network(plain, "network", s.network, data_.guard) : (bool)wrong("two networks");
        return mixed == Py_None || experts(mixed);
    }

    bool experts(PyObject* tuple) {
        using F = tuples::Experts;
        using R = tuples::Routing;
        const Fields<F> f(tuple, "experts");
        Experts& e = data_.experts;
        if (!f || !routing_from(f[F::routing], kind(), data_.step.embed_dim, e.routing)) return false;
        PyObject *networks = f[F::networks], *watched = f[F::watched], *routing = f[F::routing];
        const int64_t X = e.routing.router.out_features;
        if (!PyTuple_Check(networks) || PyTuple_Size(networks) != X || !PyTuple_Check(watched) || PyTuple_Size(watched) != X)
            return wrong("experts: as many networks, each watched, as the router chooses from");
        data_.networks = new (std::nothrow) Network[X]();
        data_.guards = new (std::nothrow) Guard[X];
        if (!data_.networks || !data_.guards) return PyErr_NoMemory(), false;
        for (int64_t i = 0; i < X; ++i) {
            if (!network(PyTuple_GetItem(networks, i), "an expert", data_.networks[i], data_.guards[i]) ||
                !watch(PyTuple_GetItem(watched, i), data_.guards[i]))
                return false;
            if (data_.networks[i].up.out_features != data_.networks->up.out_features) return wrong("experts: of one size");
        }
        e.networks = data_.networks, e.hidden = data_.networks->up.out_features, e.weighs_input = f[F::weighs_input] == Py_True;
        data_.step.experts = &e;
        if (e.routing.shared_gate.weight && f[F::shared] == Py_None) return wrong("experts: a shared gate without its network");
        return watch_all(PyTuple_GetItem(routing, R::router), "router", data_.guard) &&
               watch_tensor(PyTuple_GetItem(routing, R::choice_bias), "choice_bias") &&
               watch_all(PyTuple_GetItem(routing, R::shared_gate), "shared_gate", data_.guard) &&
               (f[F::shared] == Py_None || network(f[F::shared], "shared", e.shared, data_.guard));
    }

    bool slopes() {
        PyObject* tensor = weights_[tuples::LayerWeights::slopes];
        if (tensor == Py_None) return true;
        View view;
        if (!view_of(tensor, "slopes", view)) return false;
        if (view.kind != kOfFloat32 || !view.is_vector(data_.step.heads))
            return wrong("slopes: sizes that do not go together");
        data_.step.slopes = (const float*)view.at;
        return watch_tensor(tensor, "slopes");
    }

    bool sinks() {
        PyObject* tensor = weights_[tuples::LayerWeights::sinks];
        if (tensor == Py_None) return true;
        View view;
        if (!view_of(tensor, "sinks", view)) return false;
        Step& s = data_.step;
        s.fp32_sinks = view.kind == kOfFloat32;
        if ((view.kind != kind() && !s.fp32_sinks) || !view.is_vector(s.heads))
            return wrong("sinks: sizes that do not go together");
        s.sinks = view.at;
        return watch_tensor(tensor, "sinks");
    }

    // Constants, which nobody changes.
    bool temperatures() {
        PyObject* tensor = weights_[tuples::LayerWeights::temperatures];
        if (tensor == Py_None) return true;
        View view;
        if (!view_of(tensor, "temperatures", view)) return false;
        Step& s = data_.step;
        if (view.kind != kOfFloat32 || view.dims != 1 || !view.is_dense_from(0) || s.every < 1 || s.offset < 0 || s.offset > kMostFeatures || s.latent.rank)
            return wrong("temperatures: sizes that do not go together");
        s.temperatures = (const float*)view.at, s.periods = view.size[0];
        Py_INCREF(data_.kept = tensor);
        return true;
    }

    bool cross(PyObject* tuple) {
        using F = tuples::Cross;
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
    const Fields<tuples::LayerWeights>& weights_;
};

inline bool form_from(PyObject* tuple, Step& s) {
    using F = tuples::LayerForm;
    const Fields<F> form(tuple, "form");
    if (!form || !heads_from(form[F::heads], s)) return false;
    s.embed_dim = form.as_int64(F::embed_dim), s.dtype = (Dtype)form.as_int64(F::dtype);
    s.parallel = (Parallel)form.as_int64(F::parallel), s.post = form[F::post] == Py_True;
    s.residual_scale = form.as_float(F::residual_scale), s.clip = form.as_float(F::clip);
    s.window = form[F::window] == Py_None ? 0 : form.as_int64(F::window);
    s.chunk = form[F::chunk] == Py_None ? 0 : form.as_int64(F::chunk);
    s.rounded = form.as_float(F::rounded), s.every = form.as_int64(F::every), s.offset = form.as_int64(F::offset);
    s.block_size = form.as_int64(F::block_size), s.choice.top_k = form.as_int64(F::top_k);
    if (PyErr_Occurred()) return false;
    if (s.dtype < 0 || s.dtype > kFloat16 || s.parallel < 0 || s.parallel > kTwoNorms || s.embed_dim < 1 || s.embed_dim > kMostFeatures ||
        s.block_size < 1 || s.block_size > kMaxBlockSize || s.choice.top_k < 0 || s.choice.top_k > kMaxBlockSize || s.window < 0 || s.chunk < 0 || (s.window && s.chunk) || !(s.clip > 0))
        return wrong("layer: sizes that do not go together");
    return true;
}

// layer(weights, form, watched) -> what step takes.
inline PyObject* layer(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::layer;
    using L = tuples::LayerWeights;
    if (count != A::size) return PyErr_Format(PyExc_TypeError, "layer takes %d arguments: got %zd", (int)A::size, count), nullptr;
    const Fields<L> weights(args[A::weights], "weights");
    Owner<LayerData>* made = weights ? Owner<LayerData>::make(layer_type) : nullptr;
    if (!made) return nullptr;
    LayerData& data = *made->data;
    if (form_from(args[A::form], data.step) && watch(args[A::watched], data.guard)) {
        LayerReader reader(data, weights);
        const bool good = weights[L::latent] == Py_None ? reader.heads() : reader.latent(weights[L::latent]);
        if (good && reader.rest()) return (PyObject*)made;
    }
    Py_DECREF(made);
    return nullptr;
}

}  // namespace polyhead
