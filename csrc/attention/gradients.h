// Gradients of q, k and v (Dao 2023, algorithm 2). Weights are computed again from lse:
//
//     P = exp(score − lse)    dP = dO Vᵀ    dS = scale · P ∘ (dP − Δ)    Δ = rowsum(dO ∘ O) − dlse
//     dV = Pᵀ dO              dK = dSᵀ Q    dQ = dS K
//
// With dropout dP and the P of dV are multiplied with 0 where a weight was dropped, and 1 / (1 − p) elsewhere.
//
// A task is a kv head and every n-th of its blocks of keys. It goes over all rows of its group for
// each of them, so the gradients of its keys and values are its own. Those of the queries it adds up
// in memory of its own (the first task of a head where they belong, if it can), and they are summed
// over tasks in the end, always in the same order; that of the bias likewise (bias_gradients.h).
#pragma once

#include "bias_gradients.h"
#include "prefill.h"

namespace polyhead::PH_NAMESPACE {

constexpr int64_t kGradientRows = 96;
constexpr int64_t kTasks = 16, kMostSplits = 4;

// Rows of a block: queries and gradients of the output, as left and as right factor of a product.
template <class E> struct Packed {
    const E *q, *grad;            // [rows, steps of D or V]
    const E *q_rows, *grad_rows;  // [steps of rows, width]
    float *delta, *lse;           // [rows]
};

// Where rows are put to be packed: as they are, and in the other forms where these differ.
template <class T, class E> struct PackingScratch {
    T *q, *grad;
    E *q_left, *grad_left, *q_right, *grad_right;
    float *delta, *lse;
};

struct GradientPlan {
    int64_t heads, head_blocks, tokens, token_blocks;  // of a block of rows
    int64_t rows, key_width, value_width;
    int64_t key_blocks, splits;
    BiasPlan bias;
    int64_t batch_turns, head_turns;  // batch rows and kv heads whose tasks run one after the other
    int64_t sum;                      // numbers of the gradient of a group's queries, as summed
    bool straight;                    // they lie like grad_q: the first split of a head is summed there
};

// Parts of a kv head: enough tasks to keep threads busy, few enough for the memory of their sums, and
// the same for any number of threads, so that sums are always added in the same order. By row also for
// any number of batch rows: those are not counted among the heads.
inline int64_t splits_of(int64_t heads, int64_t key_blocks) {
    const int64_t wanted = (kTasks + heads - 1) / heads, most = wanted < kMostSplits ? wanted : kMostSplits;
    return most < key_blocks ? most : key_blocks;
}

inline GradientPlan gradient_plan_of(const Gradients& g) {
    const Attention& c = g.call;
    GradientPlan p{};
    const int64_t group = c.heads / c.kv_heads;
    p.tokens = c.queries < kGradientRows ? c.queries : kGradientRows;
    p.heads = kGradientRows / p.tokens < group ? kGradientRows / p.tokens : group;
    p.head_blocks = (group + p.heads - 1) / p.heads;
    p.token_blocks = (c.queries + p.tokens - 1) / p.tokens;
    p.rows = p.heads * p.tokens;
    p.key_width = up_to(c.key_dim, W);
    p.value_width = up_to(c.value_dim, W);
    p.key_blocks = (c.keys + kPrefillKeys - 1) / kPrefillKeys;
    p.bias = bias_plan_of(g);
    p.batch_turns = p.bias.in_place && !g.bias_batch ? c.batch : 1;
    p.head_turns = p.bias.in_place && !g.bias_head ? c.kv_heads : 1;
    p.splits = splits_of((c.batch_invariant ? 1 : c.batch / p.batch_turns) * (c.kv_heads / p.head_turns), p.key_blocks);
    p.sum = group * c.queries * p.key_width;
    p.straight = c.dtype == kFloat32 && c.key_dim == p.key_width;
    return p;
}

// Rows of D numbers as left factors: those of bfloat16 are pairs as they lie, if they are even.
template <class T, class E> const E* as_left(const T* x, int64_t rows, int64_t D, E* scratch) {
    constexpr bool pairs = !__is_same(E, float);
    if (__is_same(T, E) || (pairs && D % 2 == 0)) return (const E*)x;
    for (int64_t i = 0; i < rows; ++i) pack_query(x + i * D, D, scratch + i * steps_of(D, pairs));
    return scratch;
}

template <class T, class E> const E* as_right(const T* x, int64_t rows, int64_t D, E* scratch) {
    const int64_t width = up_to(D, W);
    if (__is_same(T, E) && D == width) return (const E*)x;
    pack_values(x, D, rows, D, width, scratch);
    return scratch;
}

template <class T> inline float dot(const T* a, const T* b, int64_t n) {
    Vec all{};
    int64_t i = 0;
    for (; i + W <= n; i += W) all += load(a + i) * load(b + i);
    float total = sum(all);
    for (; i < n; ++i) total += to_float(a[i]) * to_float(b[i]);
    return total;
}

template <class T> inline bool has_nan(const T* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i)
        if (const float number = to_float(x[i]); number != number) return true;
    return false;
}

// The rows of a block, packed both ways; a row that saw nothing, or content that is not finite (its out
// is NaN, but its lse, of what was put in place of such content, is not), is 0.
template <class T, class E>
Packed<E> pack_rows(const Gradients& g, const Rows& rows, const PackingScratch<T, E>& scratch) {
    const Attention& c = g.call;
    const int64_t D = c.key_dim, V = c.value_dim;
    for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t h = rows.head(i), t = rows.token(i), at = (rows.batch * c.heads + h) * c.queries + t;
        const T* out = (const T*)c.out + rows.batch * c.out_batch + h * c.out_head + t * c.out_query;
        const T* grad = (const T*)g.grad_out + rows.batch * g.grad_batch + h * g.grad_head + t * g.grad_query;
        const float lse = c.lse[at], delta = dot(grad, out, V);
        const bool strange = delta != delta && lse - lse == 0.0f && has_nan(out, V);
        const bool without_grad = lse == kMinusInfinity || strange;
        scratch.lse[i] = without_grad ? -kMinusInfinity : lse;
        scratch.delta[i] = without_grad ? 0.0f : delta - g.grad_lse[at];
        if (without_grad) {
            __builtin_memset(scratch.q + i * D, 0, D * sizeof(T));
            __builtin_memset(scratch.grad + i * V, 0, V * sizeof(T));
        } else {
            __builtin_memcpy(scratch.q + i * D, query<T>(c, rows, i), D * sizeof(T));
            __builtin_memcpy(scratch.grad + i * V, grad, V * sizeof(T));
        }
    }
    return {as_left(scratch.q, rows.count, D, scratch.q_left), as_left(scratch.grad, rows.count, V, scratch.grad_left),
            as_right(scratch.q, rows.count, D, scratch.q_right), as_right(scratch.grad, rows.count, V, scratch.grad_right),
            scratch.delta, scratch.lse};
}

// Scores become weights, and gradients of weights gradients of scores, times scale, row by row.
template <class E>
void weigh_again(const Attention& c, const Rows& rows, const Strip& strip, Visible visible, int64_t padded,
                 const Packed<E>& packed, float* s, float* ds, const BiasSum& bias) {
    float slope[kPrefillKeys], changes[kPrefillKeys];
    const float power = post_scale(c) * kLog2OfE;
    const Keys& keys = strip.keys;
    for (int64_t i = strip.row; i < strip.row + strip.count; ++i) {
        float *weights = s + i * kPrefillKeys, *gradients = ds + i * kPrefillKeys;
        for (int64_t j = 0; j < padded; j += W)
            if (j < strip.from || j >= strip.to) store_any(weights + j, Vec{}), store_any(gradients + j, Vec{});
        weights += strip.from, gradients += strip.from;
        if (!keys.length) continue;
        score(c, rows, i, keys, visible, weights, strip.to - strip.from, slope);
        const Vec lse = splat(packed.lse[i] * kLog2OfE), delta = splat(packed.delta[i]);
        const Vec factor = splat(c.dropout.factor);
        Dropped dropped(c, rows, i, keys);
        for (int64_t j = 0; j < strip.to - strip.from; j += W) {
            const Vec weight = power_of_two(load(weights + j) * power - lse);
            const Vec share = c.dropout.least ? dropped.next(factor) : factor;
            Vec change = weight * (load(gradients + j) * share - delta);
            if (bias.to) store_any(changes + j, change);
            change = change * c.scale;
            if (c.softcap > 0) change = change * load(slope + j);
            store_any(weights + j, weight * share);
            store_any(gradients + j, change);
        }
        if (bias.to) add_bias_gradient(c, rows, i, keys, bias, changes);
    }
}

// to[m] += Σ a[k, m] b[k] over the rows k of those strips that see any of the keys: a product whose left
// factor lies transposed, for `count` keys m.
template <class E>
void add_transposed(const E* a, const E* b, const Strip* strips, int64_t number, int64_t count, float* to,
                    int64_t vectors) {
    constexpr bool pairs = !__is_same(E, float);
    float ones[kTileRows<E>];
    for (float& one : ones) one = 1.0f;
    for (int64_t m = 0; m < count; m += kTileRows<E>) {
        const int64_t keys = count - m < kTileRows<E> ? count - m : kTileRows<E>;
        auto sees_none = [&](const Strip& strip) { return strip.to <= m || strip.from >= m + keys; };
        int64_t first = 0, last = number;
        while (first < last && sees_none(strips[first])) ++first;
        while (first < last && sees_none(strips[last - 1])) --last;
        if (first == last) continue;
        const int64_t k = strips[first].row / (pairs ? 2 : 1);
        const int64_t steps = steps_of(strips[last - 1].row + strips[last - 1].count, pairs) - k;
        block_product<E, true>(keys, a + k * kPrefillKeys + m, kPrefillKeys, b + k * vectors * W, vectors * W, steps,
                               to + m * vectors * W, vectors * W, vectors, ones);
    }
}

#if PH_PAIRS
// Two rows of numbers, rounded, as pairs.
inline void pack_row_pair(const float* a, const float* b, int64_t count, Pair* to) {
    for (int64_t j = 0; j < count; j += W) store_any(to + j, bits_of(a + j) | (b ? bits_of(b + j) << 16 : VecInt{}));
}
#endif

template <class T> inline void store_row(const float* from, int64_t n, T* to) {
    for (int64_t d = 0; d < n; d += W) store_some(load_some(from + d, n - d), to + d, n - d);
}

template <class E> struct KeyBlock {
    E *k_columns, *v_columns;  // [steps of D or V, kPrefillKeys]
    E* k_rows;                 // [steps of keys, key_width]
    float *grad_k, *grad_v;    // [keys, width]
};

// The sums of a task over all its blocks.
struct Sums {
    float* grad_q;  // [heads of the group, queries, key_width]
    BiasSum bias;
};

inline int64_t numbers_of_sums(const Attention& c, const GradientPlan& p) {
    return c.batch * c.kv_heads * ((p.splits - p.straight) * p.sum + p.splits * p.bias.part);
}

inline Sums sums_of(const Gradients& g, const GradientPlan& p, int64_t task, float* scratch) {
    const int64_t heads = g.call.batch * g.call.kv_heads, others = p.splits - p.straight;
    const int64_t head = task / p.splits, split = task % p.splits;
    Sums sums{scratch + (head * others + split - p.straight) * p.sum,
              {g.grad_bias, g.bias_head, g.bias_query, g.bias_key}};
    if (p.straight && split == 0) sums.grad_q = (float*)g.grad_q + head * p.sum;
    if (p.bias.in_place) sums.bias.to = bias_of_group(g, head);
    else if (g.grad_bias) sums.bias.to = scratch + heads * others * p.sum + task * p.bias.part;
    return sums;
}

template <class E>
void gradients_of_block(const Attention& c, const GradientPlan& p, const Rows& rows, const Keys& keys,
                        Visible visible, const Packed<E>& packed, const KeyBlock<E>& block, float* s,
                        float* ds, Pair* pairs_s, Pair* pairs_ds, Pair* pairs_keys, const Sums& sums) {
    constexpr bool pairs = !__is_same(E, float);
    const int64_t D = steps_of(c.key_dim, pairs), V = steps_of(c.value_dim, pairs);
    const int64_t padded = up_to(keys.length, pairs ? 2 * W : W);
    const int64_t key_vectors = p.key_width / W, value_vectors = p.value_width / W;
    Strip strips[(kGradientRows + kTileRows<E> - 1) / kTileRows<E>];
    int64_t number = 0;
    for (int64_t i = 0; i < rows.count; i += kTileRows<E>) {
        const Strip& strip = strips[number++] = strip_of<E>(c, rows, i, keys, visible);
        const int64_t at = i * kPrefillKeys + strip.from, vectors = (strip.to - strip.from) / W;
        block_product<E>(strip.count, packed.q + i * D, D, block.k_columns + strip.from, kPrefillKeys, D, s + at,
                         kPrefillKeys, vectors, nullptr);
        block_product<E>(strip.count, packed.grad + i * V, V, block.v_columns + strip.from, kPrefillKeys, V, ds + at,
                         kPrefillKeys, vectors, nullptr);
        weigh_again(c, rows, strip, visible, padded, packed, s, ds, sums.bias);
    }
    const E *weights = nullptr, *changes = nullptr, *changes_of_keys = nullptr;
    int64_t change_stride = kPrefillKeys;
    if constexpr (pairs) {
#if PH_PAIRS
        for (int64_t i = 0; i < rows.count; i += 2) {
            const bool both = i + 1 < rows.count;
            const float *a = s + i * kPrefillKeys, *b = ds + i * kPrefillKeys;
            pack_row_pair(a, both ? a + kPrefillKeys : nullptr, padded, pairs_s + i / 2 * kPrefillKeys);
            pack_row_pair(b, both ? b + kPrefillKeys : nullptr, padded, pairs_ds + i / 2 * kPrefillKeys);
        }
        for (int64_t i = 0; i < rows.count; ++i)
            pack_weights(ds + i * kPrefillKeys, padded, pairs_keys + i * kPrefillKeys / 2);
#endif
        weights = pairs_s, changes = pairs_ds, changes_of_keys = pairs_keys;
        change_stride = kPrefillKeys / 2;
    } else {
        weights = s, changes = changes_of_keys = ds;
    }
    add_transposed<E>(weights, packed.grad_rows, strips, number, keys.length, block.grad_v, value_vectors);
    add_transposed<E>(changes, packed.q_rows, strips, number, keys.length, block.grad_k, key_vectors);
    float ones[kTileRows<E>];
    for (float& one : ones) one = 1.0f;
    for (int64_t n = 0; n < number; ++n) {
        const Strip& strip = strips[n];
        const int64_t i = strip.row, k = strip.from / (pairs ? 2 : 1);
        float* to = sums.grad_q + ((rows.head(i) - rows.kv_head * (c.heads / c.kv_heads)) * c.queries + rows.token(i)) * p.key_width;
        // Rows of a block lie after each other: it has whole heads, or tokens of one.
        block_product<E>(strip.count, changes_of_keys + i * change_stride + k, change_stride,
                         block.k_rows + k * p.key_width, p.key_width, steps_of(strip.keys.length, pairs), to,
                         p.key_width, key_vectors, ones);
    }
}

inline int64_t gradient_bytes(const Attention& c, const GradientPlan& p) {
    const int64_t wide = p.key_width + p.value_width, rows = up_to(p.rows, 2);
    return 4 * (rows * (2 * wide + wide + 2 * kPrefillKeys * 2 + 2) + kPrefillKeys * (5 * wide + wide)) + 32 * 64;
}

template <class T>
void gradients_of_task(const Gradients& g, const GradientPlan& p, int64_t task, const Sums& sums, Arena arena) {
    using E = typename Element<T>::type;
    constexpr bool pairs = !__is_same(E, float);
    const Attention& c = g.call;
    const int64_t D = c.key_dim, V = c.value_dim, group = c.heads / c.kv_heads, rows_most = up_to(p.rows, 2);
    const int64_t split = task % p.splits, head = task / p.splits;
    const PackingScratch<T, E> packing{
        arena.take<T>(rows_most * D), arena.take<T>(rows_most * V),
        arena.take<E>(rows_most * steps_of(D, pairs)), arena.take<E>(rows_most * steps_of(V, pairs)),
        arena.take<E>(steps_of(rows_most, pairs) * p.key_width),
        arena.take<E>(steps_of(rows_most, pairs) * p.value_width),
        arena.take<float>(rows_most), arena.take<float>(rows_most),
    };
    KeyBlock<E> block{
        arena.take<E>(kPrefillKeys * steps_of(D, pairs)), arena.take<E>(kPrefillKeys * steps_of(V, pairs)),
        arena.take<E>(kPrefillKeys * p.key_width),
        arena.take<float>(kPrefillKeys * p.key_width), arena.take<float>(kPrefillKeys * p.value_width),
    };
    float* s = arena.take<float>(rows_most * kPrefillKeys);
    float* ds = arena.take<float>(rows_most * kPrefillKeys);
    Pair *pairs_s = nullptr, *pairs_ds = nullptr, *pairs_keys = nullptr;
    if (pairs) {
        pairs_s = arena.take<Pair>(rows_most / 2 * kPrefillKeys);
        pairs_ds = arena.take<Pair>(rows_most / 2 * kPrefillKeys);
        pairs_keys = arena.take<Pair>(rows_most * kPrefillKeys / 2);
    }
    float* good_k = arena.take<float>(kPrefillKeys * D);
    float* good_v = arena.take<float>(kPrefillKeys * V);
    const KVSegment& segment = c.segments[0];
    [[maybe_unused]] const TilesInUse tiles;
    Rows rows{};
    rows.batch = head / c.kv_heads, rows.kv_head = head % c.kv_heads;
    __builtin_memset(sums.grad_q, 0, p.sum * 4);
    if (p.bias.part) __builtin_memset(sums.bias.to, 0, p.bias.part * 4);
    for (int64_t number = split; number < p.key_blocks; number += p.splits) {
        const int64_t at = number * kPrefillKeys;
        const Keys keys = keys_at(segment, rows.batch, at, c.keys - at < kPrefillKeys ? c.keys - at : kPrefillKeys, at);
        Content<T> from = content_of<T>(c, rows, segment, at, keys.length, nullptr);
        if ((c.low || c.keep) && !all_finite<T>(c, keys, from)) {
            State unmarked{};
            rows.count = 0;
            from = without_nonfinite<T>(c, rows, keys, from, good_k, good_v, unmarked);
        }
        transpose(from.k, from.k_token, keys.length, D, block.k_columns);
        transpose(from.v, from.v_token, keys.length, V, block.v_columns);
        pack_values(from.k, from.k_token, keys.length, D, p.key_width, block.k_rows);
        __builtin_memset(block.grad_k, 0, kPrefillKeys * p.key_width * 4);
        __builtin_memset(block.grad_v, 0, kPrefillKeys * p.value_width * 4);
        for (int64_t number = 0; number < p.head_blocks * p.token_blocks; ++number) {
            const int64_t first = number / p.token_blocks * p.heads;
            const int64_t heads = group - first < p.heads ? group - first : p.heads;
            rows.first_head = rows.kv_head * group + first;
            rows.t0 = number % p.token_blocks * p.tokens;
            rows.t1 = rows.t0 + p.tokens < c.queries ? rows.t0 + p.tokens : c.queries;
            rows.count = heads * (rows.t1 - rows.t0);
            if (stopped(c)) return;
            const Visible visible = visible_of(c, rows, keys);
            if (visible == Visible::none) continue;
            const Packed<E> packed = pack_rows(g, rows, packing);
            gradients_of_block<E>(c, p, rows, keys, visible, packed, block, s, ds, pairs_s, pairs_ds,
                                  pairs_keys, sums);
        }
        T* to_k = (T*)g.grad_k + ((rows.batch * c.kv_heads + rows.kv_head) * c.keys + at) * D;
        T* to_v = (T*)g.grad_v + ((rows.batch * c.kv_heads + rows.kv_head) * c.keys + at) * V;
        for (int64_t j = 0; j < keys.length; ++j) {
            store_row(block.grad_k + j * p.key_width, D, to_k + j * D);
            store_row(block.grad_v + j * p.value_width, V, to_v + j * V);
        }
    }
}

// Runs tasks that must take turns, one after the other; a task without this need is alone.
template <class T>
void gradients_of_turns(const Gradients& g, const GradientPlan& p, int64_t number, float* all_sums, Arena arena) {
    const int64_t heads = g.call.kv_heads, head_groups = heads / p.head_turns;
    const int64_t split = number % p.splits, rest = number / p.splits;
    const int64_t batch = rest / head_groups * p.batch_turns, head = rest % head_groups * p.head_turns;
    for (int64_t b = batch; b < batch + p.batch_turns; ++b)
        for (int64_t h = head; h < head + p.head_turns; ++h) {
            const int64_t task = (b * heads + h) * p.splits + split;
            gradients_of_task<T>(g, p, task, sums_of(g, p, task, all_sums), arena);
        }
}

template <class T> Outcome gradients_for(const Gradients& g, int threads) {
    const Attention& c = g.call;
    if (!c.batch) return Outcome::done;
    const GradientPlan p = gradient_plan_of(g);
    const int64_t group = c.heads / c.kv_heads, tasks = c.batch * c.kv_heads * p.splits;
    const int64_t turns = p.batch_turns * p.head_turns;
    const Scratch sums(numbers_of_sums(c, p) * 4);
    if (!sums) return Outcome::no_memory;
    float* const all_sums = sums.arena().take<float>(numbers_of_sums(c, p));
    int64_t next = 0;
    int unfinished = 0, oom = 0;  // tasks that were stopped, threads that found no memory
    in_team(threads, [&](int64_t thread, int64_t team) {
        {
            const Scratch scratch(gradient_bytes(c, p));
            if (!scratch) __atomic_store_n(&oom, 1, __ATOMIC_RELAXED);
            while (scratch) {
                const int64_t number = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
                if (number >= tasks / turns) break;
                if (!stopped(c)) gradients_of_turns<T>(g, p, number, all_sums, scratch.arena());
                if (stopped(c)) __atomic_store_n(&unfinished, 1, __ATOMIC_RELAXED);
            }
        }
        wait_for_team();
        const int64_t rows = oom || unfinished ? 0 : c.batch * c.heads * c.queries;
        for (int64_t row = rows * thread / team; row < rows * (thread + 1) / team; ++row) {
            const int64_t head = row / (group * c.queries), inside = row % (group * c.queries);
            float* sum = sums_of(g, p, head * p.splits, all_sums).grad_q + inside * p.key_width;
            for (int64_t n = 1; n < p.splits; ++n) {
                const float* next = sums_of(g, p, head * p.splits + n, all_sums).grad_q + inside * p.key_width;
                for (int64_t d = 0; d < p.key_width; d += W) store_any(sum + d, load(sum + d) + load(next + d));
            }
            if (p.straight) continue;
            T* to = (T*)g.grad_q + row * c.key_dim;
            store_row(sum, c.key_dim, to);
        }
    });
    if (oom) return Outcome::no_memory;
    if (unfinished) return Outcome::stopped;
    for (int64_t task = 0; p.bias.part && task < tasks; ++task)
        add_to(bias_of_group(g, task / p.splits), sums_of(g, p, task, all_sums).bias.to, p.bias.part);
    return Outcome::done;
}

inline Outcome gradients(const Gradients& g, int threads) {
    return with_dtype(g.call.dtype, [&](auto number) { return gradients_for<decltype(number)>(g, threads); });
}

}  // namespace polyhead::PH_NAMESPACE
