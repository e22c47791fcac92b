// The code of one instruction set: PH_WIDTH lanes, in namespace PH_NAMESPACE, exported as PH_CODE.

#include <cstdint>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "native.h"
#include "team.h"

namespace polyhead {
namespace PH_NAMESPACE {

#include "vector.h"
#include "blocks.h"
#include "products.h"
#include "many_products.h"
#include "many_networks.h"
#include "scores.h"
#include "attend.h"
#include "bias_gradients.h"
#include "gradients.h"
#include "statistics.h"

void product(const Product& p, int threads) {
    in_team(threads, [&](int thread, int team) {
        if (p.dtype == kFloat32) product_of<float>(p, thread, team);
        else if (p.dtype == kBFloat16) product_of<BFloat16>(p, thread, team);
        else product_of<Half>(p, thread, team);
    });
}

// Calls of(dtype, element of packed rows) for products of many rows.
template <class Of> void with_elements(const ManyProduct& p, const Of& of) {
    if (p.dtype == kFloat32) return of(float{}, float{});
#if PH_PAIRS
    if (p.dtype == kBFloat16 && p.pairs) return of(BFloat16{}, Pair{});
#endif
    if (p.dtype == kBFloat16) return of(BFloat16{}, float{});
    of(Half{}, float{});
}

void many_product(const ManyProduct& p, int threads) {
    in_team(threads, [&](int thread, int team) {
        with_elements(p, [&](auto number, auto element) {
            many_product_of<decltype(number), decltype(element)>(p, thread, team);
        });
    });
}

void many_network(const ManyNetwork& f, int threads) {
    in_team(threads, [&](int thread, int team) {
        with_elements(f.in, [&](auto number, auto element) {
            many_network_of<decltype(number), decltype(element)>(f, thread, team);
        });
    });
}

void unpack(const Unpacked& u, int threads) {
    const int64_t rows = u.from.out_features;
    if (rows * u.numbers < 1 << 14) threads = 1;
    in_team(threads, [&](int64_t thread, int64_t team) {
        const int64_t first = rows * thread / team, last = rows * (thread + 1) / team;
        if (u.dtype == kFloat32) unpack_rows<float>(u, first, last);
        else if (u.dtype == kBFloat16) unpack_rows<BFloat16>(u, first, last);
        else unpack_rows<Half>(u, first, last);
    });
}

void feed_forward(const FeedForward& f, int threads) {
    in_team(threads, [&](int thread, int team) {
        if (f.dtype == kFloat32) hidden_of<float>(f, thread, team);
        else if (f.dtype == kBFloat16) hidden_of<BFloat16>(f, thread, team);
        else hidden_of<Half>(f, thread, team);
        wait_for_team();
        if (f.dtype == kFloat32) output_of<float>(f, thread, team);
        else if (f.dtype == kBFloat16) output_of<BFloat16>(f, thread, team);
        else output_of<Half>(f, thread, team);
    });
}

void norm(const Norm& p, int threads) {
    if (p.rows * p.dim < 1 << 16) threads = 1;
    in_team(threads, [&](int64_t thread, int64_t team) {
        const int64_t first = p.rows * thread / team, last = p.rows * (thread + 1) / team;
        if (p.dtype == kFloat32) norm_rows<float>(p, first, last);
        else if (p.dtype == kBFloat16) norm_rows<BFloat16>(p, first, last);
        else norm_rows<Half>(p, first, last);
    });
}

void rotate(const Rotation& r, int threads) {
    const int64_t rows = r.batch * r.tokens;
    if (rows * r.heads * r.dim < 1 << 16) threads = 1;
    in_team(threads, [&](int64_t thread, int64_t team) {
        const int64_t first = rows * thread / team, last = rows * (thread + 1) / team;
        if (r.dtype == kFloat32) rotate_rows<float>(r, first, last);
        else if (r.dtype == kBFloat16) rotate_rows<BFloat16>(r, first, last);
        else rotate_rows<Half>(r, first, last);
    });
}

template <class T> void head_product_in_team(const HeadProduct& p, int threads) {
    widen_heads<T>(p);
    if (p.rows * p.heads * p.in_features * p.out_features < 1 << 16) threads = 1;
    in_team(threads, [&](int thread, int team) { head_product_of<T>(p, thread, team); });
}

void head_product(const HeadProduct& p, int threads) {
    if (p.dtype == kFloat32) head_product_in_team<float>(p, threads);
    else if (p.dtype == kBFloat16) head_product_in_team<BFloat16>(p, threads);
    else head_product_in_team<Half>(p, threads);
}

Outcome attend(const Attention& c, int threads) {
    if (c.dtype == kFloat32) return attend_of<float>(c, threads);
    if (c.dtype == kBFloat16) return attend_of<BFloat16>(c, threads);
    return attend_of<Half>(c, threads);
}

Outcome gradients(const Gradients& g, int threads) {
    if (g.call.dtype == kFloat32) return gradients_for<float>(g, threads);
    if (g.call.dtype == kBFloat16) return gradients_for<BFloat16>(g, threads);
    return gradients_for<Half>(g, threads);
}

#include "sinks.h"
#include "step.h"
#include "training.h"

Outcome step(const Step& s, int threads) {
    if (s.dtype == kFloat32) return step_of<float>(s, threads);
    if (s.dtype == kBFloat16) return step_of<BFloat16>(s, threads);
    return step_of<Half>(s, threads);
}

void route(const Route& r, int threads) {
    if (r.dtype == kFloat32) route_of<float>(r, threads);
    else if (r.dtype == kBFloat16) route_of<BFloat16>(r, threads);
    else route_of<Half>(r, threads);
}

void widened(Dtype dtype, const void* from, int64_t stride, int64_t rows, int64_t K, float* to) {
    if (dtype == kFloat32) widen<float>(from, stride, rows, K, to);
    else if (dtype == kBFloat16) widen<BFloat16>(from, stride, rows, K, to);
    else widen<Half>(from, stride, rows, K, to);
}

}  // namespace PH_NAMESPACE

extern const Code PH_CODE;
const Code PH_CODE = {PH_NAME, PH_NAMESPACE::product, PH_NAMESPACE::many_product, PH_NAMESPACE::unpack, PH_NAMESPACE::feed_forward, PH_NAMESPACE::many_network,
                      PH_NAMESPACE::norm, PH_NAMESPACE::rotate, PH_NAMESPACE::head_product, PH_NAMESPACE::widened, PH_NAMESPACE::attend,
                      PH_NAMESPACE::gradients, PH_NAMESPACE::tile_sums, PH_NAMESPACE::step, PH_NAMESPACE::route, PH_NAMESPACE::sink,
                      PH_NAMESPACE::gated, PH_NAMESPACE::dropped, PH_NAMESPACE::norm_gradients};

}  // namespace polyhead
