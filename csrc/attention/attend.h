// Attention over blocks of keys (Dao et al. 2022), in one of two ways:
//
//   decode      every key and value is read where it lies, once for all rows of its kv head;
//               scores are dot products. Decoding waits for memory, so nothing is copied.
//   prefill     a block of keys is transposed and a block of values packed once for all rows,
//               and both products run on tiles of registers.
//
// Work is (batch row, kv head, block of rows) × keys. The keys of a block are one split, or several that
// threads compute side by side; the splits are merged in order by their (peak, total).
#pragma once

#include "decode.h"
#include "prefill.h"

namespace polyhead::PH_NAMESPACE {

template <class T>
void run_rows(const Attention& c, const Plan& p, const Rows& rows, int64_t from, int64_t to,
              State& state, Arena arena) {
    start(state, rows.count, p.width);
    if (!rows.count) return;
    if (p.decode) decode_rows<T>(c, p, rows, from, to, state, arena);
    else prefill_rows<T>(c, p, rows, from, to, state, arena);
}

// Merges the state of other keys into that of the same rows.
inline void merge(State& into, const State& part, int64_t rows, int64_t width, float scale) {
    for (int64_t i = 0; i < rows; ++i) {
        const float peak = part.peak[i] > into.peak[i] ? part.peak[i] : into.peak[i];
        const float a = into.peak[i] == kMinusInfinity ? (into.total[i] == 0 ? 0.0f : 1.0f)
                                                       : __builtin_expf((into.peak[i] - peak) * scale);
        const float b = part.peak[i] == kMinusInfinity ? (part.total[i] == 0 ? 0.0f : 1.0f)
                                                       : __builtin_expf((part.peak[i] - peak) * scale);
        into.peak[i] = peak;
        into.total[i] = multiply_add(part.total[i] * b, into.total[i], a);
        into.sees_nonfinite[i] |= part.sees_nonfinite[i];
        float* x = into.values + i * width;
        const float* y = part.values + i * width;
        for (int64_t d = 0; d < width; d += W) store_any(x + d, multiply_add(load(y + d) * b, load(x + d), splat(a)));
    }
}

template <class T> void finish(const Attention& c, const Rows& rows, const State& state, int64_t width) {
    const float scale = post_scale(c);
    for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t h = rows.head(i), t = rows.token(i);
        const float total = state.total[i];
        const float factor = state.sees_nonfinite[i] ? __builtin_nanf("") : total == 0 ? 0.0f : c.dropout.factor / total;
        T* out = (T*)c.out + first_query(c, rows, c.out_batch, c.out_query) + h * c.out_head + t * c.out_query;
        const float* values = state.values + i * width;
        for (int64_t d = 0; d < c.value_dim; d += W) store_some(load(values + d) * factor, out + d, c.value_dim - d);
        if (c.lse)
            c.lse[c.firsts ? (c.firsts[rows.batch] + t) * c.heads + h : (rows.batch * c.heads + h) * c.queries + t] =
                total == 0 ? kMinusInfinity : state.peak[i] * scale + __builtin_logf(total);
    }
}

inline State state_of(Arena& arena, const Plan& p) {
    State s;
    s.peak = arena.take<float>(p.rows);
    s.total = arena.take<float>(p.rows);
    s.sees_nonfinite = arena.take<uint8_t>(p.rows);
    s.values = arena.take<float>(p.rows * p.width);
    return s;
}

inline int64_t state_bytes(const Plan& p) {
    return up_to(p.rows * 4, 64) * 2 + up_to(p.rows, 64) + up_to(p.rows * p.width * 4, 64);
}

// The first of `items` (splits of blocks) in a run of them; all runs read equally many keys.
inline int64_t first_of_run(const Plan& p, int64_t items, int64_t run, int64_t runs) {
    if (runs == items) return run;
    const int64_t from = p.blocks * p.keys * run / runs;  // of the keys of all blocks, one after another
    int64_t item = from / p.keys * p.splits;
    while (item < items && item / p.splits * p.keys + split_at(p, item % p.splits) < from) ++item;
    return item;
}

// A block of rows and all splits of its keys: the sums of a split in `part`, of those before it in `state`.
template <class T>
void split_k_serial(const Attention& c, const Plan& p, const Rows& rows, State& state, State& part, Arena arena) {
    run_rows<T>(c, p, rows, 0, split_at(p, 1), state, arena);
    for (int64_t split = 1; split < p.splits && !stopped(c); ++split) {
        run_rows<T>(c, p, rows, split_at(p, split), split_at(p, split + 1), part, arena);
        merge(state, part, rows.count, p.width, post_scale(c));
    }
}

template <class T> Outcome attend_of(const Attention& c, int threads) {
    if (!c.batch || !c.queries) return Outcome::done;
    const Plan p = plan_of(c, threads);
    const bool apart = p.splits > 1 && !p.serial;  // splits of a block are kept until all are there
    const int64_t items = apart ? p.blocks * p.splits : p.blocks, each = up_to(state_bytes(p), 64);
    const int64_t own = 2 * each + (p.decode ? decode_bytes(c) : prefill_bytes<T>(c, p));
    const int64_t of_splits = apart ? items * each : 0;
    const Scratch scratch(of_splits + p.blocks * (int64_t)sizeof(int));
    if (!scratch) return Outcome::no_memory;
    Arena of_call = scratch.arena();
    char* states = of_call.take<char>(of_splits);
    int* computed = of_call.take<int>(p.blocks);  // splits of a block
    __builtin_memset(computed, 0, p.blocks * sizeof(int));
    auto state_at = [&](int64_t item) {
        Arena arena{states + item * each, each};
        return state_of(arena, p);
    };
    if (p.decode && p.blocks * p.keys < 2 * kDecodeKeys * threads) threads = (int)(p.blocks * p.keys / (2 * kDecodeKeys));
    if (threads < 1) threads = 1;
    // In decode a thread reads splits that follow each other in memory; elsewhere it takes the next one.
    const int64_t runs = p.decode && apart && threads < items ? threads : items;
    int64_t next = 0;
    int oom = 0;  // whether a thread found no memory
    in_team(runs < threads ? (int)runs : threads, [&](int, int) {
        const Scratch scratch(own);
        if (!scratch) __atomic_store_n(&oom, 1, __ATOMIC_RELAXED);
        while (scratch && !stopped(c)) {
            const int64_t run = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (run >= runs) break;
            const int64_t last = first_of_run(p, items, run + 1, runs);
            for (int64_t item = first_of_run(p, items, run, runs); item < last; ++item) {
                const int64_t block = apart ? item / p.splits : item, split = item - block * p.splits;
                const Rows rows = rows_of(c, p, block);
                Arena arena = scratch.arena();
                State state = state_of(arena, p), part = state_of(arena, p);
                if (p.serial) {
                    split_k_serial<T>(c, p, rows, state, part, arena);
                } else if (!apart) {
                    run_rows<T>(c, p, rows, 0, p.keys, state, arena);
                } else {
                    State kept = state_at(item);
                    run_rows<T>(c, p, rows, split_at(p, split), split_at(p, split + 1), kept, arena);
                    if (__atomic_add_fetch(computed + block, 1, __ATOMIC_ACQ_REL) < p.splits) continue;
                    state = state_at(block * p.splits);
                    for (int64_t other = 1; other < p.splits; ++other)
                        merge(state, state_at(block * p.splits + other), rows.count, p.width, post_scale(c));
                }
                finish<T>(c, rows, state, p.width);
            }
        }
    });
    return oom ? Outcome::no_memory : stopped(c) ? Outcome::stopped : Outcome::done;
}

inline Outcome attend(const Attention& c, int threads) {
    return with_dtype(c.dtype, [&](auto number) { return attend_of<decltype(number)>(c, threads); });
}

}  // namespace polyhead::PH_NAMESPACE
