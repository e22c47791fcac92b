// A sink joins the denominator of a softmax and has no value: what is left of the rest is sigmoid(lse − sink).
#pragma once

#include "scores.h"
#include "../common/team.h"
#include "../products/activations.h"

namespace polyhead::PH_NAMESPACE {

template <class T> void sink_of(const Sinks& s, int threads) {
    const int64_t rows = s.batch * s.heads * s.queries;
    if (rows * s.value_dim < 1 << 16) threads = 1;
    in_team(threads, [&](int64_t thread, int64_t team) {
        for (int64_t row = rows * thread / team; row < rows * (thread + 1) / team; ++row) {
            const int64_t t = row % s.queries, h = row / s.queries % s.heads, b = row / s.queries / s.heads;
            const float lse = s.lse[row], sink = s.fp32 ? ((const float*)s.sinks)[h] : to_float(((const T*)s.sinks)[h]);
            const float share = lse == kMinusInfinity ? 0.0f : sigmoid(lse - sink);
            T* x = (T*)s.x + b * s.x_batch + h * s.x_head + t * s.x_query;
            for (int64_t d = 0, n = s.value_dim; n > 0; d += W, n -= W) store_some(load_some(x + d, n) * share, x + d, n);
        }
    });
}

inline void sink(const Sinks& s, int threads) {
    with_dtype(s.dtype, [&](auto number) { sink_of<decltype(number)>(s, threads); });
}

}  // namespace polyhead::PH_NAMESPACE
