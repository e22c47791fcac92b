// Prefill of bfloat16 on matrix tiles.
//
// While the vectors weigh the scores of one strip of rows, the tiles multiply the weights of the strip before with its
// values, and the queries of the strip after with its keys: a step of tiles is issued between the rows that are
// weighed, and both run at the same time.
//
// A row's sums of weights stay apart in the lanes of a vector until the last key, and the greatest scores of sixteen
// rows are found together, so that no row adds across lanes.
#pragma once

#include "strips.h"

#if PH_TILES
namespace polyhead::PH_NAMESPACE {

constexpr int64_t kPanelColumns = 2 * kTile;
static_assert(kStripRows == 2 * kTile);

inline int64_t tiled_bytes(const Attention& c, const Plan& p) {
    return 4 * (p.rows * (c.key_dim / 2 + W) + kPrefillKeys * (3 * c.key_dim + 3 * c.value_dim) +
                3 * kStripRows * kPrefillKeys) + 16 * 64;
}

// 2^x, rounded to bfloat16 afterwards: fitted to 4e-6 relative, exact where x is whole; 0 for −∞, and NaN for NaN.
inline Vec power_of_two_for_pairs(Vec x) {
    const Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vec p = splat(1.35557467e-2f);
    p = p * f + 5.20323685e-2f;
    p = p * f + 2.41379765e-1f;
    p = p * f + 6.93032120e-1f;
    p = p * f + 1.0f;
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)x);
}

// c[32, columns] = or += a · b of packed tiles, a [steps / 16, 32, 16] and b [columns / 32] panels [panel, 32], in parts.
class TileProduct {
  public:
    TileProduct() = default;
    TileProduct(bool both, const Pair* a, const Pair* b, int64_t panel, int64_t steps, float* c, int64_t c_stride,
                int64_t columns, bool add)
        : a_(a), b_(b), c_(c), panel_(panel * kPanelColumns), c_stride_(c_stride), steps_(steps),
          left_(columns / kPanelColumns * (steps / kTile)), both_(both), add_(add) {}

    // Parts that are left; sums are written when those of the next panel begin, or by `finish`.
    int64_t left() const { return left_; }
    void next() { both_ ? next_of<2>() : next_of<1>(); }
    void finish() {
        if (!computed_) return;
        both_ ? store_sums<2, 2>(computed_, c_stride_) : store_sums<1, 2>(computed_, c_stride_);
        computed_ = nullptr;
    }

  private:
    template <int R> void next_of() {
        if (!at_) {
            if (computed_) store_sums<R, 2>(computed_, c_stride_);
            begin_sums<R, 2>(c_, c_stride_, add_);
        }
        multiply_tiles<R, 2>(a_ + at_ * kStripRows, kTile, b_ + at_ * kPanelColumns, kPanelColumns);
        --left_;
        if ((at_ += kTile) < steps_) return;
        computed_ = c_, c_ += kPanelColumns, b_ += panel_, at_ = 0;
    }

    const Pair *a_ = nullptr, *b_ = nullptr;
    float *c_ = nullptr, *computed_ = nullptr;
    int64_t panel_ = 0, c_stride_ = 0, steps_ = 0, at_ = 0, left_ = 0;
    bool both_ = false, add_ = false;  // both tiles of rows
};

// Two products whose parts are spread evenly over `ticks` calls of `tick`.
class TileWork {
  public:
    TileWork(TileProduct first, TileProduct second, int64_t ticks)
        : first_(first), second_(second), parts_(first.left() + second.left()), ticks_(ticks) {}
    void tick() {
        for (due_ += parts_; due_ >= ticks_; due_ -= ticks_) part();
    }
    void finish() {
        while (first_.left() || second_.left()) part();
        first_.finish();
        second_.finish();
    }

  private:
    void part() {
        if (first_.left()) return first_.next();
        first_.finish();
        second_.next();
    }
    TileProduct first_, second_;
    int64_t parts_, ticks_, due_ = 0;
};

// A strip between its two products.
struct Weighed {
    Strip strip;
    float* s;                // [32, kPrefillKeys], scores
    Pair* weights;           // [padded / 32, 32, 16]
    Vec factors[2];          // of what the rows have summed so far
    int64_t padded() const { return strip.to - strip.from; }
    bool both() const { return strip.count > kTile; }
    int64_t ticks() const { return (both() ? 2 : 1) * (4 + kTile); }  // of weigh_strip
};

// Turns the raw products of a strip into weights exp(score − peak) as pairs, and adds them to totals[32, W].
inline void weigh_strip(const Attention& c, const Rows& rows, Weighed& w, Visible visible, float* peaks, float* totals, TileWork work) {
    const int64_t padded = w.padded();
    const float scale = post_scale(c), power = scale * kLog2OfE;
    const bool plain = c.softcap <= 0 && scale == c.scale && visible != Visible::some && padded == w.strip.keys.length;
    for (int64_t first = 0; first < (w.both() ? kStripRows : kTile); first += kTile) {
        float* s = w.s + first * kPrefillKeys;
        const int64_t left = w.strip.count - first, count = left < kTile ? left : kTile;
        if (!plain)
            for (int64_t m = 0; m < count; ++m)
                score(c, rows, w.strip.row + first + m, w.strip.keys, visible, s + m * kPrefillKeys, padded, nullptr);
        Vec most[kTile];
        for (int64_t m = 0; m < kTile; m += 4) {
            PH_UNROLL(4) for (int64_t i = m; i < m + 4; ++i) most[i] = load(s + i * kPrefillKeys);
            for (int64_t j = W; j < padded; j += W)
                PH_UNROLL(4) for (int64_t i = m; i < m + 4; ++i) most[i] = larger(load(s + i * kPrefillKeys + j), most[i]);
            work.tick();
        }
        const Vec before = load(peaks + first), peak = larger(fold<W / 2, Larger>(most), before);
        store_any(peaks + first, peak);
        // 0 for rows that see no key yet: 2^−∞ is 0, and a NaN among the scores stays one.
        const Vec at = choose((VecInt)(peak == splat(kMinusInfinity)), Vec{}, peak), origin = at * power;
        w.factors[first / kTile] = choose((VecInt)(before == at), splat(1.0f), power_of_two((before - at) * power));
        alignas(64) float origins[kTile], factors[kTile];
        store_any(origins, -origin);
        store_any(factors, w.factors[first / kTile]);
        for (int64_t m = 0; m < kTile; ++m, s += kPrefillKeys) {
            const Vec from = splat(origins[m]);
            Pair* to = w.weights + (first + m) * kTile;
            Vec low{}, high{};
            for (int64_t j = 0; j < padded; j += 2 * W) {
                const Vec a = power_of_two_for_pairs(multiply_add(from, load(s + j), splat(power)));
                const Vec b = power_of_two_for_pairs(multiply_add(from, load(s + j + W), splat(power)));
                low += a, high += b;
                store_any(to + j / 2 * kStripRows, pairs_of(a, b));
                if (c.dropout.least) store_any(s + j, a), store_any(s + j + W, b);
            }
            float* total = totals + (first + m) * W;
            store_any(total, multiply_add(low + high, load(total), splat(factors[m])));
            if (c.dropout.least && m < count) {
                Dropped dropped(c, rows, w.strip.row + first + m, w.strip.keys);
                for (int64_t j = 0; j < padded; j += 2 * W) {
                    const Vec a = dropped.next(load(s + j)), b = dropped.next(load(s + j + W));
                    store_any(to + j / 2 * kStripRows, pairs_of(a, b));
                }
            }
            work.tick();
        }
    }
    work.finish();
}

// The rows of a block of work with one block of keys after the other. There is memory for whole strips of rows.
class TiledRows {
  public:
    TiledRows(const Attention& c, const Plan& p, const Rows& rows, State& state, Arena& arena)
        : c_(c), p_(p), rows_(rows), state_(state), steps_(c.key_dim / 2), q_(arena.take<Pair>(p.rows * steps_)),
          k_(arena.take<Pair>(kPrefillKeys * steps_)), v_(arena.take<Pair>(kPrefillKeys / 2 * p.width)),
          totals_(arena.take<float>(p.rows * W)) {
        for (Weighed& w : weighed_)
            w.s = arena.take<float>(kStripRows * kPrefillKeys), w.weights = arena.take<Pair>(kStripRows * kPrefillKeys / 2);
        __builtin_memset(totals_, 0, p.rows * W * sizeof(float));
        for (int64_t i = rows.count; i < p.rows; ++i) state.peak[i] = 0;  // of rows that are not there
        for (int64_t i = 0; i < p.rows; ++i)
            for (int64_t k = 0; k < steps_; k += kTile) {
                Pair* to = q_ + i / kStripRows * kStripRows * steps_ + k * kStripRows + i % kStripRows * kTile;
                if (i < rows.count) __builtin_memcpy(to, query<BFloat16>(c, rows, i) + 2 * k, kTile * sizeof(Pair));
                else __builtin_memset((void*)to, 0, kTile * sizeof(Pair));
            }
    }

    void block(const Keys& keys, Visible visible, const Content<BFloat16>& from) {
        pack(keys.length, from);
        set_tile_rows(kStripRows);
        int64_t row = 0, number = 0;
        auto begin = [&](Weighed& w) {  // the next strip that sees a key
            while (row < rows_.count) {
                w.strip = strip_of<Pair>(c_, rows_, row, keys, visible);
                row += kStripRows;
                if (w.strip.keys.length) return true;
            }
            return false;
        };
        if (!begin(weighed_[0])) return;
        TileWork(scores(weighed_[0]), {}, 1).finish();
        for (bool more = true; more; ++number) {
            Weighed &now = weighed_[number % 2], &other = weighed_[(number + 1) % 2];
            const TileProduct before = number ? values(other) : TileProduct();
            more = begin(other);
            weigh_strip(c_, rows_, now, visible, state_.peak + now.strip.row, totals_ + now.strip.row * W,
                        TileWork(before, more ? scores(other) : TileProduct(), now.ticks()));
        }
        TileWork(values(weighed_[(number + 1) % 2]), {}, 1).finish();
    }

    // Adds the sums of weights across lanes.
    void finish() {
        for (int64_t i = 0; i < rows_.count; ++i) state_.total[i] += sum(load(totals_ + i * W));
    }

  private:
    // Keys and values behind the last key are 0, up to whole panels.
    void pack(int64_t length, const Content<BFloat16>& from) {
        const int64_t padded = up_to(length, kPanelColumns), packed = (length + 1) / 2;
        for (int64_t j = 0; j < padded; j += kPanelColumns)
            transpose(from.k + j * from.k_token, from.k_token, length - j < kPanelColumns ? length - j : kPanelColumns,
                      c_.key_dim, k_ + j * steps_, kPanelColumns);
        for (int64_t d = 0; d < p_.width; d += kPanelColumns) {
            Pair* to = v_ + d * (kPrefillKeys / 2);
            pack_values(from.v + d, from.v_token, length, kPanelColumns, kPanelColumns, to);
            __builtin_memset((void*)(to + packed * kPanelColumns), 0, (padded / 2 - packed) * kPanelColumns * sizeof(Pair));
        }
    }

    TileProduct scores(const Weighed& w) const {
        return {w.both(), q_ + w.strip.row * steps_, k_ + w.strip.from * steps_, steps_, steps_, w.s, kPrefillKeys, w.padded(), false};
    }

    TileProduct values(const Weighed& w) const {
        float* to = state_.values + w.strip.row * p_.width;
        for (int half = 0; half <= w.both(); ++half)
            for (uint32_t changed = lanes_that_differ(w.factors[half], splat(1.0f)); changed; changed &= changed - 1) {
                const int64_t m = __builtin_ctz(changed);
                float* x = to + (half * kTile + m) * p_.width;
                for (int64_t d = 0; d < p_.width; d += W) store_any(x + d, load(x + d) * w.factors[half][m]);
            }
        return {w.both(), w.weights, v_ + w.strip.from / 2 * kPanelColumns, kPrefillKeys / 2, w.padded() / 2, to, p_.width, p_.width, true};
    }

    const Attention& c_;
    const Plan& p_;
    const Rows& rows_;
    State& state_;
    int64_t steps_;
    Pair *q_;        // [strips, steps / 16, 32, 16]
    Pair *k_, *v_;   // [4, steps, 32] and [width / 32, 64, 32]
    float* totals_;  // [rows, W]
    Weighed weighed_[2];
};

inline void prefill_tiles(const Attention& c, const Plan& p, const Rows& rows, int64_t from, int64_t to, State& state, Arena arena) {
    const TilesInUse in_use;
    TiledRows tiled(c, p, rows, state, arena);
    float* good_k = arena.take<float>(kPrefillKeys * c.key_dim);
    float* good_v = arena.take<float>(kPrefillKeys * c.value_dim);
    BFloat16* scratch = arena.take<BFloat16>(kPrefillKeys * (c.key_dim + c.value_dim));
    const bool masked = c.low || c.keep;
    auto block = [&](const Keys& keys, Visible visible, Content<BFloat16> from) {
        if (masked && !all_finite<BFloat16>(c, keys, from))
            from = without_nonfinite<BFloat16>(c, rows, keys, from, good_k, good_v, state);
        tiled.block(keys, visible, from);
    };
    if (c.chosen) over_chosen<BFloat16>(c, rows, from, to, kPrefillKeys, scratch, block);
    else over_keys<BFloat16>(c, p, rows, from, to, kPrefillKeys, scratch, block);
    tiled.finish();
}

}  // namespace polyhead::PH_NAMESPACE
#endif
