// Elementwise parts of layers in training, in one pass where torch needs several.
#pragma once

#include "../attention/scores.h"
#include "../common/team.h"
#include "arguments.h"

namespace polyhead::PH_NAMESPACE {

// Calls range(first, last) in each thread, in whole vectors.
template <class Range> inline void in_shares(int64_t count, int threads, Range&& range) {
    if (count < 1 << 14) threads = 1;
    const int64_t vectors = (count + W - 1) / W;
    in_team(threads, [&](int64_t thread, int64_t team) {
        const int64_t last = vectors * (thread + 1) / team * W;
        range(vectors * thread / team * W, last < count ? last : count);
    });
}

struct Activated { Vec value, slope; };

// An activation and its derivative.
inline Activated activated(Vec x, Activation kind) {
    if (kind == kRelu) {
        const VecInt none = (VecInt)(x <= splat(0.0f));  // false for NaN
        return {choose(none, Vec{}, x), choose(none, Vec{}, splat(1.0f))};
    }
    // This far from 0 the result no longer changes.
    const Vec least = splat(kind == kSilu ? -87.0f : -10.0f), near = smaller(-least, larger(least, x));
    if (kind == kSilu) {
        const Vec share = 1.0f / (1.0f + exponential(-near));
        return {larger(least, x) * share, share * (1.0f + near * (1.0f - share))};
    }
    // 1 + tanh(u) = 2 / (1 + exp(−2 u))
    const Vec square = near * near, power = exponential(-1.5957691216f * near * (1.0f + 0.044715f * square));
    const Vec share = 1.0f / (1.0f + power);
    const Vec inner = 1.5957691216f * near * (1.0f + 0.134145f * square);
    return {larger(least, x) * share, share * (1.0f + inner * (power * share))};
}

template <class T> void gated_of(const Gated& g, int threads) {
    const T *gate = (const T*)g.gate, *up = (const T*)g.up;
    in_shares(g.count, threads, [&](int64_t i, int64_t last) {
        for (; i < last; i += W) {
            const int64_t n = last - i;
            const Activated a = activated(load_some(gate + i, n), g.activation);
            store_some(a.value * load_some(up + i, n), (T*)g.y + i, n);
        }
    });
}

template <class T> void gated_gradients_of(const Gated& g, int threads) {
    const T *gate = (const T*)g.gate, *up = (const T*)g.up, *grad = (const T*)g.grad;
    in_shares(g.count, threads, [&](int64_t i, int64_t last) {
        for (; i < last; i += W) {
            const int64_t n = last - i;
            const Activated a = activated(load_some(gate + i, n), g.activation);
            const Vec change = load_some(grad + i, n);
            store_some(change * load_some(up + i, n) * a.slope, (T*)g.grad_gate + i, n);
            store_some(change * a.value, (T*)g.grad_up + i, n);
        }
    });
}

// y = plus + x where it is kept, times the factor of dropout.
template <class T> void dropped_of(const Elements& e, int threads) {
    const T *x = (const T*)e.x;
    const Vec factor = splat(e.dropout.factor);
    const int32_t least = (int32_t)e.dropout.least;
    in_shares(e.count, threads, [&](int64_t i, int64_t last) {
        while (i < last) {
            const int64_t high = i >> 32, end = (high + 1) << 32 < last ? (high + 1) << 32 : last;
            const uint32_t row = hash32(hash32(e.dropout.seed) + (uint32_t)high);
            for (; i < end; i += W) {
                const int64_t n = end - i;
                const VecInt number = (VecInt)(hash32((VecWord)counted() + (row + (uint32_t)i)) & 0xffffffu);
                Vec y = (Vec)((VecInt)(number >= least) & (VecInt)(load_some(x + i, n) * factor));
                if (e.plus) y += e.fp32_plus ? load_some((const float*)e.plus + i, n) : load_some((const T*)e.plus + i, n);
                if (e.fp32_plus) store_some(y, (float*)e.y + i, n);
                else store_some(y, (T*)e.y + i, n);
            }
        }
    });
}

// Of y = x · r · (w + offset) with r = 1 / √(mean(x²) + eps), for rows [first, last):
//
//     g = dy (w + offset)      dx = r (g − x · r² · mean(g x))      dw = Σ dy x r
template <class T> void norm_gradients_of(const NormGradients& g, int64_t first, int64_t last, float* grad_weight) {
    const Norm& p = g.norm;
    const T* weight = (const T*)p.weight;
    const float share = 1.0f / (float)p.dim;
    for (int64_t m = first; m < last; ++m) {
        const T *x = (const T*)p.x + m * p.x_stride, *grad = (const T*)g.grad + m * p.dim;
        T* grad_x = (T*)g.grad_x + m * p.dim;
        Vec squares{}, products{};
        for (int64_t d = 0; d < p.dim; d += W) {
            const int64_t n = p.dim - d;
            const Vec number = load_some(x + d, n);
            squares += number * number;
            products += load_some(grad + d, n) * (load_some(weight + d, n) + p.offset) * number;
        }
        const float factor = 1.0f / __builtin_sqrtf(sum(squares) * share + p.eps);
        const float back = sum(products) * share * factor * factor;
        for (int64_t d = 0; d < p.dim; d += W) {
            const int64_t n = p.dim - d;
            const Vec number = load_some(x + d, n), change = load_some(grad + d, n);
            store_some((change * (load_some(weight + d, n) + p.offset) - number * back) * factor, grad_x + d, n);
            store_some(load_some(grad_weight + d, n) + change * number * factor, grad_weight + d, n);
        }
    }
}

// Rows are summed in splits that depend on their number alone, and these in order.
inline void norm_gradients(const NormGradients& g, int threads) {
    const Norm& p = g.norm;
    const int64_t splits = norm_splits(p.rows);
    int64_t next = 0;
    in_team(p.rows * p.dim < 1 << 14 ? 1 : threads, [&](int, int) {
        for (int64_t i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < splits;) {
            const int64_t first = p.rows * i / splits, last = p.rows * (i + 1) / splits;
            float* sums = g.scratch + i * p.dim;
            with_dtype(p.dtype, [&](auto number) { norm_gradients_of<decltype(number)>(g, first, last, sums); });
        }
    });
    for (int64_t i = 0; i < splits; ++i)
        for (int64_t d = 0; d < p.dim; ++d) g.grad_weight[d] += g.scratch[i * p.dim + d];
}

inline void gated(const Gated& g, int threads) {
    with_dtype(g.dtype, [&](auto number) {
        using T = decltype(number);
        g.grad ? gated_gradients_of<T>(g, threads) : gated_of<T>(g, threads);
    });
}

inline void dropped(const Elements& e, int threads) {
    with_dtype(e.dtype, [&](auto number) { dropped_of<decltype(number)>(e, threads); });
}

}  // namespace polyhead::PH_NAMESPACE
