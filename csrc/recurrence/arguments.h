// The recurrence, as the module passes it.
#pragma once

#include "../common/types.h"

namespace polyhead {

// Rows [B, heads, T, size]: strided, the last dimension dense.
struct HeadRows {
    const char* at;
    int64_t sharing;                    // heads of the recurrence that read one head of these
    int64_t batch, head, token;         // strides in elements
};

// S = D S + k uᵀ,  u = β (v − δ (D S)ᵀ k),  out = Sᵀ q · scale, token by token.
struct Recurrence {
    Dtype dtype;
    int64_t batch, heads, tokens, key_dim, value_dim;
    HeadRows q, k, v;
    float scale;
    const float* decay;                 // factors, [B or 1, H, T, 1 or K]; or null: 1
    int64_t decay_batch, decay_head, decay_token;
    bool decay_by_key;                  // the last dimension is K, and dense
    const float* beta;                  // [B, H, T], or null: 1
    int64_t beta_batch, beta_head, beta_token;
    const uint8_t* real;                // [B, T], 0: the token is skipped and its output is 0; or null
    int64_t real_batch, real_token;
    bool delta;
    float* state;                       // [B, H, K, V] without gaps, in place
    char* out;                          // [B, H, T, V] without gaps
    float* scratch;                     // kScratchRows · key_dim for each thread
};

constexpr int64_t kTokenRows = 4;       // of a token: q, k, the decay, k times the decay
constexpr int64_t kStateColumns = 64;   // most columns of a state that are taken together
constexpr int64_t kScratchRows = kTokenRows + kStateColumns;

}  // namespace polyhead
