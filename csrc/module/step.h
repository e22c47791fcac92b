// The calls of decode/step.h: what changes from step to step.
#pragma once

#include "attention.h"
#include "choice.h"
#include "layer.h"

#include "../common/team.h"

namespace polyhead {

// A segment of a cache, from its slot `first` on, of so many rows; `width` and `values` are those of
// numbers that are not coded.
inline bool cache_segment_from(PyObject* tuple, const Step& s, int64_t batch, int64_t heads, int64_t width, int64_t values, KVSegment& p,
                     Known* known = nullptr) {
    using F = tuples::CacheSegment;
    const Fields<F> f(tuple, "segments");
    View k, v, pages, positions;
    if (!f || !optional_view_of(f[F::pages], "pages", pages) || !optional_view_of(f[F::positions], "positions", positions)) return false;
    if (known ? !view_again(known[0], f[F::k], "segments", k) || (f[F::v] != Py_None && !view_again(known[1], f[F::v], "segments", v))
              : !view_of(f[F::k], "segments", k) || !optional_view_of(f[F::v], "segments", v))
        return false;
    const int64_t first = f.as_int64(F::first), length = f.as_int64(F::length);
    const bool coded = f[F::coding] != Py_None;
    if (PyErr_Occurred()) return false;
    if (k.dims != 4 || (v && v.dims != 4) || (coded && !v)) return wrong("segments: sizes that do not go together");
    int64_t unit = 1;
    if (coded) {
        Attention c{};
        c.key_dim = width;
        if (!coding_from(f[F::coding], k, v, c, p)) return false;
        if (c.value_dim != values) return wrong("segments: codes of another size");
        unit = p.coding.group;
    } else if (k.kind != (int)s.dtype || !k.is(3, width) || !k.is_dense_from(3) ||
               (v ? v.kind != k.kind || !v.is(3, values) || !v.is_dense_from(3) : values > width)) {
        return wrong("segments: sizes that do not go together");
    }
    auto fits = [&](const View& held) {
        bool good = held.is(1, heads) && length >= 1 && first >= 0 && length < INT64_MAX / 4 / unit && first < INT64_MAX / 4 / unit;
        for (int d = 0; d < 3; ++d) good = good && held.is(d, k.size[d]);
        return good && (pages || (held.is(0, batch) && first <= held.size[2] - length));
    };
    if (!fits(k) || (v && !fits(v))) return wrong("segments: sizes that do not go together");
    const int64_t size = kItemSize[k.kind], skipped = pages ? 0 : first;
    p.k = k.at + skipped * k.stride[2] * size, p.k_batch = k.stride[0], p.k_head = k.stride[1], p.k_token = k.stride[2];
    p.v = p.k, p.v_batch = p.k_batch, p.v_head = p.k_head, p.v_token = p.k_token;  // the first columns of a latent
    if (v) p.v = v.at + skipped * v.stride[2] * size, p.v_batch = v.stride[0], p.v_head = v.stride[1], p.v_token = v.stride[2];
    if (coded) {
        Coding& g = p.coding;
        g.k_scale += skipped * g.k_unit, g.k_zero += skipped * g.k_unit;
        if (g.v_bits) g.v_scale += skipped * g.v_unit, g.v_zero += skipped * g.v_unit;
    }
    p.length = length * unit;
    if (positions) {
        if (positions.kind != kOfInt64 || positions.dims != 2 || !positions.is_dense_from(0) || !positions.is(0, batch) || !positions.is(1, p.length))
            return wrong("positions must be [B, n] int64, of every token of a segment");
        p.positions = (const int64_t*)positions.at, p.positions_batch = p.length;
    }
    if (!pages) return true;
    const int64_t each = k.size[2], used = each < 1 ? 0 : (first + length + each - 1) / each;
    if (pages.kind != kOfInt64 || pages.dims != 2 || !pages.is_dense_from(1) || !pages.is(0, batch) || each < 1 || used > pages.size[1])
        return wrong("pages must be [B, m] int64, enough for the tokens");
    p.pages = (const int64_t*)pages.at, p.pages_batch = pages.step(0), p.page_length = each * unit, p.skipped = first * unit;
    return pages_exist(pages, batch, used, k.size[0]);
}

// The keys and values that a cache holds, the last T tokens of them still to be written.
inline bool cache_from(PyObject* list, Step& s, Known* known) {
    const int64_t segments = PyList_Check(list) ? PyList_Size(list) : 0;
    if (segments < 1 || segments > kMaxCacheSegments) return wrong("segments must be a list of one to six tuples");
    for (; s.segments < segments; ++s.segments)
        if (!cache_segment_from(PyList_GetItem(list, s.segments), s, s.batch, s.kv_heads, s.key_dim, s.value_dim, s.cache[s.segments], s.segments ? nullptr : known))
            return false;
    int64_t lacking = s.tokens;  // of the tokens that are written, which are not coded
    for (int i = s.segments; lacking > 0 && i > 0 && !s.cache[i - 1].coding.group; --i) lacking -= s.cache[i - 1].length;
    return lacking <= 0 || wrong("segments: fewer exact tokens than are written");
}

// Those of the only segment, of which rows are then read by row; None: otherwise.
inline PyObject* firsts_of(PyObject* segments) {
    return PyTuple_GetItem(PyList_GetItem(segments, 0), tuples::CacheSegment::firsts);
}

// How many tokens every batch row has: those of x [B, T, E], or a list.
inline bool counts_from(PyObject* list, const View& x, Step& s) {
    if (list == Py_None) {
        s.batch = x.size[0], s.tokens = x.size[1];
        place_rows(s, nullptr);
        return true;
    }
    const int64_t rows = x.size[0] * x.size[1];
    int64_t counts[kMaxStepRows], total = 0;
    s.packed = true, s.batch = PyList_Check(list) ? PyList_Size(list) : 0;
    bool good = s.batch >= 1 && s.batch <= rows;
    for (int64_t b = 0; good && b < s.batch; total += counts[b++]) {
        counts[b] = PyLong_AsLongLong(PyList_GetItem(list, b));
        if (PyErr_Occurred()) return false;
        good = counts[b] >= 1 && counts[b] <= rows - total;
        s.tokens = larger_of(s.tokens, counts[b]);
    }
    if (!good || total != rows) return wrong("counts must be tokens of every row, at least 1, which are those of x");
    place_rows(s, counts);
    return true;
}

// A number for every batch row; false: an exception is set.
inline bool rows_from(PyObject* list, const Step& s, int64_t* to, const char* name) {
    if (!PyList_Check(list) || PyList_Size(list) != s.batch) return wrong(name);
    for (int64_t b = 0; b < s.batch; ++b) {
        to[b] = PyLong_AsLongLong(PyList_GetItem(list, b));
        if (PyErr_Occurred()) return false;
    }
    return true;
}

// Where the first token of every row goes: one place for all, or a list.
inline bool starts_from(PyObject* starts, Step& s) {
    if (!PyList_Check(starts)) {
        s.position = PyLong_AsLongLong(starts);
        return !PyErr_Occurred() && (s.rows == s.batch * s.tokens || wrong("starts must be one for every row, as counts differ"));
    }
    s.uneven = true;
    return rows_from(starts, s, s.starts, "starts must be one for every row");
}

// Whether the places of the new tokens are in the segments, and what rows hold where they differ in it.
inline bool places_from(PyObject* firsts, Step& s) {
    const KVSegment &first = s.cache[0], &last = s.cache[s.segments - 1];
    s.by_row = firsts != Py_None, s.placed = s.by_row || last.positions;
    for (int i = 0; i < s.segments; ++i)
        if ((bool)s.cache[i].positions != (s.placed && !s.by_row)) return wrong("positions must be of every segment");
    if (!s.uneven && !s.placed) return true;
    const bool alone = s.segments == 1 && !first.skipped && !first.coding.group;
    if (s.placed ? last.skipped || last.coding.group || last.pages || (s.by_row && !alone) : !alone)
        return wrong("rows that differ must write to a single segment of exact tokens");
    if (s.by_row && !rows_from(firsts, s, s.held_from, "firsts must be one for every row")) return false;
    s.base = s.segments > 1 && !first.coding.group ? first.length : 0;
    for (int64_t b = 0; b < s.batch; ++b) {
        const int64_t start = start_of(s, b), count = s.firsts[b + 1] - s.firsts[b];
        bool good = start >= s.base && start <= INT64_MAX / 4 && count <= last.length && (s.placed || start <= last.length - count);
        if (good && s.by_row) good = s.held_from[b] >= 0 && s.held_from[b] <= start && start + count - s.held_from[b] <= last.length;
        for (int64_t t = 0; good && last.positions && t < count; ++t)
            good = last.positions[b * last.positions_batch + (start + t - s.base) % last.length] == start + t;
        if (!good) return wrong("starts must leave room for the tokens");
    }
    return true;
}

// The keys and values of the context, whose rows may each serve several rows of x. Without them the step
// ends before the attention to them.
inline bool memory_from(PyObject* tuple, Step& s) {
    CrossHeads& c = s.cross;
    if (tuple == Py_None) {
        if (c.q.weight) s.network = Network{}, s.experts = nullptr;
        return true;
    }
    PyObject* k = PyTuple_Check(tuple) && PyTuple_Size(tuple) ? PyTuple_GetItem(tuple, 0) : Py_None;
    View view;
    if (!view_of(k, "memory", view)) return false;
    const int64_t rows = view.dims == 4 ? view.size[0] : 0;
    if (!c.q.weight || rows < 1 || s.batch % rows || s.packed) return wrong("memory: sizes that do not go together");
    c.shared = s.batch / rows;
    if (!cache_segment_from(tuple, s, rows, c.kv_heads, c.key_dim, c.value_dim, c.memory)) return false;
    return (!c.memory.pages && !c.memory.coding.group && !c.memory.positions && c.memory.v != c.memory.k) || wrong("memory: keys and values in rows");
}

// The entries by which the queries of one token of rows of equal length choose blocks.
inline bool choice_from(PyObject* tensor, Step& s) {
    BlockChoice& b = s.choice;
    if (!b.top_k) return tensor == Py_None || wrong("entries of a layer that chooses no blocks");
    b.batch = s.batch, b.kv_heads = s.kv_heads, b.key_dim = s.key_dim;
    if (!entries_from(tensor, s.dtype, b)) return false;
    if (s.tokens != 1 || s.uneven || s.placed || s.packed || s.position < 0 || s.position / s.block_size > b.count)
        return wrong("entries: of one token of rows of equal length, an entry for each whole block");
    return true;
}

inline bool distances_from(PyObject* tensor, Step& s) {
    if (tensor == Py_None) return true;
    View view;
    if (!view_of(tensor, "by_distance", view)) return false;
    if (view.kind != kOfFloat32 || view.dims != 2 || !view.is(0, s.heads) || view.size[1] % 2 == 0 || !view.is_dense_from(0) || s.slopes)
        return wrong("by_distance: sizes that do not go together");
    s.by_distance = (const float*)view.at, s.farthest = view.size[1] / 2;
    return true;
}

// Re-checks the guards of the routed experts, for which it takes Python's lock.
class ExpertGuards : public ExpertCheck {
  public:
    ExpertGuards(const LayerData& data, Unlocked& unlocked) : ExpertCheck{ask}, data_(data), unlocked_(unlocked) {}

  private:
    static bool ask(ExpertCheck& asked, const int64_t* chosen, int64_t count) {
        const ExpertGuards& self = static_cast<ExpertGuards&>(asked);
        return self.unlocked_.locked([&] {
            for (int64_t i = 0; i < count; ++i)
                if (!is_unchanged(self.data_.guards[chosen[i]])) return false;
            return true;
        });
    }
    const LayerData& data_;
    Unlocked& unlocked_;
};

// Layers that are computed in one call, one after the other. What was read of them serves the next token too, where
// no more is new than its position (`is_repeatable`).
class FusedLayers {
  public:
    // False: an exception is set.
    bool take(PyObject* list) {
        const int64_t count = PyList_Check(list) ? PyList_Size(list) : 0;
        if (count < 1) return wrong("calls must be a list of one or more layers");
        if (!(layers_ = new (std::nothrow) Layer[count])) return PyErr_NoMemory(), false;
        for (; count_ < count; ++count_) {
            const Fields<tuples::LayerCall> f(PyList_GetItem(list, count_), "call");
            if (!f) return false;
            PyObject* layer = f[tuples::LayerCall::layer];
            if (Py_TYPE(layer) != layer_type) return PyErr_SetString(PyExc_TypeError, "layer must be what layer() returned"), false;
            Py_INCREF(layers_[count_].object = layer);
        }
        return true;
    }

    // The layers in front of the first that is no longer as it was described.
    int64_t valid() {
        for (int64_t i = 0; i < count_; ++i) layers_[i].data = ((const Owner<LayerData>*)layers_[i].object)->data;
        for (int64_t i = 0; i < count_; ++i) {
            if (i + 1 < count_ && layers_[i + 1].data) prefetch(layers_[i + 1].data->guard);
            if (!layers_[i].data || !is_unchanged(layers_[i].data->guard)) return i;
        }
        return count_;
    }

    bool is_valid() { return valid() == count_; }

    // Reads what the first layers are given, and the memory that they work in; false: an exception is set.
    bool read(int64_t layers, PyObject* list, const View& x, PyObject* starts, PyObject* counts) {
        repeatable_ = layers == count_;
        for (; read_ < layers; ++read_)
            if (!read_layer(PyList_GetItem(list, read_), x, starts, counts)) return false;
        return true;
    }

    // The parts that were computed of all layers that were read; less than 0: an exception is set.
    long compute(const Code& code, const char* x, char* y, int threads) {
        const Scratch scratch(bytes_);
        if (!scratch) return PyErr_NoMemory(), -1;
        long done = 0;
        Outcome outcome = Outcome::done;
        {
            Unlocked unlocked;
            with_team(threads, [&] {
                for (int64_t i = 0; i < read_ && done == kParts * i && outcome == Outcome::done; ++i) {
                    Step& s = layers_[i].step;
                    ExpertGuards asking(*layers_[i].data, unlocked);
                    s.x = i ? y : x, s.y = y, s.arena = scratch.arena(), s.ask = &asking;
                    outcome = code.step(s, threads);
                    const bool whole = outcome == Outcome::done && (s.network.up.weight || s.experts);
                    if (outcome != Outcome::no_memory) done += whole ? kParts : s.cross.memory.length ? 2 : 1;
                }
            });
        }
        return outcome == Outcome::no_memory ? PyErr_NoMemory(), -1 : done;
    }

    // Whether all was read, and nothing but the position and the rotations changes in the next step.
    bool is_repeatable() const { return repeatable_; }

    // Makes what was read that of tokens that begin at another position of the same caches; False if it is not, where
    // an exception counts as no.
    bool move_to(const View& x, int64_t position, PyObject* rotations) {
        const int64_t pairs = PyTuple_Check(rotations) ? PyTuple_Size(rotations) : -1;
        if (position < 0 || pairs != rotations_read_) return false;
        for (int r = 0; r < rotations_read_; ++r) {
            rotations_[r] = Rotary{};
            if (!pair_of(PyTuple_GetItem(rotations, r), "rotation", rotations_[r].cos, rotations_[r].sin)) return false;
        }
        for (int64_t i = 0; i < count_; ++i) {
            Layer& layer = layers_[i];
            Step& s = layer.step;
            if (!takes(s, x, false) || x.size[0] != s.batch || x.size[1] != s.tokens || !has_room(layer, position)) return false;
            s.position = position, s.cache[0].length = position + s.tokens;
            if (!has_temperatures(s) || !rotate_by(layer.rotation < 0 ? Rotary{} : rotations_[layer.rotation], x.kind, s)) return false;
        }
        return true;
    }

    int traverse(visitproc visit, void* arg) const {
        for (int64_t i = 0; i < count_; ++i) Py_VISIT(layers_[i].object);
        return 0;
    }

    FusedLayers() = default;
    FusedLayers(const FusedLayers&) = delete;
    ~FusedLayers() {
        for (int64_t i = 0; i < count_; ++i) Py_DECREF(layers_[i].object);
        delete[] layers_;
    }

  private:
    static constexpr int kParts = 3;  // of a layer: NETWORK of layers/native_layer.py
    static constexpr int kMostRotations = 8;

    struct Layer {
        Step step;
        PyObject* object;  // held: of which `data` is read again before every step
        const LayerData* data;
        int rotation;      // its place among them, or -1
    };
    // Angles that layers share.
    struct Rotary {
        PyObject* pair = nullptr;  // compared only, while a list of calls keeps it
        View cos, sin;
    };

    static bool takes(const Step& s, const View& x, bool packed) {
        return x.dims == 3 && x.kind == (int)s.dtype && x.is_dense_from(0) && x.size[0] >= 1 && x.size[1] >= 1 && x.size[0] <= kMaxStepRows &&
               x.size[1] <= (packed ? kMaxStepRows : kMaxGemvRows) && x.size[0] * x.size[1] <= kMaxStepRows && x.is(2, s.embed_dim);
    }

    bool read_layer(PyObject* tuple, const View& x, PyObject* starts, PyObject* counts) {
        using F = tuples::LayerCall;
        const Fields<F> f(tuple, "call");
        Layer& layer = layers_[read_];
        Step& s = layer.step = layer.data->step;
        if (!takes(s, x, counts != Py_None)) {
            PyErr_Format(PyExc_ValueError, "step takes up to %d tokens of a batch row and %d in all, of the layer's size and dtype",
                         kMaxGemvRows, kMaxStepRows);
            return false;
        }
        if (!counts_from(counts, x, s) || !cache_from(f[F::segments], s, layer.data->cache) || !starts_from(starts, s) ||
            !places_from(firsts_of(f[F::segments]), s) || !choice_from(f[F::entries], s) || !distances_from(f[F::by_distance], s) ||
            !memory_from(f[F::memory], s) || !rotation_from(f[F::rotation], x.kind, layer))
            return false;
        if (!has_temperatures(s)) return wrong("starts: positions that have no temperature");
        bytes_ = larger_of(bytes_, step_bytes(s));
        repeatable_ = repeatable_ && f[F::by_distance] == Py_None && f[F::memory] == Py_None && !s.choice.top_k && !s.uneven && !s.placed && !s.packed && s.segments == 1 &&
                      !s.cache[0].pages && !s.cache[0].coding.group && s.cache[0].length == s.position + s.tokens;
        return true;
    }

    // Whether the cache that was read lies where it lay, with room for tokens from a position on.
    static bool has_room(const Layer& layer, int64_t position) {
        const Step& s = layer.step;
        const KVSegment& p = s.cache[0];
        auto holds = [&](const Known& known, const char* at, int64_t batch, int64_t head, int64_t token, int64_t width) {
            const View& v = known.view;
            return known.tensor && is_unchanged(known) && v.at == at && v.kind == (int)s.dtype && v.dims == 4 && v.is(0, s.batch) &&
                   v.is(1, s.kv_heads) && v.is(3, width) && position <= v.size[2] - s.tokens && v.stride[0] == batch &&
                   v.stride[1] == head && v.stride[2] == token && v.is_dense_from(3);
        };
        return holds(layer.data->cache[0], (const char*)p.k, p.k_batch, p.k_head, p.k_token, s.key_dim) &&
               (p.v == p.k || holds(layer.data->cache[1], (const char*)p.v, p.v_batch, p.v_head, p.v_token, s.value_dim));
    }

    static bool has_temperatures(const Step& s) {
        for (int64_t m = 0; s.temperatures && m < s.rows; ++m) {
            const int64_t at = position_of(s, m);
            if (at < 0 || at > INT64_MAX / 2 || (at + s.offset) / s.every >= s.periods) return false;
        }
        return true;
    }

    // Layers with the same angles share the views of their tables.
    bool rotation_from(PyObject* pair, int kind, Layer& layer) {
        layer.rotation = -1;
        int r = 0;
        while (pair != Py_None && r < rotations_read_ && rotations_[r].pair != pair) ++r;
        if (pair != Py_None && r == rotations_read_) {
            if (r == kMostRotations) --r, repeatable_ = false;
            rotations_[r] = Rotary{};
            if (!pair_of(pair, "rotation", rotations_[r].cos, rotations_[r].sin)) return false;
            rotations_[r].pair = pair, rotations_read_ = r + 1;
        }
        if (pair != Py_None) layer.rotation = r;
        return rotate_by(layer.rotation < 0 ? Rotary{} : rotations_[r], kind, layer.step) || wrong("rotation: sizes that do not go together");
    }

    static bool rotate_by(const Rotary& by, int kind, Step& s) {
        auto is_table = [&](const View& v) {
            return v.kind == kind && v.numbers() == s.rotary * (s.uneven || s.packed ? s.rows : s.tokens) && v.is_dense_from(0);
        };
        if (s.rotary ? !is_table(by.cos) || !is_table(by.sin) : (bool)by.cos) return false;
        s.cos = by.cos.at, s.sin = by.sin.at;
        return true;
    }

    int64_t count_ = 0, read_ = 0, bytes_ = 0;
    Layer* layers_ = nullptr;
    Rotary rotations_[kMostRotations];
    int rotations_read_ = 0;
    bool repeatable_ = false;
};

// What a step leaves for the next one; who computes with it takes it out meanwhile.
struct Run {
    FusedLayers* layers = nullptr;
    Run() = default;
    Run(const Run&) = delete;
    ~Run() { delete layers; }
};

inline int traverse(const Run& run, visitproc visit, void* arg) { return run.layers ? run.layers->traverse(visit, arg) : 0; }
inline PyTypeObject* run_type;

// Layers while they are computed: taken from a run, or new; kept by the run, if there is one, in the end.
class Taken {
  public:
    // False: an exception is set.
    bool from(PyObject* run) {
        if (run != Py_None && Py_TYPE(run) != run_type) return PyErr_SetString(PyExc_TypeError, "run must be what run() returned"), false;
        run_ = run == Py_None ? nullptr : (Owner<Run>*)run;
        if (run_ && run_->data) layers_ = run_->data->layers, run_->data->layers = nullptr;
        return true;
    }
    FusedLayers* renewed() {
        delete layers_;
        if (!(layers_ = new (std::nothrow) FusedLayers)) PyErr_NoMemory();
        return layers_;
    }
    FusedLayers* layers() const { return layers_; }
    Taken() = default;
    Taken(const Taken&) = delete;
    ~Taken() {
        if (run_ && run_->data && !run_->data->layers && layers_ && layers_->is_repeatable()) run_->data->layers = layers_;
        else delete layers_;
    }

  private:
    Owner<Run>* run_ = nullptr;
    FusedLayers* layers_ = nullptr;
};

// run() -> what `step` fills for `again`.
inline PyObject* run(PyObject*, PyObject*) { return (PyObject*)Owner<Run>::make(run_type); }

// step(...) -> the parts that were computed, of layers/native_layer.py: three of every layer, fewer of the last where
// it ends before its network or an expert is not as it was described. Layers from the first on that is not as it
// was described are left out, and nothing is computed before all have been looked at.
inline PyObject* step(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::step;
    const Arguments<A> a("step", args, count);
    const Guard* classes = a.code ? guard_from(a[A::guard]) : nullptr;
    if (!classes) return PyErr_Occurred() ? nullptr : PyLong_FromLong(0);
    Taken taken;
    FusedLayers* run = taken.from(a[A::run]) ? taken.renewed() : nullptr;
    if (!run || !run->take(a[A::calls])) return nullptr;
    const int64_t layers = is_unchanged(*classes) ? run->valid() : 0;
    if (!layers) return PyLong_FromLong(0);
    View x;
    if (!view_of(a[A::x], "x", x) || !run->read(layers, a[A::calls], x, a[A::starts], a[A::counts])) return nullptr;
    char* y = output_ptr(a[A::y], "y", x.size[0] * x.size[1] * x.size[2], x.kind);
    if (PyErr_Occurred()) return nullptr;
    const long done = run->compute(*a.code, x.at, y, a.threads);
    return done < 0 ? nullptr : PyLong_FromLong(done);
}

// again(...) -> the same of the layers of the last step, and of its caches, at another position; 0 as well where the
// run holds nothing or what it holds is not that of this x.
inline PyObject* again(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::again;
    const Arguments<A> a("again", args, count);
    const Guard* classes = a.code ? guard_from(a[A::guard]) : nullptr;
    if (!classes) return PyErr_Occurred() ? nullptr : PyLong_FromLong(0);
    Taken taken;
    if (!taken.from(a[A::run])) return nullptr;
    FusedLayers* run = taken.layers();
    const int64_t start = a.as_int64(A::start);
    View x;
    if (PyErr_Occurred() || !view_of(a[A::x], "x", x)) return nullptr;
    if (!run || !is_unchanged(*classes) || !run->is_valid() || !run->move_to(x, start, a[A::rotations])) {
        PyErr_Clear();
        return PyLong_FromLong(0);
    }
    char* y = output_ptr(a[A::y], "y", x.size[0] * x.size[1] * x.size[2], x.kind);
    if (PyErr_Occurred()) return nullptr;
    const long done = run->compute(*a.code, x.at, y, a.threads);
    return done < 0 ? nullptr : PyLong_FromLong(done);
}

}  // namespace polyhead
