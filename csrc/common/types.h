// What all calls of compiled code share.
#pragma once

#include <cstdint>

namespace polyhead {

// How a call ended: if it ran out of memory or was stopped, its results are incomplete.
enum class Outcome { done, no_memory, stopped };

// Checked after every few blocks of work: the calling thread asks whether to stop, the others read its answer.
struct InterruptCheck {
    bool (*ask)(InterruptCheck&);  // by the thread that called
    int stop = 0;         // read and written atomically
    bool stopped(bool calling) {
        if (!__atomic_load_n(&stop, __ATOMIC_RELAXED) && calling && ask(*this))
            __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
        return __atomic_load_n(&stop, __ATOMIC_RELAXED);
    }
};

enum Dtype { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

}  // namespace polyhead
