// Products with weights, networks, norms and rotations, as the module passes them.
#pragma once

#include "../quantized/arguments.h"

namespace polyhead {

// A weight [out_features, in_features] without gaps between its rows, and a bias [out_features] or null.
struct LinearWeight {
    const void* weight;
    const void* bias;
    int64_t out_features;
    int type;                           // of the weight in blocks; 0: numbers of the dtype
    int64_t row_bytes;                  // of such a row
    bool int8_activations;                        // x is rounded to 8 bits
    Scales scales;                      // from kFirstScaled on
};

constexpr int kMaxWeights = 4;
constexpr int kMaxGemvRows = 8;   // of a product by itself; more are multiplied by GEMM
constexpr int kMaxStepRows = 64;  // of the products of a decoding step

// y[m, :] = [x[m] · W0ᵀ + b0 | x[m] · W1ᵀ + b1 | …] for m < rows.
struct Gemv {
    Dtype dtype;            // of weights, biases and y
    const float* x;         // [rows, in_features]
    int64_t rows, in_features;
    LinearWeight weights[kMaxWeights];
    int count;
    void* y;
    int64_t y_stride;
};

// Scratch memory of GEMM, for the widest vectors: packed rows that all threads read, of x and of hidden
// features; of each thread sums, and rows of weights as they are multiplied.
constexpr int64_t kBlockRows = 768, kMostPanel = 96, kMostTileRows = 6, kMostWidth = 16;
constexpr int64_t kSumsNumbers = 2 * kMostTileRows * kMostPanel * kMostWidth;
inline int64_t panel_row(int64_t features) { return (features + kMostWidth - 1) / kMostWidth * kMostWidth + kMostWidth; }
inline int64_t panel_numbers(int64_t features) { return kMostPanel * panel_row(features); }
inline int64_t packed_numbers(int64_t rows, int64_t features) {
    return (rows < kBlockRows ? rows : kBlockRows) * panel_row(features);
}
struct GemmScratch {
    int64_t x_numbers, hidden_numbers, panel_numbers;
    float* at;
    int64_t numbers(int threads) const { return x_numbers + hidden_numbers + threads * (kSumsNumbers + panel_numbers); }
    float* x() const { return at; }
    float* hidden() const { return at + x_numbers; }
    float* sums(int thread) const { return hidden() + hidden_numbers + thread * (kSumsNumbers + panel_numbers); }
    float* panel(int thread) const { return sums(thread) + kSumsNumbers; }
};

// Whether a fused product has dense weights, quantised weights, or both; and weights that x in 8 bits meets, or others.
struct WeightKinds {
    bool numbers = false, blocks = false, int8 = false, not_int8 = false;
    void add(const LinearWeight& f) {
        if (f.weight) (f.type ? blocks : numbers) = true, (f.int8_activations ? int8 : not_int8) = true;
    }
};

// The same for more than kMaxGemvRows rows, each with the bits of Gemv unless blocks meet `pairs`, or in `any_order`. All
// weights take x in 8 bits, or none.
struct Gemm {
    Dtype dtype;            // of x, weights, biases and y
    bool pairs;             // of bfloat16, by instructions that not every code has; blocks are rounded to it
    bool any_order;         // products of bfloat16 may be added up in another order than Gemv's
    const void* x;          // rows `x_stride` apart
    int64_t x_stride, rows, in_features;
    LinearWeight weights[kMaxWeights];
    int count;
    void* y;
    int64_t y_stride;
    GemmScratch scratch;
};

inline bool is_read_in_place(const LinearWeight& f, Dtype dtype) { return dtype == kFloat32 && !f.type; }

// Without its memory, as the next one.
inline GemmScratch scratch_of(const Gemm& p) {
    bool in_place = true;
    for (int i = 0; i < p.count; ++i) in_place = in_place && is_read_in_place(p.weights[i], p.dtype);
    return {packed_numbers(p.rows, p.in_features), 0, in_place ? 0 : panel_numbers(p.in_features), nullptr};
}

// y = the numbers of rows of blocks.
struct Unpacked {
    Dtype dtype;                        // of y
    LinearWeight from;                        // rows `row_bytes` apart, without a bias
    int64_t numbers;
    void* y;                            // [rows, numbers]
};

// From kRelu2 on without a derivative in training/elementwise.h.
enum Activation { kRelu = 0, kSilu = 1, kGeluTanh = 2, kRelu2 = 3, kGelu = 4, kQuickGelu = 5, kXielu = 6 };

// down(activation(gate(x)) · up(x)), or down(activation(up(x))) where gate has no weight.
struct Network {
    LinearWeight gate, up, down;
    Activation activation;
    float clamp;            // what is activated is at most this, and what a gate multiplies within ± it
    float offset;           // added to what a gate multiplies
    const void *alpha_p, *alpha_n;  // of xielu: a number each, in the dtype of the weights
};

// y = what a network makes of x.
struct FeedForward {
    Dtype dtype;
    const float* x;         // [rows, in_features]
    int64_t rows, in_features;
    Network network;
    float* hidden;          // [rows, up.out_features], scratch
    void* y;                // [rows, down.out_features]
};

// The same for more than kMaxGemvRows rows: its x and y, and scratch for hidden features too.
struct GemmNetwork {
    Gemm in;         // without weights
    Network network;
};

inline GemmScratch scratch_of(const GemmNetwork& f) {
    const Network& n = f.network;
    const Gemm& p = f.in;
    const int64_t F = n.up.out_features;
    const bool in_place = is_read_in_place(n.up, p.dtype) && is_read_in_place(n.gate, p.dtype) && is_read_in_place(n.down, p.dtype);
    const int64_t panels = 2 * panel_numbers(p.in_features), last = panel_numbers(F);
    return {packed_numbers(p.rows, p.in_features), packed_numbers(p.rows, F), in_place ? 0 : panels > last ? panels : last, nullptr};
}

// y = x / √(mean(x²) + eps) · (weight + offset) along rows, with x − mean(x) in place of x where centred.
struct Norm {
    Dtype dtype;
    const void* x;
    int64_t rows, dim, x_stride;
    const void* weight;
    float eps, offset;
    void* y;                // [rows, dim]
    const void* bias;       // or null
    bool centred;           // LayerNorm
    int64_t heads;          // rows of weight and bias, which rows of x take in turn
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

struct NormWeight {
    const void* weight;                 // or null: nothing is multiplied
    float eps, offset;
    const void* bias;                   // or null
    bool centred;                       // LayerNorm
    bool there;                         // false: no norm
    int64_t heads;                      // rows of weight and bias: 1, or one for each head
};

// A product for each head: y[m, h] = x[m, h] · W[h] (`summed`, W[h] is [in, out]) or W[h] · x[m, h] (W[h]
// is [out, in]). Rows of W[h] have no gaps.
struct HeadProduct {
    Dtype dtype;
    int64_t rows, heads, in_features, out_features;
    const void* x;
    int64_t x_row, x_head;              // strides in elements
    const void* weight;
    int64_t weight_head;
    bool summed;
    void* y;
    int64_t y_row, y_head;
    float* fp32;                        // [rows, heads, in_features]: fp32 scratch copy of x
};

}  // namespace polyhead
