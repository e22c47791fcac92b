// The arguments that the module passes to the code of one instruction set.
#pragma once
#include <cstdint>

namespace polyhead {

// How a call ended: if it ran out of memory or was stopped, its results are incomplete.
enum class Outcome { done, no_memory, stopped };

// Checked after every few blocks of work: the calling thread asks whether to stop, the others read its answer.
struct Watch {
    bool (*ask)(Watch&);  // by the thread that called
    int stop = 0;         // read and written atomically
    bool stopped(bool calling) {
        if (!__atomic_load_n(&stop, __ATOMIC_RELAXED) && calling && ask(*this))
            __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
        return __atomic_load_n(&stop, __ATOMIC_RELAXED);
    }
};

enum Dtype { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Types of blocks that are read without unpacking, as GGUF files number them: name, type number, numbers and bytes of a
// block. From kFirstScaled on their scales lie in another tensor, as in files of Hugging Face (Scales).
constexpr int kFirstScaled = 64, kFloat8 = 64, kScaledNumbers = 32;
#define PH_BLOCKS(BLOCK) \
    BLOCK(Q4_0, 2, 32, 18) BLOCK(Q4_1, 3, 32, 20) BLOCK(Q5_0, 6, 32, 22) BLOCK(Q5_1, 7, 32, 24) BLOCK(Q8_0, 8, 32, 34) \
    BLOCK(Q2_K, 10, 256, 84) BLOCK(Q3_K, 11, 256, 110) BLOCK(Q4_K, 12, 256, 144) BLOCK(Q5_K, 13, 256, 176) \
    BLOCK(Q6_K, 14, 256, 210) BLOCK(IQ4_NL, 20, 32, 18) BLOCK(IQ4_XS, 23, 256, 136) BLOCK(TQ2_0, 35, 256, 66) \
    BLOCK(MXFP4, 39, 32, 17) BLOCK(IQ2_XXS, 16, 256, 66) BLOCK(IQ2_XS, 17, 256, 74) BLOCK(IQ3_XXS, 18, 256, 98) \
    BLOCK(IQ1_S, 19, 256, 50) BLOCK(IQ3_S, 21, 256, 110) BLOCK(IQ2_S, 22, 256, 82) BLOCK(IQ1_M, 29, 256, 56) \
    BLOCK(TQ1_0, 34, 256, 54) BLOCK(F16, 1, 32, 64) BLOCK(BF16, 30, 32, 64) \
    BLOCK(F8_E4M3, 64, 32, 32) BLOCK(I8, 65, 32, 32) BLOCK(U8, 66, 32, 32) BLOCK(U4, 67, 32, 16)

// The grids of the IQ types, entries of 8 or 4 bytes, one after the other. They are the gguf package's, which
// Python hands over before a block of these types is read.
constexpr int64_t kGridOf1 = 0, kGridOf2XXS = kGridOf1 + 2048 * 8, kGridOf2XS = kGridOf2XXS + 256 * 8,
                  kGridOf2S = kGridOf2XS + 512 * 8, kGridOf3XXS = kGridOf2S + 1024 * 8, kGridOf3S = kGridOf3XXS + 256 * 4,
                  kGridBytes = kGridOf3S + 512 * 4;
extern uint8_t grids[kGridBytes];

// Bytes of a row of so many numbers; -1 where they are no whole blocks, or the type is not among these.
inline int64_t bytes_of_row(int64_t type, int64_t count) {
#define PH_ROW(name, number, numbers, bytes) if (type == number) return count % numbers ? -1 : count / numbers * bytes;
    PH_BLOCKS(PH_ROW)
#undef PH_ROW
    return -1;
}

// Types whose products take x in 8 bits where they are asked to, by kInEights beside the type's number; and how many
// numbers a row may have.
constexpr int kInEights = 256;
constexpr int64_t kMostEights = 1 << 15;  // a thread keeps them on its stack
inline bool takes_eights(int64_t type) {
    return type == 2 || type == 3 || (type >= 6 && type <= 8) || (type >= 12 && type <= 14);
}

// The scales of a weight whose blocks have none: number k of row n has those at [n / rows, k / numbers].
struct Scales {
    const void* scales;                 // [.., row]
    Dtype dtype;                        // of scales
    const uint8_t* zeros;               // the code that stands for 0, of the same shape; null: the middle one
    int64_t numbers, rows, row;
};

// Rows of a weight [out_features, in_features] without gaps, and a bias [out_features] or null.
struct Factor {
    const void* weight;
    const void* bias;
    int64_t out_features;
    int type;                           // of the weight in blocks; 0: numbers of the dtype
    int64_t row_bytes;                  // of such a row
    bool eights;                        // x is rounded to 8 bits
    Scales scales;                      // from kFirstScaled on
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

// What products of many rows work in, for the widest vectors: packed rows that all threads read, of x and of hidden
// features; of each thread sums, and rows of weights as they are multiplied.
constexpr int64_t kBlockRows = 768, kMostPanel = 96, kMostTileRows = 6, kMostWidth = 16;
constexpr int64_t kSumsNumbers = 2 * kMostTileRows * kMostPanel * kMostWidth;
inline int64_t panel_row(int64_t features) { return (features + kMostWidth - 1) / kMostWidth * kMostWidth + kMostWidth; }
inline int64_t panel_numbers(int64_t features) { return kMostPanel * panel_row(features); }
inline int64_t packed_numbers(int64_t rows, int64_t features) {
    return (rows < kBlockRows ? rows : kBlockRows) * panel_row(features);
}
struct ManyRoom {
    int64_t x_numbers, hidden_numbers, panel_numbers;
    float* at;
    int64_t numbers(int threads) const { return x_numbers + hidden_numbers + threads * (kSumsNumbers + panel_numbers); }
    float* x() const { return at; }
    float* hidden() const { return at + x_numbers; }
    float* sums(int thread) const { return hidden() + hidden_numbers + thread * (kSumsNumbers + panel_numbers); }
    float* panel(int thread) const { return sums(thread) + kSumsNumbers; }
};

// What weights that are multiplied together consist of.
struct Kinds {
    bool numbers = false, blocks = false;
    void add(const Factor& f) { if (f.weight) (f.type ? blocks : numbers) = true; }
};

// The same for more than kMostRows rows, each with the bits that it has among few unless `pairs` and there are blocks.
struct ManyProduct {
    Dtype dtype;            // of x, weights, biases and y
    bool pairs;             // of bfloat16, by instructions that not every code has; blocks are rounded to it
    const void* x;          // rows `x_stride` apart
    int64_t x_stride, rows, in_features;
    Factor factors[kMostFactors];
    int count;
    void* y;
    int64_t y_stride;
    ManyRoom room;
};

inline bool is_read_in_place(const Factor& f, Dtype dtype) { return dtype == kFloat32 && !f.type; }

// Without its memory, as the next one.
inline ManyRoom room_of(const ManyProduct& p) {
    bool in_place = true;
    for (int i = 0; i < p.count; ++i) in_place = in_place && is_read_in_place(p.factors[i], p.dtype);
    return {packed_numbers(p.rows, p.in_features), 0, in_place ? 0 : panel_numbers(p.in_features), nullptr};
}

// y = the numbers of rows of blocks.
struct Unpacked {
    Dtype dtype;                        // of y
    Factor from;                        // rows `row_bytes` apart, without a bias
    int64_t numbers;
    void* y;                            // [rows, numbers]
};

// From kRelu2 on without a derivative in training.h.
enum Activation { kRelu = 0, kSilu = 1, kGeluTanh = 2, kRelu2 = 3, kGelu = 4, kQuickGelu = 5, kXielu = 6 };

// down(activation(gate(x)) · up(x)), or down(activation(up(x))) where gate has no weight.
struct Network {
    Factor gate, up, down;
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
    float* hidden;          // [rows, up.out_features], room to work in
    void* y;                // [rows, down.out_features]
};

// The same for more than kMostRows rows: its x and y, and room for its hidden features too.
struct ManyNetwork {
    ManyProduct in;         // without factors
    Network network;
};

inline ManyRoom room_of(const ManyNetwork& f) {
    const Network& n = f.network;
    const ManyProduct& p = f.in;
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

// Scales of codes of 8 or 4 bits, in units of `group` tokens: code c is the number
// zero + scale · c. Keys have a scale for every column of a unit, values one for `v_share` columns of
// a token. Rows of codes follow on from each other; in 4 bits a row holds those of a token of the first
// half of the unit in the low bits of its bytes, and of the token half a unit later in the high ones.
struct Coding {
    int64_t group;                          // even; 0: the piece holds numbers as they are
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
    Coding coding;
};

constexpr int kMostPieces = 16;

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
    Piece pieces[kMostPieces];
    int count;
    float scale, softcap;               // softcap 0: none
    const int64_t *low, *high;          // [B or 1, T] positions that a query sees: low ≤ p < high; null: all
    int64_t bounds_batch;
    const uint8_t* keep;                // nonzero: visible; strides in elements, keys dense; or null
    int64_t keep_batch, keep_head, keep_query;
    const float* slopes;                // [H] of ALiBi, or null
    float rounded;                      // not 0: they add bfloat16(slope · key position) times this
    const float* by_distance;           // [H, 2 · farthest + 1], by key − query held within ±farthest; or null
    int64_t farthest;
    const int64_t* q_positions;         // [B or 1, T], with either of them
    int64_t q_positions_batch;
    const float* bias;                  // float32, strides in elements, or null
    int64_t bias_batch, bias_head, bias_query, bias_key;
    Dropout dropout;
    bool by_row;                        // the bits of a row: those that it has alone, in decoding
    char* out;                          // [B, H, T, V]
    int64_t out_batch, out_head, out_query;
    float* lse;                         // [B, H, T] without gaps, or null
    Watch* watch;                       // or null: never stopped
};

#include "layer.h"

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

// y = activation(gate) · up, element by element; with `grad`, that of y, the gradients of both.
struct Gated {
    Dtype dtype;
    int64_t count;
    const void *gate, *up, *grad;
    Activation activation;
    void *y, *grad_gate, *grad_up;
};

// y = plus + x after dropout, element by element; the number of an element is the place of its key.
struct Elements {
    Dtype dtype;
    int64_t count;
    const void *x, *plus;               // plus: or null
    bool wide_plus;                     // plus and y are float32
    Dropout dropout;
    void* y;
};

struct NormGradients {
    Norm norm;                          // without y
    const void* grad;                   // of y, [rows, dim]
    void* grad_x;                       // [rows, dim]
    float *grad_weight, *room;          // zeros: [dim], [norm_shares(rows), dim]
};

inline int64_t norm_shares(int64_t rows) { return rows < 16 * 16 ? (rows + 15) / 16 : 16; }

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
    float* room;                        // zeros: [batch, ⌈rows / kTileRun⌉, columns], with received
};

// The code of one instruction set.
struct Code {
    const char* name;
    void (*product)(const Product&, int threads);
    void (*many_product)(const ManyProduct&, int threads);
    void (*unpack)(const Unpacked&, int threads);
    void (*feed_forward)(const FeedForward&, int threads);
    void (*many_network)(const ManyNetwork&, int threads);
    void (*norm)(const Norm&, int threads);
    void (*rotate)(const Rotation&, int threads);
    void (*head_product)(const HeadProduct&, int threads);
    void (*widen)(Dtype, const void* from, int64_t stride, int64_t rows, int64_t K, float* to);
    Outcome (*attend)(const Attention&, int threads);
    Outcome (*gradients)(const Gradients&, int threads);
    void (*tile_sums)(const Tile&, int threads);
    Outcome (*step)(const Step&, int threads);
    void (*route)(const Route&, int threads);
    void (*sink)(const Sinks&, int threads);
    void (*gated)(const Gated&, int threads);
    void (*dropped)(const Elements&, int threads);
    void (*norm_gradients)(const NormGradients&, int threads);
};

#if defined(__x86_64__)
extern const Code avx512_amx_code, avx512_bf16_code, avx512_code, avx2_code;
#endif
extern const Code portable_code;

}  // namespace polyhead
