// How far decoding looks ahead of the rows that it reads.
#pragma once

#include <cstdint>

namespace polyhead {

// Which cache rows that will be read soon are prefetched into, and how many bytes ahead.
struct LookAhead { bool first_cache; int64_t bytes; };
inline constexpr LookAhead kIntoFirstCache = {true, 5120}, kIntoSecondCache = {false, 10240};

// The same for all codes: the module sets it for the processor (instruction_sets/processors.h). No bit depends on it.
inline LookAhead look_ahead_here = kIntoSecondCache;

}  // namespace polyhead
