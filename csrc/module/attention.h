// Attention, its gradients, statistics and sinks.
#pragma once

#include "arguments.h"
#include "interface.h"

#include <initializer_list>

namespace polyhead {

// Rows [n], [1, n] or [B, n] of whole numbers for at least `length` tokens.
inline bool is_table(const View& v, int64_t batch, int64_t length) {
    const int last = v.dims - 1;
    return v.kind == kOfInt64 && v.dims <= 2 && v.size[last] >= length && v.is_dense_from(last) &&
           (last == 0 || v.is_or_one(0, batch));
}

inline int64_t table_stride(const View& v) { return v.dims == 2 ? v.step(0) : 0; }

// Scales and zeros [.., G, units, width] beside codes.
inline bool scales_from(PyObject* scales, const char* name, PyObject* zeros, const char* zero_name, const View& codes, int64_t width,
                 const uint16_t*& scale_at, const uint16_t*& zero_at, int64_t* strides) {
    View scale, zero;
    if (!view_of(scales, name, scale) || !view_of(zeros, zero_name, zero)) return false;
    for (const View* v : {&scale, &zero}) {
        bool good = v->kind == kOfBFloat16 && v->dims == 4 && v->is(3, width) && v->is_dense_from(3);
        for (int d = 0; d < 3; ++d) good = good && v->is(d, codes.size[d]) && v->stride[d] == scale.stride[d];
        if (!good) {
            PyErr_Format(PyExc_ValueError, "%s must be bfloat16, as many as there are codes, and alike", name);
            return false;
        }
    }
    scale_at = (const uint16_t*)scale.at, zero_at = (const uint16_t*)zero.at;
    for (int d = 0; d < 3; ++d) strides[d] = scale.stride[d];
    return true;
}

inline bool coding_from(PyObject* tuple, const View& k, const View& v, Attention& c, KVSegment& p) {
    using F = tuples::Coding;
    const Fields<F> f(tuple, "coding");
    if (!f) return false;
    Coding& g = p.coding;
    g.group = f.as_int64(F::group), g.k_bits = f.as_int64(F::k_bits), g.v_bits = f.as_int64(F::v_bits);
    g.v_share = f.as_int64(F::value_group);
    const int64_t D = f.as_int64(F::key_dim), V = f.as_int64(F::value_dim);
    auto is_codes = [&](const View& codes, int64_t width, int64_t bits) {
        return codes.kind == kOfUint8 && codes.dims == 4 && (bits == 4 || bits == 8) &&
               codes.size[3] == g.group * width * bits / 8 && codes.is_dense_from(3);
    };
    if (PyErr_Occurred()) return false;
    if (g.group < 2 || g.group > 1 << 20 || g.group % 2 || g.v_share < 1 || D != c.key_dim || V < 1 || V % g.v_share ||
        V > 1 << 24 || (g.v_bits ? !is_codes(v, V, g.v_bits) : V > D) || !is_codes(k, D, g.k_bits))
        return wrong("codes that are not of the sizes that their coding says");
    c.value_dim = V;
    int64_t strides[3];
    if (!scales_from(f[F::k_scale], "k_scale", f[F::k_zero], "k_zero", k, D, g.k_scale, g.k_zero, strides)) return false;
    g.k_batch = strides[0], g.k_head = strides[1], g.k_unit = strides[2];
    if (!g.v_bits) return true;
    if (!scales_from(f[F::v_scale], "v_scale", f[F::v_zero], "v_zero", v, g.group * (V / g.v_share), g.v_scale, g.v_zero, strides)) return false;
    g.v_batch = strides[0], g.v_head = strides[1], g.v_unit = strides[2];
    return true;
}

// Whether every page that a batch row's tokens lie in is one of the pool.
inline bool pages_exist(const View& pages, int64_t batch, int64_t used, int64_t held) {
    for (int64_t b = 0; b < (pages.size[0] == 1 ? 1 : batch); ++b)
        for (int64_t i = 0; i < used; ++i) {
            const int64_t page = ((const int64_t*)pages.at)[b * pages.stride[0] + i];
            if (page < 0 || page >= held) {
                PyErr_Format(PyExc_ValueError, "pages holds page %lld of %lld", (long long)page, (long long)held);
                return false;
            }
        }
    return true;
}

inline bool segment_from(PyObject* tuple, Attention& c, KVSegment& p, bool is_first) {
    using F = tuples::KVSegment;
    const Fields<F> f(tuple, "a segment");
    View k, v, positions, pages;
    if (!f || !view_of(f[F::k], "k", k) || !view_of(f[F::v], "v", v) ||
        !optional_view_of(f[F::positions], "positions", positions) || !optional_view_of(f[F::pages], "pages", pages))
        return false;
    const bool coded = f[F::coding] != Py_None;
    const int64_t value_dim = c.value_dim;
    if (k.dims != 4 || v.dims != 4) return wrong("k and v must have four dimensions");
    if (!coded && (k.kind != (int)c.dtype || v.kind != (int)c.dtype || !k.is(3, c.key_dim)))
        return wrong("k and v must be of the dtype of q, and k of its head size");
    if (!coded && (!k.is_dense_from(3) || !v.is_dense_from(3))) return refuse("k or v", "one with gaps in its last dimension");
    if (coded ? !coding_from(f[F::coding], k, v, c, p) : ((c.value_dim = v.size[3]), false)) return false;
    const int64_t unit = coded ? p.coding.group : 1;
    for (int d = 0; d < 3; ++d)
        if (k.size[d] != v.size[d]) return wrong("k and v must hold as many tokens");
    if (is_first) c.kv_heads = k.size[1];
    else if (value_dim != c.value_dim) return wrong("segments must share a value size");
    if (c.value_dim < 1 || c.kv_heads < 1 || !k.is(1, c.kv_heads)) return wrong("segments must share their kv heads and a value size");
    p.k = k.at, p.k_batch = k.stride[0], p.k_head = k.stride[1], p.k_token = k.stride[2];
    p.v = v.at, p.v_batch = v.stride[0], p.v_head = v.stride[1], p.v_token = v.stride[2];
    p.position = f.as_int64(F::first);
    int64_t skipped = 0, held = k.size[2];
    if (pages) {
        skipped = f.as_int64(F::skipped), held = f.as_int64(F::paged);
        const int64_t each = k.size[2];
        if (PyErr_Occurred()) return false;
        if (pages.kind != kOfInt64 || pages.dims != 2 || !pages.is_dense_from(1) || !pages.is_or_one(0, c.batch) || each < 1 ||
            skipped < 0 || held < 0 || skipped > INT64_MAX / 4 || held > INT64_MAX / 4 ||
            (skipped + held + each - 1) / each > pages.size[1])
            return wrong("pages must be [B, m] int64, enough for the tokens");
        if (!pages_exist(pages, c.batch, (skipped + held + each - 1) / each, k.size[0])) return false;
        p.pages = (const int64_t*)pages.at, p.pages_batch = pages.step(0);
        p.page_length = each * unit;
    } else if (!k.is(0, c.batch)) {
        return wrong("q and k must share the batch");
    }
    if (held > INT64_MAX / 4 / unit) return wrong("more tokens than numbers can count");
    p.skipped = skipped * unit, p.length = held * unit;
    if (positions) {
        if (!is_table(positions, c.batch, p.length)) return wrong("positions must be [n] or [B, n] int64, without gaps");
        p.positions = (const int64_t*)positions.at, p.positions_batch = table_stride(positions);
    }
    return !PyErr_Occurred();
}

inline bool dropout_from(PyObject* tuple, Dropout& d) {
    using F = tuples::Dropout;
    const Fields<F> f(tuple, "dropout");
    View seed;
    if (!f || !view_of(f[F::seed], "seed", seed)) return false;
    if (seed.kind != kOfInt64 || !seed.is_vector(1)) return wrong("seed must be [1] int64");
    const double p = PyFloat_AsDouble(f[F::p]);
    d.query = (uint32_t)f.as_int64(F::query), d.key = (uint32_t)f.as_int64(F::key);
    if (PyErr_Occurred()) return false;
    if (!(p > 0 && p < 1)) return wrong("p of dropout must be above 0 and below 1");
    d.seed = (uint32_t)*(const int64_t*)seed.at;
    d.least = (uint32_t)__builtin_ceil((double)(float)p * (1 << 24));  // torch compares in float32
    d.factor = (float)(1.0 / (1.0 - p));
    return true;
}

inline bool score_mods_from(PyObject* tuple, Attention& c) {
    using F = tuples::ScoreMods;
    const Fields<F> f(tuple, "mods");
    if (!f) return false;
    c.softcap = f.as_float(F::softcap), c.batch_invariant = f[F::batch_invariant] == Py_True, c.rounded = f.as_float(F::rounded);
    View low, high, keep, q_positions, slopes, by_distance, bias, chosen;
    if (!pair_of(f[F::bounds], "bounds", low, high) || !optional_view_of(f[F::keep], "keep", keep) ||
        !optional_view_of(f[F::q_positions], "q_positions", q_positions) ||
        !optional_view_of(f[F::slopes], "slopes", slopes) ||
        !optional_view_of(f[F::by_distance], "by_distance", by_distance) || !optional_view_of(f[F::bias], "bias", bias) ||
        !optional_view_of(f[F::chosen], "chosen", chosen))
        return false;
    if (low) {
        if (!is_table(low, c.batch, c.queries) || !is_table(high, c.batch, c.queries) ||
            table_stride(low) != table_stride(high))
            return wrong("bounds must be two of [1 or B, T] int64, alike");
        c.low = (const int64_t*)low.at, c.high = (const int64_t*)high.at, c.bounds_batch = table_stride(low);
    }
    if (keep) {
        if (keep.kind != kOfBool || keep.dims != 4 || !keep.is_or_one(0, c.batch) || !keep.is_or_one(1, c.heads) ||
            !keep.is(2, c.queries) || !keep.is(3, c.keys) || !keep.is_dense_from(3))
            return wrong("keep must be [1 or B, 1 or H, T, S] bool, its keys without gaps");
        c.keep = (const uint8_t*)keep.at;
        c.keep_batch = keep.step(0), c.keep_head = keep.step(1), c.keep_query = keep.step(2);
    }
    if (chosen) {
        long long shared = 0, skipped = 0;
        if (!PyArg_ParseTuple(f[F::chosen_queries], "LL", &shared, &skipped)) return false;
        c.chosen_size = f.as_int64(F::chosen_size);
        if (PyErr_Occurred()) return false;
        if (c.chosen_size < 1 || shared < 1 || skipped < 0 || skipped >= shared)
            return wrong("chosen_size and chosen_queries must be at least 1, and fewer queries be skipped");
        if (shared - skipped >= c.queries) shared = c.queries ? c.queries : 1, skipped = 0;  // one list
        const int64_t lists = (skipped + c.queries - 1) / shared + 1;
        if (chosen.kind != kOfInt64 || chosen.dims != 4 || !chosen.is_or_one(0, c.batch) || chosen.size[1] < 1 ||
            c.heads % chosen.size[1] || !chosen.is_or_one(2, lists) || !chosen.is_dense_from(3))
            return wrong("chosen must be [1 or B, n, 1 or lists, m] int64, n a divisor of H, its last dimension without gaps");
        if (chosen.size[2] == 1) shared = c.queries ? c.queries : 1, skipped = 0;
        if (c.keep || bias || f[F::dropout] != Py_None) return wrong("chosen goes without keep, bias and dropout");
        static const int64_t none = -1;  // a tensor without elements has no address
        c.chosen = chosen.at ? (const int64_t*)chosen.at : &none;
        c.chosen_batch = chosen.step(0), c.chosen_head = chosen.step(1), c.chosen_list = chosen.step(2);
        c.chosen_count = chosen.size[3], c.chosen_heads = c.heads / chosen.size[1];
        c.chosen_queries = shared, c.chosen_skipped = skipped;
    }
    if (slopes) {
        if (slopes.kind != kOfFloat32 || !slopes.is_vector(c.heads))
            return wrong("slopes must be [H] float32, without gaps");
        c.slopes = (const float*)slopes.at;
    }
    if (by_distance) {
        if (by_distance.kind != kOfFloat32 || by_distance.dims != 2 || !by_distance.is(0, c.heads) ||
            by_distance.size[1] % 2 != 1 || !by_distance.is_dense_from(0))
            return wrong("by_distance must be [H, 2 n + 1] float32, without gaps");
        c.by_distance = (const float*)by_distance.at, c.farthest = by_distance.size[1] / 2;
    }
    if (q_positions) {
        if (!is_table(q_positions, c.batch, c.queries)) return wrong("q_positions must be [T], [1, T] or [B, T] int64, without gaps");
        c.q_positions = (const int64_t*)q_positions.at, c.q_positions_batch = table_stride(q_positions);
    } else if (slopes || by_distance) {
        return wrong("a bias by distance needs q_positions");
    }
    if (bias) {
        if (bias.kind != kOfFloat32 || bias.dims != 4 || !bias.is_or_one(0, c.batch) || !bias.is_or_one(1, c.heads) ||
            !bias.is_or_one(2, c.queries) || !bias.is_or_one(3, c.keys))
            return wrong("bias must be [1 or B, 1 or H, 1 or T, 1 or S] float32");
        c.bias = (const float*)bias.at;
        c.bias_batch = bias.step(0), c.bias_head = bias.step(1), c.bias_query = bias.step(2), c.bias_key = bias.step(3);
    }
    if (c.rounded != 0.0f && !c.slopes) return wrong("rounded goes with slopes");
    if (f[F::dropout] != Py_None && !dropout_from(f[F::dropout], c.dropout)) return false;
    return !PyErr_Occurred();
}

// All of an attention but its results.
inline bool attention_from(PyObject* queries, PyObject* segments, PyObject* mods, Attention& c) {
    View q;
    if (!view_of(queries, "q", q)) return false;
    if (q.dims != 4 || q.kind > kOfFloat16 || q.size[3] < 1) return wrong("q must be [B, H, T, D] of floating point");
    if (!q.is_dense_from(3)) return refuse("q", "one with gaps in its last dimension");
    c.dtype = (Dtype)q.kind;
    c.batch = q.size[0], c.heads = q.size[1], c.queries = q.size[2], c.key_dim = q.size[3];
    c.q = q.at, c.q_batch = q.stride[0], c.q_head = q.stride[1], c.q_token = q.stride[2];
    const Py_ssize_t number = PySequence_Size(segments);
    if (number < 1 || number > kMaxSegments) return wrong("segments of keys and values must be 1 to 16");
    for (; c.count < number; ++c.count) {
        PyObject* segment = PySequence_GetItem(segments, c.count);
        const bool good = segment_from(segment, c, c.segments[c.count], c.count == 0);
        Py_XDECREF(segment);  // the caller's sequence holds it
        if (!good) return false;
        c.keys += c.segments[c.count].length;
    }
    if (c.heads < 1 || c.heads % c.kv_heads) return wrong("kv heads must divide query heads");
    return score_mods_from(mods, c);
}

// out and lse as a call makes them.
inline bool results_into(PyObject* out, PyObject* lse, Attention& c) {
    const int64_t rows = c.batch * c.heads * c.queries;
    c.out = output_ptr(out, "out", rows * c.value_dim, (int)c.dtype);
    c.out_query = c.value_dim, c.out_head = c.queries * c.out_query, c.out_batch = c.heads * c.out_head;
    if (lse != Py_None) c.lse = (float*)output_ptr(lse, "lse", rows, kOfFloat32);
    return !PyErr_Occurred();
}

inline PyObject* attend(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::attend;
    const Arguments<A> a("attend", args, count);
    Attention c{};
    if (!a.code || !attention_from(a[A::q], a[A::segments], a[A::mods], c) || !results_into(a[A::out], a[A::lse], c))
        return nullptr;
    c.scale = a.as_float(A::scale);
    if (PyErr_Occurred()) return nullptr;
    return run_interruptible([&](InterruptCheck& check) { return c.interrupt = &check, a.code->attend(c, a.threads); });
}

// Where the gradient of a bias is added up: of slopes, by_distance or bias, in its own shape.
inline bool bias_gradient_into(PyObject* tensor, Gradients& g) {
    View v;
    if (!view_of(tensor, "grad_bias", v)) return false;
    const Attention& c = g.call;
    bool good = v.kind == kOfFloat32 && v.is_dense_from(0);
    if (c.slopes) {
        good = good && v.dims == 1 && v.is(0, c.heads);
        g.bias_head = v.step(0);
    } else if (c.by_distance) {
        good = good && v.dims == 2 && v.is(0, c.heads) && v.is(1, 2 * c.farthest + 1);
        g.bias_head = v.step(0), g.bias_key = v.step(1);
    } else if (c.bias) {
        good = good && v.dims == 4 && v.is(0, c.bias_batch ? c.batch : v.size[0]) && v.is_or_one(0, c.batch) &&
               v.is_or_one(1, c.heads) && v.is_or_one(2, c.queries) && v.is_or_one(3, c.keys);
        g.bias_batch = v.step(0), g.bias_head = v.step(1), g.bias_query = v.step(2), g.bias_key = v.step(3);
    } else {
        good = false;
    }
    g.grad_bias = (float*)v.at;
    return good || wrong("grad_bias must be float32 in the shape of the bias, without gaps");
}

inline PyObject* gradients(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::gradients;
    const Arguments<A> a("gradients", args, count);
    Gradients g{};
    Attention& c = g.call;
    View out, lse, grad_out, grad_lse;
    if (!a.code || !attention_from(a[A::q], a[A::segments], a[A::mods], c) || !view_of(a[A::out], "out", out) ||
        !view_of(a[A::lse], "lse", lse) || !view_of(a[A::grad_out], "grad_out", grad_out) ||
        !view_of(a[A::grad_lse], "grad_lse", grad_lse))
        return nullptr;
    if (c.count != 1 || c.segments[0].pages || c.segments[0].coding.group) return wrong("gradients takes keys in one segment");
    if (c.chosen) return wrong("gradients takes no chosen keys");
    if (c.queries < 1 || c.keys < 1) return wrong("gradients takes queries and keys: got none");
    auto are_rows = [&](const View& v, int dims) {
        bool good = v.dims == dims && v.is(0, c.batch) && v.is(1, c.heads) && v.is(2, c.queries);
        return good && (dims == 3 ? v.kind == kOfFloat32 && v.is_dense_from(0)
                                  : v.kind == (int)c.dtype && v.is(3, c.value_dim) && v.is_dense_from(3));
    };
    if (!are_rows(out, 4) || !are_rows(grad_out, 4) || !are_rows(lse, 3) || !are_rows(grad_lse, 3))
        return wrong("out and lse, and their gradients, must be as attend gives them");
    c.scale = a.as_float(A::scale);
    c.out = out.at, c.out_batch = out.stride[0], c.out_head = out.stride[1], c.out_query = out.stride[2];
    c.lse = (float*)lse.at;
    g.grad_out = grad_out.at, g.grad_batch = grad_out.stride[0], g.grad_head = grad_out.stride[1];
    g.grad_query = grad_out.stride[2], g.grad_lse = (const float*)grad_lse.at;
    const int64_t keys = c.batch * c.kv_heads * c.keys;
    g.grad_q = output_ptr(a[A::grad_q], "grad_q", c.batch * c.heads * c.queries * c.key_dim, (int)c.dtype);
    g.grad_k = output_ptr(a[A::grad_k], "grad_k", keys * c.key_dim, (int)c.dtype);
    g.grad_v = output_ptr(a[A::grad_v], "grad_v", keys * c.value_dim, (int)c.dtype);
    if (PyErr_Occurred() || (a[A::grad_bias] != Py_None && !bias_gradient_into(a[A::grad_bias], g))) return nullptr;
    return run_interruptible([&](InterruptCheck& check) { return c.interrupt = &check, a.code->gradients(g, a.threads); });
}

// Sums over rows [B, T] or [B, T, n] of a tile, all with one batch stride, and rows without gaps.
inline bool sums_from(const View& v, const char* name, int kind, const Tile& t, int dims, int64_t& row_batch) {
    const int64_t each = dims == 3 ? v.size[2] : 1;
    if (v.kind != kind || v.dims != dims || !v.is(0, t.batch) || v.size[1] < t.rows || !v.is_dense_from(1) || each < 1 ||
        v.step(0) % each || (row_batch >= 0 && t.batch > 1 && row_batch != v.step(0) / each)) {
        PyErr_Format(PyExc_ValueError, "%s must hold the rows of the tile, with one batch stride for all sums", name);
        return false;
    }
    row_batch = v.step(0) / each;
    return true;
}

inline PyObject* tile_sums(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::tile_sums;
    using F = tuples::TileSums;
    const Arguments<A> a("tile_sums", args, count);
    View logs, entropy, squares, most, most_keys, top, top_keys, received;
    if (!a.code || !view_of(a[A::logs], "logs", logs)) return nullptr;
    const Fields<F> f(a[A::sums], "sums");
    if (!f || !optional_view_of(f[F::entropy], "entropy", entropy) ||
        !optional_view_of(f[F::squares], "squares", squares) || !pair_of(f[F::largest], "largest", most, most_keys) ||
        !pair_of(f[F::top], "top", top, top_keys) || !optional_view_of(f[F::received], "received", received))
        return nullptr;
    if (logs.dims != 3 || logs.kind != kOfFloat32 || !logs.is_dense_from(0))
        return wrong("logs must be [B, rows, columns] float32, without gaps");
    Tile t{};
    t.weights = (float*)logs.at, t.batch = logs.size[0], t.rows = logs.size[1], t.columns = logs.size[2];
    t.first = a.as_int64(A::first);
    int64_t stride = -1;
    if ((entropy && !sums_from(entropy, "entropy", kOfFloat32, t, 2, stride)) ||
        (squares && !sums_from(squares, "squares", kOfFloat32, t, 2, stride)) ||
        (most && (!sums_from(most, "largest", kOfFloat32, t, 2, stride) ||
                  !sums_from(most_keys, "largest", kOfInt64, t, 2, stride))) ||
        (top && (!sums_from(top, "top", kOfFloat32, t, 3, stride) ||
                 !sums_from(top_keys, "top", kOfInt64, t, 3, stride))))
        return nullptr;
    if (top && top.size[2] != top_keys.size[2]) return wrong("top must be weights and as many keys");
    if (received && (received.kind != kOfFloat32 || received.dims != 2 || !received.is(0, t.batch) ||
                     received.size[1] < t.columns || !received.is_dense_from(1)))
        return wrong("received must hold the columns of the tile");
    t.entropy = (float*)entropy.at, t.squares = (float*)squares.at;
    t.most = (float*)most.at, t.most_keys = (int64_t*)most_keys.at, t.row_batch = stride < 0 ? 0 : stride;
    t.top = (float*)top.at, t.top_keys = (int64_t*)top_keys.at, t.top_count = top ? top.size[2] : 0;
    t.received = (float*)received.at, t.received_batch = received ? received.step(0) : 0;
    const int64_t numbers = t.received ? t.batch * ((t.rows + kTileRun - 1) / kTileRun) * t.columns : 0;
    const Scratch scratch(numbers * sizeof(float));
    t.scratch = scratch.arena().take<float>(numbers);
    return run(scratch, [&] {
        __builtin_memset(t.scratch, 0, numbers * sizeof(float));
        a.code->tile_sums(t, a.threads);
    });
}

// sink(...): x [B, H, T, V] in place.
inline PyObject* sink(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::sink;
    const Arguments<A> a("sink", args, count);
    View x, lse, sinks;
    if (!a.code || !view_of(a[A::x], "x", x) || !view_of(a[A::lse], "lse", lse) || !view_of(a[A::sinks], "sinks", sinks)) return nullptr;
    bool good = x.dims == 4 && x.kind <= kOfFloat16 && x.is_dense_from(3) && lse.dims == 3 && lse.kind == kOfFloat32 && lse.is_dense_from(0);
    for (int d = 0; good && d < 3; ++d) good = lse.is(d, x.size[d]);
    if (!good || !sinks.is_vector(x.size[1]) || (sinks.kind != x.kind && sinks.kind != kOfFloat32))
        return wrong("x must be [B, H, T, V], lse [B, H, T] float32 and sinks [H], without gaps");
    const Sinks s{(Dtype)x.kind, x.size[0], x.size[1], x.size[2], x.size[3], x.at, x.stride[0], x.stride[1], x.stride[2],
                  (const float*)lse.at, sinks.at, sinks.kind == kOfFloat32};
    return run([&] { a.code->sink(s, a.threads); });
}

}  // namespace polyhead
