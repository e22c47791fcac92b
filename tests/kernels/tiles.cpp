// Compares products on matrix tiles, and attention on them, with sums in double: every dtype, and numbers of rows, pairs
// and columns around whole tiles; with an argument, every number of rows. Says how many it compared, or the first that
// differs. With PH_TILE_MODEL the instructions are plain code.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>
#include <immintrin.h>
#include <unistd.h>
#include <sys/syscall.h>

#define PH_WIDTH 16
#define PH_TILES 1

#define PH_NAMESPACE tiles
#include "common/tile_products.h"
#include "attention/attend.h"
#include "products/gemm.h"

namespace polyhead { uint8_t grids[kGridBytes]; }

namespace {
using namespace polyhead::tiles;

float random_number() { return (float)std::rand() / (float)RAND_MAX * 2.0f - 1.0f; }

std::vector<Pair> random_pairs(int64_t count) {
    std::vector<Pair> pairs(count);
    for (Pair& pair : pairs) {
        BFloat16 low, high;
        round_to(random_number(), &low), round_to(random_number(), &high);
        pair.bits = low.bits | (uint32_t)high.bits << 16;
    }
    return pairs;
}

double dot(Pair a, Pair b) {
    auto low = [](Pair p) { return (double)to_float(BFloat16{(uint16_t)p.bits}); };
    auto high = [](Pair p) { return (double)to_float(BFloat16{(uint16_t)(p.bits >> 16)}); };
    return low(a) * low(b) + high(a) * high(b);
}

enum Factors { none, ones, others };

// What lies round c must stay: a frame of untouched numbers.
template <bool Transposed> bool is_right(int64_t rows, int64_t K, int64_t vectors, Factors kind) {
    const int64_t columns = vectors * W, most = 2 * kTile, c_stride = columns + W;
    const int64_t a_stride = Transposed ? most : K + 3, b_stride = columns + W;
    const auto a = random_pairs(Transposed ? K * a_stride : (rows - 1) * a_stride + K);
    const auto b = random_pairs((K - 1) * b_stride + columns);
    std::vector<float> c((rows + 1) * c_stride), factors(most, 1.0f);
    for (float& x : c) x = random_number();
    if (kind == others)
        for (float& x : factors) x = random_number();
    const std::vector<float> before = c;
    block_product<Pair, Transposed>(rows, a.data(), a_stride, b.data(), b_stride, K, c.data(), c_stride, vectors,
                                    kind == none ? nullptr : factors.data());
    for (int64_t m = 0; m <= rows; ++m)
        for (int64_t n = 0; n < c_stride; ++n) {
            const int64_t at = m * c_stride + n;
            if (m == rows || n >= columns) {
                if (c[at] != before[at]) return false;
                continue;
            }
            double sum = kind == none ? 0 : (double)before[at] * factors[m];
            for (int64_t k = 0; k < K; ++k)
                sum += dot(a[Transposed ? k * a_stride + m : m * a_stride + k], b[k * b_stride + n]);
            if (!(std::abs(c[at] - sum) < 1e-4)) return false;
        }
    return true;
}

// Some of them smaller than any normal number.
template <class T> std::vector<T> random_numbers(int64_t count, float size) {
    std::vector<T> numbers(count);
    for (T& x : numbers) round_to(size * random_number() * (std::rand() % 5 ? 1.0f : 1e-40f), &x);
    return numbers;
}

// A tile of rows of T with a panel of a weight, as slices of E: float32 has the error of sums in float32.
template <class T, class E = T> bool is_right_in_slices(int64_t rows, int64_t K, int64_t columns, bool transposed) {
    const auto x = random_numbers<T>(rows * (K + 3), 1), w = random_numbers<T>(K * columns, 1);
    const int64_t pairs = pairs_of_row(K);
    std::vector<Tiled<E>> left(kSlices<E> * rows * pairs), right(kSlices<E> * polyhead::up_to(columns, kTwoTiles) * pairs);
    std::vector<float> sums(rows * kTilePanel, 7.0f);
    if (transposed) {
        std::vector<T> turned(K * (rows + 2));
        for (int64_t m = 0; m < rows; ++m)
            for (int64_t k = 0; k < K; ++k) turned[k * (rows + 2) + m] = x[m * (K + 3) + k];
        pack_transposed(turned.data(), rows + 2, rows, K, left.data());
    } else {
        pack_tile(x.data(), K + 3, rows, K, left.data());
    }
    polyhead::LinearWeight f{w.data(), nullptr, columns};
    f.transposed = transposed;
    transpose_panel<T>(f, 0, columns, K, 0, pairs, right.data());
    multiply_panel(rows, left.data(), pairs * rows, right.data(), columns, pairs, sums.data(), kTilePanel, false);
    for (int64_t m = 0; m < rows; ++m)
        for (int64_t n = 0; n < columns; ++n) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < K; ++k) {
                const double product = (double)to_float(x[m * (K + 3) + k]) * to_float(w[transposed ? k * columns + n : n * K + k]);
                sum += product, size += std::abs(product);
            }
            if (!(std::abs(sums[m * kTilePanel + n] - sum) <= 1e-6 * size + 1e-30)) return false;
        }
    return true;
}

int64_t numbers_of(int type) { return type == 10 || type == 14 ? 256 : 32; }  // Q2_K, Q6_K

// Rows in 8 bits with a weight in blocks, whose numbers are those that are unpacked.
bool is_right_in_8_bits(int type, int64_t rows, int64_t K, int64_t columns) {
    const int64_t row_bytes = polyhead::bytes_of_row(type, K), blocks = columns * K / numbers_of(type);
    std::vector<uint8_t> w(columns * row_bytes);
    for (uint8_t& byte : w) byte = (uint8_t)std::rand();
    for (int64_t i = 0; i < blocks; ++i) {  // scales that are numbers
        uint8_t* at = w.data() + i * ((int64_t)w.size() / blocks);
        if (type == 10) at += 80;
        if (type == 14) at += 208;
        at[1] = 0x2c;
        if (type == 3 || type == 10) at[3] = 0xac;
    }
    const auto x = random_numbers<float>(rows * K, 1);
    std::vector<float> numbers(columns * K), y(rows * columns, 7.0f);
    const polyhead::LinearWeight f{w.data(), nullptr, columns, type, row_bytes, true};
    for (int64_t n = 0; n < columns; ++n) unpack_run(f, n, 0, K, numbers.data() + n * K);
    polyhead::Gemm p{};
    p.dtype = polyhead::kFloat32, p.x = x.data(), p.x_stride = K, p.rows = rows, p.in_features = K;
    p.weights[0] = f, p.count = 1, p.y = y.data(), p.y_stride = columns;
    p.scratch = scratch_of(p);
    std::vector<float> scratch(p.scratch.numbers(1) + 16);
    p.scratch.at = (float*)polyhead::up_to((int64_t)scratch.data(), 64);
    gemm(p, 1);
    for (int64_t m = 0; m < rows; ++m)
        for (int64_t n = 0; n < columns; ++n) {
            double sum = 0, size = 0;
            for (int64_t u = 0; u < K; u += kUnit) {
                const Int8Unit unit = int8_unit_of(x.data() + m * K + u, 1);
                for (int64_t i = 0; i < kUnit; ++i) {
                    const double product = (double)unit.scale * (int8_t)unit.codes[i] * numbers[n * K + u + i];
                    sum += product, size += std::abs(product);
                }
            }
            if (!(std::abs(y[m * columns + n] - sum) <= 1e-5 * size)) return false;
        }
    return true;
}

// Heads of one kv head; query t sees the keys [low, high) around its place, or all. Keys of great scores come
// late, so that what was summed is rescaled.
template <class T> bool attends(polyhead::Dtype dtype, double error, int64_t heads, int64_t queries, int64_t keys, int64_t D, int64_t V, bool bounded) {
    polyhead::Attention c{};
    const auto q = random_numbers<T>(heads * queries * D, 2), v = random_numbers<T>(keys * V, 1);
    auto k = random_numbers<T>(keys * D, 1);
    for (int64_t i = keys * D * 2 / 3; i < keys * D; ++i) round_to(2 * to_float(k[i]), &k[i]);
    std::vector<T> out(heads * queries * V);
    std::vector<float> lse(heads * queries);
    std::vector<int64_t> low(queries), high(queries);
    for (int64_t t = 0; t < queries; ++t) high[t] = keys - queries + t + 1, low[t] = t % 7 ? high[t] - 40 : keys;
    c.dtype = dtype, c.batch = 1, c.heads = heads, c.kv_heads = 1, c.queries = queries, c.keys = keys;
    c.key_dim = D, c.value_dim = V, c.count = 1, c.scale = 0.3f;
    c.q = (const char*)q.data(), c.q_head = queries * D, c.q_token = D;
    c.segments[0].k = (const char*)k.data(), c.segments[0].v = (const char*)v.data();
    c.segments[0].k_token = D, c.segments[0].v_token = V, c.segments[0].length = keys;
    c.out = (char*)out.data(), c.out_head = queries * V, c.out_query = V, c.lse = lse.data();
    if (bounded) c.low = low.data(), c.high = high.data();
    if (!is_tiled(c) || plan_of(c, 1).decode || attend(c, 1) != polyhead::Outcome::done) return false;
    for (int64_t h = 0; h < heads; ++h)
        for (int64_t t = 0; t < queries; ++t) {
            double total = 0;
            std::vector<double> sums(V);
            for (int64_t j = bounded ? std::max<int64_t>(low[t], 0) : 0; j < (bounded ? std::min(high[t], keys) : keys); ++j) {
                double score = 0;
                for (int64_t d = 0; d < D; ++d)
                    score += (double)to_float(q[(h * queries + t) * D + d]) * to_float(k[j * D + d]);
                const double weight = std::exp(c.scale * score);
                total += weight;
                for (int64_t d = 0; d < V; ++d) sums[d] += weight * to_float(v[j * V + d]);
            }
            const double found = lse[h * queries + t];
            if (total == 0 ? found != -INFINITY : !(std::abs(found - std::log(total)) < 1e-4)) return false;
            for (int64_t d = 0; d < V; ++d)
                if (!(std::abs(to_float(out[(h * queries + t) * V + d]) - (total == 0 ? 0 : sums[d] / total)) < error)) return false;
        }
    return true;
}
}  // namespace

int main(int argc, char**) {
#if !defined(PH_TILE_MODEL)
    if (syscall(SYS_arch_prctl, 0x1023, 18) != 0) return 2;  // Linux does not give out the registers
#endif
    const TilesInUse tiles;
    std::vector<int64_t> numbers_of_rows = {1, 2, 7, 8, 9, 15, 16, 17, 23, 31, 32};
    if (argc > 1) numbers_of_rows.resize(32), std::iota(numbers_of_rows.begin(), numbers_of_rows.end(), 1);
    int compared = 0;
    for (int64_t rows : numbers_of_rows)
        for (int64_t K : {1, 15, 16, 17, 32, 40, 63, 64, 65, 130})
            for (int64_t vectors : {1, 2, 3, 4})
                for (Factors kind : {none, ones, others}) {
                    const bool plain = is_right<false>(rows, K, vectors, kind);
                    if (!plain || !is_right<true>(rows, K, vectors, kind)) {
                        std::printf("wrong: rows %d, pairs %d, vectors %d, factors %d, %s\n", (int)rows, (int)K,
                                    (int)vectors, (int)kind, plain ? "transposed" : "plain");
                        return 1;
                    }
                    ++compared;
                }
    for (int64_t rows : numbers_of_rows)
        for (int64_t K : {1, 31, 32, 97, 300})
            for (int64_t columns : {1, 16, 17, 65})
                for (bool transposed : {false, true}) {
                    if (!is_right_in_slices<BFloat16>(rows, K, columns, transposed) || !is_right_in_slices<Half>(rows, K, columns, transposed) ||
                        !is_right_in_slices<Half, float>(rows, K, columns, transposed) || !is_right_in_slices<float>(rows, K, columns, transposed)) {
                        std::printf("wrong: rows %d, inputs %d, columns %d, transposed %d, in slices\n", (int)rows, (int)K, (int)columns, transposed);
                        return 1;
                    }
                    ++compared;
                }
    for (int64_t rows : numbers_of_rows)
        for (int type : {2, 3, 8, 10, 14})
            for (int64_t units : {1, 2, 3})
                for (int64_t columns : {1, 37}) {
                    const int64_t K = units * numbers_of(type);
                    if (!is_right_in_8_bits(type, rows, K, columns)) {
                        std::printf("wrong: rows %d, inputs %d, columns %d, type %d, in 8 bits\n", (int)rows, (int)K, (int)columns, type);
                        return 1;
                    }
                    ++compared;
                }
    for (auto [heads, queries] : {std::pair<int64_t, int64_t>{1, 17}, {3, 9}, {3, 16}, {3, 33}, {2, 70}})
        for (int64_t keys : {1, 31, 32, 127, 129, 300})
            for (int64_t D : {32, 96})
                for (bool bounded : {false, true}) {
                    const int64_t V = D == 32 ? 64 : 32;
                    if (!attends<BFloat16>(polyhead::kBFloat16, 1e-2, heads, queries, keys, D, V, bounded) ||
                        !attends<Half>(polyhead::kFloat16, 1e-3, heads, queries, keys, D, V, bounded) ||
                        (heads * queries >= kLeastSlicedRows &&
                         !attends<float>(polyhead::kFloat32, 5e-6, heads, queries, keys, D, V, bounded))) {
                        std::printf("wrong: %d heads, %d queries, %d keys, D %d, bounded %d\n", (int)heads, (int)queries, (int)keys, (int)D, bounded);
                        return 1;
                    }
                    ++compared;
                }
    std::printf("%d shapes\n", compared);
    return 0;
}
