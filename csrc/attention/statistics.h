// Sums over the rows and columns of a tile of attention weights, in one pass that also makes the
// weights: p = exp(log p).
#pragma once

#include "scores.h"
#include "../common/team.h"

namespace polyhead::PH_NAMESPACE {

constexpr float kLeastLog = -1e4f;  // its exponential is 0, and 0 · kLeastLog too; 0 · −∞ is NaN

// The order of the largest weights: NaN comes before all numbers.
inline bool above(float a, float b) { return a > b || (a != a && b == b); }

// Puts a key among the `count` with the largest weights.
inline void put(float weight, int64_t key, float* top, int64_t* keys, int64_t count) {
    int64_t place = count;
    for (; place > 0 && above(weight, top[place - 1]); --place)
        if (place < count) top[place] = top[place - 1], keys[place] = keys[place - 1];
    if (place < count) top[place] = weight, keys[place] = key;
}

// Adds a row's keys that are among its largest weights. Most runs of keys have none.
inline void put_all(const float* weights, int64_t columns, int64_t first, float* top, int64_t* keys,
                    int64_t count) {
    constexpr int64_t run = 4 * W;
    for (int64_t start = 0; start < columns; start += run) {
        const int64_t end = start + run < columns ? start + run : columns;
        const float least = top[count - 1];
        if (end == start + run && least == least) {
            VecInt any{};
            for (int64_t j = start; j < end; j += W) any |= ~(VecInt)(load(weights + j) <= splat(least));
            int32_t lanes[W], found = 0;
            store_any(lanes, any);
            for (int i = 0; i < W; ++i) found |= lanes[i];
            if (!found) continue;
        }
        for (int64_t j = start; j < end; ++j)
            if (above(weights[j], top[count - 1])) put(weights[j], first + j, top, keys, count);
    }
}

// One row: `weights` holds logarithms and gets weights; `received` gets them added.
inline void tile_row(const Tile& t, float* weights, float* received, int64_t at) {
    Vec all{}, entropy{}, squares{}, most{};
    for (int64_t j = 0; j < t.columns; j += W) {
        const int64_t left = t.columns - j;
        float lanes[W];
        if (left < W)
            for (int i = 0; i < W; ++i) lanes[i] = i < left ? weights[j + i] : kMinusInfinity;
        const Vec log = load(left < W ? lanes : weights + j);
        const Vec weight = exponential(log);
        entropy += weight * larger(log, splat(kLeastLog));
        squares += weight * weight;
        all += weight;
        most = larger(weight, most);
        if (left < W) {
            store_any(lanes, weight);
            for (int i = 0; i < left; ++i) weights[j + i] = lanes[i];
        } else {
            store_any(weights + j, weight);
        }
        if (!received) continue;
        for (int i = 0; left < W && i < left; ++i) received[j + i] += lanes[i];
        if (left >= W) store_any(received + j, load(received + j) + weight);
    }
    if (t.entropy) t.entropy[at] -= sum(entropy);
    if (t.squares) t.squares[at] += sum(squares);
    const float total = sum(all), peak = largest(most);
    const bool strange = total != total;  // a NaN, which `larger` passes over
    if (t.most && peak > t.most[at] && !strange) {
        int64_t j = 0;
        while (weights[j] != peak) ++j;
        t.most_keys[at] = t.first + j;
    }
    if (t.most && (strange || peak > t.most[at])) t.most[at] = strange ? total : peak;
    if (t.top) {
        float* top = t.top + at * t.top_count;
        if (strange || !(peak <= top[t.top_count - 1]))
            put_all(weights, t.columns, t.first, top, t.top_keys + at * t.top_count, t.top_count);
    }
}

// Rows are summed in runs of one length, and runs in order, so that bits do not depend on threads.
inline void tile_sums(const Tile& t, int threads) {
    const int64_t runs = (t.rows + kTileRun - 1) / kTileRun;
    if (t.batch * t.rows * t.columns < 1 << 15) threads = 1;
    in_team(threads, [&](int64_t thread, int64_t team) {
        const int64_t items = t.batch * runs;
        for (int64_t item = items * thread / team; item < items * (thread + 1) / team; ++item) {
            const int64_t b = item / runs, start = item % runs * kTileRun;
            const int64_t end = start + kTileRun < t.rows ? start + kTileRun : t.rows;
            float* received = t.received ? t.scratch + item * t.columns : nullptr;
            for (int64_t i = start; i < end; ++i)
                tile_row(t, t.weights + (b * t.rows + i) * t.columns, received, b * t.row_batch + i);
        }
    });
    if (!t.received) return;
    for (int64_t item = 0; item < t.batch * runs; ++item) {
        float* received = t.received + item / runs * t.received_batch;
        for (int64_t j = 0; j < t.columns; ++j) received[j] += t.scratch[item * t.columns + j];
    }
}

}  // namespace polyhead::PH_NAMESPACE
