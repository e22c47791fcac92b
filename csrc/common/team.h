// A team of threads that run the same code, started by functions of the OpenMP runtime instead of pragmas:
// the runtime is torch's (libgomp), but pragmas compiled by clang would start clang's own beside it. libomp
// has the same functions.
#pragma once

#include <cstdint>

extern "C" {
void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags);
void GOMP_barrier(void);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
}

namespace polyhead {

// Calls body(thread, team) in each thread of a team of at most `threads`.
template <class Body> inline void in_team(int threads, const Body& body) {
    auto run = [](void* data) { (*(const Body*)data)(omp_get_thread_num(), omp_get_num_threads()); };
    GOMP_parallel(run, (void*)&body, (unsigned)threads, 0);
}

// Calls body(first, last) in each of them, with its part of `count`.
template <class Body> inline void over_range(int64_t count, int threads, const Body& body) {
    in_team(threads, [&](int64_t thread, int64_t team) { body(count * thread / team, count * (thread + 1) / team); });
}

// Returns when every thread of the team has called it.
inline void wait_for_team() { GOMP_barrier(); }

}  // namespace polyhead
