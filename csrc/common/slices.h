// Numbers as sums of bfloat16, their slices, whose products matrix tiles add (Henry, Tang and Heinecke 2019,
// arXiv:1904.06376): float32 is a sum of three exactly, eight bits of its significand each, float16 of two. Of the
// products of three slices those are left out that are smaller than what float32 rounds. Tiles take slices below 2^-126
// for 0, and the slices of what is infinite are not numbers.
#pragma once

#include "registers.h"

#if PH_TILES
#include "amx.h"

namespace polyhead::PH_NAMESPACE {

template <class T> constexpr int kSlices = 3;
template <> inline constexpr int kSlices<Half> = 2;
template <> inline constexpr int kSlices<BFloat16> = 1;

// Whether the sums of a block begin with 0 and are added to those of others by vectors: products of slices are many, and
// each would be rounded like sums of all.
template <int Slices> constexpr bool kSumsApart = Slices == 3;

// Products of a slice of the left factor and one of the right, the greatest slice being 0, in an order in which each has
// a factor of the one before.
struct SliceProduct { int left, right; };
template <int Slices> constexpr SliceProduct kSliceProducts[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 2}, {0, 0}};
template <> inline constexpr SliceProduct kSliceProducts<2>[] = {{1, 1}, {1, 0}, {0, 0}, {0, 1}};
template <> inline constexpr SliceProduct kSliceProducts<1>[] = {{0, 0}};
template <int Slices> constexpr int kSliceProductCount = sizeof kSliceProducts<Slices> / sizeof(SliceProduct);

// C += A · B for the I-th of them, after the one before: packed tiles a [slices, …, R · 16, 16] and b [slices, …, 16, 32].
template <int R, int N, int Slices, int I>
inline void multiply_slices(const Pair* a, int64_t a_slice, const Pair* b, int64_t b_slice) {
    constexpr SliceProduct now = kSliceProducts<Slices>[I], before = kSliceProducts<Slices>[I ? I - 1 : 0];
    constexpr bool new_left = !I || now.left != before.left, new_right = !I || now.right != before.right;
    multiply_tiles<R, N, new_left, new_right>(a + now.left * a_slice, kTile, b + now.right * b_slice, kTwoTiles);
}

// The slices of x, each with 16 bits of 0 but the last, which may have to be rounded.
template <int Slices> inline void split(Vec x, Vec* slices) {
    PH_UNROLL(2) for (int i = 0; i < Slices - 1; ++i) {
        slices[i] = (Vec)((VecWord)x & 0xffff0000u);
        x -= slices[i];
    }
    slices[Slices - 1] = x;
}

// The slices of 2 W numbers as pairs of neighbours.
template <int Slices> inline void pairs_in_slices(Vec a, Vec b, Vec* pairs) {
    Vec low[Slices], high[Slices];
    split<Slices>(a, low), split<Slices>(b, high);
    PH_UNROLL(3) for (int i = 0; i < Slices; ++i) pairs[i] = pairs_of(low[i], high[i]);
}
template <class T> inline void pairs_in_slices(const T* x, Vec* pairs) { pairs_in_slices<kSlices<T>>(load(x), load(x + W), pairs); }
template <> inline void pairs_in_slices(const BFloat16* x, Vec* pairs) { *pairs = load_any<Vec>(x); }

// The slices of W numbers of two rows as pairs of both.
template <int Slices> inline void pairs_of_two_rows(Vec a, Vec b, Vec* pairs) {
    Vec low[Slices], high[Slices];
    split<Slices>(a, low), split<Slices>(b, high);
    PH_UNROLL(3) for (int i = 0; i < Slices; ++i) pairs[i] = (Vec)((VecWord)low[i] >> 16 | ((VecWord)high[i] & 0xffff0000u));
}

// W pairs in slices, `slice` apart.
template <int Slices> inline void store_slices(const Vec* pairs, Pair* to, int64_t slice) {
    PH_UNROLL(3) for (int i = 0; i < Slices; ++i) store_any(to + i * slice, pairs[i]);
}

// The first `count` columns of W rows of W pairs in slices, as rows `stride` apart: row(i, pairs) gives row i.
template <int Slices, class Row>
inline void transpose_in_slices(const Row& row, Pair* to, int64_t stride, int64_t slice, int64_t count = W) {
    Vec block[Slices][W];
    for (int64_t i = 0; i < W; ++i) {
        Vec pairs[Slices] = {};
        row(i, pairs);
        PH_UNROLL(3) for (int s = 0; s < Slices; ++s) block[s][i] = pairs[s];
    }
    PH_UNROLL(3) for (int s = 0; s < Slices; ++s, to += slice) {
        transpose_in_registers(block[s]);
        PH_UNROLL(16) for (int64_t i = 0; i < count; ++i) store_any(to + i * stride, block[s][i]);
    }
}

}  // namespace polyhead::PH_NAMESPACE
#endif
