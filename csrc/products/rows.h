// Rows of numbers: as float32, and added.
#pragma once

#include "../common/vector.h"

namespace polyhead::PH_NAMESPACE {

// x as float32 rows without gaps.
template <class T> void widen(const void* from, int64_t stride, int64_t rows, int64_t K, float* to) {
    const T* x = (const T*)from;
    for (int64_t m = 0; m < rows; ++m)
        for (int64_t k = 0; k < K; ++k) to[m * K + k] = to_float(x[m * stride + k]);
}

template <class T> void add_rows(const T* x, const T* h, int64_t count, T* y) {
    for (int64_t i = 0; i < count; i += W) store_some(load_some(x + i, count - i) + load_some(h + i, count - i), y + i, count - i);
}

inline void widened(Dtype dtype, const void* from, int64_t stride, int64_t rows, int64_t K, float* to) {
    with_dtype(dtype, [&](auto number) { widen<decltype(number)>(from, stride, rows, K, to); });
}

}  // namespace polyhead::PH_NAMESPACE
