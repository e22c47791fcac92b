// The code of one instruction set: PH_WIDTH lanes, in namespace PH_NAMESPACE, exported as PH_CODE.

#include <cstdint>
#include <utility>
#include <omp.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include "native.h"

namespace polyhead {
namespace PH_NAMESPACE {

#include "vector.h"
#include "blocks.h"
#include "products.h"
#include "scores.h"
#include "attend.h"

void product(const Product& p, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), team = omp_get_num_threads();
        if (p.dtype == kFloat32) product_of<float>(p, thread, team);
        else if (p.dtype == kBFloat16) product_of<BFloat16>(p, thread, team);
        else product_of<Half>(p, thread, team);
    }
}

void attend(const Attention& c, int threads) {
    if (c.dtype == kFloat32) attend_of<float>(c, threads);
    else if (c.dtype == kBFloat16) attend_of<BFloat16>(c, threads);
    else attend_of<Half>(c, threads);
}

void widened(Dtype dtype, const void* from, int64_t stride, int64_t rows, int64_t K, float* to) {
    if (dtype == kFloat32) widen<float>(from, stride, rows, K, to);
    else if (dtype == kBFloat16) widen<BFloat16>(from, stride, rows, K, to);
    else widen<Half>(from, stride, rows, K, to);
}

}  // namespace PH_NAMESPACE

extern const Code PH_CODE;
const Code PH_CODE = {PH_NAME, PH_RUNS_HERE, PH_NAMESPACE::product, PH_NAMESPACE::widened, PH_NAMESPACE::attend};

}  // namespace polyhead
