// Memory that a call works in.
#pragma once

#include <cstdint>

namespace polyhead {

inline int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Hands out memory in parts that are aligned to a cache line. A part that does not fit ends the process: the sizes
// are computed in advance, so it is a mistake in them.
class Arena {
  public:
    Arena() = default;
    Arena(char* start, int64_t bytes) : next_(start), end_(start + bytes) {}
    template <class T> T* take(int64_t count) {
        T* part = (T*)next_;
        const int64_t bytes = up_to(count * (int64_t)sizeof(T), 64);
        if (bytes > end_ - next_) __builtin_trap();
        next_ += bytes;
        return part;
    }

    // An arena of its own.
    Arena part(int64_t bytes) { return {take<char>(bytes), up_to(bytes, 64)}; }

  private:
    char *next_ = nullptr, *end_ = nullptr;
};

// Memory from the system for as long as it exists; false where there is none left.
class Scratch {
  public:
    explicit Scratch(int64_t bytes) : start_((char*)__builtin_malloc(bytes + 128)), bytes_(up_to(bytes, 64)) {}
    Scratch(const Scratch&) = delete;
    ~Scratch() { __builtin_free(start_); }
    explicit operator bool() const { return start_; }
    Arena arena() const { return {(char*)up_to((int64_t)start_, 64), bytes_}; }

  private:
    char* start_;
    int64_t bytes_;
};

}  // namespace polyhead
