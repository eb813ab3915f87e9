// Counts of durations in classes a quarter of an octave wide: enough for percentiles within an eighth, without
// allocation. One thread adds, any thread reads.
#pragma once
#include <atomic>
#include <cmath>
#include <cstdint>

namespace syshax {

class Histogram {
 public:
  void add(uint64_t ns) noexcept {
    std::atomic<uint64_t>& count = counts_[index(ns)];
    count.store(count.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  // Nanoseconds that the part of all durations did not exceed; 0 when there are none.
  double percentile(double part) const noexcept {
    uint64_t total = 0, below = 0;
    for (const auto& count : counts_) total += count.load(std::memory_order_relaxed);
    const double wanted = std::ceil(part * static_cast<double>(total));
    for (uint32_t i = 0; i < kClasses && total != 0; ++i) {
      below += counts_[i].load(std::memory_order_relaxed);
      if (static_cast<double>(below) >= wanted) return middle(i);
    }
    return 0;
  }

 private:
  static constexpr uint32_t kQuarters = 4, kClasses = 64 * kQuarters;

  // The octave is the highest bit, the quarter the two bits behind it.
  static uint32_t index(uint64_t ns) noexcept {
    if (ns < kQuarters) return static_cast<uint32_t>(ns);
    const uint32_t octave = 63u - static_cast<uint32_t>(__builtin_clzll(ns));
    return octave * kQuarters + static_cast<uint32_t>(ns >> (octave - 2) & 3u);
  }
  static double middle(uint32_t index) noexcept {
    if (index < kQuarters) return index;
    const double quarter = std::ldexp(1.0, static_cast<int>(index / kQuarters) - 2);
    return (4 + index % kQuarters + 0.5) * quarter;
  }

  std::atomic<uint64_t> counts_[kClasses] = {};
};

}  // namespace syshax
