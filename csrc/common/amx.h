// Products of bfloat16 pairs on matrix tiles (Intel AMX): eight registers of 16 rows of 64 bytes, and
// C[16, 16] += A[16, 16 pairs] · B[16 pairs, 16], added in float32, as one instruction.
//
// A and B lie in memory as the vectors want them, so tiles are read where blocks are. A register has as
// many rows as a product has; what is left of K over 16 goes through a copy with zeros.
#pragma once

#include "registers.h"

namespace polyhead::PH_NAMESPACE {

constexpr int64_t kTile = 16;        // rows, pairs and columns
constexpr int64_t kTwoTiles = 2 * kTile;  // rows and columns that the registers hold of C
constexpr int64_t kTileSteps = 64;   // pairs of a left factor that are turned round at a time

#if defined(PH_TILE_MODEL)
// The instructions in plain code, for tests on processors without them. A register without rows does not
// exist.
struct TileRegister { uint32_t lanes[kTile][kTile]; int rows, bytes; };
inline thread_local TileRegister tile_registers[8];

inline void configure_tiles(const uint8_t* rows, int left_bytes) {
    for (int i = 0; i < 8; ++i) tile_registers[i] = TileRegister{{}, rows[i], i / 2 == 2 ? left_bytes : 64};
}
inline void release_tiles() {
    for (TileRegister& r : tile_registers) r.rows = 0;
}
template <int I> inline TileRegister& tile() {
    if (!tile_registers[I].rows) __builtin_trap();
    return tile_registers[I];
}
template <int I> inline void tile_zero() { __builtin_memset(tile<I>().lanes, 0, sizeof tile<I>().lanes); }
template <int I> inline void tile_load(const void* from, int64_t stride) {
    for (int m = 0; m < tile<I>().rows; ++m) __builtin_memcpy(tile<I>().lanes[m], (const char*)from + m * stride, tile<I>().bytes);
}
template <int I> inline void tile_store(void* to, int64_t stride) {
    for (int m = 0; m < tile<I>().rows; ++m) __builtin_memcpy((char*)to + m * stride, tile<I>().lanes[m], 64);
}
template <int C, int A, int B> inline void tile_multiply_add() {
    TileRegister& c = tile<C>();
    const TileRegister &a = tile<A>(), &b = tile<B>();
    auto number = [](uint32_t bits) {
        float x;
        __builtin_memcpy(&x, &bits, 4);
        return x;
    };
    for (int m = 0; m < c.rows; ++m) {
        float sums[kTile];
        __builtin_memcpy(sums, c.lanes[m], sizeof sums);
        for (int k = 0; k < b.rows; ++k) {
            const float low = number(a.lanes[m][k] << 16), high = number(a.lanes[m][k] & 0xffff0000u);
            for (int n = 0; n < kTile; ++n) {
                sums[n] += low * number(b.lanes[k][n] << 16);
                sums[n] += high * number(b.lanes[k][n] & 0xffff0000u);
            }
        }
        __builtin_memcpy(c.lanes[m], sums, sizeof sums);
    }
}
template <int C, int A, int B> inline void tile_multiply_add_bytes() {
    TileRegister& c = tile<C>();
    const TileRegister &a = tile<A>(), &b = tile<B>();
    if (a.bytes != 4 * b.rows) __builtin_trap();
    for (int m = 0; m < c.rows; ++m)
        for (int k = 0; k < b.rows; ++k)
            for (int n = 0; n < kTile; ++n)
                for (int byte = 0; byte < 32; byte += 8) c.lanes[m][n] += (uint32_t)((int8_t)(a.lanes[m][k] >> byte) * (int8_t)(b.lanes[k][n] >> byte));
}
#else
struct TileConfiguration {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
};
inline void configure_tiles(const uint8_t* rows, int left_bytes) {
    TileConfiguration c;
    for (int i = 0; i < 8; ++i) c.rows[i] = rows[i], c.bytes[i] = !rows[i] ? 0 : i / 2 == 2 ? left_bytes : 64;
    __asm__ volatile("ldtilecfg %0" ::"m"(c) : "memory");
}
inline void release_tiles() { __asm__ volatile("tilerelease" ::: "memory"); }
template <int I> inline void tile_zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(I)); }
template <int I> inline void tile_load(const void* from, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(I) : "memory");
}
template <int I> inline void tile_store(void* to, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(I) : "memory");
}
template <int C, int A, int B> inline void tile_multiply_add() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// C[16, 16] += A[16, words] · B[words, 16] of four bytes a word, each with a sign, in whole numbers.
template <int C, int A, int B> inline void tile_multiply_add_bytes() {
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
#endif

// The rows that this thread's registers are set to, negative: the words of set_byte_tiles; 0: they are not in use.
inline thread_local int64_t tile_rows = 0;

// Registers 0 to 3 are C (rows × columns), 4 and 5 are A, 6 and 7 are B.
inline void set_tile_rows(int64_t rows) {
    if (rows == tile_rows) return;
    const uint8_t upper = (uint8_t)(rows < kTile ? rows : kTile), lower = (uint8_t)(rows - upper);
    const uint8_t of[8] = {upper, upper, lower, lower, upper, lower, kTile, kTile};
    configure_tiles(of, 64);
    tile_rows = rows;
}

// Registers 0 to 3 are C (16 × 16), 4 and 5 are A (16 × words), 6 and 7 are B (words × 16).
inline void set_byte_tiles(int words) {
    if (tile_rows == -words) return;
    const uint8_t of[8] = {kTile, kTile, kTile, kTile, kTile, kTile, (uint8_t)words, (uint8_t)words};
    configure_tiles(of, 4 * words);
    tile_rows = -words;
}

// Exists while a thread works on tiles; afterwards the registers are released.
struct TilesInUse {
    TilesInUse() { tile_rows = 0; }
    ~TilesInUse() {
        if (tile_rows) release_tiles();
        tile_rows = 0;
    }
};

// C += A · B, whose tiles are loaded where the registers do not hold them yet: each before the product that needs it
// first, so that loads and products overlap.
template <int R, int N, bool LoadA = true, bool LoadB = true>
inline void multiply_tiles(const Pair* a, int64_t a_stride, const Pair* b, int64_t b_stride) {
    if constexpr (LoadA) tile_load<4>(a, a_stride * 4);
    if constexpr (LoadB) tile_load<6>(b, b_stride * 4);
    tile_multiply_add<0, 4, 6>();
    if constexpr (LoadA) {
        if constexpr (LoadB && N == 2) tile_load<7>(b + kTile, b_stride * 4);
        if constexpr (N == 2) tile_multiply_add<1, 4, 7>();
        if constexpr (R == 2) tile_load<5>(a + kTile * a_stride, a_stride * 4);
        if constexpr (R == 2) tile_multiply_add<2, 5, 6>();
    } else {
        if constexpr (R == 2) tile_multiply_add<2, 5, 6>();
        if constexpr (LoadB && N == 2) tile_load<7>(b + kTile, b_stride * 4);
        if constexpr (N == 2) tile_multiply_add<1, 4, 7>();
    }
    if constexpr (R == 2 && N == 2) tile_multiply_add<3, 5, 7>();
}

// C begins with 0 or with what lies at c, and goes there.
template <int R, int N> inline void begin_sums(const float* c, int64_t c_stride, bool add) {
    if (add) {
        tile_load<0>(c, c_stride * 4);
        if constexpr (N == 2) tile_load<1>(c + kTile, c_stride * 4);
        if constexpr (R == 2) tile_load<2>(c + kTile * c_stride, c_stride * 4);
        if constexpr (R == 2 && N == 2) tile_load<3>(c + kTile * c_stride + kTile, c_stride * 4);
    } else {
        tile_zero<0>();
        if constexpr (N == 2) tile_zero<1>();
        if constexpr (R == 2) tile_zero<2>();
        if constexpr (R == 2 && N == 2) tile_zero<3>();
    }
}
template <int R, int N> inline void store_sums(float* c, int64_t c_stride) {
    tile_store<0>(c, c_stride * 4);
    if constexpr (N == 2) tile_store<1>(c + kTile, c_stride * 4);
    if constexpr (R == 2) tile_store<2>(c + kTile * c_stride, c_stride * 4);
    if constexpr (R == 2 && N == 2) tile_store<3>(c + kTile * c_stride + kTile, c_stride * 4);
}

// c[rows, N · 16] = a[rows, K] · b[K, N · 16], or added to what c holds; R = ⌈rows / 16⌉.
template <int R, int N, class Next>
inline void product_of_tiles(Next& next, int64_t rows, const Pair* a, int64_t a_stride, const Pair* b,
                             int64_t b_stride, int64_t K, float* c, int64_t c_stride, bool add) {
    begin_sums<R, N>(c, c_stride, add);
    const auto lines = next.next(K);
    int64_t k = 0;
    for (; k + kTile <= K; k += kTile) {
        for (int64_t i = 0; i < kTile; ++i) lines.ask(k + i);
        multiply_tiles<R, N>(a + k, a_stride, b + k * b_stride, b_stride);
    }
    if (k < K) {
        alignas(64) Pair left[kTwoTiles * kTile] = {}, right[kTile * kTwoTiles] = {};
        for (int64_t m = 0; m < rows; ++m)
            __builtin_memcpy(left + m * kTile, a + m * a_stride + k, (K - k) * sizeof(Pair));
        for (int64_t i = 0; k + i < K; ++i) {
            lines.ask(k + i);
            __builtin_memcpy(right + i * kTwoTiles, b + (k + i) * b_stride, N * kTile * sizeof(Pair));
        }
        multiply_tiles<R, N>(left, kTile, right, kTwoTiles);
    }
    store_sums<R, N>(c, c_stride);
}

template <int R, class Next>
inline void product_of_rows(Next& next, int64_t rows, const Pair* a, int64_t a_stride, const Pair* b,
                            int64_t b_stride, int64_t K, float* c, int64_t c_stride, int64_t vectors, bool add) {
    int64_t n = 0;
    for (; n + 2 <= vectors; n += 2)
        product_of_tiles<R, 2>(next, rows, a, a_stride, b + n * W, b_stride, K, c + n * W, c_stride, add);
    if (n < vectors)
        product_of_tiles<R, 1>(next, rows, a, a_stride, b + n * W, b_stride, K, c + n * W, c_stride, add);
}

// A left factor given as [steps, rows] as [rows, kTileSteps]; whole vectors of it are read.
inline void transpose_tile(const Pair* a, int64_t a_stride, int64_t steps, int64_t rows, Pair* to) {
    for (int64_t m = 0; m < rows; m += W)
        for (int64_t k = 0; k < steps; k += W) {
            Vec block[W];
            for (int64_t n = 0; n < W; ++n)
                block[n] = k + n < steps ? load_any<Vec>(a + (k + n) * a_stride + m) : Vec{};
            transpose_in_registers(block);
            for (int64_t n = 0; n < W; ++n) store_any(to + (m + n) * kTileSteps + k, block[n]);
        }
}

// As block_product of vectors, for up to 32 rows.
template <bool Transposed, class Next>
inline void tiled_product(Next& next, int64_t rows, const Pair* a, int64_t a_stride, const Pair* b, int64_t b_stride,
                          int64_t K, float* c, int64_t c_stride, int64_t vectors, const float* factors) {
    set_tile_rows(rows);
    for (int64_t m = 0; factors && m < rows; ++m)
        for (int64_t n = 0; factors[m] != 1.0f && n < vectors * W; n += W)
            store_any(c + m * c_stride + n, load(c + m * c_stride + n) * factors[m]);
    auto product = [&](const Pair* left, int64_t left_stride, int64_t k, int64_t steps) {
        const Pair* right = b + k * b_stride;
        const bool add = factors || k;
        if (rows > kTile) product_of_rows<2>(next, rows, left, left_stride, right, b_stride, steps, c, c_stride, vectors, add);
        else product_of_rows<1>(next, rows, left, left_stride, right, b_stride, steps, c, c_stride, vectors, add);
    };
    if constexpr (Transposed) {
        alignas(64) Pair turned[kTwoTiles * kTileSteps];
        for (int64_t k = 0; k < K; k += kTileSteps) {
            const int64_t steps = K - k < kTileSteps ? K - k : kTileSteps;
            transpose_tile(a + k * a_stride, a_stride, steps, rows, turned);
            product(turned, kTileSteps, k, steps);
        }
    } else {
        product(a, a_stride, 0, K);
    }
}

}  // namespace polyhead::PH_NAMESPACE
