// Attention, its gradients and statistics, as the module passes them.
#pragma once

#include "../common/types.h"

namespace polyhead {

// Scales of codes of 8 or 4 bits, in units of `group` tokens: code c is the number
// zero + scale · c. Keys have a scale for every column of a unit, values one for `v_share` columns of
// a token. Rows of codes follow on from each other; in 4 bits a row holds those of a token of the first
// half of the unit in the low bits of its bytes, and of the token half a unit later in the high ones.
struct Coding {
    int64_t group;                          // even; 0: the segment holds numbers as they are
    int64_t k_bits, v_bits;                 // v_bits 0: a value is the first columns of its key
    int64_t v_share;
    const uint16_t *k_scale, *k_zero;       // bfloat16, [B, G, units, D]
    int64_t k_batch, k_head, k_unit;        // strides in elements, of both
    const uint16_t *v_scale, *v_zero;       // bfloat16, [B, G, units, group, V / v_share]
    int64_t v_batch, v_head, v_unit;
};

// Keys and values of `length` tokens: strided, [B, G, length, D] and [B, G, length, V]; or in pages,
// [pages, G, page_length, D] and V, of which `pages` tells the number for every batch row. Where they
// are coded, k and v are bytes, and k_token and v_token go from unit to unit.
struct KVSegment {
    const char *k, *v;
    int64_t k_batch, k_head, k_token;  // strides in elements; the last dimension is dense
    int64_t v_batch, v_head, v_token;  // batch: from page to page
    const int64_t* pages;              // [B or 1, n], or null
    int64_t pages_batch, page_length;
    int64_t skipped;                   // tokens of the first page that come before the segment
    int64_t length;
    int64_t position;                  // of the first token; they count on from there, unless
    const int64_t* positions;          // [B or 1, length]
    int64_t positions_batch;           // stride of the batch, 0 where all rows share them
    Coding coding;
};

constexpr int kMaxSegments = 16;

// Dropout sets weights to 0 if their hash of (seed, batch row and head, query place, key place) is
// less than `least`, of 24 bits. The others are multiplied with `factor`.
struct Dropout {
    uint32_t least = 0;                 // 0: all are kept
    float factor = 1;
    uint32_t seed = 0, query = 0, key = 0;  // places of the first query and the first key
};

struct Attention {
    Dtype dtype;
    int64_t batch, heads, kv_heads, queries, keys, key_dim, value_dim;
    const char* q;
    int64_t q_batch, q_head, q_token;
    const int64_t* firsts;              // [B + 1], or null: the queries [firsts[b], firsts[b + 1]) of all are those of batch row b;
                                        // in what has a stride of the batch they follow on, and lse is [queries, H]
    KVSegment segments[kMaxSegments];
    int count;
    float scale, softcap;               // softcap 0: none
    const int64_t *low, *high;          // [B or 1, T] positions that a query sees: low ≤ p < high; null: all
    int64_t bounds_batch;
    const uint8_t* keep;                // nonzero: visible; strides in elements, keys dense; or null
    int64_t keep_batch, keep_head, keep_query;
    const int64_t* chosen;              // [B, H / chosen_heads, lists, chosen_count] blocks of keys that queries
    int64_t chosen_batch, chosen_head, chosen_list;  // see alone, ascending, each once; or null: all
    int64_t chosen_count, chosen_size;  // and keys of a block
    int64_t chosen_heads, chosen_queries, chosen_skipped;  // that share a list; queries of the first before these
    const float* slopes;                // [H] of ALiBi, or null
    float rounded;                      // not 0: they add bfloat16(slope · key position) times this
    const float* by_distance;           // [H, 2 · farthest + 1], by key − query held within ±farthest; or null
    int64_t farthest;
    const int64_t* q_positions;         // [B or 1, T], with either of them
    int64_t q_positions_batch;
    const float* bias;                  // float32, strides in elements, or null
    int64_t bias_batch, bias_head, bias_query, bias_key;
    Dropout dropout;
    bool batch_invariant;                        // the bits of a row: those that it has alone, in decoding
    char* out;                          // [B, H, T, V]
    int64_t out_batch, out_head, out_query;
    float* lse;                         // [B, H, T] without gaps, or null
    InterruptCheck* interrupt;                       // or null: never stopped
};

// Queries that choose blocks of keys by bounds of their products, all heads of a kv head together: their own block, and
// of those before it the ones whose bounds are highest, of equal ones the first.
struct BlockChoice {
    Dtype dtype;
    int64_t batch, heads, kv_heads, queries, key_dim;
    const char* q;
    int64_t q_batch, q_head, q_token;
    const char* entries;                // [B, count, G · 2 D]: greatest features of a block's keys, then least ones
    int64_t entries_batch, entries_row, count;
    const int64_t* own;                 // [B or 1, T]; below 0: the query chooses none
    int64_t own_batch;
    int64_t top_k;                      // 0: they see all keys
    int64_t* chosen;                    // [B, G, T, top_k], ascending, -1 behind them
    float* scratch;                     // choice_numbers(...)
};

constexpr int kMostChoosers = 16;  // threads that choose in a step

inline int64_t choice_numbers(const BlockChoice& c, int64_t threads) { return threads * (2 * c.key_dim + c.count); }

// Queries that choose single keys by a lightning indexer's scores, all heads together: of those that they see the ones
// whose Σ_h weight_h · relu(q_h · k) is highest, of equal ones the first.
struct KeyChoice {
    Attention call;                     // its queries, its keys of one kv head, and who sees whom: alike for all heads
    const float* weights;               // [B, H, T]
    int64_t weights_batch, weights_head, weights_query;
    int64_t top_k;
    int64_t* chosen;                    // [B, T, top_k], ascending, -1 behind them
};

// What `out` and `lse` of a call that was computed say about its q, k and v (one segment), and its bias.
struct Gradients {
    Attention call;
    const char* grad_out;               // [B, H, T, V], the last dimension dense
    int64_t grad_batch, grad_head, grad_query;
    const float* grad_lse;              // [B, H, T] without gaps
    char *grad_q, *grad_k, *grad_v;     // [B, H, T, D], [B, G, S, D], [B, G, S, V] without gaps
    float* grad_bias;                   // of slopes, by_distance or bias, without gaps, all 0; or null
    int64_t bias_batch, bias_head, bias_query, bias_key;  // its strides, 0 along what was broadcast
};

constexpr int64_t kTileRun = 64;  // rows that are summed at a time

// A tile of attention weights and the sums over all tiles that it adds to; null: not wanted.
struct Tile {
    float* weights;                     // [batch, rows, columns]: logarithms, which become weights
    int64_t batch, rows, columns;
    int64_t first;                      // index of the first column's key
    float *entropy, *squares;           // of rows: −Σ p log p, Σ p²
    float* most;                        // the largest weight, and its key
    int64_t* most_keys;
    int64_t row_batch;                  // stride of the batch
    float* top;                         // the `top_count` largest weights in order, and their keys
    int64_t* top_keys;
    int64_t top_count;
    float* received;                    // of columns: Σ p
    int64_t received_batch;
    float* scratch;                        // zeros: [batch, ⌈rows / kTileRun⌉, columns], with received
};

// x[b, h, t] · sigmoid(lse[b, h, t] − sink[h]): heads whose scores a sink joins.
struct Sinks {
    Dtype dtype;
    int64_t batch, heads, queries, value_dim;
    void* x;                            // in place
    int64_t x_batch, x_head, x_query;   // strides in elements
    const float* lse;                   // [B, H, T] without gaps
    const void* sinks;                  // [H]
    bool fp32;                          // they are float32, else in the dtype of x
};

}  // namespace polyhead
