// Small dense products on vectors: the parts that scores and weighted sums are made of.
#pragma once

#include "registers.h"
#if PH_TILES
#include "amx.h"
#endif

namespace polyhead::PH_NAMESPACE {

// Prefetches rows for the next block, one cache line at every step of the current block's products, so that
// memory and arithmetic overlap; requested in bursts they would wait for each other. Prefetching behind the
// last row is harmless.
class NextBlock {
  public:
    NextBlock() = default;  // none
    // `rows` of `bytes` each, `stride` bytes apart. Rows without gaps between them are one column of lines, so they
    // are prefetched in the order of memory.
    NextBlock(const void* first, int64_t stride, int64_t rows, int64_t bytes)
        : column_((const char*)first), stride_(stride), rows_(rows), columns_((bytes + 63) / 64) {
        if (stride == columns_ * 64) stride_ = 64, rows_ *= columns_, columns_ = 1;
    }
    struct Lines {
        const char* first;
        int64_t stride;
        void ask(int64_t step) const { __builtin_prefetch(first + step * stride, 0, 2); }
    };
    // The lines for the next `steps` steps: the same column of so many rows.
    Lines next(int64_t steps) {
        if (row_ + steps > rows_) row_ = 0, column_ += 64, --columns_;
        if (columns_ <= 0 || steps > rows_) return {(const char*)this, 0};  // none: one at hand
        const Lines lines{column_ + row_ * stride_, stride_};
        row_ += steps;
        return lines;
    }
    // Prefetches that many lines now.
    void ask(int64_t lines) {
        if (columns_ <= 0) return;
        const Lines some = next(lines);
        for (int64_t i = 0; i < lines; ++i) some.ask(i);
    }

  private:
    const char* column_ = nullptr;
    int64_t stride_ = 0, rows_ = 0, columns_ = 0, row_ = 0;
};

// For products whose next block is in the cache already.
struct Nothing {
    struct Lines { void ask(int64_t) const {} };
    Lines next(int64_t) const { return {}; }
    void ask(int64_t) const {}
};

// c[M, N·W] = factor[m] · c + a[M, K] · b[K, N·W]; without factors c is overwritten. Transposed: a is
// given as [K, M].
template <int M, int N, bool Transposed, class E, class Next>
inline void tile_product(Next& next, const E* a, int64_t a_stride, const E* b, int64_t b_stride, int64_t K,
                         float* c, int64_t c_stride, const float* factors) {
    Vec acc[M][N];
    PH_UNROLL(8) for (int m = 0; m < M; ++m)
        PH_UNROLL(8) for (int n = 0; n < N; ++n)
            acc[m][n] = factors ? load(c + m * c_stride + n * W) * factors[m] : Vec{};
    const auto lines = next.next(K);
    for (int64_t k = 0; k < K; ++k) {
        lines.ask(k);
        Vec row[N];
        PH_UNROLL(8) for (int n = 0; n < N; ++n) row[n] = load_elements(b + k * b_stride + n * W);
        PH_UNROLL(8) for (int m = 0; m < M; ++m) {
            const Vec x = broadcast(Transposed ? a + k * a_stride + m : a + m * a_stride + k);
            PH_UNROLL(8) for (int n = 0; n < N; ++n) acc[m][n] = multiply_add_of<E>(acc[m][n], x, row[n]);
        }
    }
    PH_UNROLL(8) for (int m = 0; m < M; ++m)
        PH_UNROLL(8) for (int n = 0; n < N; ++n) store_any(c + m * c_stride + n * W, acc[m][n]);
}

// Rows of a left factor that a product takes at a time, and vectors of columns that it holds.
template <class E> constexpr int kTileRows = 6;
constexpr int kTileVectors = PH_WIDTH == 16 ? 4 : 2;

// The same for any number of rows up to kTileRows and any number of vectors of columns.
template <int M, bool Transposed, class E, class Next>
inline void product_rows(Next& next, const E* a, int64_t a_stride, const E* b, int64_t b_stride, int64_t K,
                         float* c, int64_t c_stride, int64_t vectors, const float* factors) {
    int64_t n = 0;
    for (; n + kTileVectors <= vectors; n += kTileVectors)
        tile_product<M, kTileVectors, Transposed>(next, a, a_stride, b + n * W, b_stride, K, c + n * W, c_stride, factors);
    if (kTileVectors > 2 && n + 2 <= vectors) {
        tile_product<M, 2, Transposed>(next, a, a_stride, b + n * W, b_stride, K, c + n * W, c_stride, factors);
        n += 2;
    }
    if (n < vectors)
        tile_product<M, 1, Transposed>(next, a, a_stride, b + n * W, b_stride, K, c + n * W, c_stride, factors);
}

#if PH_TILES
template <> inline constexpr int kTileRows<Pair> = 32;
#else
struct TilesInUse {};
#endif

template <class E, bool Transposed = false, class Next>
inline void block_product(int64_t rows, const E* a, int64_t a_stride, const E* b, int64_t b_stride,
                          int64_t K, float* c, int64_t c_stride, int64_t vectors,
                          const float* factors, Next& next) {
#if PH_TILES
    if constexpr (__is_same(E, Pair))
        return tiled_product<Transposed>(next, rows, a, a_stride, b, b_stride, K, c, c_stride, vectors, factors);
    else
#endif
    with_constant<6>(rows, [&](auto m) {
        product_rows<m, Transposed>(next, a, a_stride, b, b_stride, K, c, c_stride, vectors, factors);
    });
}

template <class E, bool Transposed = false>
inline void block_product(int64_t rows, const E* a, int64_t a_stride, const E* b, int64_t b_stride,
                          int64_t K, float* c, int64_t c_stride, int64_t vectors,
                          const float* factors) {
    Nothing nothing;
    block_product<E, Transposed>(rows, a, a_stride, b, b_stride, K, c, c_stride, vectors, factors, nothing);
}

}  // namespace polyhead::PH_NAMESPACE
