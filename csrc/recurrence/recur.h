// Heads with a state: one loop over the tokens, for decoding and for prompts.
//
// Columns of a state are independent. A task is a head and a block of columns, whose part of the state stays in
// the first cache for all tokens: of many tokens as a copy without gaps, since rows that lie a power of two apart
// share few places of that cache. Of a token it reads the state once to learn what it answers to the key (with the
// delta rule), and once more to write it and read the output from it. That is as many products as chunks would take
// for states of the size of a chunk and larger, and nothing depends on how a sequence is cut.
#pragma once

#include <cstring>

#include "../common/team.h"
#include "../common/vector.h"
#include "arguments.h"

namespace polyhead::PH_NAMESPACE {

constexpr int kStateVectors = 4;
constexpr int64_t kFewTokens = 8;       // for these a copy of the state does not pay
static_assert(kStateVectors * W <= kStateColumns);

// Vectors of columns of one row of the state; the last one of a row may be incomplete.
template <int N, bool Partial> struct StateRow {
    Vec v[N];
    static StateRow from(const float* p, int64_t columns) {
        StateRow row;
        if constexpr (Partial) row.v[0] = load_some(p, columns);
        else
            PH_UNROLL(4) for (int n = 0; n < N; ++n) row.v[n] = load(p + n * W);
        return row;
    }
    void to(float* p, int64_t columns) const {
        if constexpr (Partial) store_some(v[0], p, columns);
        else
            PH_UNROLL(4) for (int n = 0; n < N; ++n) store(v[n], p + n * W);
    }
    void add(float x, const StateRow& other) {
        PH_UNROLL(4) for (int n = 0; n < N; ++n) v[n] = multiply_add(v[n], splat(x), other.v[n]);
    }
};

// What a token says, in float32: q · scale, k, the decay and k · decay.
template <class T> void read_token(const Recurrence& r, int64_t b, int64_t h, int64_t t, float* room) {
    const int64_t K = r.key_dim;
    const auto row = [&](const HeadRows& of) {
        return (const T*)of.at + b * of.batch + h / of.sharing * of.head + t * of.token;
    };
    const T *q = row(r.q), *k = row(r.k);
    const float* decay = r.decay ? r.decay + b * r.decay_batch + h * r.decay_head + t * r.decay_token : nullptr;
    const Vec same = splat(decay ? *decay : 1.0f);
    for (int64_t i = 0, n = K; n > 0; i += W, n -= W) {
        const Vec key = load_some(k + i, n), factor = r.decay_by_key ? load_some(decay + i, n) : same;
        store_some(load_some(q + i, n) * r.scale, room + i, n);
        store_some(key, room + K + i, n);
        store_some(factor, room + 2 * K + i, n);
        store_some(key * factor, room + 3 * K + i, n);
    }
}

inline void copy_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, columns * sizeof(float));
}

// All tokens of head (b, h), for columns [first, first + columns) of its state.
template <class T, int N, bool Partial>
void recur_columns(const Recurrence& r, int64_t b, int64_t h, int64_t first, int64_t columns, float* room) {
    using Row = StateRow<N, Partial>;
    const int64_t K = r.key_dim, V = r.value_dim, head = b * r.heads + h;
    float *const held = r.state + head * K * V + first, *const copy = room + kTokenRows * K;
    const bool copied = r.tokens > kFewTokens;
    const int64_t stride = copied ? columns : V;
    float* const state = copied ? copy : held;
    if (copied) copy_rows(held, V, copy, columns, K, columns);
    T* out = (T*)r.out + head * r.tokens * V + first;
    const T* values = (const T*)r.v.at + b * r.v.batch + h / r.v.sharing * r.v.head + first;
    const float *q = room, *k = room + K, *decay = room + 2 * K, *decayed_k = room + 3 * K;
    for (int64_t t = 0; t < r.tokens; ++t, out += V) {
        if (r.real && !r.real[b * r.real_batch + t * r.real_token]) {
            for (int64_t i = 0; i < columns; ++i) round_to(0.0f, out + i);
            continue;
        }
        read_token<T>(r, b, h, t, room);
        Row u;
        PH_UNROLL(4) for (int n = 0; n < N; ++n) u.v[n] = load_some(values + t * r.v.token + n * W, columns - n * W);
        // Even and odd keys are added up apart: two chains of additions hide each other's latency.
        if (r.delta) {
            Row even{}, odd{};
            int64_t i = 0;
            for (; i + 2 <= K; i += 2) {
                even.add(decayed_k[i], Row::from(state + i * stride, columns));
                odd.add(decayed_k[i + 1], Row::from(state + (i + 1) * stride, columns));
            }
            if (i < K) even.add(decayed_k[i], Row::from(state + i * stride, columns));
            PH_UNROLL(4) for (int n = 0; n < N; ++n) u.v[n] -= even.v[n] + odd.v[n];
        }
        if (r.beta) {
            const Vec beta = splat(r.beta[b * r.beta_batch + h * r.beta_head + t * r.beta_token]);
            PH_UNROLL(4) for (int n = 0; n < N; ++n) u.v[n] *= beta;
        }
        Row even{}, odd{};
        const auto write = [&](int64_t i, Row& sum) {
            Row row = Row::from(state + i * stride, columns);
            PH_UNROLL(4) for (int n = 0; n < N; ++n) row.v[n] *= decay[i];
            row.add(k[i], u);
            row.to(state + i * stride, columns);
            sum.add(q[i], row);
        };
        int64_t i = 0;
        for (; i + 2 <= K; i += 2) write(i, even), write(i + 1, odd);
        if (i < K) write(i, even);
        PH_UNROLL(4) for (int n = 0; n < N; ++n) store_some(even.v[n] + odd.v[n], out + n * W, columns - n * W);
    }
    if (copied) copy_rows(copy, columns, held, V, K, columns);
}

inline void recur(const Recurrence& r, int threads) {
    constexpr int64_t kColumns = kStateVectors * W;
    const int64_t V = r.value_dim, blocks = (V + kColumns - 1) / kColumns, tasks = r.batch * r.heads * blocks;
    if (tasks * kColumns * r.tokens * r.key_dim < 1 << 16) threads = 1;
    int64_t next = 0;
    in_team(threads, [&](int64_t thread, int64_t team) {
        float* room = r.scratch + thread * kScratchRows * r.key_dim;
        // Of few tokens each thread takes the same part of the state every time, which its cache may still hold.
        const bool fixed = r.tokens <= kFewTokens;
        const int64_t stop = fixed ? tasks * (thread + 1) / team : tasks;
        int64_t own = fixed ? tasks * thread / team : 0;
        for (int64_t i; (i = fixed ? own++ : __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < stop;) {
            const int64_t head = i / blocks, b = head / r.heads, h = head % r.heads;
            int64_t first = i % blocks * kColumns;
            const int64_t last = first + kColumns < V ? first + kColumns : V;
            with_dtype(r.dtype, [&](auto number) {
                using T = decltype(number);
                if (last - first == kColumns) return recur_columns<T, kStateVectors, false>(r, b, h, first, kColumns, room);
                for (; first + W <= last; first += W) recur_columns<T, 1, false>(r, b, h, first, W, room);
                if (first < last) recur_columns<T, 1, true>(r, b, h, first, last - first, room);
            });
        }
    });
}

}  // namespace polyhead::PH_NAMESPACE
