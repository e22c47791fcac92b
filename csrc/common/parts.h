// Numbers as sums of bfloat16, whose products matrix tiles add: float32 is three of them exactly (eight bits of its
// significand each), float16 two. Of the products of three parts those are left out that are smaller than what float32
// rounds. Tiles take parts below 2^-126 for 0, and the parts of what is infinite are not numbers.
#pragma once

#include "registers.h"

#if PH_TILES
namespace polyhead::PH_NAMESPACE {

template <class T> constexpr int kParts = 3;
template <> inline constexpr int kParts<Half> = 2;
template <> inline constexpr int kParts<BFloat16> = 1;

// Products of a part of the left factor and one of the right, the greatest part being 0, in a row in which each has
// a factor of the one before.
struct PartProduct { int left, right; };
template <int Parts> constexpr PartProduct kPartProducts[] = {{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 2}, {0, 0}};
template <> inline constexpr PartProduct kPartProducts<2>[] = {{1, 1}, {1, 0}, {0, 0}, {0, 1}};
template <> inline constexpr PartProduct kPartProducts<1>[] = {{0, 0}};
template <int Parts> constexpr int kPartCount = sizeof kPartProducts<Parts> / sizeof(PartProduct);

// The I-th of them, and which of its factors are others than those of the one before.
template <int Parts, int I> struct PartProductAt {
    static constexpr int left = kPartProducts<Parts>[I].left, right = kPartProducts<Parts>[I].right;
    static constexpr bool new_left = !I || left != kPartProducts<Parts>[I ? I - 1 : 0].left;
    static constexpr bool new_right = !I || right != kPartProducts<Parts>[I ? I - 1 : 0].right;
};
template <int Parts, class Of, int... I> inline void over_part_products(const Of& of, std::integer_sequence<int, I...>) {
    (of(PartProductAt<Parts, I>{}), ...);
}
template <int Parts, class Of> inline void over_part_products(const Of& of) {
    over_part_products<Parts>(of, std::make_integer_sequence<int, kPartCount<Parts>>{});
}

// The parts of x, each with 16 bits of 0 but the last, which may have to be rounded.
template <int Parts> inline void split(Vec x, Vec* part) {
    PH_UNROLL(2) for (int i = 0; i < Parts - 1; ++i) {
        part[i] = (Vec)((VecWord)x & 0xffff0000u);
        x -= part[i];
    }
    part[Parts - 1] = x;
}

// The parts of 2 W numbers as pairs of neighbours.
template <int Parts> inline void pairs_in_parts(Vec a, Vec b, Vec* pairs) {
    Vec low[Parts], high[Parts];
    split<Parts>(a, low), split<Parts>(b, high);
    PH_UNROLL(3) for (int i = 0; i < Parts; ++i) pairs[i] = pairs_of(low[i], high[i]);
}
template <class T> inline void pairs_in_parts(const T* x, Vec* pairs) { pairs_in_parts<kParts<T>>(load(x), load(x + W), pairs); }
template <> inline void pairs_in_parts(const BFloat16* x, Vec* pairs) { *pairs = load_any<Vec>(x); }

// The parts of W numbers of two rows as pairs of both.
template <class T> inline void pairs_of_rows(Vec a, Vec b, Vec* pairs) {
    constexpr int parts = kParts<T>;
    Vec low[parts], high[parts];
    split<parts>(a, low), split<parts>(b, high);
    PH_UNROLL(3) for (int i = 0; i < parts; ++i) pairs[i] = (Vec)((VecWord)low[i] >> 16 | ((VecWord)high[i] & 0xffff0000u));
}

}  // namespace polyhead::PH_NAMESPACE
#endif
