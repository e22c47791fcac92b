// The lightning indexer (DeepSeek-V3.2, arXiv 2512.02556, eq. 1): every query chooses the keys of highest
//
//     I[t, s] = Σ_h w[t, h] · relu(q[t, h] · k[s])
//
// Heads are lanes: a query's heads are transposed once, and tiles of keys are multiplied with them where they lie. A
// tile's products are weighted and added while they are near, in one order whatever stands beside them; what is
// kept of a pair is its rank. Queries of a batch row are scored in blocks, which read a strip of keys once.
#pragma once

#include "prefill.h"
#include "ranks.h"

namespace polyhead::PH_NAMESPACE {

constexpr int64_t kChoosers = 8;             // queries of a block
constexpr int64_t kStripKeys = 96;           // keys of a strip: whole tiles and whole vectors
constexpr int64_t kRunKeys = 8 * kStripKeys;  // that a thread scores for a block at a time
constexpr int64_t kNumbers = 1 << 20;        // that the ranks and the transposed heads of a round take, if one block does
static_assert(kStripKeys % W == 0);

template <class E> struct ChoicePlan {
    int64_t width, steps;         // heads, padded to vectors; elements of a query's head or of a key
    int64_t queries, row_blocks;  // of a block; blocks of a batch row
    int64_t blocks, round;        // of all batch rows; that are scored and ranked together

    explicit ChoicePlan(const Attention& c) : width(up_to(c.heads, W)), steps(steps_of(c.key_dim, !__is_same(E, float))) {
        const int64_t each = c.keys + width * (steps + 1), most = kNumbers / each;
        queries = most < kChoosers ? most : kChoosers;
        if (queries > c.queries) queries = c.queries;
        if (queries < 1) queries = 1;
        row_blocks = (c.queries + queries - 1) / queries, blocks = c.batch * row_blocks;
        round = most / queries < blocks ? most / queries : blocks;
        if (round < 1) round = 1;
    }

    Rows rows(const Attention& c, int64_t block) const {
        const int64_t t0 = block % row_blocks * queries, t1 = t0 + queries < c.queries ? t0 + queries : c.queries;
        return {block / row_blocks, 0, 0, t0, t1, t1 - t0};
    }
};

// What a thread works in.
template <class T, class E> struct ChoiceScratch {
    T* content;
    E* keys;
    float *products, *scores;
    Vec* sums;

    ChoiceScratch(Arena arena, const Attention& c, const ChoicePlan<E>& p)
        : content(arena.take<T>(kStripKeys * (c.key_dim + c.value_dim))), keys(arena.take<E>(kStripKeys * p.steps)),
          products(arena.take<float>(kTileRows<E> * p.width)), scores(arena.take<float>(kStripKeys)),
          sums(arena.take<Vec>(kStripKeys)) {}
    static int64_t bytes(const Attention& c, const ChoicePlan<E>& p) {
        return 5 * 64 + 4 * (kStripKeys * (c.key_dim + c.value_dim + p.steps + 1 + W) + kTileRows<E> * p.width);
    }
};

// Rows of elements, `stride` apart.
template <class E> struct KeyRows {
    const E* at;
    int64_t stride;
};

// Keys of a strip as elements: where they lie, or in `to`.
template <class T, class E> KeyRows<E> key_rows(const Content<T>& from, int64_t count, int64_t D, int64_t steps, E* to) {
    if constexpr (__is_same(E, float)) {
        if constexpr (__is_same(T, float)) return {from.k, from.k_token};
        else pack_values(from.k, from.k_token, count, D, D, to);
    } else {
        if (D % 2 == 0 && from.k_token % 2 == 0 && (uintptr_t)from.k % sizeof(E) == 0)
            return {(const E*)from.k, from.k_token / 2};
        for (int64_t j = 0; j < count; ++j) pack_query(from.k + j * from.k_token, D, to + j * steps);
    }
    return {to, steps};
}

// The scores of `count` keys for one query, `heads` [steps, width] transposed.
template <class T, class E>
void score_strip(const ChoicePlan<E>& p, int64_t count, KeyRows<E> keys, const E* heads, const float* weights, VecInt last,
                 const ChoiceScratch<T, E>& scratch) {
    for (int64_t j = 0; j < count; j += kTileRows<E>) {
        const int64_t rows = count - j < kTileRows<E> ? count - j : kTileRows<E>;
        block_product<E>(rows, keys.at + j * keys.stride, keys.stride, heads, p.width, p.steps, scratch.products, p.width,
                         p.width / W, nullptr);
        for (int64_t m = 0; m < rows; ++m) {
            const float* products = scratch.products + m * p.width;
            Vec all{};
            int64_t h = 0;  // relu gives a NaN back
            for (; h < p.width - W; h += W) all = multiply_add(all, larger(Vec{}, load(products + h)), load(weights + h));
            // Lanes without a head, where a key is not finite, are not 0.
            const Vec some = (Vec)((VecInt)larger(Vec{}, load(products + h)) & last);
            scratch.sums[j + m] = multiply_add(all, some, load(weights + h));
        }
    }
    // Behind the last key are sums of others, which nobody reads.
    for (int64_t j = 0; j < count; j += W) store(fold<W / 2>(scratch.sums + j), scratch.scores + j);
}

template <class T> Outcome choose_keys_of(const KeyChoice& c, int threads) {
    using E = typename Element<T>::type;
    const Attention& a = c.call;
    const ChoicePlan<E> p(a);
    const int64_t slots = p.round * p.queries, runs = (a.keys + kRunKeys - 1) / kRunKeys;
    const int64_t own = up_to(ChoiceScratch<T, E>::bytes(a, p), 64), of_heads = p.steps * p.width;
    if (a.batch * a.queries * a.keys * of_heads < 1 << 16) threads = 1;
    const Scratch memory(threads * own + slots * 4 * (of_heads + p.width + a.keys) + 3 * 64);
    if (!memory) return Outcome::no_memory;
    Arena arena = memory.arena();
    E* heads = arena.take<E>(slots * of_heads);
    float* weights = arena.take<float>(slots * p.width);
    uint32_t* ranks = arena.take<uint32_t>(slots * a.keys);
    char* of_threads = arena.take<char>(threads * own);
    const VecInt last = counted() < splat_int((int32_t)(a.heads - (p.width - W)));

    in_team(threads, [&](int64_t thread, int64_t team) {
        const ChoiceScratch<T, E> scratch({of_threads + thread * own, own}, a, p);
        [[maybe_unused]] const TilesInUse tiles;
        for (int64_t first = 0; first < p.blocks; first += p.round) {
            const int64_t blocks = p.blocks - first < p.round ? p.blocks - first : p.round;
            // Calls visit(batch row, query, slot) for the thread's part of the round's queries.
            auto over_queries = [&](auto visit) {
                for (int64_t slot = thread; slot < blocks * p.queries && !stopped(a); slot += team) {
                    const Rows rows = p.rows(a, first + slot / p.queries);
                    if (slot % p.queries < rows.count) visit(rows.batch, rows.t0 + slot % p.queries, slot);
                }
            };
            over_queries([&](int64_t b, int64_t t, int64_t slot) {
                const T* q = (const T*)a.q + b * a.q_batch + t * a.q_token;
                transpose(q, a.q_head, a.heads, a.key_dim, heads + slot * of_heads, p.width);
                const float* from = c.weights + b * c.weights_batch + t * c.weights_query;
                for (int64_t h = 0; h < p.width; ++h)
                    weights[slot * p.width + h] = h < a.heads ? from[h * c.weights_head] : 0.0f;
            });
            wait_for_team();
            for (int64_t item = thread; item < blocks * runs && !stopped(a); item += team) {
                const int64_t block = item / runs, from = item % runs * kRunKeys;
                const int64_t to = from + kRunKeys < a.keys ? from + kRunKeys : a.keys;
                const Rows rows = p.rows(a, first + block);
                for (int64_t i = 0; i < rows.count; ++i)
                    __builtin_memset(ranks + (block * p.queries + i) * a.keys + from, 0, (to - from) * sizeof *ranks);
                over_blocks(a, rows, from, to, kStripKeys, [&](const Keys& keys, Visible visible) {
                    const auto content = content_of<T>(a, rows, *keys.segment, keys.start, keys.length, scratch.content);
                    const KeyRows<E> elements = key_rows<T, E>(content, keys.length, a.key_dim, p.steps, scratch.keys);
                    for (int64_t i = 0; i < rows.count; ++i) {
                        const int64_t slot = block * p.queries + i;
                        score_strip<T, E>(p, keys.length, elements, heads + slot * of_heads, weights + slot * p.width, last,
                                          scratch);
                        if (visible == Visible::some) hide(a, rows, i, keys, scratch.scores);
                        uint32_t* to_ranks = ranks + slot * a.keys + keys.index;
                        for (int64_t j = 0; j < keys.length; ++j) to_ranks[j] = rank_of(scratch.scores[j]);
                    }
                });
            }
            wait_for_team();
            over_queries([&](int64_t b, int64_t t, int64_t slot) {
                int64_t* list = c.chosen + (b * a.queries + t) * c.top_k;
                for (int64_t n = list_highest(ranks + slot * a.keys, a.keys, c.top_k, list); n < c.top_k; ++n) list[n] = -1;
            });
        }
    });
    return stopped(a) ? Outcome::stopped : Outcome::done;
}

inline Outcome choose_keys(const KeyChoice& c, int threads) {
    return with_dtype(c.call.dtype, [&](auto number) { return choose_keys_of<decltype(number)>(c, threads); });
}

}  // namespace polyhead::PH_NAMESPACE
