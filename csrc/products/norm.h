// Norms of rows, and rotary positions.
#pragma once

#include "../common/team.h"
#include "../common/vector.h"
#include "arguments.h"

namespace polyhead::PH_NAMESPACE {

// In 16 bits the quotient is rounded before it meets the weight, as the models with such norms were
// trained; with an offset it is rounded once, at the end.
template <class T> void norm_row(const T* x, const T* weight, const Norm& p, T* y) {
    Vec squares{};
    int64_t d = 0;
    for (; d + W <= p.dim; d += W) squares += load(x + d) * load(x + d);
    float total = sum(squares);
    for (; d < p.dim; ++d) total += to_float(x[d]) * to_float(x[d]);
    const float factor = 1.0f / __builtin_sqrtf(total / (float)p.dim + p.eps);
    d = 0;
    for (; d + W <= p.dim; d += W) {
        const Vec scaled = load(x + d) * factor;
        if (!weight) store(scaled, y + d);
        else if (p.offset != 0.0f) store(scaled * (load(weight + d) + p.offset), y + d);
        else store(rounded<T>(scaled) * load(weight + d), y + d);
    }
    for (; d < p.dim; ++d) {
        const float scaled = to_float(x[d]) * factor;
        if (!weight) {
            round_to(scaled, y + d);
        } else if (p.offset != 0.0f) {
            round_to(scaled * (to_float(weight[d]) + p.offset), y + d);
        } else {
            round_to(scaled, y + d);
            round_to(to_float(y[d]) * to_float(weight[d]), y + d);
        }
    }
}

// LayerNorm rounds once, at the end. The mean goes first: of the squares alone, what is left of large
// numbers would be rounding.
template <class T> void centred_norm_row(const T* x, const T* weight, const T* bias, const Norm& p, T* y) {
    Vec numbers{}, squares{};
    int64_t d = 0;
    for (; d + W <= p.dim; d += W) numbers += load(x + d);
    float total = sum(numbers);
    for (; d < p.dim; ++d) total += to_float(x[d]);
    const float mean = total / (float)p.dim;
    for (d = 0; d + W <= p.dim; d += W) squares += (load(x + d) - mean) * (load(x + d) - mean);
    total = sum(squares);
    for (; d < p.dim; ++d) total += (to_float(x[d]) - mean) * (to_float(x[d]) - mean);
    const float factor = 1.0f / __builtin_sqrtf(total / (float)p.dim + p.eps);
    for (d = 0; d + W <= p.dim; d += W) {
        const Vec alone = (load(x + d) - mean) * factor;
        const Vec scaled = weight ? alone * (load(weight + d) + p.offset) : alone;
        store(bias ? scaled + load(bias + d) : scaled, y + d);
    }
    for (; d < p.dim; ++d) {
        const float alone = (to_float(x[d]) - mean) * factor;
        const float scaled = weight ? alone * (to_float(weight[d]) + p.offset) : alone;
        round_to(bias ? scaled + to_float(bias[d]) : scaled, y + d);
    }
}

template <class T> void norm_rows(const Norm& p, int64_t first, int64_t last) {
    for (int64_t m = first; m < last; ++m) {
        const T* x = (const T*)p.x + m * p.x_stride;
        T* y = (T*)p.y + m * p.dim;
        const int64_t own = m % p.heads * p.dim;
        const T* weight = p.weight ? (const T*)p.weight + own : nullptr;
        if (p.centred) centred_norm_row(x, weight, p.bias ? (const T*)p.bias + own : nullptr, p, y);
        else norm_row(x, weight, p, y);
    }
}

template <class T> void rotate_rows(const Rotation& r, int64_t first, int64_t last) {
    const int64_t half = r.dim / 2;
    for (int64_t row = first; row < last; ++row) {
        const int64_t t = row % r.tokens;
        const T *cos = (const T*)r.cos + t * r.dim, *sin = (const T*)r.sin + t * r.dim;
        const T* x = (const T*)r.x + row / r.tokens * r.x_batch + t * r.x_token;
        T* y = (T*)r.y + row * r.heads * r.dim;
        for (int64_t n = 0; n < r.heads; ++n, x += r.x_head, y += r.dim) {
            int64_t d = 0;
            if (half % W == 0)
                for (; d < r.dim; d += W) {
                    const T* other = x + (d < half ? d + half : d - half);
                    store(load(x + d) * load(cos + d) + load(other) * load(sin + d), y + d);
                }
            for (; d < r.dim; ++d) {
                const T other = x[d < half ? d + half : d - half];
                round_to(to_float(x[d]) * to_float(cos[d]) + to_float(other) * to_float(sin[d]), y + d);
            }
        }
    }
}

inline void norm(const Norm& p, int threads) {
    over_range(p.rows, p.rows * p.dim < 1 << 16 ? 1 : threads, [&](int64_t first, int64_t last) {
        with_dtype(p.dtype, [&](auto number) { norm_rows<decltype(number)>(p, first, last); });
    });
}

inline void rotate(const Rotation& r, int threads) {
    const int64_t rows = r.batch * r.tokens;
    over_range(rows, rows * r.heads * r.dim < 1 << 16 ? 1 : threads, [&](int64_t first, int64_t last) {
        with_dtype(r.dtype, [&](auto number) { rotate_rows<decltype(number)>(r, first, last); });
    });
}

}  // namespace polyhead::PH_NAMESPACE
