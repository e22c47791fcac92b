// What the module hands to the code of one instruction set.
#pragma once
#include <cstdint>

namespace polyhead {

enum Dtype { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Rows of a weight [out_features, in_features] without gaps, and a bias [out_features] or null.
struct Factor {
    const void* weight;
    const void* bias;
    int64_t out_features;
};

constexpr int kMostFactors = 4;
constexpr int kMostRows = 8;

// y[m, :] = [x[m] · W0ᵀ + b0 | x[m] · W1ᵀ + b1 | …] for m < rows.
struct Product {
    Dtype dtype;            // of weights, biases and y
    const float* x;         // [rows, in_features]
    int64_t rows, in_features;
    Factor factors[kMostFactors];
    int count;
    void* y;
    int64_t y_stride;
};

enum Activation { kRelu = 0, kSilu = 1, kGeluTanh = 2 };

// y = down(activation(gate(x)) · up(x)), or down(activation(up(x))) where gate has no weight.
struct FeedForward {
    Dtype dtype;
    const float* x;         // [rows, in_features]
    int64_t rows, in_features;
    Activation activation;
    Factor gate, up, down;
    float* hidden;          // [rows, up.out_features], room to work in
    void* y;                // [rows, down.out_features]
};

// y = x / √(mean(x²) + eps) · (weight + offset) along rows.
struct Norm {
    Dtype dtype;
    const void* x;
    int64_t rows, dim, x_stride;
    const void* weight;
    float eps, offset;
    void* y;                // [rows, dim]
};

// y[b, t, n] = x[b, t, n] · cos[t] + x[b, t, n] rolled by half · sin[t]: rotary positions.
struct Rotation {
    Dtype dtype;
    const void* x;
    int64_t batch, tokens, heads, dim;
    int64_t x_batch, x_token, x_head;
    const void *cos, *sin;  // [tokens, dim], the sine with the sign of its half
    void* y;                // [batch, tokens, heads, dim]
};

// Keys and values of `length` tokens: strided, [B, G, length, D] and [B, G, length, V]; or in pages,
// [pages, G, page_length, D] and V, of which `pages` tells the number for every batch row.
struct Piece {
    const char *k, *v;
    int64_t k_batch, k_head, k_token;  // strides in elements; the last dimension is dense
    int64_t v_batch, v_head, v_token;  // batch: from page to page
    const int64_t* pages;              // [B or 1, n], or null
    int64_t pages_batch, page_length;
    int64_t skipped;                   // tokens of the first page that come before the piece
    int64_t length;
    int64_t position;                  // of the first token; they count on from there, unless
    const int64_t* positions;          // [B or 1, length]
    int64_t positions_batch;           // stride of the batch, 0 where all rows share them
};

constexpr int kMostPieces = 16;

struct Attention {
    Dtype dtype;
    int64_t batch, heads, kv_heads, queries, keys, key_dim, value_dim;
    const char* q;
    int64_t q_batch, q_head, q_token;
    Piece pieces[kMostPieces];
    int count;
    float scale, softcap;               // softcap 0: none
    const int64_t *low, *high;          // [B or 1, T] positions that a query sees: low ≤ p < high; null: all
    int64_t bounds_batch;
    const uint8_t* keep;                // nonzero: visible; strides in elements, keys dense; or null
    int64_t keep_batch, keep_head, keep_query;
    const float* slopes;                // [H] of ALiBi, or null
    const float* by_distance;           // [H, 2 · farthest + 1], by key − query held within ±farthest; or null
    int64_t farthest;
    const int64_t* q_positions;         // [B or 1, T], with either of them
    int64_t q_positions_batch;
    const float* bias;                  // float32, strides in elements, or null
    int64_t bias_batch, bias_head, bias_query, bias_key;
    char* out;                          // [B, H, T, V]
    int64_t out_batch, out_head, out_query;
    float* lse;                         // [B, H, T] without gaps, or null
};

// What `out` and `lse` of a call that was computed say about its q, k and v (one piece), and its bias.
struct Gradients {
    Attention call;
    const char* grad_out;               // [B, H, T, V], the last dimension dense
    int64_t grad_batch, grad_head, grad_query;
    const float* grad_lse;              // [B, H, T] without gaps
    char *grad_q, *grad_k, *grad_v;     // [B, H, T, D], [B, G, S, D], [B, G, S, V] without gaps
    float* grad_bias;                   // of slopes, by_distance or bias, without gaps, all 0; or null
    int64_t bias_batch, bias_head, bias_query, bias_key;  // its strides, 0 along what was broadcast
};

// The code of one instruction set.
struct Code {
    const char* name;
    bool (*runs_here)();
    void (*product)(const Product&, int threads);
    void (*feed_forward)(const FeedForward&, int threads);
    void (*norm)(const Norm&, int threads);
    void (*rotate)(const Rotation&, int threads);
    void (*widen)(Dtype, const void* from, int64_t stride, int64_t rows, int64_t K, float* to);
    void (*attend)(const Attention&, int threads);
    void (*gradients)(const Gradients&, int threads);
};

#if defined(__x86_64__)
extern const Code avx512_bf16_code, avx512_code, avx2_code;
#endif
extern const Code portable_code;

}  // namespace polyhead
