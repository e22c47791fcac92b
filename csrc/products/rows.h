// Rows of numbers: as float32, added, and in blocks.
#pragma once

#include "../common/team.h"
#include "../common/vector.h"
#include "arguments.h"

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

// Calls of(first row, rows) for one block of rows after another, all threads at the same one.
template <class Of> inline void over_row_blocks(int64_t rows, int64_t features, const Of& of) {
    const int64_t most = most_block_rows(features), blocks = (rows + most - 1) / most;
    for (int64_t b = 0; b < blocks; ++b) {
        if (b) wait_for_team();
        const int64_t first = rows * b / blocks;
        of(first, rows * (b + 1) / blocks - first);
    }
}

}  // namespace polyhead::PH_NAMESPACE
