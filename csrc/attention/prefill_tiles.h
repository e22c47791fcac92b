// Prefill on matrix tiles, of bfloat16 and of what is a sum of bfloat16 (common/slices.h).
//
// While the vectors weigh the scores of one strip of rows, the tiles multiply the weights of the strip before with its
// values, and the queries of the strip after with its keys: a step of tiles is issued between the rows that are
// weighed, and both run at the same time.
//
// A row's sums of weights stay apart in the lanes of a vector until the last key, and the greatest scores of sixteen
// rows are found together, so that no row adds across lanes.
//
// While a block is packed the next block's keys are prefetched, and its values while tiles multiply that no vectors
// compute beside: few rows would wait for memory.
#pragma once

#include "../common/slices.h"
#include "strips.h"

#if PH_TILES
namespace polyhead::PH_NAMESPACE {

static_assert(kStripRows == kTwoTiles);
// Between slices of the weights of a strip, and of values of 32 features.
constexpr int64_t kWeightsSlice = kStripRows * kPrefillKeys / 2, kValuesSlice = kPrefillKeys / 2 * kTwoTiles;
constexpr int64_t kLinesAhead = 16;  // of values that are prefetched between two steps of tiles

template <class T> inline int64_t tiled_bytes(const Attention& c, const Plan& p) {
    constexpr int64_t slices = kSlices<T>;
    return 4 * (p.rows * (slices * c.key_dim / 2 + W) + kPrefillKeys * (slices + 5) / 2 * (c.key_dim + c.value_dim) +
                (2 + slices) * kStripRows * kPrefillKeys + kStripRows * c.value_dim) + 16 * 64;
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

// c[32, columns] = or += a · b of packed tiles, in steps of 16 pairs: a [slices, steps / 16, 32, 16], and b [slices, steps,
// 32] for each panel of 32 columns. Slices are `a_slice` and `b_slice` apart.
template <int Slices> class TileProduct {
  public:
    TileProduct() = default;
    TileProduct(bool both, const Pair* a, int64_t a_slice, const Pair* b, int64_t b_slice, int64_t steps, float* c, int64_t c_stride,
                int64_t columns, bool add)
        : a_(a), b_(b), c_(c), a_slice_(a_slice), b_slice_(b_slice), c_stride_(c_stride), steps_(steps),
          left_(columns / kTwoTiles * (steps / kTile) * kSliceProductCount<Slices>), both_(both), add_(add) {}

    // Steps that are left; sums are written when those of the next panel begin, or by `finish`.
    int64_t left() const { return left_; }
    void next() { both_ ? next_of<2>() : next_of<1>(); }
    void finish() {
        if (!computed_) return;
        both_ ? store_sums<2, 2>(computed_, c_stride_) : store_sums<1, 2>(computed_, c_stride_);
        computed_ = nullptr;
    }

  private:
    template <int R> void next_of() {
        if (!at_ && !product_) {
            if (computed_) store_sums<R, 2>(computed_, c_stride_);
            begin_sums<R, 2>(c_, c_stride_, add_);
        }
        with_constant<kSliceProductCount<Slices>>(product_ + 1, [&](auto number) {
            multiply_slices<R, 2, Slices, number - 1>(a_ + at_ * kStripRows, a_slice_, b_ + at_ * kTwoTiles, b_slice_);
        });
        --left_;
        if (++product_ < kSliceProductCount<Slices>) return;
        product_ = 0;
        if ((at_ += kTile) < steps_) return;
        computed_ = c_, c_ += kTwoTiles, b_ += Slices * b_slice_, at_ = 0;
    }

    const Pair *a_ = nullptr, *b_ = nullptr;
    float *c_ = nullptr, *computed_ = nullptr;
    int64_t a_slice_ = 0, b_slice_ = 0, c_stride_ = 0, steps_ = 0, at_ = 0, left_ = 0;
    int product_ = 0;
    bool both_ = false, add_ = false;  // both tiles of rows
};

// Two products whose steps are spread evenly over `ticks` calls of `tick`.
template <int Slices> class TileWork {
  public:
    using Product = TileProduct<Slices>;
    TileWork(Product first, Product second, int64_t ticks)
        : first_(first), second_(second), steps_(first.left() + second.left()), ticks_(ticks) {}
    void tick() {
        for (due_ += steps_; due_ >= ticks_; due_ -= ticks_) step();
    }
    // Between two steps some lines of `ahead` are prefetched.
    template <class Next> void finish(Next&& ahead) {
        while (first_.left() || second_.left()) {
            ahead.ask(kLinesAhead);
            step();
        }
        first_.finish();
        second_.finish();
    }

  private:
    void step() {
        if (first_.left()) return first_.next();
        first_.finish();
        second_.next();
    }
    Product first_, second_;
    int64_t steps_, ticks_, due_ = 0;
};

// A strip between its two products.
struct Weighed {
    Strip strip;
    float* s;                // [32, kPrefillKeys], scores
    Pair* weights;           // [slices, padded / 32, 32, 16], slices kWeightsSlice apart
    Vec factors[2];          // of what the rows have summed so far
    int64_t padded() const { return strip.to - strip.from; }
    bool both() const { return strip.count > kTile; }
    int64_t ticks() const { return (both() ? 2 : 1) * (4 + kTile); }  // of weigh_strip
};

// Turns the raw products of a strip into weights exp(score − peak) as pairs, and adds them to totals[32, W].
template <int Slices>
void weigh_strip(const Attention& c, const Rows& rows, Weighed& w, Visible visible, float* peaks, float* totals, TileWork<Slices> work) {
    const int64_t padded = w.padded();
    const float scale = post_scale(c), power = scale * kLog2OfE;
    auto put = [](Vec a, Vec b, Pair* to) {
        Vec pairs[Slices];
        pairs_in_slices<Slices>(a, b, pairs);
        store_slices<Slices>(pairs, to, kWeightsSlice);
    };
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
        const Vec at = choose((VecInt)(peak == splat(kMinusInfinity)), Vec{}, peak), origin = Slices == 3 ? at : at * power;
        w.factors[first / kTile] = choose((VecInt)(before == at), splat(1.0f), power_of_two((before - at) * power));
        alignas(64) float origins[kTile], factors[kTile];
        store_any(origins, -origin);
        store_any(factors, w.factors[first / kTile]);
        for (int64_t m = 0; m < kTile; ++m, s += kPrefillKeys) {
            const Vec from = splat(origins[m]);
            // The precision that is left of a weight in so many slices.
            auto weight = [&](Vec score) {
                if constexpr (Slices == 3) return power_of_two((score + from) * power);
                else return power_of_two_for_pairs(multiply_add(from, score, splat(power)));
            };
            Pair* to = w.weights + (first + m) * kTile;
            Vec low{}, high{};
            for (int64_t j = 0; j < padded; j += 2 * W) {
                const Vec a = weight(load(s + j)), b = weight(load(s + j + W));
                low += a, high += b;
                put(a, b, to + j / 2 * kStripRows);
                if (c.dropout.least) store_any(s + j, a), store_any(s + j + W, b);
            }
            float* total = totals + (first + m) * W;
            store_any(total, multiply_add(low + high, load(total), splat(factors[m])));
            if (c.dropout.least && m < count) {
                Dropped dropped(c, rows, w.strip.row + first + m, w.strip.keys);
                for (int64_t j = 0; j < padded; j += 2 * W) {
                    const Vec a = dropped.next(load(s + j)), b = dropped.next(load(s + j + W));
                    put(a, b, to + j / 2 * kStripRows);
                }
            }
            work.tick();
        }
    }
    work.finish(Nothing{});
}

// The rows of a block of work with one block of keys after the other. There is memory for whole strips of rows.
template <class T> class TiledRows {
    static constexpr int slices = kSlices<T>;
    static constexpr bool apart = kSumsApart<slices>;
    using Product = TileProduct<slices>;
    using Work = TileWork<slices>;

  public:
    TiledRows(const Attention& c, const Plan& p, const Rows& rows, State& state, Arena& arena)
        : c_(c), p_(p), rows_(rows), state_(state), steps_(c.key_dim / 2), q_(arena.take<Pair>(slices * p.rows * steps_)),
          k_(arena.take<Pair>(slices * kPrefillKeys * steps_)), v_(arena.take<Pair>(slices * kPrefillKeys / 2 * p.width)),
          totals_(arena.take<float>(p.rows * W)), sums_(arena.take<float>(kStripRows * p.width)) {
        for (Weighed& w : weighed_)
            w.s = arena.take<float>(kStripRows * kPrefillKeys), w.weights = arena.take<Pair>(slices * kWeightsSlice);
        __builtin_memset(totals_, 0, p.rows * W * sizeof(float));
        for (int64_t i = rows.count; i < p.rows; ++i) state.peak[i] = 0;  // of rows that are not there
        for (int64_t i = 0; i < p.rows; ++i)
            for (int64_t k = 0; k < steps_; k += kTile) {
                Vec pairs[slices] = {};
                if (i < rows.count) pairs_in_slices(query<T>(c, rows, i) + 2 * k, pairs);
                Pair* to = q_of(i / kStripRows * kStripRows) + k * kStripRows + i % kStripRows * kTile;
                store_slices<slices>(pairs, to, kStripRows * steps_);
            }
    }

    void block(const Keys& keys, Visible visible, const Content<T>& from) {
        look_ahead(from);
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
        Work(scores(weighed_[0]), {}, 1).finish(v_ahead_);
        for (bool more = true; more; ++number) {
            Weighed &now = weighed_[number % 2], &other = weighed_[(number + 1) % 2];
            const Weighed before = other;
            more = begin(other);
            weigh_strip<slices>(c_, rows_, now, visible, state_.peak + now.strip.row, totals_ + now.strip.row * W,
                               Work(number ? values(before) : Product(), more ? scores(other) : Product(), now.ticks()));
            if (number) add(before);
        }
        const Weighed& last = weighed_[(number + 1) % 2];
        Work(values(last), {}, 1).finish(v_ahead_);
        add(last);
    }

    // Adds the sums of weights across lanes.
    void finish() {
        for (int64_t i = 0; i < rows_.count; ++i) state_.total[i] += sum(load(totals_ + i * W));
    }

  private:
    Pair* q_of(int64_t row) const { return q_ + slices * row * steps_; }

    void look_ahead(const Content<T>& from) {
        constexpr int64_t kBytes = sizeof(T);
        k_ahead_ = {from.k + kPrefillKeys * from.k_token, from.k_token * kBytes, kPrefillKeys, c_.key_dim * kBytes};
        v_ahead_ = {from.v + kPrefillKeys * from.v_token, from.v_token * kBytes, kPrefillKeys, c_.value_dim * kBytes};
    }

    // Keys and values behind the last key are 0, up to whole panels. A piece of W keys that is packed is 8 · sizeof(T)
    // lines: half as many of the next block's keys are prefetched beside it, the others beside values.
    void pack(int64_t length, const Content<T>& from) {
        const int64_t padded = up_to(length, kTwoTiles);
        for (int64_t j = 0; j < padded; j += W)
            for (int64_t k = 0; k < steps_; k += W) {
                auto key = [&](int64_t n, Vec* pairs) {
                    if (j + n < length) pairs_in_slices(from.k + (j + n) * from.k_token + 2 * k, pairs);
                };
                k_ahead_.ask(4 * sizeof(T));
                Pair* to = k_ + (slices * (j / kTwoTiles) * steps_ + k) * kTwoTiles + j % kTwoTiles;
                transpose_in_slices<slices>(key, to, kTwoTiles, steps_ * kTwoTiles);
            }
        for (int64_t j = 0; j < padded; j += 2) {
            k_ahead_.ask(2 * sizeof(T));
            for (int64_t d = 0; d < p_.width; d += W) {
                const T* row = from.v + j * from.v_token + d;
                Vec pairs[slices];
                pairs_of_two_rows<slices>(j < length ? load(row) : Vec{}, j + 1 < length ? load(row + from.v_token) : Vec{}, pairs);
                Pair* to = v_ + slices * (d / kTwoTiles) * kValuesSlice + j / 2 * kTwoTiles + d % kTwoTiles;
                store_slices<slices>(pairs, to, kValuesSlice);
            }
        }
    }

    Product scores(const Weighed& w) const {
        return {w.both(), q_of(w.strip.row), kStripRows * steps_, k_ + slices * w.strip.from * steps_, steps_ * kTwoTiles,
                steps_, w.s, kPrefillKeys, w.padded(), false};
    }

    Product values(const Weighed& w) const {
        float* to = state_.values + w.strip.row * p_.width;
        for (int half = 0; !apart && half <= w.both(); ++half)
            for (uint32_t changed = lanes_that_differ(w.factors[half], splat(1.0f)); changed; changed &= changed - 1) {
                const int64_t m = __builtin_ctz(changed);
                float* x = to + (half * kTile + m) * p_.width;
                for (int64_t d = 0; d < p_.width; d += W) store_any(x + d, load(x + d) * w.factors[half][m]);
            }
        return {w.both(), w.weights, kWeightsSlice, v_ + w.strip.from / 2 * kTwoTiles, kValuesSlice,
                w.padded() / 2, apart ? sums_ : to, p_.width, p_.width, !apart};
    }

    // The sums of a block to those of the blocks before.
    void add(const Weighed& w) const {
        for (int64_t m = 0; apart && m < w.strip.count; ++m) {
            const Vec factor = splat(w.factors[m / kTile][m % kTile]);
            float* to = state_.values + (w.strip.row + m) * p_.width;
            for (int64_t d = 0; d < p_.width; d += W)
                store_any(to + d, multiply_add(load(sums_ + m * p_.width + d), load(to + d), factor));
        }
    }

    const Attention& c_;
    const Plan& p_;
    const Rows& rows_;
    State& state_;
    int64_t steps_;
    Pair *q_;        // [strips, slices, steps / 16, 32, 16]
    Pair *k_, *v_;   // [4, slices, steps, 32] and [width / 32, slices, 64, 32]
    float* totals_;  // [rows, W]
    float* sums_;    // [32, width], of weights and values of a strip and a block
    Weighed weighed_[2];
    NextBlock k_ahead_, v_ahead_;
};

template <class T>
void prefill_tiles(const Attention& c, const Plan& p, const Rows& rows, int64_t from, int64_t to, State& state, Arena arena) {
    const TilesInUse in_use;
    TiledRows<T> tiled(c, p, rows, state, arena);
    float* good_k = arena.take<float>(kPrefillKeys * c.key_dim);
    float* good_v = arena.take<float>(kPrefillKeys * c.value_dim);
    T* scratch = arena.take<T>(kPrefillKeys * (c.key_dim + c.value_dim));
    const bool masked = c.low || c.keep;
    auto block = [&](const Keys& keys, Visible visible, Content<T> from) {
        if (masked && !all_finite<T>(c, keys, from))
            from = without_nonfinite<T>(c, rows, keys, from, good_k, good_v, state);
        tiled.block(keys, visible, from);
    };
    if (c.chosen) over_chosen<T>(c, rows, from, to, kPrefillKeys, scratch, block);
    else over_keys<T>(c, p, rows, from, to, kPrefillKeys, scratch, block);
    tiled.finish();
}

}  // namespace polyhead::PH_NAMESPACE
#endif
