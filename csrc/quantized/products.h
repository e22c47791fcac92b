// Products of a few rows with weights in blocks, and blocks unpacked.
#pragma once

#include "../products/arguments.h"
#include "../products/tiles.h"
#include "grids.h"
#include "scaled.h"
#include "../common/team.h"

namespace polyhead::PH_NAMESPACE {

// Calls of a tag of the blocks of a type; nothing where there are none.
template <class B> struct Tag { using Blocks = B; };
template <class B> inline B block_at(const uint8_t* p, const float* halves) {
    if constexpr (B::kHalves || B::kScaled) return B(p, halves);
    else return B(p);
}
template <class Of> inline void with_blocks(int type, const Of& of) {
    switch (type) {
#define PH_CASE(B, number, numbers, bytes) case number: return of(Tag<B>{});
        PH_BLOCKS(PH_CASE)
#undef PH_CASE
    }
}

template <class B> inline void prefetch_block(const uint8_t* p) {
    PH_UNROLL(4) for (int line = 0; line < B::kBytes; line += 64) __builtin_prefetch(p + 2 * kPrefetch + line, 0, 1);
}

// What R rows of blocks from row n on are handed: halves of their own, for one block after another, or for a run of
// blocks the scales and zeros that lie in another tensor.
template <class B, int R> struct Given {
    static constexpr int kEach = B::kScaled ? 2 : B::kHalves;  // of a row
    float at[2 * R];
    const Scales& from;
    int64_t row[R], next = 0;  // in the scales
    // Rows beyond `count` repeat the last.
    Given(const LinearWeight& f, int64_t n, int64_t count = R) : from(f.scales) {
        if constexpr (B::kScaled)
            for (int r = 0; r < R; ++r) row[r] = (n + (r < count ? r : count - 1)) / from.rows * from.row;
    }
    // The scales of number k, of a row of K; returns where others begin.
    int64_t scales(int64_t k, int64_t K) {
        if constexpr (B::kScaled) {
            const int64_t i = k / from.numbers, end = (i + 1) * from.numbers;
            for (int r = 0; r < R; ++r) {
                const int64_t place = row[r] + i;
                at[2 * r] = scale_at(from, place);
                at[2 * r + 1] = !from.zeros ? (float)B::kMiddle : B::kSigned ? (float)(int8_t)from.zeros[place] : (float)from.zeros[place];
            }
            if (end < K) return end;
        }
        return K;
    }
    void halves(const uint8_t* p, int64_t row_bytes) {
        if constexpr (!B::kScaled) halves_of<B::kHalves, R>(p, row_bytes, at);
    }
    // Both, for the blocks of number k, which come one after the other.
    void blocks(const uint8_t* p, int64_t row_bytes, int64_t k, int64_t K) {
        if (B::kScaled && k == next) next = scales(k, K);
        halves(p, row_bytes);
    }
    B block(const uint8_t* p, int r) const { return block_at<B>(p, at + r * kEach); }
};

// Numbers [first, first + count) of row n, both whole blocks.
template <class B> void unpack_blocks(const LinearWeight& f, int64_t n, int64_t first, int64_t count, float* to) {
    const uint8_t* p = (const uint8_t*)f.weight + n * f.row_bytes + first / B::kNumbers * B::kBytes;
    Given<B, 1> given(f, n);
    for (int64_t done = 0; done < count;) {
        const int64_t end = given.scales(first + done, first + count) - first;
        for (; done < end; done += B::kNumbers, p += B::kBytes) {
            prefetch_block<B>(p);
            given.halves(p, 0);
            const B block = given.block(p, 0);
            PH_UNROLL(2) for (int j = 0; j < B::kNumbers / kUnit; j += B::kGiven) {
                Vec numbers[B::kGiven * kVectors];
                block.unit(j, numbers);
                for (int v = 0; v < B::kGiven * kVectors; ++v) store(numbers[v], to + done + j * kUnit + v * W);
            }
        }
    }
}

inline void unpack_run(const LinearWeight& f, int64_t n, int64_t first, int64_t count, float* to) {
    with_blocks(f.type, [&](auto of) { unpack_blocks<typename decltype(of)::Blocks>(f, n, first, count, to); });
}

constexpr int64_t kRun = 512;  // numbers of a row that are unpacked at a time

static_assert(kVectors % kSums == 0, "a unit is added up in whole rounds");

// Rows of blocks that meet one row of x together: the sums of one would wait for each other.
constexpr int kRowsAtOnce = PH_WIDTH == 16 ? 4 : 2;

// dot_rows of one row of x with R rows of blocks: the numbers are never in memory.
template <class B, int R> void dot_blocks(const float* x, const LinearWeight& f, int64_t n, int64_t K, float* found) {
    constexpr int kSteps = B::kNumbers / kUnit / B::kGiven, V = B::kGiven * kVectors;
    const int64_t row_bytes = f.row_bytes;
    const uint8_t* w = (const uint8_t*)f.weight + n * row_bytes;
    Vec acc[R][kSums] = {};
    Given<B, R> given(f, n);
    for (int64_t k = 0; k < K;) {
        const int64_t end = given.scales(k, K);
        for (; k < end; k += B::kNumbers, w += B::kBytes) {
            given.halves(w, row_bytes);
            PH_UNROLL(8) for (int r = 0; r < R; ++r) {
                const uint8_t* p = w + r * row_bytes;
                prefetch_block<B>(p);
                const B block = given.block(p, r);
                PH_UNROLL(8) for (int j = 0; j < kSteps; ++j) {
                    Vec numbers[V];
                    block.unit(j * B::kGiven, numbers);
                    PH_UNROLL(8) for (int v = 0; v < V; ++v) acc[r][v % kSums] = multiply_add(acc[r][v % kSums], numbers[v], load(x + k + (j * V + v) * W));
                }
            }
        }
    }
    PH_UNROLL(8) for (int r = 0; r < R; ++r) {
        PH_UNROLL(4) for (int s = 1; s < kSums; ++s) acc[r][0] += acc[r][s];
        found[r] = sum(acc[r][0]);
    }
}

// done(n, count, dots of rows n to n + count of a weight in blocks with x) until n is `last`.
template <class Done> inline void over_blocks_of_rows(const float* x, int64_t K, const LinearWeight& f, int64_t first, int64_t last, Done&& done) {
    with_blocks(f.type, [&](auto of) {
        using B = typename decltype(of)::Blocks;
        float found[kRowsAtOnce];
        int64_t n = first;
        for (; n + kRowsAtOnce <= last; n += kRowsAtOnce) {
            dot_blocks<B, kRowsAtOnce>(x, f, n, K, found);
            done(n, kRowsAtOnce, found);
        }
        for (; n < last; ++n) {
            dot_blocks<B, 1>(x, f, n, K, found);
            done(n, 1, found);
        }
    });
}

// Rows [first, last) of numbers, rounded to T.
template <class T> void unpack_rows(const Unpacked& u, int64_t first, int64_t last) {
    float run[kRun];
    for (int64_t n = first; n < last; ++n) {
        T* y = (T*)u.y + n * u.numbers;
        for (int64_t from = 0; from < u.numbers; from += kRun) {
            const int64_t count = u.numbers - from < kRun ? u.numbers - from : kRun;
            unpack_run(u.from, n, from, count, run);
            for (int64_t k = 0; k < count; k += W) store(load(run + k), y + from + k);
        }
    }
}

inline void unpack(const Unpacked& u, int threads) {
    const int64_t rows = u.from.out_features;
    over_range(rows, rows * u.numbers < 1 << 14 ? 1 : threads, [&](int64_t first, int64_t last) {
        with_dtype(u.dtype, [&](auto number) { unpack_rows<decltype(number)>(u, first, last); });
    });
}

}  // namespace polyhead::PH_NAMESPACE
