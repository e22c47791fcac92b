// One row of scores between the two products, however they were computed.
//
//     scale → softcap → bias → mask → online softmax → dropout
//
// Online softmax (Milakov & Gimelshein 2018): per row the greatest score m so far and the sum l of
// exp(score − m); a new m rescales what was summed by exp(m_old − m).
#pragma once

#include "arguments.h"
#include "../common/registers.h"

namespace polyhead::PH_NAMESPACE {

constexpr float kMinusInfinity = -__builtin_inff();

// The queries of one kv head that are computed together: heads `first_head` on, tokens [t0, t1).
// Row i is head first_head + i / (t1 − t0), token t0 + i % (t1 − t0).
struct Rows {
    int64_t batch, kv_head, first_head, t0, t1, count;
    int64_t head(int64_t i) const { return first_head + i / (t1 - t0); }
    int64_t token(int64_t i) const { return t0 + i % (t1 - t0); }
};

// A block of `length` keys of a segment, from its token `start` on; `index` counts keys of the call. The first
// `absent` slots are padding that aligns the block (contiguous.h).
struct Keys {
    const KVSegment* segment;
    int64_t start, length, index;
    const int64_t* positions;  // of this block and batch row, or null: first, first + 1, …
    int64_t first;
    int64_t absent = 0;
    int64_t position(int64_t j) const { return positions ? positions[j] : first + j; }
};

enum class Visible { none, some, all };

inline Keys keys_at(const KVSegment& segment, int64_t batch, int64_t start, int64_t length, int64_t index) {
    const int64_t* p = segment.positions;
    return {&segment, start, length, index,
            p ? p + batch * segment.positions_batch + start : nullptr, segment.position + start};
}

// Where the queries of a batch row begin in what is `batch` apart from row to row, and `query` from query to query.
inline int64_t first_query(const Attention& c, const Rows& rows, int64_t batch, int64_t query) {
    return c.firsts ? c.firsts[rows.batch] * query : rows.batch * batch;
}

// What rows of a call see of a block of keys; single pairs are checked only if bounds do not decide.
inline Visible visible_of(const Attention& c, const Rows& rows, const Keys& keys) {
    Visible found = keys.absent ? Visible::some : Visible::all;
    if (c.low) {
        int64_t least = keys.position(0), most = keys.position(keys.length - 1);
        if (keys.positions)
            for (int64_t j = 0; j < keys.length; ++j) {
                least = keys.positions[j] < least ? keys.positions[j] : least;
                most = keys.positions[j] > most ? keys.positions[j] : most;
            }
        const int64_t first = first_query(c, rows, c.bounds_batch, 1);
        const int64_t *low = c.low + first, *high = c.high + first;
        bool any = false, every = true;
        for (int64_t t = rows.t0; t < rows.t1; ++t) {
            any |= most >= low[t] && least < high[t] && low[t] < high[t];
            every &= least >= low[t] && most < high[t];
        }
        if (!any) return Visible::none;
        if (!every) found = Visible::some;
    }
    if (c.keep) {
        bool any = false, every = true;
        for (int64_t i = 0; i < rows.count; ++i) {
            if (c.keep_head == 0 && i >= rows.t1 - rows.t0) break;
            const uint8_t* keep = c.keep + rows.batch * c.keep_batch + rows.head(i) * c.keep_head +
                                  rows.token(i) * c.keep_query + keys.index;
            for (int64_t j = 0; j < keys.length; ++j) {
                any |= keep[j] != 0;
                every &= keep[j] != 0;
            }
        }
        if (!any) return Visible::none;
        if (!every) found = Visible::some;
    }
    return found;
}

inline bool sees(const Attention& c, const Rows& rows, int64_t i, const Keys& keys, int64_t j) {
    const int64_t t = rows.token(i);
    if (c.low) {
        const int64_t at = first_query(c, rows, c.bounds_batch, 1) + t, p = keys.position(j);
        if (p < c.low[at] || p >= c.high[at]) return false;
    }
    return !c.keep || c.keep[rows.batch * c.keep_batch + rows.head(i) * c.keep_head +
                             t * c.keep_query + keys.index + j];
}

// Sums and greatest scores of some rows, and the weighted values beside them.
struct State {
    float *peak, *total;    // [rows], the peak in units of `post_scale`
    float* values;          // [rows, width], not yet divided by total
    uint8_t* sees_nonfinite;      // [rows]: sees a key with content that is not finite
};

// a − b, or the end of the range on whose side it lies: positions may be any whole numbers.
inline int64_t difference(int64_t a, int64_t b) {
    int64_t found;
    if (!__builtin_sub_overflow(a, b, &found)) return found;
    return a < b ? INT64_MIN : INT64_MAX;
}

// −∞ where row i may not look, `count` scores padded to `padded`.
inline void hide(const Attention& c, const Rows& rows, int64_t i, const Keys& keys, float* s) {
    for (int64_t j = 0; j < keys.absent; ++j) s[j] = kMinusInfinity;
    if (c.low) {
        const int64_t at = first_query(c, rows, c.bounds_batch, 1) + rows.token(i);
        const int64_t low = c.low[at], high = c.high[at];
        if (keys.positions) {
            for (int64_t j = 0; j < keys.length; ++j)
                if (keys.positions[j] < low || keys.positions[j] >= high) s[j] = kMinusInfinity;
        } else {
            const int64_t from = difference(low, keys.first), to = difference(high, keys.first);
            for (int64_t j = 0; j < keys.length && j < from; ++j) s[j] = kMinusInfinity;
            for (int64_t j = to > 0 ? to : 0; j < keys.length; ++j) s[j] = kMinusInfinity;
        }
    }
    if (c.keep) {
        const uint8_t* keep = c.keep + rows.batch * c.keep_batch + rows.head(i) * c.keep_head +
                              rows.token(i) * c.keep_query + keys.index;
        for (int64_t j = 0; j < keys.length; ++j)
            if (!keep[j]) s[j] = kMinusInfinity;
    }
}

inline int64_t query_position(const Attention& c, const Rows& rows, int64_t i) {
    return c.q_positions[first_query(c, rows, c.q_positions_batch, 1) + rows.token(i)];
}

inline float distance(int64_t a, int64_t b) {
    const int64_t apart = difference(a, b);
    return apart < 0 ? -(float)apart : (float)apart;
}

// Whether distances between a query and keys in a row can be counted in 32 bits.
inline bool is_near(int64_t query, const Keys& keys) {
    const int64_t apart = difference(query, keys.first);
    return apart > INT32_MIN / 2 && apart < INT32_MAX / 2;
}

// Calls use(j, |query − key|) for every key.
template <class Use>
inline void with_distances(int64_t query, const Keys& keys, Use&& use) {
    if (keys.positions || !is_near(query, keys)) {
        for (int64_t j = 0; j < keys.length; ++j) use(j, distance(query, keys.position(j)));
    } else {
        const int32_t apart = (int32_t)(query - keys.first);
        for (int32_t j = 0; j < (int32_t)keys.length; ++j) {
            const int32_t d = apart - j;
            use(j, (float)(d < 0 ? -d : d));
        }
    }
}

inline int64_t clamped(int64_t x, int64_t most) { return x < 0 ? 0 : x > most ? most : x; }

// Columns of by_distance that keys in a row have: the first for those before `near`, the last from
// `far` on, and `column` + j between.
struct Columns { int64_t near, far, column; };

inline Columns columns_of(const Attention& c, int64_t query, const Keys& keys) {
    const int64_t apart = difference(keys.first, query), beyond = c.farthest + keys.length;
    // Beyond the lengths of table and block together, all places are equal.
    const int64_t column = (apart < -beyond ? -beyond : apart > beyond ? beyond : apart) + c.farthest;
    return {clamped(-column, keys.length), clamped(2 * c.farthest + 1 - column, keys.length), column};
}

// The column of by_distance that a key has.
inline int64_t column_of(const Attention& c, int64_t query, int64_t key) {
    const int64_t apart = difference(key, query);
    return (apart < -c.farthest ? -c.farthest : apart > c.farthest ? c.farthest : apart) + c.farthest;
}

inline void add_bias(const Attention& c, const Rows& rows, int64_t i, const Keys& keys, float* s) {
    const int64_t h = rows.head(i), t = rows.token(i);
    if (c.slopes) {
        const float slope = c.slopes[h];
        const int64_t query = query_position(c, rows, i);
        if (c.rounded != 0.0f) {
            const Vec scale = splat(c.rounded);
            for (int64_t j = 0; j < keys.length; j += W) {
                Vec at{};
                for (int64_t i = 0; i < W && j + i < keys.length; ++i) at[i] = (float)keys.position(j + i);
                const Vec product = rounded<BFloat16>(rounded<BFloat16>(splat(slope)) * rounded<BFloat16>(at));
                store_any(s + j, multiply_add(load(s + j), product, scale));
            }
        } else if (keys.positions || !is_near(query, keys)) {
            with_distances(query, keys, [&](int64_t j, float apart) { s[j] -= slope * apart; });
        } else {
            VecInt apart = splat_int((int32_t)(query - keys.first)) - counted();
            for (int64_t j = 0; j < keys.length; j += W, apart -= W) {
                const VecInt distance = (VecInt)__builtin_convertvector(apart, Vec) & 0x7fffffff;
                store_any(s + j, load(s + j) - slope * (Vec)distance);
            }
        }
    }
    if (c.by_distance) {
        const int64_t last = 2 * c.farthest, query = query_position(c, rows, i);
        const float* numbers = c.by_distance + h * (last + 1);
        if (keys.positions) {
            for (int64_t j = 0; j < keys.length; ++j)
                s[j] += numbers[column_of(c, query, keys.positions[j])];
        } else {
            const Columns at = columns_of(c, query, keys);
            for (int64_t j = 0; j < at.near; ++j) s[j] += numbers[0];
            for (int64_t j = at.near; j < at.far; ++j) s[j] += numbers[at.column + j];
            for (int64_t j = at.far; j < keys.length; ++j) s[j] += numbers[last];
        }
    }
    if (c.bias) {
        const float* bias = c.bias + rows.batch * c.bias_batch + h * c.bias_head +
                            t * c.bias_query + keys.index * c.bias_key;
        for (int64_t j = 0; j < keys.length; ++j) s[j] += bias[j * c.bias_key];
    }
}

// The factor of scores after `score`: if nothing is added to them, the exponentials apply the scale (or the
// softcap after its tanh).
inline float post_scale(const Attention& c) {
    if (c.slopes || c.by_distance || c.bias) return 1.0f;
    return c.softcap > 0 ? c.softcap : c.scale > 0 ? c.scale : 1.0f;
}

// Turns raw products into scores, in place. `s` holds `padded` of them, a multiple of W; those
// past the keys are −∞. With a softcap, `slope` gets the derivative of the capped score, unless null.
inline void score(const Attention& c, const Rows& rows, int64_t i, const Keys& keys, Visible visible,
                  float* s, int64_t padded, float* slope) {
    const float factor = c.softcap > 0 ? c.softcap : c.scale;
    if (c.softcap > 0) {
        const float inside = c.scale / c.softcap;
        for (int64_t j = 0; j < padded; j += W) {
            const Vec share = hyperbolic_tangent(load(s + j) * inside);
            store_any(s + j, share);
            if (slope) store_any(slope + j, 1.0f - share * share);
        }
    }
    if (factor != post_scale(c))
        for (int64_t j = 0; j < padded; j += W) store_any(s + j, load(s + j) * factor);
    if (c.slopes || c.by_distance || c.bias) add_bias(c, rows, i, keys, s);
    if (visible == Visible::some) hide(c, rows, i, keys, s);
    for (int64_t j = keys.length; j < padded; ++j) s[j] = kMinusInfinity;
}

// A 32-bit avalanche (Mueller's integer hash), as native/dropout.py has it.
template <class Word> inline Word hash32(Word x) {
    x = ((x >> 16) ^ x) * 0x45d9f3bu;
    x = ((x >> 16) ^ x) * 0x45d9f3bu;
    return (x >> 16) ^ x;
}

// What dropout does to the weights of a row, from the first key of a block on: W of them at a time.
class Dropped {
  public:
    Dropped(const Attention& c, const Rows& rows, int64_t i, const Keys& keys) : least_((int32_t)c.dropout.least) {
        const Dropout& d = c.dropout;
        const uint32_t row = hash32(d.seed + (uint32_t)(rows.batch * c.heads + rows.head(i)));
        const uint32_t first = hash32(row + d.query + (uint32_t)rows.token(i)) + d.key + (uint32_t)keys.index;
        place_ = (VecWord)counted() + first;
    }
    // `x` where weights are kept, and 0 elsewhere.
    Vec next(Vec x) {
        const VecInt number = (VecInt)(hash32(place_) & 0xffffffu);
        place_ += (uint32_t)W;
        return (Vec)((VecInt)(number >= least_) & (VecInt)x);
    }

  private:
    int32_t least_;
    VecWord place_;
};

// Turns raw products into weights exp(score − peak), in place; returns the factor of what the row
// has summed so far. Sums are those of all weights, dropped or not.
inline float weigh(const Attention& c, const Rows& rows, int64_t i, const Keys& keys, Visible visible,
                   float* s, int64_t padded, State& state) {
    score(c, rows, i, keys, visible, s, padded, nullptr);
    Vec most = load(s);
    for (int64_t j = W; j < padded; j += W) most = larger(load(s + j), most);
    const float before = state.peak[i];
    float peak = largest(most);
    peak = peak > before ? peak : before;
    if (peak == kMinusInfinity) {
        // Comparisons with NaN are false; a NaN among the scores must reach the result.
        for (int64_t j = 0; j < padded; j += W) store_any(s + j, exponential(load(s + j)));
        Vec all{};
        for (int64_t j = 0; j < padded; j += W) all += load(s + j);
        state.total[i] += sum(all);
        return 1.0f;
    }
    Vec all{};
    const Vec at = splat(peak);
    const float scale = post_scale(c), power = scale * kLog2OfE;
    for (int64_t j = 0; j < padded; j += W) {
        const Vec weight = power_of_two((load(s + j) - at) * power);
        store_any(s + j, weight);
        all += weight;
    }
    if (c.dropout.least) {
        Dropped dropped(c, rows, i, keys);
        for (int64_t j = 0; j < padded; j += W) store_any(s + j, dropped.next(load(s + j)));
    }
    float factor = 1.0f;
    if (peak != before) {
        factor = before == kMinusInfinity ? 0.0f : __builtin_expf((before - peak) * scale);
        state.peak[i] = peak;
    }
    state.total[i] = multiply_add(sum(all), state.total[i], factor);
    return factor;
}

}  // namespace polyhead::PH_NAMESPACE
