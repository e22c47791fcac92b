// y = x Wᵀ + b for a few rows of x: what decoding waits for is reading W, once, from first to last.
//
// Every thread walks its own range of rows of W in the order of memory, one row (or two) at a time:
// several rows side by side are several streams, which the processor prefetches worse (measured:
// 36 GB/s for one stream a thread, 20 for four).

constexpr int kPrefetch = 4096;  // bytes ahead

template <int M, class T>
inline void dot_rows(const float* x, int64_t stride, const T* w, int64_t K, float* found) {
    // Several sums, so that additions need not wait for each other.
    constexpr int S = M == 1 ? 4 : M <= 4 ? 2 : 1;
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
            for (int m = 0; m < M; ++m) acc[s][m] += column * load(x + m * stride + k + s * W);
        }
    }
    for (; k + W <= K; k += W) {
        const Vec column = load(w + k);
        for (int m = 0; m < M; ++m) acc[0][m] += column * load(x + m * stride + k);
    }
    for (int m = 0; m < M; ++m) {
        Vec all = acc[0][m];
        for (int s = 1; s < S; ++s) all += acc[s][m];
        float total = sum(all);
        for (int64_t rest = k; rest < K; ++rest) total += to_float(w[rest]) * x[m * stride + rest];
        found[m] = total;
    }
}

template <int M, class T>
void product_rows(const Product& p, const Factor& f, int64_t first, int64_t last, int64_t column) {
    const T* w = (const T*)f.weight + first * p.in_features;
    const T* bias = (const T*)f.bias;
    T* y = (T*)p.y + column + first;
    float found[M];
    for (int64_t n = first; n < last; ++n, w += p.in_features, ++y) {
        dot_rows<M>(p.x, p.in_features, w, p.in_features, found);
        for (int m = 0; m < M; ++m)
            round_to(found[m] + (bias ? to_float(bias[n]) : 0.0f), y + m * p.y_stride);
    }
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
        if (first < last) {
            switch (p.rows) {
                case 1: product_rows<1, T>(p, f, first, last, column); break;
                case 2: product_rows<2, T>(p, f, first, last, column); break;
                case 3: product_rows<3, T>(p, f, first, last, column); break;
                case 4: product_rows<4, T>(p, f, first, last, column); break;
                case 5: product_rows<5, T>(p, f, first, last, column); break;
                case 6: product_rows<6, T>(p, f, first, last, column); break;
                case 7: product_rows<7, T>(p, f, first, last, column); break;
                default: product_rows<8, T>(p, f, first, last, column); break;
            }
        }
        column += f.out_features;
    }
}

// x as float32 rows without gaps.
template <class T> void widen(const void* from, int64_t stride, int64_t rows, int64_t K, float* to) {
    const T* x = (const T*)from;
    for (int64_t m = 0; m < rows; ++m)
        for (int64_t k = 0; k < K; ++k) to[m * K + k] = to_float(x[m * stride + k]);
}
