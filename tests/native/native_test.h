// What the native tests share: numbers that are the same in every run, aligned memory of exact size (so that the
// address sanitizer sees one byte too far), and an end with one clear line at the first thing that is wrong.
#pragma once
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace native_test {

[[noreturn, gnu::format(printf, 1, 2)]] inline void fail(const char* format, ...) {
  std::fflush(stdout);
  std::fputs("WRONG: ", stderr);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::exit(1);
}

// splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  uint32_t below(uint32_t limit) { return static_cast<uint32_t>((bits() >> 32) * limit >> 32); }
  // Uniform in [-1, 1).
  float unit() { return static_cast<float>(static_cast<int32_t>(bits() >> 32)) * 0x1p-31f; }

 private:
  uint64_t state_;
};

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

template <typename T>
using Memory = std::unique_ptr<T[], Free>;

// 64-byte aligned; whole cache lines, as everything in the product is; filled with a pattern that nobody may rely on.
template <typename T>
Memory<T> make_memory(size_t count) {
  const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
  void* memory = std::aligned_alloc(64, bytes);
  if (!memory) fail("no memory for %zu bytes", bytes);
  std::memset(memory, 0xee, bytes);
  return Memory<T>(static_cast<T*>(memory));
}

// Equal bits, or NaN both.
inline bool same(float a, float b) { return std::memcmp(&a, &b, 4) == 0 || (a != a && b != b) || (a == 0 && b == 0); }

}  // namespace native_test
