// Keys that lie in several pieces, read as one: what a ring holds, around its end or not, gives the bits that
// the same keys give in order. Blocks begin at multiples of their size of the places of keys, wherever the
// call's first key stands and wherever its keys lie.
#pragma once

#include "plan.h"

namespace polyhead::PH_NAMESPACE {

// The keys from `index` on, to the end of their piece.
struct Found {
    const Piece* piece;
    int64_t start, left;
};

inline Found found_at(const Attention& c, int64_t index) {
    int i = 0;
    for (; index >= c.pieces[i].length; ++i) index -= c.pieces[i].length;
    return {&c.pieces[i], index, c.pieces[i].length - index};
}

// Keys and values of a block that lies in several pieces, or begins with keys that are absent: copied to `room`.
template <class T>
Content<T> joined_content(const Attention& c, const Rows& rows, const Keys& keys, T* room, int64_t* positions) {
    T *k = room, *v = room + keys.length * c.key_dim;
    __builtin_memset(k, 0, keys.absent * c.key_dim * sizeof(T));
    __builtin_memset(v, 0, keys.absent * c.value_dim * sizeof(T));
    for (int64_t j = 0; j < keys.absent; ++j) positions[j] = keys.first + j;
    for (int64_t j = keys.absent; j < keys.length;) {
        const Found found = found_at(c, keys.index + j);
        const int64_t count = found.left < keys.length - j ? found.left : keys.length - j;
        const Content<T> from = content_of<T>(c, rows, *found.piece, found.start, count, (T*)nullptr);
        const Keys part = keys_at(*found.piece, rows.batch, found.start, count, 0);
        for (int64_t i = 0; i < count; ++i, ++j) {
            __builtin_memcpy(k + j * c.key_dim, from.k + i * from.k_token, c.key_dim * sizeof(T));
            __builtin_memcpy(v + j * c.value_dim, from.v + i * from.v_token, c.value_dim * sizeof(T));
            positions[j] = part.position(i);
        }
    }
    return {k, v, c.key_dim, c.value_dim};
}

// As over_keys, where p.joined.
template <class T, class Block>
void over_joined(const Attention& c, const Plan& p, const Rows& rows, int64_t from, int64_t to, int64_t size, T* room,
                 Block&& block) {
    int64_t positions[kManyKeys], visited = 0;
    for (int64_t index = from, next; index < to; index = next) {
        if (++visited % kBlocksUnwatched == 0 && stopped(c)) return;
        const int64_t place = p.origin + index, end = (place / size + 1) * size - p.origin;
        next = end < to ? end : to;
        // What stands before is hidden in whole vectors or not read: both give the same bits.
        const int64_t absent = place % (2 * W);
        const Found found = found_at(c, index);
        Keys keys = keys_at(*found.piece, rows.batch, found.start, next - index, index);
        const bool apart = absent || found.left < keys.length;
        if (apart) {
            keys.absent = absent, keys.length += absent, keys.index -= absent, keys.first -= absent;
            if (keys.positions) {
                joined_content<T>(c, rows, keys, room, positions);
                keys.positions = positions;
            }
        }
        const Visible visible = visible_of(c, rows, keys);
        if (visible == Visible::none) continue;
        block(keys, visible, apart ? joined_content<T>(c, rows, keys, room, positions)
                                   : content_of<T>(c, rows, *found.piece, found.start, keys.length, room));
    }
}

// The same with the keys and values of every block.
template <class T, class Block>
void over_keys(const Attention& c, const Plan& p, const Rows& rows, int64_t from, int64_t to, int64_t size, T* room,
               Block&& block) {
    if (p.joined) return over_joined<T>(c, p, rows, from, to, size, room, block);
    over_blocks(c, rows, from, to, size, [&](const Keys& keys, Visible visible) {
        block(keys, visible, content_of<T>(c, rows, *keys.piece, keys.start, keys.length, room));
    });
}

}  // namespace polyhead::PH_NAMESPACE
