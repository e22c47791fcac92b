// Feed-forward networks as GEMV.
#pragma once

#include "activations.h"
#include "gemv.h"

namespace polyhead::PH_NAMESPACE {

// Hidden features [first, last). What they are summed up in stays float32 until the last product.
template <class T> void hidden_rows(const FeedForward& f, int64_t first, int64_t last) {
    const Network& n = f.network;
    const int64_t F = n.up.out_features, K = f.in_features;
    const bool gate = n.gate.weight;
    const Bend bend = bend_of<T>(n);
    auto activate_all = [&] {
        for (int64_t m = 0; m < f.rows; ++m) activate(n, bend, f.hidden + m * F + first, last - first);
    };
    if (gate) {
        gemv_rows<T>(f.x, f.rows, K, n.gate, first, last, f.hidden, F);
        activate_all();
    }
    const T* up_bias = (const T*)n.up.bias;
    over_rows<T>(f.x, f.rows, K, n.up, first, last, [&](const Dots& d) {
        for (int64_t r = 0; r < d.rows; ++r) {
            const float* at = d.at + r * kFewColumns;
            float* hidden = f.hidden + (d.row + r) * F + d.column;
            for (int64_t c = 0; c < d.columns; ++c) {
                float value = at[c] + (up_bias ? to_float(up_bias[d.column + c]) : 0.0f);
                if (!gate) {
                    hidden[c] = value;
                    continue;
                }
                value = value > n.clamp ? n.clamp : value < -n.clamp ? -n.clamp : value;
                hidden[c] *= n.offset != 0.0f ? value + n.offset : value;
            }
        }
    });
    if (!gate) activate_all();
}

template <class T> void hidden_of(const FeedForward& f, int thread, int threads) {
    const int64_t F = f.network.up.out_features;
    hidden_rows<T>(f, F * thread / threads, F * (thread + 1) / threads);
}

template <class T> void output_of(const FeedForward& f, int thread, int threads) {
    const LinearWeight& down = f.network.down;
    const int64_t N = down.out_features;
    gemv_rows<T>(f.hidden, f.rows, f.network.up.out_features, down, N * thread / threads,
                   N * (thread + 1) / threads, (T*)f.y, N);
}

inline void feed_forward(const FeedForward& f, int threads) {
    in_team(threads, [&](int thread, int team) {
        with_dtype(f.dtype, [&](auto number) {
            hidden_of<decltype(number)>(f, thread, team);
            wait_for_team();
            output_of<decltype(number)>(f, thread, team);
        });
    });
}

}  // namespace polyhead::PH_NAMESPACE
