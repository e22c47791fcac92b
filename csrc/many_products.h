// y = x Wᵀ + b for many rows of x, each with the bits that dot_rows gives it.
//
// A tile of rows and columns is multiplied at a time, its accumulators in registers: vectors of sums along K
// as dot_rows has them, so every number of y is added up in the same order. Loads are fewer than products in
// such a tile. Rows of x are widened and packed tile by tile, once for all threads; rows of W that are not
// float32 are widened or unpacked in panels, once for all rows of x.

constexpr int kDotRows = PH_WIDTH == 16 ? 6 : 4;
constexpr int kDotColumns = PH_WIDTH == 16 ? 4 : 3;

// Sums across lanes of N vectors, as `sum` adds them: the one of vector i stands in lane i · W / N.
template <int N, int H> inline Vec folded(const Vec* v) {
    if constexpr (H == 0) {
        return v[0];
    } else if constexpr (N == 1) {
        const Vec next = added_halves<H>(v[0], v[0]);
        return folded<1, H / 2>(&next);
    } else {
        Vec next[N / 2];
#pragma GCC unroll 8
        for (int i = 0; i < N / 2; ++i) next[i] = added_halves<H>(v[i], v[i + N / 2]);
        return folded<N / 2, H / 2>(next);
    }
}

constexpr int power_within(int count) {
    int found = 1;
    while (2 * found <= count && 2 * found <= W) found *= 2;
    return found;
}

// to[i] = sum(v[i]) for i < N.
template <int N> inline void sums_of(const Vec* v, float* to) {
    if constexpr (N > 0) {
        constexpr int n = power_within(N);
        const Vec found = folded<n, W / 2>(v);
        if constexpr (n == W) {
            store(found, to);
        } else {
#pragma GCC unroll 16
            for (int i = 0; i < n; ++i) to[i] = found[i * (W / n)];
        }
        sums_of<N - n>(v + n, to + n);
    }
}

constexpr int64_t kPanel = 96;         // columns that are multiplied with one tile of rows after another
constexpr int64_t kColumnUnit = 12;    // threads share columns in whole tiles
constexpr int64_t kDotRun = PH_WIDTH == 16 ? 128 : 96;  // vectors along K that the nearest caches hold of a tile
static_assert(kPanel <= kMostPanel && kDotRows <= kMostTileRows && W <= kMostWidth);

// Rows of W: numbers of row n from at + n · row on.
struct WeightRows {
    const float* at;
    int64_t row;
};

// Vectors [from, to) along K of R packed rows of x and C columns, added to what `sums` holds of those before:
// [kSums, R, C]. The last ones give the dots, with the K % W numbers that fill no vector.
template <int R, int C>
inline void dot_tile(const float* x, WeightRows w, int64_t K, int64_t from, int64_t to, Vec* sums, float* dots) {
    const bool last = to == K / W;
    Vec total[R * C];
#pragma GCC unroll 2
    for (int s = 0; s < kSums; ++s) {
        Vec acc[R][C], *held = sums + s * R * C;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) acc[r][c] = from ? held[r * C + c] : Vec{};
        const float* a = x + (from + s) * (R * W);
        const float* b = w.at + (from + s) * W;
        for (int64_t v = from + s; v < to; v += kSums, a += kSums * R * W, b += kSums * W) {
            Vec column[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) column[c] = load(b + c * w.row);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) {
                const Vec row = load(a + r * W);
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) acc[r][c] = multiply_add(acc[r][c], column[c], row);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                const int i = r * C + c;
                if (last) total[i] = s ? total[i] + acc[r][c] : acc[r][c];
                else held[i] = acc[r][c];
            }
    }
    if (!last) return;
    float found[R * C];
    sums_of<R * C>(total, found);
    for (int64_t k = K / W * W; k < K; ++k)
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c)
                found[r * C + c] = multiply_add(found[r * C + c], w.at[c * w.row + k], x[K / W * W * R + r * W + k % W]);
    for (int r = 0; r < R; ++r) __builtin_memcpy(dots + r * kPanel, found + r * C, C * sizeof(float));
}

// Columns that R rows are multiplied with at a time, so that registers hold the tile.
template <int R> constexpr int kTileColumns = PH_WIDTH == 16 ? (R > 4 ? 4 : 6) : R > 3 ? 3 : 4;

// dots[R, kPanel] of R packed rows with `count` rows of W.
template <int R> void dot_panel(const float* x, WeightRows w, int64_t count, int64_t K, Vec* room, float* dots) {
    constexpr int C = kTileColumns<R>;
    const int64_t vectors = K / W;
    int64_t from = 0;
    do {
        const int64_t to = vectors - from > kDotRun * 5 / 4 ? from + kDotRun : vectors;
        Vec* sums = room;
        auto tile = [&](int64_t n, auto columns) {
            constexpr int c = columns;
            const WeightRows here{w.at + n * w.row, w.row};
            dot_tile<R, c>(x, here, K, from, to, sums, dots + n);
            if (to < vectors || from) sums += kSums * R * c;
        };
        int64_t n = 0;
        for (; n + C <= count; n += C) tile(n, std::integral_constant<int, C>{});
        for (; n < count; ++n) tile(n, std::integral_constant<int, 1>{});
        from = to;
    } while (from < vectors);
}

// For the rows that tiles of more than kMostRows rows have.
inline void dots_of_tile(int64_t rows, const float* x, WeightRows w, int64_t count, int64_t K, Vec* room, float* dots) {
    if constexpr (kDotRows == 6) {
        if (rows == 6) return dot_panel<6>(x, w, count, K, room, dots);
        if (rows == 5) return dot_panel<5>(x, w, count, K, room, dots);
    }
    if (rows == 4) return dot_panel<4>(x, w, count, K, room, dots);
    if constexpr (kDotRows == 4) dot_panel<3>(x, w, count, K, room, dots);
}

// Rows 9 and more in tiles of nearly as many: row of x that tile i begins with.
struct TilesOfRows {
    int64_t rows, count;
    explicit TilesOfRows(int64_t rows) : rows(rows), count((rows + kDotRows - 1) / kDotRows) {}
    int64_t start(int64_t i) const { return rows / count * i + (i < rows % count ? i : rows % count); }
};

template <class X> void pack_tile(const X* x, int64_t stride, int64_t rows, int64_t K, float* to) {
    const int64_t whole = K / W * W;
    for (int64_t r = 0; r < rows; ++r) {
        const X* from = x + r * stride;
        for (int64_t k = 0; k < whole; k += W) store(load(from + k), to + k * rows + r * W);
        for (int64_t k = whole; k < K; ++k) to[whole * rows + r * W + k % W] = to_float(from[k]);
    }
}

// Rows [n, n + count) of a weight as float32, widened or unpacked into `panel` where they are none.
template <class T> WeightRows weight_rows(const Factor& f, int64_t n, int64_t count, int64_t K, float* panel) {
    if constexpr (__is_same(T, float))
        if (!f.type) return {(const float*)f.weight + n * K, K};
    const int64_t row = panel_row(K);
    for (int64_t i = 0; i < count; ++i) {
        float* to = panel + i * row;
        if (f.type) unpack_run(f.type, (const uint8_t*)f.weight + (n + i) * f.row_bytes, 0, K, to);
        else widen<T>((const T*)f.weight + (n + i) * K, K, 1, K, to);
    }
    return {panel, row};
}

// What a thread of a team computes: tiles of rows and columns, both in whole ones.
struct Share {
    int64_t first_tile, last_tile, first_column, last_column;
    Share(int64_t tiles, int64_t columns, int64_t thread, int64_t threads) {
        const int64_t units = columns ? (columns + kColumnUnit - 1) / kColumnUnit : 1;
        int64_t across = 1, down = 1, least = INT64_MAX;
        for (int64_t d = 1; d <= threads && d <= tiles; ++d) {
            const int64_t a = threads / d < units ? threads / d : units;
            const int64_t most = ((units + a - 1) / a) * ((tiles + d - 1) / d);
            if (most < least) least = most, across = a, down = d;
        }
        const int64_t i = thread % across, j = thread / across;
        if (j >= down) first_tile = last_tile = 0;
        else first_tile = tiles * j / down, last_tile = tiles * (j + 1) / down;
        first_column = units * i / across * kColumnUnit;
        last_column = units * (i + 1) / across * kColumnUnit;
        if (last_column > columns) last_column = columns;
    }
};

// y[r, n] = dots + bias for R rows and `count` columns.
template <class T, class Y>
void write_dots(const float* dots, int64_t rows, const T* bias, int64_t count, Y* y, int64_t stride) {
    float added[kPanel] = {};
    for (int64_t n = 0; bias && n < count; ++n) added[n] = to_float(bias[n]);
    for (int64_t r = 0; r < rows; ++r, dots += kPanel, y += stride) {
        int64_t n = 0;
        for (; n + W <= count; n += W) store(load(dots + n) + load(added + n), y + n);
        for (; n < count; ++n) round_to(dots[n] + added[n], y + n);
    }
}

template <class T> void many_product_of(const ManyProduct& p, int thread, int threads) {
    const int64_t K = p.in_features, width = (K + W - 1) / W * W;
    ManyRoom room(p, thread);
    int64_t columns = 0;
    for (int i = 0; i < p.count; ++i) columns += p.factors[i].out_features;
    const int64_t blocks = (p.rows + kBlockRows - 1) / kBlockRows;
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t block = p.rows * b / blocks;
        const TilesOfRows tiles(p.rows * (b + 1) / blocks - block);
        if (b) wait_for_team();
        for (int64_t i = tiles.count * thread / threads; i < tiles.count * (thread + 1) / threads; ++i) {
            const int64_t row = tiles.start(i);
            pack_tile((const T*)p.x + (block + row) * p.x_stride, p.x_stride, tiles.start(i + 1) - row, K, room.x + row * width);
        }
        wait_for_team();
        const Share share(tiles.count, columns, thread, threads);
        if (share.first_tile == share.last_tile) continue;
        int64_t column = 0;
        for (int i = 0; i < p.count; column += p.factors[i++].out_features) {
            const Factor& f = p.factors[i];
            int64_t n = share.first_column > column ? share.first_column - column : 0;
            const int64_t last = share.last_column - column < f.out_features ? share.last_column - column : f.out_features;
            for (int64_t count; n < last; n += count) {
                count = last - n < kPanel ? last - n : kPanel;
                const WeightRows w = weight_rows<T>(f, n, count, K, room.panel);
                for (int64_t t = share.first_tile; t < share.last_tile; ++t) {
                    const int64_t row = tiles.start(t), rows = tiles.start(t + 1) - row;
                    float dots[kDotRows * kPanel];
                    dots_of_tile(rows, room.x + row * width, w, count, K, (Vec*)room.sums, dots);
                    write_dots(dots, rows, f.bias ? (const T*)f.bias + n : nullptr, count,
                               (T*)p.y + (block + row) * p.y_stride + column + n, p.y_stride);
                }
            }
        }
    }
}
