// Products with weights, networks, norms and rotations, as the module passes them.
#pragma once

#include "../quantized/arguments.h"

namespace polyhead {

// A weight [out_features, in_features] without gaps, or where `transposed` [in_features, out_features], and a bias
// [out_features] or null.
struct LinearWeight {
    const void* weight;
    const void* bias;
    int64_t out_features;
    int type;                           // of the weight in blocks; 0: numbers of the dtype
    int64_t row_bytes;                  // of such a row
    bool int8_activations;                        // x is rounded to 8 bits
    Scales scales;                      // from kFirstScaled on
    bool transposed = false;            // numbers alone, in Gemm::any_order
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
// features; of each thread sums, rows of weights as they are multiplied, and what gates are made of.
constexpr int64_t kBlockRows = 768, kMostPanel = 96, kMostTileRows = 6, kMostWidth = 16;
// With matrix tiles: slices that a number is a sum of, pairs of all slices along K of a panel, and its columns.
constexpr int64_t kMostSlices = 3, kMostSlicedSteps = 480, kMostColumns = 288;
constexpr int64_t kSumsNumbers = 2 * kMostTileRows * kMostPanel * kMostWidth;
inline int64_t panel_row(int64_t features) { return (features + kMostWidth - 1) / kMostWidth * kMostWidth + kMostWidth; }
inline int64_t panel_numbers(int64_t features) {
    const int64_t rows = kMostPanel * panel_row(features), tiles = kMostSlicedSteps * kMostColumns;
    return rows > tiles ? rows : tiles;
}
constexpr int64_t kBlockNumbers = 1 << 23, kLeastBlockRows = 96;  // of packed rows, where features are many: 32 MB
constexpr int64_t kMostOuterPart = 1024;    // elements along K of a panel of outer products
inline int64_t most_block_rows(int64_t features) {
    const int64_t fit = kBlockNumbers / (features ? features : 1);
    return fit >= kBlockRows ? kBlockRows : fit > kLeastBlockRows ? fit : kLeastBlockRows;
}
inline int64_t rows_of_block(int64_t rows, int64_t features) { return rows < most_block_rows(features) ? rows : most_block_rows(features); }
// Of packed rows, each element half a number of every slice; whole lines of memory, so that others begin behind them.
inline int64_t rows_numbers(int64_t rows, int64_t features) { return (rows * kMostSlices + 1) / 2 * panel_row(features); }
struct GemmScratch {
    int64_t x_numbers, hidden_numbers, panel_numbers, sums_numbers, gates_numbers;
    float* at;
    int64_t numbers_of_thread() const { return sums_numbers + panel_numbers + gates_numbers; }
    int64_t numbers(int threads) const { return x_numbers + hidden_numbers + threads * numbers_of_thread(); }
    float* x() const { return at; }
    float* hidden() const { return at + x_numbers; }
    float* sums(int thread) const { return hidden() + hidden_numbers + thread * numbers_of_thread(); }
    float* panel(int thread) const { return sums(thread) + sums_numbers; }
    float* gates(int thread) const { return panel(thread) + panel_numbers; }
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
    bool any_order;         // products may be added up in another order than Gemv's
    bool add;               // to what y holds
    bool x_transposed;      // x is [in_features, rows]; as LinearWeight::transposed, of more than kMaxStepRows rows
    const void* x;          // rows `x_stride` apart
    int64_t x_stride, rows, in_features;
    LinearWeight weights[kMaxWeights];
    int count;
    void* y;
    int64_t y_stride;
    GemmScratch scratch;
};

// Without its memory, as the next one.
inline GemmScratch scratch_of(const Gemm& p) {
    const int64_t rows = rows_of_block(p.rows, p.in_features), sums = rows * kMostColumns;
    return {rows_numbers(rows, p.in_features), 0, panel_numbers(p.in_features), sums < kSumsNumbers ? kSumsNumbers : sums, 0, nullptr};
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
    GemmScratch found = scratch_of(f.in);
    const int64_t F = f.network.up.out_features, rows = rows_of_block(f.in.rows, f.in.in_features), last = panel_numbers(F);
    found.hidden_numbers = rows_numbers(rows, F), found.gates_numbers = rows * kMostColumns;
    if (found.panel_numbers < last) found.panel_numbers = last;
    return found;
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
