// Quest (arXiv 2406.10774, Algorithm 1): queries choose the blocks of keys whose greatest and least features allow the
// largest products.
#pragma once

#include "../common/registers.h"
#include "../common/team.h"
#include "arguments.h"

namespace polyhead::PH_NAMESPACE {

// Scores as whole numbers of the same order; 0: a block that is never chosen.
inline uint32_t rank_of(float score) {
    if (!(score > -__builtin_inff())) return 0;
    score += 0.0f;  // of two zeros too
    uint32_t bits;
    __builtin_memcpy(&bits, &score, 4);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// The highest number that `wanted` of the ranks reach; 0: fewer have one.
inline uint32_t rank_reached_by(const uint32_t* ranks, int64_t count, int64_t wanted) {
    uint32_t least = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
        uint32_t reached = 0;
        for (int64_t n = 0; n < count; ++n) reached += ranks[n] >= (least | bit);
        if (reached >= wanted) least |= bit;
    }
    return least;
}

// `bounds` and `ranks` are the thread's own.
template <class T> void choose_list(const BlockChoice& c, int64_t b, int64_t g, int64_t t, float* bounds, uint32_t* ranks) {
    const int64_t D = c.key_dim, group = c.heads / c.kv_heads, own = c.own[b * c.own_batch + t];
    int64_t* list = c.chosen + ((b * c.kv_heads + g) * c.queries + t) * c.top_k;
    int64_t found = 0;
    if (own >= 0) {
        for (int64_t d = 0; d < 2 * D; ++d) bounds[d] = 0;
        for (int64_t h = g * group; h < (g + 1) * group; ++h) {
            const T* q = (const T*)c.q + b * c.q_batch + h * c.q_head + t * c.q_token;
            for (int64_t d = 0; d < D; ++d) {
                const float feature = to_float(q[d]);
                bounds[d] += feature > 0 ? feature : 0, bounds[D + d] += feature > 0 ? 0 : feature;
            }
        }
        const int64_t before = own < c.count ? own : c.count;
        for (int64_t n = 0; n < before; ++n) {
            const T* entry = (const T*)c.entries + b * c.entries_batch + n * c.entries_row + g * 2 * D;
            Vec all{};
            for (int64_t d = 0; d < 2 * D; d += W) all = multiply_add(all, load_some(entry + d, 2 * D - d), load_some(bounds + d, 2 * D - d));
            ranks[n] = rank_of(sum(all));
        }
        const uint32_t least = rank_reached_by(ranks, before, c.top_k - 1);
        int64_t equal = c.top_k - 1;
        for (int64_t n = 0; n < before; ++n) equal -= ranks[n] > least;
        for (int64_t n = 0; n < before; ++n)
            if (ranks[n] > least || (least && ranks[n] == least && equal-- > 0)) list[found++] = n;
        list[found++] = own;
    }
    while (found < c.top_k) list[found++] = -1;
}

inline void choose_blocks(const BlockChoice& c, int threads) {
    const int64_t lists = c.batch * c.kv_heads * c.queries;
    if (lists * c.count * c.key_dim < 1 << 13) threads = 1;
    with_dtype(c.dtype, [&](auto number) {
        in_team(threads, [&](int64_t thread, int64_t team) {
            float* scratch = c.scratch + thread * (2 * c.key_dim + c.count);
            for (int64_t i = lists * thread / team; i < lists * (thread + 1) / team; ++i) {
                const int64_t t = i % c.queries, g = i / c.queries % c.kv_heads, b = i / c.queries / c.kv_heads;
                choose_list<decltype(number)>(c, b, g, t, scratch, (uint32_t*)scratch + 2 * c.key_dim);
            }
        });
    });
}

}  // namespace polyhead::PH_NAMESPACE
