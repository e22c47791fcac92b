// The highest of many scores, of equal ones the first: what queries choose.
#pragma once

#include "../common/vector.h"

namespace polyhead::PH_NAMESPACE {

// A score as a whole number of the same order; 0: what is never chosen.
inline uint32_t rank_of(float score) {
    if (!(score > -__builtin_inff())) return 0;
    score += 0.0f;  // of two zeros too
    uint32_t bits;
    __builtin_memcpy(&bits, &score, 4);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

// The highest number that `wanted` of the ranks reach; 0: fewer have one.
inline uint32_t rank_reached_by(const uint32_t* ranks, int64_t count, int64_t wanted) {
    uint32_t least = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
        uint32_t reached = 0;
        for (int64_t n = 0; n < count; ++n) reached += ranks[n] >= (least | bit);
        if (reached >= wanted) least |= bit;
    }
    return least;
}

// Writes the indexes of the `wanted` highest ranks, ascending; returns how many there are.
inline int64_t list_highest(const uint32_t* ranks, int64_t count, int64_t wanted, int64_t* list) {
    const uint32_t least = rank_reached_by(ranks, count, wanted);
    int64_t equal = wanted, found = 0;
    for (int64_t n = 0; n < count; ++n) equal -= ranks[n] > least;
    for (int64_t n = 0; n < count; ++n)
        if (ranks[n] > least || (least && ranks[n] == least && equal-- > 0)) list[found++] = n;
    return found;
}

}  // namespace polyhead::PH_NAMESPACE
