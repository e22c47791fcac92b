// y = x Wᵀ + b for a few rows of x: what decoding waits for is reading W, once, from first to last.
//
// Every thread walks its own range of rows of W in the order of memory, one row (or two) at a time:
// several rows side by side are several streams, which the processor prefetches worse (measured:
// 36 GB/s for one stream a thread, 20 for four).

constexpr int kPrefetch = 4096;  // bytes ahead

// Sums of a row: as many as additions need to keep up with memory. Not more for one row than for eight: a
// row gets the same bits beside others and alone.
constexpr int kSums = PH_WIDTH == 16 ? 1 : 2;

template <int M, class T>
inline void dot_rows(const float* x, int64_t stride, const T* w, int64_t K, float* found) {
    constexpr int S = kSums;
    Vec acc[S][M] = {};
    int64_t k = 0;
    for (; k + S * W <= K; k += S * W) {
        __builtin_prefetch((const char*)(w + k) + kPrefetch, 0, 1);
        if (S * W * sizeof(T) > 64) __builtin_prefetch((const char*)(w + k) + kPrefetch + 64, 0, 1);
        if (S * W * sizeof(T) > 128) {
            __builtin_prefetch((const char*)(w + k) + kPrefetch + 128, 0, 1);
            __builtin_prefetch((const char*)(w + k) + kPrefetch + 192, 0, 1);
        }
#pragma GCC unroll 4
        for (int s = 0; s < S; ++s) {
            const Vec column = load(w + k + s * W);
#pragma GCC unroll 8
            for (int m = 0; m < M; ++m) acc[s][m] = multiply_add(acc[s][m], column, load(x + m * stride + k + s * W));
        }
    }
    for (; k + W <= K; k += W) {
        const Vec column = load(w + k);
        for (int m = 0; m < M; ++m) acc[0][m] = multiply_add(acc[0][m], column, load(x + m * stride + k));
    }
    for (int m = 0; m < M; ++m) {
        Vec all = acc[0][m];
        for (int s = 1; s < S; ++s) all += acc[s][m];
        float total = sum(all);
        for (int64_t rest = k; rest < K; ++rest) total = multiply_add(total, to_float(w[rest]), x[m * stride + rest]);
        found[m] = total;
    }
}

#if PH_PAIRS
// The same for bfloat16, by the processor's instruction for pairs of neighbours: x is rounded to what W consists of. The
// last pairs are filled up with zeros, as those of many rows are.
template <int M>
inline void dot_rows(const float* x, int64_t stride, const BFloat16* w, int64_t K, float* found) {
    Vec acc[M] = {};
    auto add = [&](const float* from, int64_t step, const BFloat16* columns) {
        const Vec column = load_any<Vec>(columns);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) acc[m] = multiply_add_pairs(acc[m], column, pairs_of(from + m * step));
    };
    int64_t k = 0;
    for (; k + 2 * W <= K; k += 2 * W) {
        __builtin_prefetch((const char*)(w + k) + kPrefetch, 0, 1);
        add(x + k, stride, w + k);
    }
    if (k < K) {
        float last[M * 2 * W] = {};
        BFloat16 columns[2 * W] = {};
        for (int m = 0; m < M; ++m) __builtin_memcpy(last + m * 2 * W, x + m * stride + k, (K - k) * sizeof *x);
        __builtin_memcpy(columns, w + k, (K - k) * sizeof *w);
        add(last, 2 * W, columns);
    }
    for (int m = 0; m < M; ++m) found[m] = sum(acc[m]);
}
#endif

// dots[m] of one row of W with every row of x, for as many rows as x has.
template <class T>
inline void dots_with(const float* x, int64_t stride, int64_t rows, const T* w, int64_t K, float* found) {
    switch (rows) {
        case 1: return dot_rows<1>(x, stride, w, K, found);
        case 2: return dot_rows<2>(x, stride, w, K, found);
        case 3: return dot_rows<3>(x, stride, w, K, found);
        case 4: return dot_rows<4>(x, stride, w, K, found);
        case 5: return dot_rows<5>(x, stride, w, K, found);
        case 6: return dot_rows<6>(x, stride, w, K, found);
        case 7: return dot_rows<7>(x, stride, w, K, found);
        default: return dot_rows<8>(x, stride, w, K, found);
    }
}

#include "quantized.h"
#include "quantized_products.h"
#include "eights.h"

// done(n, dots of row n of a factor with every row of x [rows, K]) for n in [first, last). What a weight
// consists of is asked once: asked for every row, it made a head of 49,152 rows a fifth slower.
template <class T, class Done>
inline void over_rows(const float* x, int64_t rows, int64_t K, const Factor& f, int64_t first, int64_t last, Done&& done) {
    if (f.eights) return over_rows_in_eights(x, rows, K, f, first, last, done);
    if (f.type && rows == 1) return over_blocks_of_rows(x, K, f, first, last, done);
    float found[kMostRows];
    if (f.type) {
        for (int64_t n = first; n < last; ++n) {
            quantized_dots(x, K, rows, f, n, K, found);
            done(n, found);
        }
        return;
    }
    const T* w = (const T*)f.weight + first * K;
    for (int64_t n = first; n < last; ++n, w += K) {
        dots_with(x, K, rows, w, K, found);
        done(n, found);
    }
}

// y[m, n] for n in [first, last) of one factor.
template <class T, class Y>
void factor_rows(const float* x, int64_t rows, int64_t K, const Factor& f, int64_t first, int64_t last,
                 Y* y, int64_t y_stride) {
    const T* bias = (const T*)f.bias;
    over_rows<T>(x, rows, K, f, first, last, [&](int64_t n, const float* found) {
        for (int64_t m = 0; m < rows; ++m)
            round_to(found[m] + (bias ? to_float(bias[n]) : 0.0f), y + m * y_stride + n);
    });
}

template <class T> void product_of(const Product& p, int thread, int threads) {
    // Rows of all factors are one range, so that threads share them evenly.
    int64_t total = 0;
    for (int i = 0; i < p.count; ++i) total += p.factors[i].out_features;
    const int64_t from = total * thread / threads, to = total * (thread + 1) / threads;
    int64_t column = 0;
    for (int i = 0; i < p.count; ++i) {
        const Factor& f = p.factors[i];
        const int64_t first = from > column ? from - column : 0;
        const int64_t last = to - column < f.out_features ? to - column : f.out_features;
        if (first < last)
            factor_rows<T>(p.x, p.rows, p.in_features, f, first, last, (T*)p.y + column, p.y_stride);
        column += f.out_features;
    }
}

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

// x = activation(x held below a clamp), `count` numbers.
inline void activate(const Network& n, Bend bend, float* x, int64_t count) {
    int64_t i = 0;
    for (; i + W <= count; i += W) store(acted(choose((VecInt)(load(x + i) > splat(n.clamp)), splat(n.clamp), load(x + i)), n.activation, bend), x + i);
    for (; i < count; ++i) x[i] = activated(x[i] > n.clamp ? n.clamp : x[i], n.activation, bend);
}

// Hidden features [first, last). What they are summed up in stays float32 until the last product.
template <class T> void hidden_rows(const FeedForward& f, int64_t first, int64_t last) {
    const Network& n = f.network;
    const int64_t F = n.up.out_features, K = f.in_features;
    const bool gate = n.gate.weight;
    const Bend bend = bend_of<T>(n);
    auto activate_all = [&] {
        for (int64_t m = 0; m < f.rows; ++m) activate(n, bend, f.hidden + m * F + first, last - first);
    };
    if (gate) {
        factor_rows<T>(f.x, f.rows, K, n.gate, first, last, f.hidden, F);
        activate_all();
    }
    const T* up_bias = (const T*)n.up.bias;
    over_rows<T>(f.x, f.rows, K, n.up, first, last, [&](int64_t i, const float* found) {
        for (int64_t m = 0; m < f.rows; ++m) {
            float value = found[m] + (up_bias ? to_float(up_bias[i]) : 0.0f);
            float& hidden = f.hidden[m * F + i];
            if (!gate) {
                hidden = value;
                continue;
            }
            value = value > n.clamp ? n.clamp : value < -n.clamp ? -n.clamp : value;
            hidden *= n.offset != 0.0f ? value + n.offset : value;
        }
    });
    if (!gate) activate_all();
}

template <class T> void hidden_of(const FeedForward& f, int thread, int threads) {
    const int64_t F = f.network.up.out_features;
    hidden_rows<T>(f, F * thread / threads, F * (thread + 1) / threads);
}

template <class T> void output_of(const FeedForward& f, int thread, int threads) {
    const Factor& down = f.network.down;
    const int64_t N = down.out_features;
    factor_rows<T>(f.hidden, f.rows, f.network.up.out_features, down, N * thread / threads,
                   N * (thread + 1) / threads, (T*)f.y, N);
}

// In 16 bits the quotient is rounded before it meets the weight, as the models with such norms were
// trained; with an offset it is rounded once, at the end.
template <class T> void norm_row(const T* x, const T* weight, const Norm& p, T* y) {
    Vec squares{};
    int64_t d = 0;
    for (; d + W <= p.dim; d += W) squares += load(x + d) * load(x + d);
    float total = sum(squares);
    for (; d < p.dim; ++d) total += to_float(x[d]) * to_float(x[d]);
    const float factor = 1.0f / __builtin_sqrtf(total / (float)p.dim + p.eps);
    d = 0;
    for (; d + W <= p.dim; d += W) {
        const Vec scaled = load(x + d) * factor;
        if (!weight) store(scaled, y + d);
        else if (p.offset != 0.0f) store(scaled * (load(weight + d) + p.offset), y + d);
        else store(rounded<T>(scaled) * load(weight + d), y + d);
    }
    for (; d < p.dim; ++d) {
        const float scaled = to_float(x[d]) * factor;
        if (!weight) {
            round_to(scaled, y + d);
        } else if (p.offset != 0.0f) {
            round_to(scaled * (to_float(weight[d]) + p.offset), y + d);
        } else {
            round_to(scaled, y + d);
            round_to(to_float(y[d]) * to_float(weight[d]), y + d);
        }
    }
}

// LayerNorm rounds once, at the end. The mean goes first: of the squares alone, what is left of large
// numbers would be rounding.
template <class T> void centred_norm_row(const T* x, const T* weight, const T* bias, const Norm& p, T* y) {
    Vec numbers{}, squares{};
    int64_t d = 0;
    for (; d + W <= p.dim; d += W) numbers += load(x + d);
    float total = sum(numbers);
    for (; d < p.dim; ++d) total += to_float(x[d]);
    const float mean = total / (float)p.dim;
    for (d = 0; d + W <= p.dim; d += W) squares += (load(x + d) - mean) * (load(x + d) - mean);
    total = sum(squares);
    for (; d < p.dim; ++d) total += (to_float(x[d]) - mean) * (to_float(x[d]) - mean);
    const float factor = 1.0f / __builtin_sqrtf(total / (float)p.dim + p.eps);
    for (d = 0; d + W <= p.dim; d += W) {
        const Vec alone = (load(x + d) - mean) * factor;
        const Vec scaled = weight ? alone * (load(weight + d) + p.offset) : alone;
        store(bias ? scaled + load(bias + d) : scaled, y + d);
    }
    for (; d < p.dim; ++d) {
        const float alone = (to_float(x[d]) - mean) * factor;
        const float scaled = weight ? alone * (to_float(weight[d]) + p.offset) : alone;
        round_to(bias ? scaled + to_float(bias[d]) : scaled, y + d);
    }
}

template <class T> void norm_rows(const Norm& p, int64_t first, int64_t last) {
    for (int64_t m = first; m < last; ++m) {
        const T* x = (const T*)p.x + m * p.x_stride;
        T* y = (T*)p.y + m * p.dim;
        const int64_t own = m % p.heads * p.dim;
        const T* weight = p.weight ? (const T*)p.weight + own : nullptr;
        if (p.centred) centred_norm_row(x, weight, p.bias ? (const T*)p.bias + own : nullptr, p, y);
        else norm_row(x, weight, p, y);
    }
}

template <class T> void rotate_rows(const Rotation& r, int64_t first, int64_t last) {
    const int64_t half = r.dim / 2;
    for (int64_t row = first; row < last; ++row) {
        const int64_t t = row % r.tokens;
        const T *cos = (const T*)r.cos + t * r.dim, *sin = (const T*)r.sin + t * r.dim;
        const T* x = (const T*)r.x + row / r.tokens * r.x_batch + t * r.x_token;
        T* y = (T*)r.y + row * r.heads * r.dim;
        for (int64_t n = 0; n < r.heads; ++n, x += r.x_head, y += r.dim) {
            int64_t d = 0;
            if (half % W == 0)
                for (; d < r.dim; d += W) {
                    const T* other = x + (d < half ? d + half : d - half);
                    store(load(x + d) * load(cos + d) + load(other) * load(sin + d), y + d);
                }
            for (; d < r.dim; ++d) {
                const T other = x[d < half ? d + half : d - half];
                round_to(to_float(x[d]) * to_float(cos[d]) + to_float(other) * to_float(sin[d]), y + d);
            }
        }
    }
}

// x as float32 rows without gaps.
template <class T> void widen(const void* from, int64_t stride, int64_t rows, int64_t K, float* to) {
    const T* x = (const T*)from;
    for (int64_t m = 0; m < rows; ++m)
        for (int64_t k = 0; k < K; ++k) to[m * K + k] = to_float(x[m * stride + k]);
}

// Columns [first, last) of y[m] = Σ_n x[m, n] · W[n], in the order of n whatever the columns.
template <int M, class T>
void sums_of_rows(const float* x, int64_t x_stride, const T* w, int64_t count, int64_t width, int64_t first,
                  int64_t last, T* y, int64_t y_stride) {
    auto columns = [&](int64_t d, auto number) {
        constexpr int C = number;
        Vec acc[M][C] = {};
        for (int64_t n = 0; n < count; ++n) {
            Vec row[C];
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c) {
                row[c] = load(w + n * width + d + c * W);
                __builtin_prefetch((const char*)(w + n * width + d + c * W) + kPrefetch, 0, 1);
            }
#pragma GCC unroll 4
            for (int m = 0; m < M; ++m) {
                const Vec factor = splat(x[m * x_stride + n]);
#pragma GCC unroll 8
                for (int c = 0; c < C; ++c) acc[m][c] += factor * row[c];
            }
        }
        for (int m = 0; m < M; ++m)
            for (int c = 0; c < C; ++c) store(acc[m][c], y + m * y_stride + d + c * W);
    };
    constexpr int C = M <= 2 ? 8 : 4;
    int64_t d = first;
    for (; d + C * W <= last; d += C * W) columns(d, std::integral_constant<int, C>{});
    for (; d + 4 * W <= last; d += 4 * W) columns(d, std::integral_constant<int, 4>{});
    for (; d + W <= last; d += W) columns(d, std::integral_constant<int, 1>{});
    for (; d < last; ++d)
        for (int m = 0; m < M; ++m) {
            float total = 0;
            for (int64_t n = 0; n < count; ++n) total += x[m * x_stride + n] * to_float(w[n * width + d]);
            round_to(total, y + m * y_stride + d);
        }
}

// A thread's share of the columns (some vectors of them) or rows of all heads' weights.
template <class T> void head_product_of(const HeadProduct& p, int thread, int threads) {
    const int64_t run = p.summed ? 4 * W : 1, each = (p.out_features + run - 1) / run, total = p.heads * each;
    const int64_t to = total * (thread + 1) / threads, x_row = p.heads * p.in_features;
    float found[kMostRows];
    for (int64_t at = total * thread / threads; at < to;) {
        const int64_t h = at / each, unit = at % each, units = each - unit < to - at ? each - unit : to - at;
        const int64_t first = unit * run;
        const int64_t last = first + units * run < p.out_features ? first + units * run : p.out_features;
        const float* x = p.wide + h * p.in_features;
        const T* w = (const T*)p.weight + h * p.weight_head;
        T* y = (T*)p.y + h * p.y_head;
        at += units;
        if (p.summed) {
            int64_t m = 0;
            auto sums = [&](auto rows) {
                sums_of_rows<rows, T>(x + m * x_row, x_row, w, p.in_features, p.out_features, first, last, y + m * p.y_row, p.y_row);
                m += rows;
            };
            while (p.rows - m >= 4) sums(std::integral_constant<int, 4>{});
            while (p.rows - m >= 2) sums(std::integral_constant<int, 2>{});
            while (p.rows - m >= 1) sums(std::integral_constant<int, 1>{});
            continue;
        }
        for (int64_t n = first; n < last; ++n) {
            dots_with(x, x_row, p.rows, w + n * p.in_features, p.in_features, found);
            for (int64_t m = 0; m < p.rows; ++m) round_to(found[m], y + m * p.y_row + n);
        }
    }
}

// x as float32 for all heads, which head_product_of reads.
template <class T> void widen_heads(const HeadProduct& p) {
    for (int64_t m = 0; m < p.rows; ++m)
        for (int64_t h = 0; h < p.heads; ++h) {
            const T* x = (const T*)p.x + m * p.x_row + h * p.x_head;
            float* to = p.wide + (m * p.heads + h) * p.in_features;
            for (int64_t i = 0; i < p.in_features; ++i) to[i] = to_float(x[i]);
        }
}
