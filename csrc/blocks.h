// Small dense products and reductions on vectors: the parts that scores and weighted sums are made of.

// Sums across lanes of W vectors at once: lane i of the result is the sum of vector i. Halves are
// exchanged and added log2 W times, one addition and two shuffles for each vector that goes away.
template <int H, int Upper> constexpr int lane_of(int i) {
    const int inside = i % (2 * H), block = i - inside;
    return (inside < H ? block + inside : W + block + inside - H) + (Upper ? H : 0);
}
template <int H, int Upper, int... I>
inline Vec halves(Vec a, Vec b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, lane_of<H, Upper>(I)...);
}
template <int H> inline Vec added_halves(Vec a, Vec b) {
    using Lanes = std::make_integer_sequence<int, W>;
    return halves<H, 0>(a, b, Lanes{}) + halves<H, 1>(a, b, Lanes{});
}
template <int H> inline Vec fold(const Vec* v) {
    if constexpr (H == 0) {
        return v[0];
    } else {
        Vec next[H];
#pragma GCC unroll 8
        for (int i = 0; i < H; ++i) next[i] = added_halves<H>(v[i], v[i + H]);
        return fold<H / 2>(next);
    }
}

// Two neighbouring bfloat16 columns as one 32-bit element; their products are added in float32.
struct Pair { uint32_t bits; };

#if defined(__AVX512BF16__) && PH_WIDTH == 16
#define PH_PAIRS 1
inline Vec multiply_add_pairs(Vec sum, Vec a, Vec b) {
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
// 2 W numbers as pairs, rounded to nearest even.
inline Vec pairs_of(const float* s) { return (Vec)_mm512_cvtne2ps_pbh((__m512)load(s + W), (__m512)load(s)); }
// Weights of one row as pairs of keys.
inline void pack_weights(const float* s, int64_t count, Pair* to) {
    for (int64_t j = 0; j < count; j += 2 * W) store_any(to + j / 2, pairs_of(s + j));
}
#else
#define PH_PAIRS 0
inline Vec multiply_add_pairs(Vec sum, Vec, Vec) { return sum; }
#endif

template <class E> inline Vec multiply_add_of(Vec sum, Vec a, Vec b) {
    if constexpr (sizeof(E) == 4 && !__is_same(E, float)) return multiply_add_pairs(sum, a, b);
    else return multiply_add(sum, a, b);
}

inline Vec broadcast(const float* p) { return splat(*p); }
inline Vec broadcast(const Pair* p) { return (Vec)splat_int((int32_t)p->bits); }
inline Vec load_elements(const float* p) { return load_any<Vec>(p); }
inline Vec load_elements(const Pair* p) { return load_any<Vec>(p); }

// Prefetches rows for the next block, one cache line at every step of the current block's products, so that
// memory and arithmetic overlap; requested in bursts they would wait for each other. Prefetching behind the
// last row is harmless.
class NextBlock {
  public:
    // `rows` of `bytes` each, `stride` bytes apart.
    NextBlock(const void* first, int64_t stride, int64_t rows, int64_t bytes)
        : first_((const char*)first), stride_(stride), rows_(rows), lines_((bytes + 63) / 64) {}
    struct Lines {
        const char* first;
        int64_t stride;
        void ask(int64_t step) const { __builtin_prefetch(first + step * stride, 0, 2); }
    };
    // The lines for the next `steps` steps: the same column of so many rows.
    Lines next(int64_t steps) {
        const int64_t column = asked_ / rows_, row = asked_ - column * rows_;
        if (column >= lines_ || row + steps > rows_) return {(const char*)this, 0};  // none: one at hand
        asked_ += steps;
        return {first_ + row * stride_ + column * 64, stride_};
    }

  private:
    const char* first_;
    int64_t stride_, rows_, lines_, asked_ = 0;
};

// For products whose next block is in the cache already.
struct Nothing {
    struct Lines { void ask(int64_t) const {} };
    Lines next(int64_t) const { return {}; }
};

// c[M, N·W] = factor[m] · c + a[M, K] · b[K, N·W]; without factors c is overwritten. Transposed: a is
// given as [K, M].
template <int M, int N, bool Transposed, class E, class Next>
inline void tile_product(Next& next, const E* a, int64_t a_stride, const E* b, int64_t b_stride, int64_t K,
                         float* c, int64_t c_stride, const float* factors) {
    Vec acc[M][N];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n)
            acc[m][n] = factors ? load(c + m * c_stride + n * W) * factors[m] : Vec{};
    const auto lines = next.next(K);
    for (int64_t k = 0; k < K; ++k) {
        lines.ask(k);
        Vec row[N];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) row[n] = load_elements(b + k * b_stride + n * W);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const Vec x = broadcast(Transposed ? a + k * a_stride + m : a + m * a_stride + k);
#pragma GCC unroll 8
            for (int n = 0; n < N; ++n) acc[m][n] = multiply_add_of<E>(acc[m][n], x, row[n]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) store_any(c + m * c_stride + n * W, acc[m][n]);
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

// Rows become columns.
template <int H> inline void transpose_step(Vec* rows) {
    using Lanes = std::make_integer_sequence<int, W>;
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i)
        if ((i & H) == 0) {
            const Vec a = rows[i], b = rows[i + H];
            rows[i] = halves<H, 0>(a, b, Lanes{});
            rows[i + H] = halves<H, 1>(a, b, Lanes{});
        }
    if constexpr (H > 1) transpose_step<H / 2>(rows);
}
inline void transpose_in_registers(Vec* rows) { transpose_step<W / 2>(rows); }

#if PH_TILES
template <> inline constexpr int kTileRows<Pair> = 32;
#include "tiles.h"
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
    switch (rows) {
        case 6: return product_rows<6, Transposed>(next, a, a_stride, b, b_stride, K, c, c_stride, vectors, factors);
        case 5: return product_rows<5, Transposed>(next, a, a_stride, b, b_stride, K, c, c_stride, vectors, factors);
        case 4: return product_rows<4, Transposed>(next, a, a_stride, b, b_stride, K, c, c_stride, vectors, factors);
        case 3: return product_rows<3, Transposed>(next, a, a_stride, b, b_stride, K, c, c_stride, vectors, factors);
        case 2: return product_rows<2, Transposed>(next, a, a_stride, b, b_stride, K, c, c_stride, vectors, factors);
        default: return product_rows<1, Transposed>(next, a, a_stride, b, b_stride, K, c, c_stride, vectors, factors);
    }
}

template <class E, bool Transposed = false>
inline void block_product(int64_t rows, const E* a, int64_t a_stride, const E* b, int64_t b_stride,
                          int64_t K, float* c, int64_t c_stride, int64_t vectors,
                          const float* factors) {
    Nothing nothing;
    block_product<E, Transposed>(rows, a, a_stride, b, b_stride, K, c, c_stride, vectors, factors, nothing);
}
