// Computes the cases of a file with one code, without Python: tools/arm.py writes it, and compares what comes out.
//
//     arm_harness CODE CASES RESULTS
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "instruction_sets/code.h"
#include "instruction_sets/processors.h"

using namespace polyhead;

uint8_t polyhead::grids[kGridBytes];

namespace {

const Code* const kCodes[] = {&neon_bf16_code, &neon_dot_code, &portable_code};
bool (*const kRunsHere[])() = {runs_neon_bf16, runs_neon_dot, runs_portable};
FILE *cases, *results;

int64_t number() {
    int64_t found = 0;
    if (std::fread(&found, sizeof found, 1, cases) != 1) std::exit(3);
    return found;
}

double real() {
    double found = 0;
    if (std::fread(&found, sizeof found, 1, cases) != 1) std::exit(3);
    return found;
}

// Bytes that a number of them comes before; some more lie behind, as behind tensors.
std::vector<char> bytes() {
    const int64_t count = number();
    std::vector<char> found(count + 64);
    if (count && std::fread(found.data(), count, 1, cases) != 1) std::exit(3);
    return found;
}

void write(const std::vector<char>& from) { std::fwrite(from.data(), from.size(), 1, results); }

int64_t size_of(Dtype dtype) { return dtype == kFloat32 ? 4 : 2; }

void product(const Code& code, int threads) {
    Gemm p{};
    p.dtype = (Dtype)number(), p.rows = number(), p.in_features = p.x_stride = number(), p.count = 1;
    LinearWeight& w = p.weights[0];
    p.y_stride = w.out_features = number();
    w.type = (int)number(), w.int8_activations = number() != 0;
    p.x_transposed = number() != 0, w.transposed = number() != 0;
    if (p.x_transposed) p.x_stride = p.rows;
    w.row_bytes = w.type ? bytes_of_row(w.type, p.in_features) : 0;
    const std::vector<char> x = bytes(), weight = bytes(), bias = bytes(), scales = bytes(), zeros = bytes();
    w.scales = {scales.data(), kFloat32, (const uint8_t*)zeros.data(), 64, 1, p.in_features / 64};
    p.x = x.data(), w.weight = weight.data(), w.bias = bias.size() > 64 ? bias.data() : nullptr;
    std::vector<char> y(p.rows * w.out_features * size_of(p.dtype));
    p.y = y.data(), p.pairs = true, p.any_order = p.rows > kMaxStepRows, p.scratch = scratch_of(p);
    const bool few = p.rows <= kMaxGemvRows;
    std::vector<float> scratch(few ? kMaxGemvRows * p.in_features + 64 : p.scratch.numbers(threads) + 64);
    p.scratch.at = scratch.data();
    if (few) {
        code.widen(p.dtype, p.x, p.x_stride, p.rows, p.in_features, scratch.data());
        code.gemv({p.dtype, scratch.data(), p.rows, p.in_features, {w}, 1, p.y, p.y_stride}, threads);
    } else {
        code.gemm(p, threads);
    }
    write(y);
}

void attention(const Code& code, int threads) {
    Attention c{};
    c.dtype = (Dtype)number(), c.batch = number(), c.heads = number(), c.kv_heads = number(), c.queries = number();
    c.keys = number(), c.key_dim = number(), c.value_dim = number(), c.scale = (float)real();
    const std::vector<char> q = bytes(), k = bytes(), v = bytes(), low = bytes(), high = bytes(), grad_out = bytes();
    c.q = q.data(), c.q_token = c.key_dim, c.q_head = c.queries * c.q_token, c.q_batch = c.heads * c.q_head;
    KVSegment& s = c.segments[0];
    c.count = 1, s.k = k.data(), s.v = v.data(), s.length = c.keys;
    s.k_token = c.key_dim, s.k_head = c.keys * s.k_token, s.k_batch = c.kv_heads * s.k_head;
    s.v_token = c.value_dim, s.v_head = c.keys * s.v_token, s.v_batch = c.kv_heads * s.v_head;
    c.low = (const int64_t*)low.data(), c.high = (const int64_t*)high.data(), c.bounds_batch = 0;
    const int64_t rows = c.batch * c.heads * c.queries, size = size_of(c.dtype);
    std::vector<char> out(rows * c.value_dim * size), lse(rows * 4), zeros(rows * 4);
    c.out = out.data(), c.out_query = c.value_dim, c.out_head = c.queries * c.out_query, c.out_batch = c.heads * c.out_head;
    c.lse = (float*)lse.data();
    if (code.attend(c, threads) != Outcome::done) std::exit(4);
    std::vector<char> grad_q(rows * c.key_dim * size), grad_k(c.batch * s.k_batch * size), grad_v(c.batch * s.v_batch * size);
    Gradients g{};
    g.call = c, g.grad_out = grad_out.data();
    g.grad_query = c.value_dim, g.grad_head = c.out_head, g.grad_batch = c.out_batch;
    g.grad_lse = (const float*)zeros.data(), g.grad_q = grad_q.data(), g.grad_k = grad_k.data(), g.grad_v = grad_v.data();
    if (code.gradients(g, threads) != Outcome::done) std::exit(4);
    write(out), write(lse), write(grad_q), write(grad_k), write(grad_v);
}

void choice(const Code& code, int threads) {
    KeyChoice c{};
    Attention& a = c.call;
    a.dtype = (Dtype)number(), a.batch = number(), a.heads = number(), a.kv_heads = 1, a.queries = number(), a.keys = number();
    a.key_dim = a.value_dim = number(), c.top_k = number();
    const std::vector<char> q = bytes(), k = bytes(), weights = bytes();
    a.q = q.data(), a.q_token = a.key_dim, a.q_head = a.queries * a.q_token, a.q_batch = a.heads * a.q_head;
    KVSegment& s = a.segments[0];
    a.count = 1, s.k = s.v = k.data(), s.length = a.keys;
    s.k_token = s.v_token = a.key_dim, s.k_batch = s.v_batch = a.keys * s.k_token;
    c.weights = (const float*)weights.data(), c.weights_query = 1, c.weights_head = a.queries, c.weights_batch = a.heads * a.queries;
    std::vector<char> chosen(a.batch * a.queries * c.top_k * sizeof(int64_t));
    c.chosen = (int64_t*)chosen.data();
    if (code.choose_keys(c, threads) != Outcome::done) std::exit(4);
    write(chosen);
}

}  // namespace

int main(int count, char** args) {
    if (count != 4 || !(cases = std::fopen(args[2], "rb")) || !(results = std::fopen(args[3], "wb"))) return 2;
    if (std::fread(polyhead::grids, sizeof polyhead::grids, 1, cases) != 1) return 2;
    for (int i = 0; i < 3; ++i) {
        if (std::strcmp(args[1], kCodes[i]->name)) continue;
        if (!kRunsHere[i]()) return 5;
        for (int64_t kind; (kind = number()) != 0;) {
            const int threads = (int)number();
            (kind == 1 ? product : kind == 2 ? attention : choice)(*kCodes[i], threads);
        }
        return std::fclose(results) ? 6 : 0;
    }
    return 2;
}
