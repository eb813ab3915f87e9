// A counter that threads wait on: spin while that pays, then sleep. One thread at a time bumps it, any number wait for
// the next value. Whoever is woken wakes two more, so that waking many does not keep the bumper from its work; sleepers
// wake in the order in which they fell asleep, so that nobody who waits for an older value is passed over.
#pragma once
#include <time.h>

#include "base/spin.h"
#include "threads/futex.h"

namespace syshax {

inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

class alignas(64) Event {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  // Everything written before bump is seen by whoever returns from await.
  void bump() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    wake_some();
  }

  // Returns the new value once it differs from `seen`. `spin` is the caller's own, for this place in its work.
  uint32_t await(uint32_t seen, syshax_spin& spin, uint32_t spin_us) {
    uint32_t value = look(seen, spin, spin_us);
    while (value == seen) {
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      futex_wait(value_, seen);
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      value = this->value();
      if (value != seen) wake_some();
    }
    return value;
  }

 private:
  // Nobody is missed: who is not asleep yet finds the value changed, and every sleeper that wakes passes it on.
  void wake_some() {
    if (sleepers_.load(std::memory_order_seq_cst) != 0) futex_wake(value_, 2);
  }

  static constexpr int kLooksPerClock = 32;

  uint32_t look(uint32_t seen, syshax_spin& spin, uint32_t spin_us) const {
    uint32_t value = this->value();
    if (value != seen || spin_us == 0) return value;
    while (syshax_spin_again(&spin, spin_us, now_ns())) {
      for (int i = 0; i < kLooksPerClock && value == seen; ++i) {
        syshax_cpu_pause();
        value = this->value();
      }
      if (value == seen) continue;
      syshax_spin_found(&spin, now_ns());
      return value;
    }
    return this->value();
  }

  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace syshax
