// Activations of feed-forward networks.
#pragma once

#include "../common/vector.h"
#include "arguments.h"

namespace polyhead::PH_NAMESPACE {

// What xielu's learned numbers make of x: above · x² beyond 0, below · (eˣ − 1 − x) up to 0.
struct Bend { float above, below; };

inline float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

template <class T> Bend bend_of(const Network& n) {
    if (n.activation != kXielu) return {};
    return {softplus(to_float(*(const T*)n.alpha_p)), 0.5f + softplus(to_float(*(const T*)n.alpha_n))};
}

// eˣ − 1 − x for x ≤ 0: near 0 its series, of which rounding would leave nothing.
inline Vec beyond_line(Vec x) {
    Vec p = splat(1.0f / 362880.0f);
    for (float factorial : {40320.0f, 5040.0f, 720.0f, 120.0f, 24.0f, 6.0f, 2.0f}) p = p * x + 1.0f / factorial;
    return choose((VecInt)(x > splat(-0.5f)), p * x * x, exponential(x) - 1.0f - x);
}

// An activation of W numbers; of one, the same bits.
inline Vec acted(Vec x, Activation kind, Bend bend) {
    auto gated = [x](Vec by) { return x / (1.0f + exponential(smaller(-by, splat(88.0f)))); };  // beyond, nothing of x is left
    if (kind == kRelu) return larger(x, Vec{});
    if (kind == kSilu) return gated(x);
    if (kind == kQuickGelu) return gated(1.702f * x);
    if (kind == kRelu2) return choose((VecInt)(x > Vec{}), x * x, choose((VecInt)(x == x), Vec{}, x));
    if (kind == kGelu) return x * normal_distribution(x);
    if (kind == kXielu) {
        const Vec low = smaller(splat(-1e-6f), x);  // not quite 0, as the models were trained
        return choose((VecInt)(x > Vec{}), bend.above * x * x, (beyond_line(low) + (low - x)) * bend.below) + 0.5f * x;
    }
    const Vec inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (1.0f + hyperbolic_tangent(inner));
}
inline float activated(float x, Activation kind, Bend bend) { return acted(splat(x), kind, bend)[0]; }

inline float exponential_of(float x) { return exponential(splat(x))[0]; }
inline float sigmoid(float x) { return 1.0f / (1.0f + exponential_of(-x < 88.0f ? -x : 88.0f)); }

// activation(x held below a clamp); a NaN stays.
inline Vec activated(const Network& n, Bend bend, Vec x) { return acted(smaller(splat(n.clamp), x), n.activation, bend); }
// What an activated gate is multiplied by: value within ± the clamp, and the offset.
inline Vec multiplied_by_gate(const Network& n, Vec value) {
    const Vec most = splat(n.clamp);
    value = larger(-most, smaller(most, value));
    return n.offset != 0.0f ? value + n.offset : value;
}

// x = activation(x held below a clamp), `count` numbers.
inline void activate(const Network& n, Bend bend, float* x, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(activated(n, bend, load(x + i)), x + i);
    for (; i < count; ++i) x[i] = activated(x[i] > n.clamp ? n.clamp : x[i], n.activation, bend);
}

}  // namespace polyhead::PH_NAMESPACE
