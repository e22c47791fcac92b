// A team of threads that run the same code, started by functions of the OpenMP runtime instead of pragmas:
// the runtime is torch's (libgomp), but pragmas compiled by clang would start clang's own beside it. libomp
// has the same functions.
//
// Threads of a team wait for each other here and not in the runtime: libgomp's barrier sleeps at once when a
// process has more threads than processors, as one that serves has, and otherwise spins for long, also where
// other processes need the processor.
#pragma once

#include <sched.h>

#include <cstdint>

extern "C" {
void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_num_threads(void);
int omp_pause_resource_all(int kind);
}

namespace polyhead {

// What threads wait at until all `size` are there.
struct Barrier {
    alignas(64) int size = 1, arrived = 0;
    alignas(64) int round = 0;
};

// A team that stays while its first thread computes what needs it from time to time; the others wait for work.
struct KeptTeam {
    Barrier all, working;  // `working`: of the threads that a piece of work takes
    void (*run)(const void*, int, int) = nullptr;
    const void* data = nullptr;
    alignas(64) int posted = 0;
};

inline thread_local Barrier* barrier_of_team = nullptr;  // of the team that this thread computes in
inline thread_local KeptTeam* kept_team = nullptr;       // of which this thread is the first

// Functions of this file have internal linkage: what was compiled for one processor is not linked into the path
// of another.
template <class Done> static void wait_until(const Done& done) {
    constexpr int kSpins = 200;  // some microseconds: where nothing else is to run, yielding takes less
    for (int spins = 0; !done(); ++spins) {
        if (spins >= kSpins) sched_yield();
#if defined(__x86_64__)
        else __builtin_ia32_pause();
#elif defined(__aarch64__)
        else asm volatile("yield");
#endif
    }
}

// Every thread of a team stores its size.
static inline int size_of(const Barrier& b) { return __atomic_load_n(&b.size, __ATOMIC_RELAXED); }

static inline void wait_at(Barrier& b) {
    const int round = __atomic_load_n(&b.round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&b.arrived, 1, __ATOMIC_ACQ_REL) < size_of(b)) {
        wait_until([&] { return __atomic_load_n(&b.round, __ATOMIC_ACQUIRE) != round; });
    } else {
        __atomic_store_n(&b.arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&b.round, round + 1, __ATOMIC_RELEASE);
    }
}

// Returns when every thread of the team has called it.
static inline void wait_for_team() {
    if (barrier_of_team) wait_at(*barrier_of_team);
}

// Calls body(thread, team) as a thread of the team of a barrier.
template <class Body> static void as_member(Barrier* barrier, int thread, int team, const Body& body) {
    Barrier* const outer = barrier_of_team;
    barrier_of_team = barrier;
    body(thread, team);
    barrier_of_team = outer;
}

// Calls body(thread, team) in each thread of a team of at most `threads`; a thread of a team calls it alone.
template <class Body> static void in_team(int threads, const Body& body) {
    if (barrier_of_team) {
        Barrier alone;
        return as_member(&alone, 0, 1, body);
    }
    if (threads < 2) return body(0, 1);
    if (KeptTeam* kept = kept_team) {
        const int most = size_of(kept->all), team = threads < most ? threads : most;
        kept->working.size = team;
        kept->run = [](const void* data, int thread, int team) { (*(const Body*)data)(thread, team); };
        kept->data = &body;
        __atomic_add_fetch(&kept->posted, 1, __ATOMIC_RELEASE);
        as_member(&kept->working, 0, team, body);
        return wait_at(kept->all);
    }
    struct Call {
        const Body& body;
        Barrier barrier;
    } call{body, {}};
    auto run = [](void* data) {
        Call& call = *(Call*)data;
        const int team = omp_get_num_threads();
        __atomic_store_n(&call.barrier.size, team, __ATOMIC_RELAXED);
        as_member(&call.barrier, omp_get_thread_num(), team, call.body);
    };
    GOMP_parallel(run, &call, (unsigned)threads, 0);
}

// Calls body(first, last) in each of them, with its part of `count`.
template <class Body> static void over_range(int64_t count, int threads, const Body& body) {
    in_team(threads, [&](int64_t thread, int64_t team) { body(count * thread / team, count * (thread + 1) / team); });
}

// Calls body() while a team waits for what it computes by `in_team`, started once for all of it.
template <class Body> static void with_team(int threads, const Body& body) {
    if (threads < 2 || barrier_of_team || kept_team) return body();
    struct Call {
        const Body& body;
        KeptTeam team;
    } call{body, {}};
    auto run = [](void* data) {
        Call& call = *(Call*)data;
        KeptTeam& kept = call.team;
        const int thread = omp_get_thread_num();
        __atomic_store_n(&kept.all.size, omp_get_num_threads(), __ATOMIC_RELAXED);
        if (!thread) {
            kept_team = &kept;
            call.body();
            kept_team = nullptr;
            kept.run = nullptr;
            __atomic_add_fetch(&kept.posted, 1, __ATOMIC_RELEASE);
            return;
        }
        for (int seen = 0;; wait_at(kept.all)) {
            wait_until([&] { return __atomic_load_n(&kept.posted, __ATOMIC_ACQUIRE) != seen; });
            ++seen;
            if (!kept.run) return;
            const int team = kept.working.size;
            if (thread < team) as_member(&kept.working, thread, team, [&](int thread, int team) { kept.run(kept.data, thread, team); });
        }
    };
    GOMP_parallel(run, &call, (unsigned)threads, 0);
}

// Ends the threads that wait to be in the next team of this thread, which then starts others.
static inline void end_team() {
#if defined(__linux__)
    constexpr int kSoft = 1;
    omp_pause_resource_all(kSoft);
#endif
}

}  // namespace polyhead
