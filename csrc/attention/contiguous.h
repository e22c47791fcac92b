// Keys that lie in several segments, read as one: what a ring holds, around its end or not, gives the bits that
// the same keys give in order. Blocks begin at multiples of their size of the places of keys, wherever the
// call's first key stands and wherever its keys lie.
#pragma once

#include "plan.h"

namespace polyhead::PH_NAMESPACE {

// The keys from `index` on, to the end of their segment.
struct SegmentSlice {
    const KVSegment* segment;
    int64_t start, left;
};

inline SegmentSlice slice_at(const Attention& c, int64_t index) {
    int i = 0;
    for (; index >= c.segments[i].length; ++i) index -= c.segments[i].length;
    return {&c.segments[i], index, c.segments[i].length - index};
}

// Keys and values of a block that lies in several segments, or begins with keys that are absent: copied to `scratch`.
template <class T>
Content<T> copied_content(const Attention& c, const Rows& rows, const Keys& keys, T* scratch, int64_t* positions) {
    T *k = scratch, *v = scratch + keys.length * c.key_dim;
    __builtin_memset(k, 0, keys.absent * c.key_dim * sizeof(T));
    __builtin_memset(v, 0, keys.absent * c.value_dim * sizeof(T));
    for (int64_t j = 0; j < keys.absent; ++j) positions[j] = keys.first + j;
    for (int64_t j = keys.absent; j < keys.length;) {
        const SegmentSlice found = slice_at(c, keys.index + j);
        const int64_t count = found.left < keys.length - j ? found.left : keys.length - j;
        const Content<T> from = content_of<T>(c, rows, *found.segment, found.start, count, (T*)nullptr);
        const Keys part = keys_at(*found.segment, rows.batch, found.start, count, 0);
        for (int64_t i = 0; i < count; ++i, ++j) {
            __builtin_memcpy(k + j * c.key_dim, from.k + i * from.k_token, c.key_dim * sizeof(T));
            __builtin_memcpy(v + j * c.value_dim, from.v + i * from.v_token, c.value_dim * sizeof(T));
            positions[j] = part.position(i);
        }
    }
    return {k, v, c.key_dim, c.value_dim};
}

// As over_keys, where p.contiguous.
template <class T, class Block>
void over_contiguous(const Attention& c, const Plan& p, const Rows& rows, int64_t from, int64_t to, int64_t size, T* scratch,
                 Block&& block) {
    int64_t positions[kPrefillKeys], visited = 0;
    for (int64_t index = from, next; index < to; index = next) {
        if (++visited % kBlocksPerCheck == 0 && stopped(c)) return;
        const int64_t place = p.origin + index, end = (place / size + 1) * size - p.origin;
        next = end < to ? end : to;
        // What stands before is hidden in whole vectors or not read: both give the same bits.
        const int64_t absent = place % (2 * W);
        const SegmentSlice found = slice_at(c, index);
        Keys keys = keys_at(*found.segment, rows.batch, found.start, next - index, index);
        const bool apart = absent || found.left < keys.length;
        if (apart) {
            keys.absent = absent, keys.length += absent, keys.index -= absent, keys.first -= absent;
            if (keys.positions) {
                copied_content<T>(c, rows, keys, scratch, positions);
                keys.positions = positions;
            }
        }
        const Visible visible = visible_of(c, rows, keys);
        if (visible == Visible::none) continue;
        block(keys, visible, apart ? copied_content<T>(c, rows, keys, scratch, positions)
                                   : content_of<T>(c, rows, *found.segment, found.start, keys.length, scratch));
    }
}

// The same with the keys and values of every block.
template <class T, class Block>
void over_keys(const Attention& c, const Plan& p, const Rows& rows, int64_t from, int64_t to, int64_t size, T* scratch,
               Block&& block) {
    if (p.contiguous) return over_contiguous<T>(c, p, rows, from, to, size, scratch, block);
    over_blocks(c, rows, from, to, size, [&](const Keys& keys, Visible visible) {
        block(keys, visible, content_of<T>(c, rows, *keys.segment, keys.start, keys.length, scratch));
    });
}

}  // namespace polyhead::PH_NAMESPACE
