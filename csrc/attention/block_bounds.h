// Quest (arXiv 2406.10774, Algorithm 1): queries choose the blocks of keys whose greatest and least features allow the
// largest products.
#pragma once

#include "../common/registers.h"
#include "../common/team.h"
#include "arguments.h"
#include "ranks.h"

namespace polyhead::PH_NAMESPACE {

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
        found = list_highest(ranks, before, c.top_k - 1, list);
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
