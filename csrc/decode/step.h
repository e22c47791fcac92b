// A few tokens of every batch row through a layer: the steps that layers/transformer_layer takes one by
// one, without returning to Python between them.
#pragma once

#include "../attention/attend.h"
#include "../attention/block_bounds.h"
#include "../attention/sinks.h"
#include "experts.h"
#include "../products/head_product.h"
#include "../products/norm.h"

namespace polyhead::PH_NAMESPACE {

// Rows of x `stride` apart, those of y without gaps; y may be x.
inline void norm_with(const Step& s, const NormWeight& n, const void* x, int64_t stride, int64_t rows, int64_t dim,
                      void* y, int threads) {
    norm(Norm{s.dtype, x, rows, dim, stride, n.weight, n.eps, n.offset, y, n.bias, n.centred, n.heads}, threads);
}

template <class T>
void product_with(const Step& s, const T* x, int64_t stride, int64_t in_features, const LinearWeight* weights, int count,
                  float* fp32, T* y, int threads) {
    widen<T>(x, stride, s.rows, in_features, fp32);
    Gemv p{};
    p.dtype = s.dtype, p.x = fp32, p.rows = s.rows, p.in_features = in_features, p.y = y;
    for (p.count = 0; p.count < count; ++p.count) {
        p.weights[p.count] = weights[p.count];
        p.y_stride += weights[p.count].out_features;
    }
    gemv(p, threads);
}

// Turns the first features of every head where they lie; rows are `stride` apart, heads `head`.
template <class T>
void apply_rope(const Step& s, T* x, int64_t stride, int64_t heads, int64_t head, T* turned, int threads) {
    const int64_t dim = s.rotary, batch = s.uneven || s.packed ? 1 : s.batch, tokens = s.rows / batch;
    rotate(Rotation{s.dtype, x, batch, tokens, heads, dim, tokens * stride, stride, head, s.cos, s.sin, turned}, threads);
    for (int64_t m = 0; m < s.rows; ++m)
        for (int64_t h = 0; h < heads; ++h)
            __builtin_memcpy(x + m * stride + h * head, turned + (m * heads + h) * dim, dim * sizeof(T));
}

// Where new token t of a batch row and kv head goes: the last T of what the segments hold, or of the row.
inline char* place_of(const Step& s, int64_t b, int64_t t, int64_t g, bool values) {
    const bool by_position = s.uneven || s.placed;
    int i = s.segments - 1;
    int64_t back = s.tokens - t;
    for (; !by_position && back > s.cache[i].length; --i) back -= s.cache[i].length;
    const KVSegment& segment = s.cache[i];
    int64_t row = b, at = segment.skipped + (by_position ? (start_of(s, b) + t - s.base) % segment.length : segment.length - back);
    if (segment.pages) row = segment.pages[b * segment.pages_batch + at / segment.page_length], at %= segment.page_length;
    const int64_t size = s.dtype == kFloat32 ? 4 : 2;
    return values ? (char*)segment.v + (row * segment.v_batch + g * segment.v_head + at * segment.v_token) * size
                  : (char*)segment.k + (row * segment.k_batch + g * segment.k_head + at * segment.k_token) * size;
}

// Writes keys and values of the new tokens: rows `stride` apart, keys of all heads, then values.
template <class T> void write_cache(const Step& s, const T* tokens, int64_t stride, bool values) {
    const int64_t G = s.kv_heads, D = s.key_dim, V = s.value_dim;
    for (int64_t m = 0; m < s.rows; ++m)
        for (int64_t g = 0; g < G; ++g) {
            const T* row = tokens + m * stride;
            const int64_t b = s.batch_row[m], t = m - s.firsts[b];
            __builtin_memcpy(place_of(s, b, t, g, false), row + g * D, D * sizeof(T));
            if (values) __builtin_memcpy(place_of(s, b, t, g, true), row + G * D + g * V, V * sizeof(T));
        }
}

// A limit is rounded to the dtype of what it limits.
template <class T> void clip(const Step& s, T* x, int64_t count) {
    T limit;
    round_to(s.clip, &limit);
    const float most = to_float(limit);
    for (int64_t i = 0; i < count; ++i) {
        const float number = to_float(x[i]);
        if (number > most || number < -most) round_to(number > most ? most : -most, x + i);
    }
}

// Queries times the temperatures of their positions; rows are `stride` apart.
template <class T> void apply_temperatures(const Step& s, T* q, int64_t stride) {
    for (int64_t m = 0; m < s.rows; ++m) {
        const float factor = s.temperatures[(position_of(s, m) + s.offset) / s.every];
        for (int64_t i = 0; i < s.heads * s.key_dim; ++i) round_to(to_float(q[m * stride + i]) * factor, q + m * stride + i);
    }
}

// Queries, keys and values of the new tokens; keys and values go to the end of the cache. Returns
// the queries, whose rows are q_row apart.
template <class T>
const T* project(const Step& s, const T* x, float* fp32, Arena& arena, int64_t& q_row, int threads) {
    const int64_t H = s.heads, G = s.kv_heads, D = s.key_dim, V = s.value_dim;
    const int64_t width = (H + G) * D + G * V;
    T* qkv = arena.take<T>(s.rows * width);
    product_with(s, x, s.embed_dim, s.embed_dim, s.qkv, 3, fp32, qkv, threads);
    auto normed = [&](const NormWeight& by, int64_t heads, T* x) {
        if (!by.there) return;
        const bool whole = s.norm_place == kFullWidth;
        const int64_t rows = whole ? 1 : heads, dim = whole ? heads * D : D;
        for (int64_t b = 0; b < s.rows; ++b) norm_with(s, by, x + b * width, dim, rows, dim, x + b * width, 1);
    };
    auto both_normed = [&] { normed(s.q_norm, H, qkv), normed(s.k_norm, G, qkv + H * D); };
    if (s.norm_place == kFullWidth) both_normed();
    if (s.clip < __builtin_inff()) clip(s, qkv, s.rows * width);
    if (s.norm_place == kBeforeRope) both_normed();
    if (s.cos) apply_rope(s, qkv, width, H + G, D, arena.take<T>(s.rows * (H + G) * D), threads);
    if (s.norm_place == kAfterRope) both_normed();
    if (s.temperatures) apply_temperatures(s, qkv, width);
    write_cache(s, qkv + H * D, width, true);
    q_row = width;
    return qkv;
}

// The same of latent attention, absorbed: queries [n Wuk | p] of R + P numbers; a token is [c | r].
template <class T>
const T* project_latent(const Step& s, const T* x, float* fp32, Arena& arena, int64_t& q_row, int threads) {
    const LatentHeads& l = s.latent;
    const int64_t H = s.heads, N = l.plain, P = l.rotated, R = l.rank, D = R + P;
    const int64_t into = s.qkv[0].out_features, width = into + D;
    T* made = arena.take<T>(s.rows * width);
    product_with(s, x, s.embed_dim, s.embed_dim, s.qkv, 2, fp32, made, threads);
    T* q = made;
    int64_t made_row = width;
    if (l.q.weight) {
        const T* latent = made;
        int64_t stride = width;
        if (l.q_norm.there) {
            T* normed = arena.take<T>(s.rows * into);
            norm_with(s, l.q_norm, made, width, s.rows, into, normed, threads);
            latent = normed, stride = into;
        }
        made_row = H * (N + P);
        q = arena.take<T>(s.rows * made_row);
        product_with(s, latent, stride, into, &l.q, 1, fp32, q, threads);
    }
    T* token = made + into;
    if (s.cos) {
        T* turned = arena.take<T>(s.rows * H * P);
        apply_rope(s, q + N, made_row, H, N + P, turned, threads);
        apply_rope(s, token + R, width, 1, P, turned, threads);
    }
    if (l.norm.there) {
        T* normed = arena.take<T>(s.rows * R);
        norm_with(s, l.norm, token, width, s.rows, R, normed, threads);
        for (int64_t b = 0; b < s.rows; ++b) __builtin_memcpy(token + b * width, normed + b * R, R * sizeof(T));
    }
    q_row = H * D;
    T* queries = arena.take<T>(s.rows * q_row);
    HeadProduct p{s.dtype, s.rows, H, N, R, q, made_row, N + P, l.up, (N + l.value) * R, true, queries, q_row, D, fp32};
    head_product(p, threads);
    for (int64_t b = 0; b < s.rows; ++b) {
        for (int64_t h = 0; h < H; ++h)
            __builtin_memcpy(queries + b * q_row + h * D + R, q + b * made_row + h * (N + P) + N, P * sizeof(T));
    }
    write_cache(s, token, width, false);
    return queries;
}

// Which positions queries see, and their own, where the attention must know.
inline void place_queries(const Step& s, Attention& c, Arena& arena) {
    auto lowest = [&](int64_t at) { return s.chunk ? at - at % s.chunk : s.window ? at - s.window + 1 : INT64_MIN; };
    const bool bounded = s.tokens > 1 || s.uneven || s.placed || s.position + 1 - c.keys < lowest(s.position);
    int64_t next = s.uneven || s.placed ? 0 : s.position + s.tokens - c.keys;
    for (int i = 0; i < c.count; ++i) c.segments[i].position = next, next += c.segments[i].length;
    if (!bounded && !s.slopes && !s.by_distance) return;
    int64_t *at = arena.take<int64_t>(s.rows), *low = arena.take<int64_t>(s.rows), *high = arena.take<int64_t>(s.rows);
    const int64_t rows = s.uneven || s.packed ? s.rows : s.tokens;
    for (int64_t m = 0; m < rows; ++m) {
        at[m] = position_of(s, m);
        low[m] = lowest(at[m]);
        high[m] = at[m] + 1;
    }
    c.q_positions = at, c.q_positions_batch = s.uneven ? s.tokens : 0;
    if (bounded) c.low = low, c.high = high, c.bounds_batch = c.q_positions_batch;
}

// The keys that the queries of one token see, if they do not see all.
inline void choose_keys(const Step& s, Attention& c, Arena& arena, int threads) {
    BlockChoice b = s.choice;
    if (!b.top_k || c.keys <= s.block_size * b.top_k) return;
    b.dtype = s.dtype, b.batch = s.batch, b.heads = s.heads, b.kv_heads = s.kv_heads, b.queries = 1, b.key_dim = s.key_dim;
    b.q = c.q, b.q_batch = c.q_batch, b.q_head = c.q_head;
    int64_t* own = arena.take<int64_t>(1);
    *own = s.position / s.block_size;
    b.own = own, b.chosen = arena.take<int64_t>(b.batch * b.kv_heads * b.top_k);
    threads = threads < kMostChoosers ? threads : kMostChoosers;
    b.scratch = arena.take<float>(choice_numbers(b, threads));
    choose_blocks(b, threads);
    c.chosen = b.chosen, c.chosen_batch = b.kv_heads * b.top_k, c.chosen_head = b.top_k;
    c.chosen_count = b.top_k, c.chosen_size = s.block_size, c.chosen_heads = b.heads / b.kv_heads, c.chosen_queries = 1;
}

// Rows of a ring that differ in what they hold, each with its keys in the order of position: the bits that it has alone.
template <class T> Outcome attend_by_row(const Step& s, const Attention& all, int threads) {
    const KVSegment ring = all.segments[0];
    for (int64_t b = 0; b < s.batch; ++b) {
        const int64_t m = s.firsts[b], count = s.firsts[b + 1] - m, first = s.held_from[b], own[2] = {0, count};
        Attention c = all;
        c.batch = 1, c.queries = count, c.keys = start_of(s, b) + count - first;
        if (s.packed) c.firsts = own;
        c.q += m * c.q_token * sizeof(T), c.out += m * c.out_query * sizeof(T);
        if (c.lse) c.lse += m * c.heads;
        if (s.uneven || s.packed) {
            if (c.low) c.low += m, c.high += m;
            if (c.q_positions) c.q_positions += m;
        }
        c.count = 0;
        for (int64_t held = 0; held < c.keys; held += c.segments[c.count++].length) {
            const int64_t at = (first + held) % ring.length, left = c.keys - held;
            KVSegment& segment = c.segments[c.count] = ring;
            segment.k += (b * ring.k_batch + at * ring.k_token) * sizeof(T);
            segment.v += (b * ring.v_batch + at * ring.v_token) * sizeof(T);
            segment.length = left < ring.length - at ? left : ring.length - at;
            segment.position = first + held;
        }
        if (const Outcome outcome = attend(c, threads); outcome != Outcome::done) return outcome;
    }
    return Outcome::done;
}

// What the attention makes of x [B, T, E], through the output projection.
template <class T> Outcome attention_of(const Step& s, const T* x, float* fp32, Arena& arena, T* y, int threads) {
    const LatentHeads& l = s.latent;
    Attention c{};
    c.dtype = s.dtype, c.batch = s.batch, c.heads = s.heads, c.kv_heads = s.kv_heads, c.queries = s.tokens;
    c.key_dim = s.key_dim, c.value_dim = s.value_dim, c.scale = s.scale, c.softcap = s.softcap;
    const T* q = l.rank ? project_latent(s, x, fp32, arena, c.q_token, threads) : project(s, x, fp32, arena, c.q_token, threads);
    // Features of a latent that no query asks for add 0 to every score; codes are read whole.
    int64_t skipped = 0;
    bool coded = false;
    for (int i = 0; i < s.segments; ++i) coded = coded || s.cache[i].coding.group;
    if (l.rank && !l.plain && !coded && s.heads <= kDecodeRows && l.rank % (2 * W) == 0 && l.rotated % (2 * W) == 0) skipped = l.rank;
    c.q = (const char*)(q + skipped), c.q_batch = s.tokens * c.q_token, c.q_head = s.key_dim, c.key_dim -= skipped;
    for (; c.count < s.segments; ++c.count) {
        KVSegment& segment = c.segments[c.count] = s.cache[c.count];
        segment.k += skipped * sizeof(T);
        c.keys += segment.length;
    }
    c.slopes = s.slopes, c.rounded = s.rounded, c.by_distance = s.by_distance, c.farthest = s.farthest;
    place_queries(s, c, arena);
    choose_keys(s, c, arena, threads);
    if (s.packed) c.firsts = s.firsts, c.batch_invariant = true;
    int64_t heads = s.heads * s.value_dim;
    T* out = arena.take<T>(s.rows * heads);
    c.out = (char*)out, c.out_batch = s.tokens * heads, c.out_head = s.value_dim, c.out_query = heads;
    if (s.sinks) c.lse = arena.take<float>(s.rows * s.heads);
    if (const Outcome outcome = s.by_row ? attend_by_row<T>(s, c, threads) : attend(c, threads); outcome != Outcome::done) return outcome;
    if (s.sinks) {
        Sinks joined{s.dtype, s.batch, s.heads, s.tokens, s.value_dim, out, c.out_batch, c.out_head, c.out_query, c.lse, s.sinks, s.fp32_sinks};
        if (s.packed) joined.batch = s.rows, joined.queries = 1, joined.x_batch = heads;
        sink(joined, threads);
    }
    if (l.rank) {
        const int64_t H = s.heads, R = l.rank, V = l.value;
        T* values = arena.take<T>(s.rows * H * V);
        const T* up = (const T*)l.up + l.plain * R;
        head_product(HeadProduct{s.dtype, s.rows, H, R, V, out, heads, R, up, (l.plain + V) * R, false, values, H * V, V, fp32}, threads);
        out = values, heads = H * V;
    }
    product_with(s, out, heads, heads, &s.out, 1, fp32, y, threads);
    return Outcome::done;
}

// What the attention to the context makes of x [B, E], through the output projection.
template <class T> Outcome cross_attention_of(const Step& s, const T* x, float* fp32, Arena& arena, T* y, int threads) {
    const CrossHeads& a = s.cross;
    const int64_t width = a.heads * a.key_dim, values = a.heads * a.value_dim;
    T* q = arena.take<T>(s.rows * width);
    product_with(s, x, s.embed_dim, s.embed_dim, &a.q, 1, fp32, q, threads);
    if (a.q_norm.there) {
        const int64_t dim = a.full_width ? width : a.key_dim;
        norm_with(s, a.q_norm, q, dim, s.rows * width / dim, dim, q, 1);
    }
    T* out = arena.take<T>(s.rows * values);
    Attention c{};
    const int64_t queries = a.shared * s.tokens;
    c.dtype = s.dtype, c.batch = s.batch / a.shared, c.heads = a.heads, c.kv_heads = a.kv_heads, c.queries = queries;
    c.key_dim = a.key_dim, c.value_dim = a.value_dim, c.scale = a.scale, c.softcap = a.softcap;
    c.q = (const char*)q, c.q_batch = queries * width, c.q_head = a.key_dim, c.q_token = width;
    c.segments[0] = a.memory, c.count = 1, c.keys = a.memory.length;
    c.out = (char*)out, c.out_batch = queries * values, c.out_head = a.value_dim, c.out_query = values;
    if (const Outcome outcome = attend(c, threads); outcome != Outcome::done) return outcome;
    product_with(s, out, values, values, &a.out, 1, fp32, y, threads);
    return Outcome::done;
}

// What the feed-forward network or the mixture in its place makes of x [B, E].
template <class T> Outcome network_of(const Step& s, const T* x, float* fp32, Arena& arena, T* y, int threads) {
    if (s.experts) return mixture_of(s, x, fp32, arena, y, threads);
    widen<T>(x, s.embed_dim, s.rows, s.embed_dim, fp32);
    float* hidden = arena.take<float>(s.rows * s.network.up.out_features);
    feed_forward(FeedForward{s.dtype, fp32, s.rows, s.embed_dim, s.network, hidden, y}, threads);
    return Outcome::done;
}

// y = x + what a part made of it, with the norms and the factor that stand there.
template <class T>
void join(const Step& s, const T* x, T* made, const NormWeight& out_norm, const NormWeight& norm, T* y, int threads) {
    const int64_t E = s.embed_dim, features = s.rows * E;
    if (out_norm.there) norm_with(s, out_norm, made, E, s.rows, E, made, threads);
    if (s.residual_scale != 1.0f)
        for (int64_t i = 0; i < features; ++i) round_to(to_float(made[i]) * s.residual_scale, made + i);
    add_rows(x, made, features, y);
    if (s.post) norm_with(s, norm, y, E, s.rows, E, y, threads);
}

// Stopped: before the mixture of experts.
template <class T> Outcome step_of(const Step& s, int threads) {
    Arena arena = s.arena;
    const int64_t E = s.embed_dim, features = s.rows * E;
    const T* x = (const T*)s.x;
    T *h = arena.take<T>(features), *made = arena.take<T>(features), *sum = arena.take<T>(features);
    float* fp32 = arena.take<float>(s.rows * widest_of(s));
    // What a part reads: x itself, or behind a norm.
    auto entered = [&](const T* from, const NormWeight& by, T* to) -> const T* {
        if (s.post || !by.there) return from;
        norm_with(s, by, from, E, s.rows, E, to, threads);
        return to;
    };
    const T* read = entered(x, s.attention_norm, h);
    if (const Outcome outcome = attention_of(s, read, fp32, arena, made, threads); outcome != Outcome::done) return outcome;
    if (s.parallel) {
        if (s.parallel == kTwoNorms) read = entered(x, s.feed_forward_norm, h);
        network_of(s, read, fp32, arena, sum, threads);  // never a mixture
        add_rows(made, sum, features, made);
        join(s, x, made, s.attention_out_norm, s.attention_norm, (T*)s.y, threads);
        return Outcome::done;
    }
    const bool across = s.cross.memory.length, further = s.network.up.weight || s.experts;
    T* y = (T*)s.y;
    join(s, x, made, s.attention_out_norm, s.attention_norm, across || further ? sum : y, threads);
    if (across) {
        read = entered(sum, s.cross.norm, h);
        if (const Outcome outcome = cross_attention_of(s, read, fp32, arena, made, threads); outcome != Outcome::done) return outcome;
        join(s, sum, made, s.cross.out_norm, s.cross.norm, further ? sum : y, threads);
    }
    if (!further) return Outcome::done;
    read = entered(sum, s.feed_forward_norm, h);
    if (network_of(s, read, fp32, arena, made, threads) != Outcome::done) {
        __builtin_memcpy(y, sum, features * sizeof(T));
        return Outcome::stopped;
    }
    join(s, sum, made, s.feed_forward_out_norm, s.feed_forward_norm, y, threads);
    return Outcome::done;
}

inline Outcome step(const Step& s, int threads) {
    return with_dtype(s.dtype, [&](auto number) { return step_of<decltype(number)>(s, threads); });
}

}  // namespace polyhead::PH_NAMESPACE
