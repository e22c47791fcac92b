// common/team.h on threads of this program in place of the OpenMP runtime, so that ThreadSanitizer sees what they share.
#include "common/team.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

static thread_local int own_number = 0, own_team = 1;
static std::atomic<int> started = 0;
static int most = 64;

extern "C" {
void GOMP_parallel(void (*run)(void*), void* data, unsigned threads, unsigned) {
    const int team = (int)threads < most ? (int)threads : most;
    ++started;
    auto member = [=](int number) {
        own_number = number, own_team = team;
        run(data);
        own_number = 0, own_team = 1;
    };
    std::vector<std::thread> others;
    for (int number = 1; number < team; ++number) others.emplace_back(member, number);
    member(0);
    for (std::thread& other : others) other.join();
}
int omp_get_thread_num() { return own_number; }
int omp_get_num_threads() { return own_team; }
int omp_pause_resource_all(int) { return 0; }
}

using namespace polyhead;

static void expect(bool right, const char* what) {
    if (!right) std::printf("wrong: %s\n", what), std::exit(1);
}

// Rounds in which every thread reads what its neighbour wrote in the round before.
static void pass_around(int threads, int expected) {
    std::vector<int> held(2 * 64, 0), seen(64, 0);
    constexpr int kRounds = 20;
    in_team(threads, [&](int thread, int team) {
        expect(team == expected, "the size of a team");
        ++seen[thread];
        for (int round = 0; round < kRounds; ++round) {
            const int *before = &held[64 * (round % 2)];
            int* after = &held[64 * ((round + 1) % 2)];
            after[thread] = before[(thread + 1) % team] + 1;
            wait_for_team();
        }
        if (team > 1) in_team(3, [&](int inner, int alone) {
            expect(inner == 0 && alone == 1, "a thread of a team computes alone");
            wait_for_team();
        });
    });
    for (int thread = 0; thread < 64; ++thread) expect(seen[thread] == (thread < expected), "each thread once");
    for (int thread = 0; thread < expected; ++thread) expect(held[64 * (kRounds % 2) + thread] == kRounds, "a barrier");
}

static void of_every_size(int largest) {
    for (int threads : {1, 2, 4, 3, 4, 1, 5}) pass_around(threads, threads < largest ? threads : largest);
    std::vector<int> counts(100, 0);
    over_range(100, 3, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) ++counts[i];
    });
    for (int count : counts) expect(count == 1, "each part once");
}

int main() {
    of_every_size(64);
    for (int largest : {4, 2, 1}) {
        started = 0;
        with_team(largest, [&] {
            for (int turn = 0; turn < 4; ++turn) of_every_size(largest > 1 ? largest : 64);
            with_team(3, [&] { pass_around(2, largest > 1 ? (2 < largest ? 2 : largest) : 2); });
        });
        if (largest > 1) expect(started == 1, "started once");
        of_every_size(64);
    }
    most = 2;  // the runtime may start fewer
    with_team(4, [] { of_every_size(2); });
    most = 1;
    with_team(4, [] { of_every_size(1); });
    std::thread other([] { with_team(2, [] { pass_around(2, 1); }); });  // two threads, each with a team
    with_team(2, [] { pass_around(2, 1); });
    other.join();
    std::puts("teams");
}
