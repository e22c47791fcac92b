// The gradient of the bias: P ∘ (dP − Δ), that of the scores behind the softcap, summed over what the
// bias was broadcast to. Of slopes it is that times −|query − key|.
//
// The gradient of a tensor with a number for every query and key is summed in place: tasks that share numbers
// of it run in a fixed order. For anything smaller every task has its own sum.
#pragma once

#include "scores.h"

namespace polyhead::PH_NAMESPACE {

// Where a task adds up: element (head of the group, query, key) is at these strides; or null.
struct BiasSum {
    float* to;
    int64_t head, query, key;
};

struct BiasPlan {
    bool in_place;
    int64_t part;  // numbers in a task's own sum
};

inline BiasPlan bias_plan_of(const Gradients& g) {
    const Attention& c = g.call;
    if (!g.grad_bias) return {false, 0};
    if (g.bias_query && g.bias_key) return {true, 0};
    int64_t of_head = 1;
    if (c.by_distance) of_head = 2 * c.farthest + 1;
    else if (g.bias_query) of_head = c.queries;
    else if (g.bias_key) of_head = c.keys;
    return {false, g.bias_head ? c.heads / c.kv_heads * of_head : of_head};
}

// The part of the whole gradient that belongs to a kv head, counted over batch rows.
inline float* bias_of_group(const Gradients& g, int64_t head) {
    const int64_t batch = head / g.call.kv_heads, group = head % g.call.kv_heads;
    return g.grad_bias + batch * g.bias_batch + group * (g.call.heads / g.call.kv_heads) * g.bias_head;
}

inline float sum_of(const float* x, int64_t count) {
    Vec all{};
    int64_t j = 0;
    for (; j + W <= count; j += W) all += load(x + j);
    float total = sum(all);
    for (; j < count; ++j) total += x[j];
    return total;
}

inline void add_to(float* to, const float* x, int64_t count) {
    for (int64_t j = 0; j < count; ++j) to[j] += x[j];
}

// Adds the gradients of one row's scores, which it may overwrite.
inline void add_bias_gradient(const Attention& c, const Rows& rows, int64_t i, const Keys& keys,
                              const BiasSum& bias, float* changes) {
    float* to = bias.to + (rows.head(i) - rows.kv_head * (c.heads / c.kv_heads)) * bias.head;
    if (c.slopes) {
        with_distances(query_position(c, rows, i), keys, [&](int64_t j, float apart) { changes[j] *= apart; });
        *to -= sum_of(changes, keys.length);
    } else if (c.by_distance) {
        const int64_t last = 2 * c.farthest, query = query_position(c, rows, i);
        if (keys.positions) {
            for (int64_t j = 0; j < keys.length; ++j)
                to[column_of(c, query, keys.positions[j])] += changes[j];
        } else {
            const Columns at = columns_of(c, query, keys);
            to[0] += sum_of(changes, at.near);
            add_to(to + at.column + at.near, changes + at.near, at.far - at.near);
            to[last] += sum_of(changes + at.far, keys.length - at.far);
        }
    } else {
        to += rows.token(i) * bias.query + keys.index * bias.key;
        if (bias.key) add_to(to, changes, keys.length);
        else *to += sum_of(changes, keys.length);
    }
}

}  // namespace polyhead::PH_NAMESPACE
