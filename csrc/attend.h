// Attention over blocks of keys (Dao et al. 2022), in one of two ways:
//
//   few rows    every key and value is read where it lies, once for all rows of its kv head;
//               scores are dot products. Decoding waits for memory, so nothing is copied.
//   many rows   a block of keys is transposed and a block of values packed once for all rows,
//               and both products run on tiles of registers.
//
// Work is (batch row, kv head, block of rows) × keys. Where there are many such blocks, threads
// take them one after the other, the longest first. Otherwise all keys of all blocks are one range
// that is shared out evenly, and parts of a block are merged by their (peak, total).

#include "codes.h"
#include "plan.h"
#include "few_products.h"
#include "few_codes.h"
#include "few_integers.h"
#include "few_rows.h"
#include "many_rows.h"

template <class T>
void run_rows(const Attention& c, const Plan& p, const Rows& rows, int64_t from, int64_t to,
              State& state, Arena arena) {
    start(state, rows.count, p.width);
    if (p.few) few_rows<T>(c, rows, from, to, state, arena);
    else many_rows<T>(c, p, rows, from, to, state, arena);
}

// Adds what another part of the keys gave to rows of the same block.
inline void merge(State& into, const State& part, int64_t rows, int64_t width, float scale) {
    for (int64_t i = 0; i < rows; ++i) {
        const float peak = part.peak[i] > into.peak[i] ? part.peak[i] : into.peak[i];
        const float a = into.peak[i] == kMinusInfinity ? (into.total[i] == 0 ? 0.0f : 1.0f)
                                                       : __builtin_expf((into.peak[i] - peak) * scale);
        const float b = part.peak[i] == kMinusInfinity ? (part.total[i] == 0 ? 0.0f : 1.0f)
                                                       : __builtin_expf((part.peak[i] - peak) * scale);
        into.peak[i] = peak;
        into.total[i] = into.total[i] * a + part.total[i] * b;
        into.poisoned[i] |= part.poisoned[i];
        float* x = into.values + i * width;
        const float* y = part.values + i * width;
        for (int64_t d = 0; d < width; d += W) store_any(x + d, load(x + d) * a + load(y + d) * b);
    }
}

template <class T> void finish(const Attention& c, const Rows& rows, const State& state, int64_t width) {
    const float scale = late_scale(c);
    for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t h = rows.head(i), t = rows.token(i);
        const float total = state.total[i];
        const float factor = state.poisoned[i] ? __builtin_nanf("") : total == 0 ? 0.0f : c.dropout.factor / total;
        T* out = (T*)c.out + rows.batch * c.out_batch + h * c.out_head + t * c.out_query;
        const float* values = state.values + i * width;
        int64_t d = 0;
        for (; d + W <= c.value_dim; d += W) store(load(values + d) * factor, out + d);
        for (; d < c.value_dim; ++d) round_to(values[d] * factor, out + d);
        if (c.lse)
            c.lse[(rows.batch * c.heads + h) * c.queries + t] =
                total == 0 ? kMinusInfinity : state.peak[i] * scale + __builtin_logf(total);
    }
}

inline State state_of(Arena& arena, const Plan& p) {
    State s;
    s.peak = arena.take<float>(p.rows);
    s.total = arena.take<float>(p.rows);
    s.poisoned = arena.take<uint8_t>(p.rows);
    s.values = arena.take<float>(p.rows * p.width);
    return s;
}

inline int64_t state_bytes(const Plan& p) {
    return up_to(p.rows * 4, 64) * 2 + up_to(p.rows, 64) + up_to(p.rows * p.width * 4, 64);
}

template <class T> Outcome attend_of(const Attention& c, int threads) {
    if (!c.batch || !c.queries) return Outcome::done;
    const Plan p = plan_of(c, threads);
    int lacking = 0;  // whether a thread found no memory
    auto outcome = [&] {
        return lacking ? Outcome::no_memory : stopped(c) ? Outcome::stopped : Outcome::done;
    };
    const int64_t own = state_bytes(p) + (p.few ? few_bytes(c) : many_bytes<T>(c, p));
    if (!p.split) {
        int64_t next = 0;
        const int team = p.blocks < threads ? (int)p.blocks : threads;
        in_team(team, [&](int, int) {
            const Memory memory(own);
            if (!memory) __atomic_store_n(&lacking, 1, __ATOMIC_RELAXED);
            while (memory && !stopped(c)) {
                const int64_t block = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
                if (block >= p.blocks) break;
                Arena arena{memory.aligned()};
                State state = state_of(arena, p);
                const Rows rows = rows_of(c, p, block);
                run_rows<T>(c, p, rows, 0, c.keys, state, arena);
                finish<T>(c, rows, state, p.width);
            }
        });
        return outcome();
    }
    // Thread i has keys [i, i + 1) · total / threads of the range of all blocks after each other.
    // It keeps a state for every block that it touches: at most blocks + threads in all.
    const int64_t total = p.blocks * c.keys, each = up_to(state_bytes(p), 64);
    if (total / threads < 2 * kFewKeys) threads = (int)(total / (2 * kFewKeys));
    int next = 0;
    const Memory states(each * (p.blocks + threads));
    if (!states) return Outcome::no_memory;
    auto state_at = [&](int64_t number) {
        Arena arena{states.aligned() + number * each};
        return state_of(arena, p);
    };
    auto begin_of = [&](int share) { return total * share / threads / kFewKeys * kFewKeys; };
    in_team(threads, [&](int, int) {
        const Memory memory(own);
        if (!memory) __atomic_store_n(&lacking, 1, __ATOMIC_RELAXED);
        // A team may come out smaller than asked for: threads then take several shares.
        while (memory && !stopped(c)) {
            const int share = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (share >= threads) break;
            int64_t at = begin_of(share);
            const int64_t end = share + 1 == threads ? total : begin_of(share + 1);
            while (at < end) {
                const int64_t block = at / c.keys, from = at % c.keys;
                const int64_t to = end - block * c.keys < c.keys ? end - block * c.keys : c.keys;
                Arena arena{memory.aligned()};
                State state = state_at(block + share);
                run_rows<T>(c, p, rows_of(c, p, block), from, to, state, arena);
                at = block * c.keys + to;
            }
        }
    });
    if (outcome() != Outcome::done) return outcome();
    for (int64_t block = 0; block < p.blocks; ++block) {
        int first = 0;
        while (first + 1 < threads && begin_of(first + 1) <= block * c.keys) ++first;
        State state = state_at(block + first);
        const Rows rows = rows_of(c, p, block);
        for (int share = first + 1; share < threads && begin_of(share) < (block + 1) * c.keys; ++share)
            merge(state, state_at(block + share), rows.count, p.width, late_scale(c));
        finish<T>(c, rows, state, p.width);
    }
    return Outcome::done;
}
