// Feed-forward networks as GEMM: the hidden features of a tile of rows are activated where they are found, and
// packed for the last product. Each row has the bits of GEMV, unless blocks are multiplied in pairs or the order is free.
#pragma once

#include "../common/arena.h"
#include "activations.h"
#include "gemm.h"

namespace polyhead::PH_NAMESPACE {

// Hidden features of rows kPanel<E> apart from dots that lie likewise, in the place of `values`.
template <class T, class E>
void activate_panel(const Network& by, Bend bend, const float* gates, float* values, int64_t rows, int64_t n, int64_t count) {
    float gate_bias[kPanel<E>] = {}, up_bias[kPanel<E>] = {};
    for (int64_t i = 0; by.gate.bias && i < count; ++i) gate_bias[i] = to_float(((const T*)by.gate.bias)[n + i]);
    for (int64_t i = 0; by.up.bias && i < count; ++i) up_bias[i] = to_float(((const T*)by.up.bias)[n + i]);
    for (int64_t r = 0; r < rows; ++r, gates += kPanel<E>, values += kPanel<E>)
        for (int64_t i = 0; i < kPanel<E>; i += W) {
            const Vec value = load(values + i) + load(up_bias + i);
            store(by.gate.weight ? activated(by, bend, load(gates + i) + load(gate_bias + i)) * multiplied_by_gate(by, value)
                                 : activated(by, bend, value), values + i);
        }
}

// Columns from n on of packed rows, of which `elements` are whole vectors.
inline void pack_panel(const float* hidden, int64_t rows, int64_t n, int64_t columns, int64_t elements, float* to) {
    for (int64_t i = 0; i < columns && n + i < elements; i += W)
        for (int64_t r = 0; r < rows; ++r) store(load(hidden + r * kPanel<float> + i), to + (n + i) * rows + r * W);
}
#if PH_PAIRS
inline void pack_panel(const float* hidden, int64_t rows, int64_t n, int64_t columns, int64_t elements, Pair* to) {
    for (int64_t i = 0; i < columns && (n + i) / 2 < elements; i += 2 * W)
        for (int64_t r = 0; r < rows; ++r) pack_weights(hidden + r * kPanel<Pair> + i, 2 * W, to + (n + i) / 2 * rows + r * W);
}
#endif
template <class E> void pack_panel(const float* hidden, int64_t rows, int64_t n, int64_t columns, int64_t elements, Outer<E>* to) {
    const int64_t per = __is_same(E, float) ? 1 : 2, rest = elements * per - n;
    pack_tile(hidden, kPanel<E>, rows, rest < columns ? rest : columns, to + n / per * rows);
}
#if PH_TILES
template <class E> void pack_panel(const float* hidden, int64_t rows, int64_t n, int64_t columns, int64_t elements, Tiled<E>* to) {
    const int64_t pairs = elements / kSlices<E>;
    pack_tile(hidden, kTilePanel, rows, columns, to + n / 2 * rows, pairs * rows);
}
#endif

static_assert(kPanel<Pair> % (2 * W) == 0, "panels of hidden features are whole vectors");

template <class T, class E>
void hidden_panels(const GemmNetwork& f, TilesOfRows tiles, int thread, int threads) {
    const Gemm& p = f.in;
    const Network& by = f.network;
    const int64_t K = p.in_features, F = by.up.out_features;
    const int64_t hidden_width = whole_vectors(elements_of<E>(F));
    const Share share(tiles.count, F, kHiddenUnit<E>, thread, threads);
    if (share.first_tile == share.last_tile) return;
    const Bend bend = bend_of<T>(by);
    float* gates = p.scratch.gates(thread);
    auto zero_behind = [](float* dots, int64_t rows, int64_t count) {  // columns behind the last
        for (int64_t r = 0; r < rows && count < kPanel<E>; ++r) __builtin_memset(dots + r * kPanel<E> + count, 0, (kPanel<E> - count) * sizeof(float));
    };
    for (int64_t n = share.first_column, count; n < share.last_column; n += count) {
        count = share.last_column - n < kPanel<E> ? share.last_column - n : kPanel<E>;
        auto over = [&](const LinearWeight& f, const auto& done) {
            over_panels<T>((const E*)p.scratch.x(), K, f, n, n + count, tiles, share, p.scratch, thread, done);
        };
        if (by.gate.weight)
            over(by.gate, [&](int64_t row, int64_t rows, int64_t, int64_t, const float* dots) {
                __builtin_memcpy(gates + row * kPanel<E>, dots, rows * kPanel<E> * sizeof(float));
                zero_behind(gates + row * kPanel<E>, rows, count);
            });
        over(by.up, [&](int64_t row, int64_t rows, int64_t, int64_t, float* values) {
            zero_behind(values, rows, count);
            activate_panel<T, E>(by, bend, gates + row * kPanel<E>, values, rows, n, count);
            pack_panel(values, rows, n, up_to(count, 2 * W), hidden_width, (E*)p.scratch.hidden() + row * hidden_width);
        });
    }
}

template <class T, class E> void gemm_network_of(const GemmNetwork& f, int thread, int threads) {
    const Gemm& p = f.in;
    const LinearWeight& down = f.network.down;
    over_row_blocks(p.rows, p.in_features, [&](int64_t block, int64_t rows_of_block) {
        const TilesOfRows tiles(rows_of_block, kRowsOfTile<E>);
        pack_block<T>(p, block, tiles, thread, threads, (E*)p.scratch.x());
        wait_for_team();
        hidden_panels<T, E>(f, tiles, thread, threads);
        wait_for_team();
        const Share share(tiles.count, down.out_features, kColumnUnit<E>, thread, threads);
        over_panels<T>((const E*)p.scratch.hidden(), f.network.up.out_features, down, share.first_column, share.last_column, tiles,
                       share, p.scratch, thread, [&](int64_t row, int64_t rows, int64_t n, int64_t count, const float* dots) {
            write_dots<E>(dots, rows, down.bias ? (const T*)down.bias + n : nullptr, count, p.add,
                       (T*)p.y + (block + row) * p.y_stride + n, p.y_stride);
        });
    });
}

inline void gemm_network(const GemmNetwork& f, int threads) {
    in_team(threads, [&](int thread, int team) {
        [[maybe_unused]] const TilesInUse tiles;
        if (f.network.up.int8_activations) return with_dtype(f.in.dtype, [&](auto number) { int8_network_of<decltype(number)>(f, thread, team); });
        const bool blocks = f.network.up.type || f.network.down.type || (f.network.gate.weight && f.network.gate.type);
        with_elements(f.in, blocks, [&](auto number, auto element) {
            gemm_network_of<decltype(number), decltype(element)>(f, thread, team);
        });
    });
}

}  // namespace polyhead::PH_NAMESPACE
