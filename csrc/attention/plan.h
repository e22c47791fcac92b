// How a call is cut into blocks of rows and blocks of keys, and what every block needs.
#pragma once

#include "quantized_kv.h"
#include "../common/arena.h"
#include "../common/team.h"

namespace polyhead::PH_NAMESPACE {

constexpr int64_t kDecodeRows = 16;       // most
constexpr int64_t kDecodeKeys = 64;       // keys of a block in decode
constexpr int64_t kPrefillKeys = 128;     // and in prefill
constexpr int64_t kPrefillRows = 384;     // which share a block that is transposed and packed
constexpr int64_t kTiledRows = 768, kStripRows = 32;  // and on matrix tiles; in strips
constexpr int64_t kLeastSlicedRows = 48;  // for which float32 is taken into slices
constexpr int64_t kBlocksPerCheck = 16;  // blocks of keys between two looks at whether to stop

struct Plan {
    bool decode;                   // keys and values are read in place (decode.h), not packed (prefill.h)
    int64_t tokens, token_blocks;  // query tokens of a block; blocks of tokens
    int64_t list_blocks;           // those of a list of chosen keys, or 0
    int64_t heads, head_blocks;    // heads of a block; blocks of heads in a group
    int64_t blocks;                // in all
    int64_t keys;                  // that a block of rows visits: all, or those along its list of chosen ones
    int64_t rows, width;           // of a block, most; values, padded to vectors
    bool batch_invariant;                   // what a row gives depends on the row and its keys alone
    bool contiguous;                   // segments are read as one, in blocks that begin at fixed places (contiguous.h)
    int64_t origin, first_split;   // place of the first key, 0 unless contiguous; the fixed split that it is in
    int64_t splits, split_keys;    // of the keys of a block; keys of all but the last of them, by row of the first
    bool serial;                   // a thread computes the splits of a block one after another
};

// Splits of keys where neither the number of threads, nor other rows, nor keys that a row does not see may
// change its bits: 16 of `keys` keys (longer in prefill, which packs the rows anew for every split),
// then eighths of powers of two.
constexpr int64_t kEvenSplits = 16, kDecodeSplit = 256, kPrefillSplit = 1024;

inline int64_t fixed_split_at(int64_t i, int64_t keys) {
    if (i <= kEvenSplits) return i * keys;
    const int64_t octave = (i - kEvenSplits) / 8, eighth = (i - kEvenSplits) % 8;
    return (kEvenSplits * keys / 8 << octave) * (8 + eighth);
}

// The first key of a split.
inline int64_t split_at(const Plan& p, int64_t i) {
    const int64_t at = p.batch_invariant ? fixed_split_at(p.first_split + i, p.split_keys) - p.origin : i * p.split_keys;
    return at < 0 ? 0 : at < p.keys ? at : p.keys;
}

// Whether the segments are keys at places that follow on, as in a ring, of which nothing but the place matters.
inline bool follows_on(const Attention& c) {
    int64_t next = c.segments[0].position;
    if (next < 0 || next > INT64_MAX / 4 || c.keep || c.bias || (c.count == 1 && !next)) return false;
    for (int i = 0; i < c.count; next += c.segments[i++].length)
        if (c.segments[i].position != next || c.segments[i].pages || c.segments[i].coding.group) return false;
    return true;
}

// Keys of a chosen block: one that is longer than all keys holds those alone.
inline int64_t chosen_length(const Attention& c) { return c.chosen_size < c.keys ? c.chosen_size : c.keys; }

// The most heads of a block of rows, up to `most`, if these must share a kv head and a list of chosen keys.
inline int64_t heads_of_a_list(int64_t group, int64_t chosen_heads, int64_t most) {
    for (int64_t n = group < most ? group : most; n > 1; --n)
        if (group % n == 0 && chosen_heads % n == 0) return n;
    return 1;
}

// Rows that share a kv head, by which a way to compute them is chosen: where other rows must not change a row's bits,
// those of one query.
inline int64_t rows_of_kv_head(const Attention& c) { return c.heads / c.kv_heads * (c.batch_invariant ? 1 : c.queries); }

// Whether prefill computes both products of a call on matrix tiles (prefill_tiles.h): if these are whole ones, and if
// enough rows share the slices of keys and values of float32 (common/slices.h).
inline bool is_tiled([[maybe_unused]] const Attention& c) {
#if PH_TILES
    return c.key_dim % kStripRows == 0 && c.value_dim % kStripRows == 0 &&
           (c.dtype != kFloat32 || rows_of_kv_head(c) >= kLeastSlicedRows);
#else
    return false;
#endif
}

// The most rows that vectors decode as fast as tiles of 16 rows compute them; codes are decoded where they lie.
inline int64_t most_decode_rows(const Attention& c) {
    if (!is_tiled(c) || c.dtype == kFloat32) return kDecodeRows;
    for (int i = 0; i < c.count; ++i)
        if (c.segments[i].coding.group) return kDecodeRows;
    return c.dtype == kBFloat16 ? 4 : 8;
}

inline Plan plan_of(const Attention& c, int threads) {
    Plan p{};
    const int64_t group = c.heads / c.kv_heads;
    p.keys = c.chosen ? c.chosen_count * chosen_length(c) : c.keys;
    p.width = up_to(c.value_dim, W);
    const int64_t rows = rows_of_kv_head(c);
    p.batch_invariant = c.batch_invariant || c.queries == 1 || rows <= kDecodeRows;
    p.decode = p.batch_invariant && rows <= most_decode_rows(c) && c.key_dim % W == 0 && c.value_dim % W == 0;
    const int64_t most = is_tiled(c) ? kTiledRows : kPrefillRows;
    p.heads = group < most ? group : most;
    p.tokens = (p.decode ? kDecodeRows : most) / p.heads;
    if (c.chosen) {
        p.heads = heads_of_a_list(group, c.chosen_heads, most);
        p.tokens = c.batch_invariant ? 1 : most / p.heads;
        if (p.tokens > c.chosen_queries) p.tokens = c.chosen_queries;
        p.batch_invariant = p.tokens == 1;
        p.decode = p.batch_invariant && p.heads <= kDecodeRows && c.key_dim % W == 0 && c.value_dim % W == 0;
    }
    if (p.tokens > c.queries) p.tokens = c.queries;
    if (p.tokens < 1) p.tokens = 1;
    // Smaller blocks if there are too few for the threads.
    while (!p.decode && p.tokens * p.heads > 48 && p.tokens > 1 &&
           c.batch * c.kv_heads * ((c.queries + p.tokens - 1) / p.tokens) < 4 * threads)
        p.tokens = (p.tokens + 1) / 2;
    p.head_blocks = (group + p.heads - 1) / p.heads;
    p.token_blocks = (c.queries + p.tokens - 1) / p.tokens;
    if (c.chosen) {
        p.list_blocks = (c.chosen_queries + p.tokens - 1) / p.tokens;
        p.token_blocks = ((c.chosen_skipped + c.queries - 1) / c.chosen_queries + 1) * p.list_blocks;
    }
    p.blocks = c.batch * c.kv_heads * p.head_blocks * p.token_blocks;
    p.rows = up_to(p.heads * p.tokens, is_tiled(c) && !p.decode ? kStripRows : 1);
    p.splits = 1, p.split_keys = p.keys;
    const bool spare = threads > 1 && p.blocks < 4 * threads;  // threads that would be idle
    if (p.batch_invariant) {
        p.split_keys = p.decode ? kDecodeSplit : kPrefillSplit;
        p.contiguous = !c.chosen && follows_on(c);
        p.origin = p.contiguous ? c.segments[0].position : 0;
        while (fixed_split_at(p.first_split + 1, p.split_keys) <= p.origin) ++p.first_split;
        while (fixed_split_at(p.first_split + p.splits, p.split_keys) < p.origin + p.keys) ++p.splits;
        p.serial = p.splits > 1 && !spare;
    } else if (spare) {
        int64_t splits = (4 * threads + p.blocks - 1) / p.blocks;
        if (splits > p.keys / (2 * kDecodeKeys)) splits = p.keys / (2 * kDecodeKeys);
        if (splits < 1) splits = 1;
        p.split_keys = up_to((p.keys + splits - 1) / splits, kDecodeKeys);
        p.splits = p.keys ? (p.keys + p.split_keys - 1) / p.split_keys : 1;
    }
    return p;
}

inline Rows rows_of(const Attention& c, const Plan& p, int64_t block) {
    // Later tokens see more keys under a causal mask: they come first.
    const int64_t token_block = p.token_blocks - 1 - block / (p.blocks / p.token_blocks);
    int64_t rest = block % (p.blocks / p.token_blocks);
    const int64_t head_block = rest % p.head_blocks;
    rest /= p.head_blocks;
    const int64_t group = c.heads / c.kv_heads, g = rest % c.kv_heads;
    Rows r;
    r.batch = rest / c.kv_heads;
    r.kv_head = g;
    r.first_head = g * group + head_block * p.heads;
    const int64_t heads = group - head_block * p.heads < p.heads ? group - head_block * p.heads : p.heads;
    r.t0 = token_block * p.tokens;
    const int64_t queries = c.firsts ? c.firsts[r.batch + 1] - c.firsts[r.batch] : c.queries;
    r.t1 = r.t0 + p.tokens < queries ? r.t0 + p.tokens : queries;
    if (r.t1 < r.t0) r.t1 = r.t0;  // a batch row with fewer queries than others
    if (c.chosen) {  // blocks begin and end with a list; those before the first query or behind the last are empty
        const int64_t start = token_block / p.list_blocks * c.chosen_queries - c.chosen_skipped;
        const int64_t stop = start + c.chosen_queries < c.queries ? start + c.chosen_queries : c.queries;
        const int64_t t = start + token_block % p.list_blocks * p.tokens;
        r.t1 = t + p.tokens < stop ? t + p.tokens : stop;
        r.t0 = t > 0 ? t : 0;
        if (r.t1 < r.t0) r.t1 = r.t0;
    }
    r.count = heads * (r.t1 - r.t0);
    return r;
}

template <class T> inline const T* query(const Attention& c, const Rows& r, int64_t i) {
    return (const T*)c.q + first_query(c, r, c.q_batch, c.q_token) + r.head(i) * c.q_head + r.token(i) * c.q_token;
}

inline bool stopped(const Attention& c) { return c.interrupt && c.interrupt->stopped(omp_get_thread_num() == 0); }

inline void start(State& state, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; ++i) {
        state.peak[i] = kMinusInfinity;
        state.total[i] = 0;
        state.sees_nonfinite[i] = 0;
    }
    __builtin_memset(state.values, 0, rows * width * sizeof(float));
}

template <class T> inline bool is_finite(const T* x, int64_t n) {
    Vec all{};
    int64_t i = 0;
    for (; i + W <= n; i += W) all += load(x + i) * 0.0f;
    float rest = sum(all);
    for (; i < n; ++i) rest += to_float(x[i]) * 0.0f;
    return rest == 0.0f;
}

inline bool is_finite(const BFloat16* x, int64_t n) {
    constexpr uint16_t exponent = 0x7f80;
    VecHalf bad{};
    int64_t i = 0;
    for (; i + W <= n; i += W) bad |= (VecHalf)((load_any<VecHalf>(x + i) & exponent) == exponent);
    uint64_t parts[sizeof(VecHalf) / 8], found = 0;
    store_any(parts, bad);
    for (uint64_t part : parts) found |= part;
    for (; i < n; ++i) found |= (x[i].bits & exponent) == exponent;
    return !found;
}

// Keys and values of a block: rows of D and V numbers.
template <class T> struct Content {
    const T *k, *v;
    int64_t k_token, v_token;
    int64_t k_ahead = 0, v_ahead = 0;  // numbers to the next block, to prefetch it; 0: it follows in memory
};

template <class T> inline void fetch(const T* row, int64_t n) {
    for (int64_t d = 0; d < n; d += 64 / (int64_t)sizeof(T)) __builtin_prefetch(row + d, 0, 2);
}

// Addresses of the tokens [at, at + length) of a segment. Those in pages are put into `scratch`, which has
// place for as many rows of D + V and stays in the cache, and those that are coded are decoded there.
template <class T>
Content<T> content_of(const Attention& c, const Rows& rows, const KVSegment& segment, int64_t at, int64_t length, T* scratch) {
    if (segment.coding.group) {
        T *k = scratch, *v = scratch + length * c.key_dim;
        expand(c, rows, segment, at, length, k, v);
        return segment.coding.v_bits ? Content<T>{k, v, c.key_dim, c.value_dim} : Content<T>{k, k, c.key_dim, c.key_dim};
    }
    Content<T> found{(const T*)segment.k + rows.kv_head * segment.k_head,
                     (const T*)segment.v + rows.kv_head * segment.v_head, segment.k_token, segment.v_token};
    if (!segment.pages) {
        found.k += rows.batch * segment.k_batch + at * segment.k_token;
        found.v += rows.batch * segment.v_batch + at * segment.v_token;
        return found;
    }
    const int64_t* pages = segment.pages + rows.batch * segment.pages_batch;
    auto key = [&](int64_t slot) {
        return found.k + pages[slot / segment.page_length] * segment.k_batch + slot % segment.page_length * segment.k_token;
    };
    auto value = [&](int64_t slot) {
        return found.v + pages[slot / segment.page_length] * segment.v_batch + slot % segment.page_length * segment.v_token;
    };
    const int64_t first = at + segment.skipped, last = segment.skipped + segment.length - 1;
    T *k = scratch, *v = scratch + length * c.key_dim;
    for (int64_t j = 0; j < length; ++j) {
        // Prefetches the next block, line by line: the processor cannot predict its address.
        const int64_t next = first + j + length < last ? first + j + length : last;
        fetch(key(next), c.key_dim);
        fetch(value(next), c.value_dim);
        __builtin_memcpy(k + j * c.key_dim, key(first + j), c.key_dim * sizeof(T));
        __builtin_memcpy(v + j * c.value_dim, value(first + j), c.value_dim * sizeof(T));
    }
    return {k, v, c.key_dim, c.value_dim};
}

// Keys and values of a block as float32, 0 in place of numbers that are not finite; marks the rows that see them.
template <class T>
void zero_nonfinite(const Attention& c, const Rows& rows, const Keys& keys, const Content<T>& from,
                float* good_k, float* good_v, State& state) {
    for (int64_t j = 0; j < keys.length; ++j) {
        bool bad = false;
        auto copy = [&](const T* x, int64_t n, float* to) {
            for (int64_t d = 0; d < n; ++d) {
                const float number = to_float(x[d]);
                const bool finite = number - number == 0.0f;
                bad |= !finite;
                to[d] = finite ? number : 0.0f;
            }
        };
        copy(from.k + j * from.k_token, c.key_dim, good_k + j * c.key_dim);
        copy(from.v + j * from.v_token, c.value_dim, good_v + j * c.value_dim);
        if (bad)
            for (int64_t i = 0; i < rows.count; ++i)
                if (sees(c, rows, i, keys, j)) state.sees_nonfinite[i] = 1;
    }
}

// The same in their own type, in which what is finite is exact: the content to go on with.
template <class T>
Content<T> without_nonfinite(const Attention& c, const Rows& rows, const Keys& keys, const Content<T>& from,
                       float* good_k, float* good_v, State& state) {
    zero_nonfinite<T>(c, rows, keys, from, good_k, good_v, state);
    T *k = (T*)good_k, *v = (T*)good_v;
    for (int64_t n = 0; n < keys.length * c.key_dim; ++n) round_to(good_k[n], k + n);
    for (int64_t n = 0; n < keys.length * c.value_dim; ++n) round_to(good_v[n], v + n);
    return {k, v, c.key_dim, c.value_dim};
}

template <class T> inline bool all_finite(const Attention& c, const Keys& keys, const Content<T>& from) {
    for (int64_t j = 0; j < keys.length; ++j)
        if (!is_finite(from.k + j * from.k_token, c.key_dim) ||
            !is_finite(from.v + j * from.v_token, c.value_dim))
            return false;
    return true;
}

// Visits the keys [from, to) of the call that any of the rows sees, `size` at a time; those of units
// are cut between units where that can be.
template <class Block>
void over_blocks(const Attention& c, const Rows& rows, int64_t from, int64_t to, int64_t size, Block&& block) {
    int64_t first = 0, visited = 0;
    for (int i = 0; i < c.count; ++i) {
        const KVSegment& segment = c.segments[i];
        const int64_t begin = from > first ? from - first : 0;
        const int64_t end = to - first < segment.length ? to - first : segment.length;
        const int64_t unit = segment.coding.group ? segment.coding.group : 1;
        for (int64_t at = begin, length; at < end; at += length) {
            length = end - at < size ? end - at : size;
            const int64_t beyond = (at + length) % unit;
            if (beyond < length && at + length < end) length -= beyond;
            if (++visited % kBlocksPerCheck == 0 && stopped(c)) return;
            const Keys keys = keys_at(segment, rows.batch, at, length, first + at);
            const Visible visible = visible_of(c, rows, keys);
            if (visible != Visible::none) block(keys, visible);
        }
        first += segment.length;
    }
}

}  // namespace polyhead::PH_NAMESPACE
