// Who computes next: classes by weight, the sessions of a class in equal shares, each session at most its own share of
// the time. Knows times and weights only, no session, request or thread; everything is called by one thread.
//
// Start-time fair queueing on two levels (P. Goyal, H. M. Vin, H. Cheng, SIGCOMM 1996): whoever has work and the lowest
// start tag computes a slice, and its tag moves on by what the slice took, divided by the weight. Who comes back after
// having had no work begins at the tag that computes now: what was not used is not saved up, and nobody who has work
// waits for more than a slice of each other. A share limit is a token bucket in nanoseconds.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace syshax {

// Classes of sessions: their weights share the time where several have work.
enum class Priority : uint32_t { kInteractive = 0, kNormal = 1, kBatch = 2 };
constexpr size_t kNumPriorities = 3;
using ClassWeights = std::array<uint32_t, kNumPriorities>;
constexpr ClassWeights kClassWeights{16, 4, 1};
constexpr uint32_t kMaxClassWeight = 10000;

// One session's account.
class Account {
 public:
  Account(Priority priority, uint32_t share) : priority_(priority), share_(share) {}

  Priority priority() const { return priority_; }
  uint32_t share() const { return share_; }
  // Nanoseconds from now on in which it may not compute, since its share is used up; 0: it may.
  uint64_t blocked_ns(uint64_t now_ns);

 private:
  friend class FairShare;
  void refill(uint64_t now_ns);

  Priority priority_;
  uint32_t share_;            // percent; 0 or 100: no limit
  uint64_t start_ = 0;        // tag within the class
  uint64_t round_ = 0;        // the last one in which it had work
  double allowance_ns_ = 0;   // may go below 0 by one slice
  uint64_t refilled_ns_ = 0;  // when; 0: never
};

class FairShare {
 public:
  void set_weights(const ClassWeights& weights) { weights_ = weights; }
  void configure(Account& account, Priority priority, uint32_t share);

  // One round: offer everybody who has work and may compute. True: it is the first so far of those offered.
  void begin_round() {
    ++round_;
    best_ = nullptr;
    offered_ = {};
  }
  bool offer(Account& account);

  // `account` has computed for ns, until now.
  void charge(Account& account, uint64_t ns, uint64_t now_ns);

 private:
  struct Class {
    double start = 0;      // tag among the classes: ns / weight, which no number of years overflows
    uint64_t session = 0;  // start tag of the session that computed last
    uint64_t round = 0;    // the last one in which somebody of it had work
  };
  bool before(const Account& a, const Account& b) const;

  ClassWeights weights_ = kClassWeights;
  std::array<Class, kNumPriorities> classes_{};
  std::array<bool, kNumPriorities> offered_{};
  double virtual_time_ = 0;  // start tag of the class that computed last
  uint64_t round_ = 0;
  const Account* best_ = nullptr;
};

}  // namespace syshax
