// Mixtures of experts for a few rows: the choice of experts, and their output. Each expert's weights
// are read once, by all threads; those of experts that no row visits are not read.
#pragma once

#include "../attention/statistics.h"
#include "../common/arena.h"
#include "arguments.h"
#include "../products/feed_forward.h"

namespace polyhead::PH_NAMESPACE {

// The `count` greatest of so many values, in order: NaN first, of equals the first.
inline void choose_greatest(const float* values, int64_t of, int64_t count, char* taken, int64_t* chosen) {
    __builtin_memset(taken, 0, of);
    for (int64_t k = 0; k < count; ++k) {
        int64_t best = -1;
        for (int64_t i = 0; i < of; ++i)
            if (!taken[i] && (best < 0 || above(values[i], values[best]))) best = i;
        taken[best] = 1, chosen[k] = best;
    }
}

inline void softmax(const float* logits, int64_t count, float* scores) {
    float peak = logits[0], total = 0;
    for (int64_t i = 1; i < count; ++i)
        if (above(logits[i], peak)) peak = logits[i];
    for (int64_t i = 0; i < count; ++i) total += scores[i] = exponential_of(logits[i] - peak);
    for (int64_t i = 0; i < count; ++i) scores[i] /= total;
}

// Experts one after the other: each weighs as in a softmax of those near the best that is left.
inline void mix_sparsely(const Routing& by, const float* logits, float* left, float* weights, int64_t* chosen) {
    const int64_t X = by.router.out_features;
    __builtin_memcpy(left, logits, X * sizeof(float));
    for (int64_t k = 0; k < by.visited; ++k) {
        int64_t best = 0;
        for (int64_t i = 1; i < X; ++i)
            if (above(left[i], left[best])) best = i;
        const float peak = left[best];
        float total = 0;
        for (int64_t i = 0; i < X; ++i) {
            const float size = __builtin_fabsf(logits[i]);
            const bool far = (peak - logits[i]) / (size < peak ? peak : size) > 2 * by.jitter;
            if (!far) total += exponential_of(left[i] - peak);
        }
        weights[k] = 1.0f / total, chosen[k] = best, left[best] = kMinusInfinity;
    }
}

// Experts outside the best groups are left out of the choice.
inline void keep_best_groups(const Routing& by, float* choice, float* goodness, char* taken, int64_t* kept) {
    const int64_t each = by.router.out_features / by.groups;
    for (int64_t g = 0; g < by.groups; ++g) {
        choose_greatest(choice + g * each, each, by.best_two ? 2 : 1, taken, kept);
        goodness[g] = choice[g * each + kept[0]] + (by.best_two ? choice[g * each + kept[1]] : 0.0f);
    }
    choose_greatest(goodness, by.groups, by.groups_per_token, taken, kept);
    for (int64_t g = 0; g < by.groups; ++g)
        for (int64_t i = 0; !taken[g] && i < each; ++i) choice[g * each + i] = kMinusInfinity;
}

// The choice of one row.
template <class T> void choose(const Routing& by, const float* logits, Arena arena, float* weights, int64_t* chosen) {
    const int64_t X = by.router.out_features, K = by.visited;
    float *scores = arena.take<float>(X), *choice = arena.take<float>(X);
    if (by.scoring == kSparseMixer) {
        mix_sparsely(by, logits, scores, weights, chosen);
    } else {
        if (by.scoring == kSoftmax) softmax(logits, X, scores);
        else for (int64_t i = 0; i < X; ++i) scores[i] = sigmoid(logits[i]);
        auto bias = [&](int64_t i) { return by.fp32_bias ? ((const float*)by.choice_bias)[i] : to_float(((const T*)by.choice_bias)[i]); };
        for (int64_t i = 0; i < X; ++i) choice[i] = by.choice_bias ? scores[i] + bias(i) : scores[i];
        char* taken = arena.take<char>(X);
        if (by.groups > 1) keep_best_groups(by, choice, arena.take<float>(by.groups), taken, arena.take<int64_t>(by.groups + 2));
        choose_greatest(choice, X, K, taken, chosen);
        float total = 0;
        for (int64_t k = 0; k < K; ++k) total += weights[k] = scores[chosen[k]];
        for (int64_t k = 0; by.normalise && k < K; ++k) weights[k] /= total + 1e-20f;
    }
    for (int64_t k = 0; k < K; ++k) weights[k] *= by.scale;
}

template <class T> __attribute__((noinline)) void route_of(const Route& r, int threads) {
    const Routing& by = r.by;
    const int64_t X = by.router.out_features, K = by.visited, E = r.in_features, stride = K + (by.shared_gate.weight ? 1 : 0);
    Arena arena = r.arena;
    float *logits = arena.take<float>(r.rows * X), *shares = arena.take<float>(kMaxStepRows);
    if (r.rows * X * E < 1 << 16) threads = 1;
    in_team(threads, [&](int64_t thread, int64_t team) {
        gemv_rows<T>(r.x, r.rows, E, by.router, X * thread / team, X * (thread + 1) / team, logits, X);
        if (by.shared_gate.weight && thread == 0) gemv_rows<T>(r.x, r.rows, E, by.shared_gate, 0, 1, shares, 1);
    });
    for (int64_t m = 0; m < r.rows; ++m) {
        choose<T>(by, logits + m * X, arena, r.weights + m * stride, r.chosen + m * K);
        if (by.shared_gate.weight) r.weights[m * stride + K] = sigmoid(shares[m]);
    }
}

// Rounded before anything is added to it, as torch does: a compiler would join both.
inline float product_alone(float a, float b, float*) {
    volatile float product = a * b;
    return product;
}
template <class T> inline float product_alone(float a, float b, T* rounded) {
    round_to(a * b, rounded);
    return to_float(*rounded);
}

// Visits sorted by expert; the inputs of each expert are copied together.
template <class T>
int64_t visits_of(const Step& s, const T* x, const float* weights, const int64_t* chosen, Arena& arena, Visit* visits) {
    const Experts& e = *s.experts;
    const int64_t E = s.embed_dim, K = e.routing.visited, stride = K + (e.routing.shared_gate.weight ? 1 : 0), all = s.rows * K;
    float *inputs = arena.take<float>(all * E), *hidden = arena.take<float>(all * e.hidden);
    int64_t count = 0;
    for (int64_t last = -1;; ++count) {
        int64_t next = -1;
        for (int64_t i = 0; i < all; ++i)
            if (chosen[i] > last && (next < 0 || chosen[i] < next)) next = chosen[i];
        if ((last = next) < 0) return count;
        Visit& v = visits[count] = Visit{e.networks + next, inputs, hidden, 0, {}, {}};
        for (int64_t i = 0; i < all; ++i) {
            if (chosen[i] != next) continue;
            const int64_t row = i / K;
            const float weight = weights[row * stride + i % K];
            T rounded;
            round_to(weight, &rounded);
            for (int64_t d = 0; d < E; ++d) {
                const float from = to_float(x[row * E + d]);
                T made;
                inputs[d] = e.weighs_input ? product_alone(from, to_float(rounded), &made) : from;
            }
            v.rows[v.count] = row, v.weights[v.count++] = weight;
            inputs += E, hidden += e.hidden;
        }
    }
}

template <class T> FeedForward feed_forward_of(const Step& s, const Visit& v) {
    FeedForward f{};
    f.dtype = s.dtype, f.x = v.x, f.rows = v.count, f.in_features = s.embed_dim, f.network = *v.network, f.hidden = v.hidden;
    return f;
}

// y = what the visited experts make of x, weighed, in the order of their numbers.
template <class T>
void experts_of(const Step& s, const T* x, const float* weights, const int64_t* chosen, Arena& arena, T* y, int threads) {
    const Experts& e = *s.experts;
    const int64_t E = s.embed_dim, F = e.hidden;
    Visit* visits = arena.take<Visit>(s.rows * e.routing.visited);
    const int64_t count = visits_of(s, x, weights, chosen, arena, visits);
    in_team(threads, [&](int64_t thread, int64_t team) {
        // Hidden features of all visited experts are one range, which threads divide evenly.
        const int64_t from = count * F * thread / team, to = count * F * (thread + 1) / team;
        for (int64_t i = from / F; i < count && i * F < to; ++i) {
            const int64_t first = from > i * F ? from - i * F : 0, last = to - i * F < F ? to - i * F : F;
            hidden_rows<T>(feed_forward_of<T>(s, visits[i]), first, last);
        }
        wait_for_team();
        const int64_t first = E * thread / team, last = E * (thread + 1) / team;
        for (int64_t m = 0; m < s.rows; ++m) __builtin_memset(y + m * E + first, 0, (last - first) * sizeof(T));
        for (int64_t i = 0; i < count; ++i) {
            const Visit& v = visits[i];
            const LinearWeight& down = v.network->down;
            const T* bias = (const T*)down.bias;
            over_rows<T>(v.hidden, v.count, F, down, first, last, [&](const Dots& d) {
                for (int64_t m = d.row; m < d.row + d.rows; ++m)
                    for (int64_t c = 0; c < d.columns; ++c) {
                        const int64_t n = d.column + c;
                        T made, *to = y + v.rows[m] * E + n;
                        round_to(d.at[(m - d.row) * kFewColumns + c] + (bias ? to_float(bias[n]) : 0.0f), &made);
                        const float joins = e.weighs_input ? to_float(made) : product_alone(to_float(made), v.weights[m], &made);
                        round_to(to_float(*to) + joins, to);
                    }
            });
        }
    });
}

// y = what a mixture makes of x; stopped where a chosen expert is no longer what was described.
template <class T> Outcome mixture_of(const Step& s, const T* x, float* fp32, Arena& arena, T* y, int threads) {
    const Experts& e = *s.experts;
    const Routing& by = e.routing;
    const int64_t E = s.embed_dim, K = by.visited, features = s.rows * E;
    widen<T>(x, E, s.rows, E, fp32);
    const bool weighed = by.shared_gate.weight;
    float* weights = arena.take<float>(s.rows * (K + 1));
    int64_t* chosen = arena.take<int64_t>(s.rows * K);
    route_of<T>(Route{s.dtype, fp32, s.rows, E, by, weights, chosen, arena.part(route_bytes(by, s.rows))}, threads);
    if (!s.ask->check(*s.ask, chosen, s.rows * K)) return Outcome::stopped;
    experts_of(s, x, weights, chosen, arena, y, threads);
    if (!e.shared.up.weight) return Outcome::done;
    T* made = arena.take<T>(features);
    feed_forward(FeedForward{s.dtype, fp32, s.rows, E, e.shared, arena.take<float>(s.rows * e.shared.up.out_features), made}, threads);
    for (int64_t i = 0; weighed && i < features; ++i) {
        T joined;
        round_to(product_alone(to_float(made[i]), weights[i / E * (K + 1) + K], &joined), made + i);
    }
    add_rows(y, made, features, y);
    return Outcome::done;
}

inline void route(const Route& r, int threads) {
    with_dtype(r.dtype, [&](auto number) { route_of<decltype(number)>(r, threads); });
}

}  // namespace polyhead::PH_NAMESPACE
