// The keys that queries choose, in blocks and single ones.
#pragma once

#include "arguments.h"
#include "attention.h"
#include "interface.h"

namespace polyhead {

// Entries [B, n, G · 2 D], each without gaps.
inline bool entries_from(PyObject* tensor, Dtype dtype, BlockChoice& c) {
    View entries;
    if (!view_of(tensor, "entries", entries)) return false;
    if (entries.kind != (int)dtype || entries.dims != 3 || !entries.is(0, c.batch) || !entries.is(2, c.kv_heads * 2 * c.key_dim) ||
        !entries.is_dense_from(2))
        return wrong("entries must be [B, n, G · 2 D] of the dtype of q, each without gaps");
    c.entries = entries.at, c.entries_batch = entries.stride[0], c.entries_row = entries.stride[1], c.count = entries.size[1];
    return true;
}

// choose_blocks(...): the lists of blocks [B, G, T, k] for q [B, H, T, D], whose own blocks are [1 or B, T].
inline PyObject* choose_blocks(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::choose_blocks;
    const Arguments<A> a("choose_blocks", args, count);
    View q, own, chosen;
    if (!a.code || !view_of(a[A::q], "q", q) || !view_of(a[A::own], "own", own) || !view_of(a[A::chosen], "chosen", chosen)) return nullptr;
    if (q.dims != 4 || q.kind > kOfFloat16 || !q.is_dense_from(3)) return wrong("q must be [B, H, T, D], its last dimension without gaps");
    if (chosen.kind != kOfInt64 || chosen.dims != 4 || !chosen.is(0, q.size[0]) || chosen.size[1] < 1 || q.size[1] % chosen.size[1] ||
        !chosen.is(2, q.size[2]) || chosen.size[3] < 1 || !chosen.is_dense_from(0))
        return wrong("chosen must be [B, G, T, k] int64 without gaps, G a divisor of H");
    if (own.kind != kOfInt64 || own.dims != 2 || !own.is_or_one(0, q.size[0]) || !own.is(1, q.size[2]) || !own.is_dense_from(1))
        return wrong("own must be [1 or B, T] int64, its last dimension without gaps");
    BlockChoice c{};
    c.dtype = (Dtype)q.kind, c.batch = q.size[0], c.heads = q.size[1], c.kv_heads = chosen.size[1], c.queries = q.size[2], c.key_dim = q.size[3];
    c.q = q.at, c.q_batch = q.stride[0], c.q_head = q.stride[1], c.q_token = q.stride[2];
    c.own = (const int64_t*)own.at, c.own_batch = own.step(0);
    c.top_k = chosen.size[3], c.chosen = (int64_t*)chosen.at;
    if (!entries_from(a[A::entries], c.dtype, c)) return nullptr;
    const int64_t numbers = choice_numbers(c, a.threads);
    const Scratch scratch(numbers * sizeof(float));
    if (scratch) c.scratch = scratch.arena().take<float>(numbers);
    return run(scratch, [&] { a.code->choose_blocks(c, a.threads); });
}

// choose_keys(...): the lists of keys [B, T, k] for q [B, H, T, D] and weights [B, H, T].
inline PyObject* choose_keys(PyObject*, PyObject* const* args, Py_ssize_t count) {
    using A = arguments::choose_keys;
    const Arguments<A> a("choose_keys", args, count);
    KeyChoice c{};
    Attention& call = c.call;
    View weights, chosen;
    if (!a.code || !attention_from(a[A::q], a[A::segments], a[A::mods], call) || !view_of(a[A::weights], "weights", weights) ||
        !view_of(a[A::chosen], "chosen", chosen))
        return nullptr;
    if (call.kv_heads != 1 || call.queries < 1 || call.keys < 1) return wrong("choose_keys takes queries, and keys of one kv head");
    if (call.softcap != 0 || call.slopes || call.by_distance || call.bias || call.chosen || call.dropout.least || call.keep_head)
        return wrong("choose_keys takes bounds and a keep that is the same for all heads, and no other mods");
    if (weights.kind != kOfFloat32 || weights.dims != 3 || !weights.is(0, call.batch) || !weights.is(1, call.heads) || !weights.is(2, call.queries))
        return wrong("weights must be [B, H, T] float32");
    if (chosen.kind != kOfInt64 || chosen.dims != 3 || !chosen.is(0, call.batch) || !chosen.is(1, call.queries) || chosen.size[2] < 1 ||
        !chosen.is_dense_from(0))
        return wrong("chosen must be [B, T, k] int64 without gaps");
    c.weights = (const float*)weights.at;
    c.weights_batch = weights.stride[0], c.weights_head = weights.stride[1], c.weights_query = weights.stride[2];
    c.top_k = chosen.size[2], c.chosen = (int64_t*)chosen.at;
    return run_interruptible([&](InterruptCheck& check) { return call.interrupt = &check, a.code->choose_keys(c, a.threads); });
}

}  // namespace polyhead
