// A layer as data, and a step through it, as the module passes them.
#pragma once

#include "../attention/arguments.h"
#include "../common/arena.h"
#include "../products/arguments.h"

namespace polyhead {

// Latent attention: queries of N + P numbers a head, a latent of R and a rotated key of P a token.
struct LatentHeads {
    int64_t rank, plain, rotated, value;  // R, 0: no latent attention; N, P, V
    LinearWeight q;                           // from the latent of queries, or without weight: straight from x
    NormWeight q_norm, norm;            // of both latents
    const void* up;                     // [H, N + V, R]
};

// Where norms of queries and keys stand: of every head, before or behind the rotation, or of all heads at once.
enum NormPlace { kBeforeRope = 0, kAfterRope = 1, kFullWidth = 2 };

// Attention to a context whose keys and values are cached: only queries are made from x.
struct CrossHeads {
    int64_t heads, kv_heads, key_dim, value_dim;
    float scale, softcap;
    NormWeight norm, q_norm;
    bool full_width;                    // q_norm is of all heads at once
    LinearWeight q, out;
    NormWeight out_norm;
    KVSegment memory;                       // [B / shared, G, S, D] and V; of no tokens: none is given
    int64_t shared;                     // rows of x that read the same row of it
};

enum Parallel { kOneAfterTheOther = 0, kOneNorm = 1, kTwoNorms = 2 };

enum Scoring { kSoftmax = 0, kSigmoid = 1, kSparseMixer = 2 };

// How tokens choose K of X experts, and their weights: layers/experts.py.
struct Routing {
    LinearWeight router;                      // [X, E]
    const void* choice_bias;            // [X], in float32 or the dtype of x; or null
    bool fp32_bias;                     // it is float32
    LinearWeight shared_gate;                 // [1, E]; without weight: none
    int64_t visited;                    // K
    Scoring scoring;
    bool normalise;
    float scale;
    int64_t groups, groups_per_token;
    bool best_two;                      // make a group good; else the best alone
    float jitter;                       // of sparsemixer
};

// The choice of rows of x.
struct Route {
    Dtype dtype;
    const float* x;                     // [rows, in_features]
    int64_t rows, in_features;
    Routing by;
    float* weights;                     // [rows, K], or K + 1 with the weight of the shared network
    int64_t* chosen;                    // [rows, K]
    Arena arena;                        // of route_bytes(by, rows)
};

inline int64_t route_bytes(const Routing& by, int64_t rows) { return (rows + 6) * (by.router.out_features + 16) * 4 + 8 * 64; }

// A mixture of experts, which are alike in size.
struct Experts {
    Routing routing;
    const Network* networks;            // [X]
    int64_t hidden;                     // features of each
    Network shared;                     // up without weight: none
    bool weighs_input;                  // weights multiply what experts read
};

// Rows of x that visit one expert.
struct Visit {
    const Network* network;
    const float* x;                     // [count, E]
    float* hidden;                      // [count, hidden]
    int64_t count;
    int64_t rows[kMaxStepRows];
    float weights[kMaxStepRows];
};

// Re-checks the guards of the routed experts before their weights are read.
struct ExpertCheck {
    bool (*check)(ExpertCheck&, const int64_t* chosen, int64_t count);
};

constexpr int kMaxCacheSegments = 6;  // segments of a cache: first tokens, codes and recent ones, the last two around a ring's end

// A layer and a few tokens of every batch row: self-attention, attention to a context, feed-forward network.
struct Step {
    Dtype dtype;
    int64_t batch, tokens, rows;        // B, T, B · T; packed: T of the row that has the most, and those of all rows
    bool packed;                        // x is [rows, E]: batch rows have numbers of tokens of their own
    int64_t firsts[kMaxStepRows + 1];   // of B batch rows and the end: their first tokens among all
    uint8_t batch_row[kMaxStepRows];    // of each token
    int64_t embed_dim, heads, kv_heads, key_dim, value_dim;  // as the cache has them
    const void* x;                      // [B, T, E] without gaps
    NormWeight attention_norm;
    LinearWeight qkv[3];                      // of latent attention: queries or their latent, [latent | key]
    NormWeight q_norm, k_norm;
    NormPlace norm_place;
    int64_t rotary;                     // features of a head that are rotated
    const void *cos, *sin;              // [T, rotary], where rows are uneven or packed [rows, rotary]; or null
    float clip;                         // queries, keys and values lie within ± this; infinity: they may be any
    LatentHeads latent;
    KVSegment cache[kMaxCacheSegments];             // in order; the last T tokens are not written yet
    int segments;
    bool uneven;                        // rows differ in length: keys count on from 0 in a single segment, unless
    bool placed;                        // rows differ in what they hold: keys have positions, or rows are read by_row
    bool by_row;                        // one after the other in the order of position, around the one segment
    int64_t base;                       // placed: a token lies at its position less this, modulo the last segment's length
    int64_t starts[kMaxStepRows];          // where the first token of each row goes, if they are uneven
    int64_t held_from[kMaxStepRows];       // the first token that each row holds, by_row
    int64_t window;                     // keys that a query sees, itself included; 0: all before it
    int64_t chunk;                      // positions are cut into runs of so many, of which a query sees its own; 0: they are not
    const float* temperatures;          // of queries, by period of their positions, or null
    int64_t periods, every, offset;     // periods: of which there are temperatures
    const void* sinks;                  // [H], in float32 or the dtype of x; or null
    bool fp32_sinks;                    // they are float32
    const float* slopes;                // of ALiBi, or null
    float rounded;                      // as in Attention, as are the next two
    const float* by_distance;           // or null
    int64_t block_size;                 // keys of a block, with `choice`
    BlockChoice choice;                 // of entries and top_k; top_k 0: queries see all keys
    int64_t farthest, position;         // position: of the first token, unless rows are uneven
    float scale, softcap;
    LinearWeight out;
    NormWeight attention_out_norm, feed_forward_norm;
    CrossHeads cross;                   // q without weight: none
    Network network;                    // up without weight: there is none
    const Experts* experts;             // in its place, or null; neither: the step ends before it
    ExpertCheck* ask;                    // with experts
    NormWeight feed_forward_out_norm;
    Parallel parallel;
    bool post;                          // the norms are behind the sums
    float residual_scale;
    void* y;                            // [B, T, E]
    Arena arena;                        // of step_bytes(step)
};

// Sets where the tokens of batch rows lie, of which `counts` has the numbers; null: T each.
inline void place_rows(Step& s, const int64_t* counts) {
    int64_t m = 0;
    for (int64_t b = 0; b < s.batch; ++b) {
        s.firsts[b] = m;
        for (const int64_t end = m + (counts ? counts[b] : s.tokens); m < end; ++m) s.batch_row[m] = (uint8_t)b;
    }
    s.firsts[s.batch] = s.rows = m;
}

inline int64_t start_of(const Step& s, int64_t b) { return s.uneven ? s.starts[b] : s.position; }

inline int64_t position_of(const Step& s, int64_t row) {
    const int64_t b = s.batch_row[row];
    return start_of(s, b) + row - s.firsts[b];
}

inline int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

// Features of the widest rows that a product of a step reads.
inline int64_t widest_of(const Step& s) {
    const LatentHeads& l = s.latent;
    int64_t widest = larger_of(larger_of(s.embed_dim, s.heads * s.value_dim), s.cross.heads * s.cross.value_dim);
    if (l.rank) widest = larger_of(larger_of(widest, s.heads * (l.plain + l.rotated + l.value)), s.qkv[0].out_features);
    return widest;
}

// What a mixture needs (experts.h): choices, visits, what they read, their hidden features; the shared network.
inline int64_t mixture_bytes(const Experts& e, int64_t rows, int64_t features) {
    const int64_t visits = rows * e.routing.visited;
    return route_bytes(e.routing, rows) + visits * ((int64_t)sizeof(Visit) + 8 + 4 + (features + e.hidden) * 4) +
           rows * (e.shared.up.out_features + features + 1) * 4 + 8 * 64;
}

inline int64_t step_bytes(const Step& s) {
    const LatentHeads& l = s.latent;
    int64_t mixed = 0;
    if (s.experts) mixed = mixture_bytes(*s.experts, s.rows, s.embed_dim);
    int64_t projected = s.heads * s.value_dim;  // and what is made of it, in the order of step.h
    for (const LinearWeight& f : s.qkv) projected += 2 * f.out_features;
    if (l.rank) projected += s.heads * (l.plain + 2 * l.rotated + s.key_dim + l.value) + l.rank;
    projected += s.cross.heads * (s.cross.key_dim + s.cross.value_dim);
    const int64_t numbers = 3 * s.embed_dim + s.network.up.out_features + widest_of(s) + projected;
    const int64_t bounds = s.rows * (3 * 8 + s.heads * 4);
    const BlockChoice& b = s.choice;
    const int64_t chosen = b.top_k && b.top_k <= b.count ? s.batch * s.kv_heads * b.top_k * 8 + choice_numbers(b, kMostChoosers) * 4 : 0;
    return s.rows * numbers * (int64_t)sizeof(float) + mixed + bounds + chosen + 33 * 64;
}

}  // namespace polyhead
