// Independent chains of one operation, all in registers, written once for every ISA. Internal linkage, for
// limit_loops_*.cc alone. An operation is a struct with a type Sum, zero(), hide(Sum&), after which the compiler may
// assume nothing of the value, and step(Sum&), which ends in hide.
#pragma once
#include <cstdint>

namespace syshax {
namespace {

template <int kValue>
struct Index {
  static constexpr int value = kValue;
};

// step(Index<0>), step(Index<1>), ...: the array that it indexes can live in registers from the first pass on.
template <int kFirst, int kEnd, class Step>
inline __attribute__((always_inline)) void each(Step& step) {
  if constexpr (kFirst < kEnd) {
    step(Index<kFirst>{});
    each<kFirst + 1, kEnd>(step);
  }
}

template <class Operation, int kSums>
void run_chains(uint64_t rounds) {
  Operation operation;
  typename Operation::Sum sums[kSums];
  auto clear = [&](auto i) {
    sums[i.value] = Operation::zero();
    Operation::hide(sums[i.value]);
  };
  auto step = [&](auto i) { operation.step(sums[i.value]); };
  each<0, kSums>(clear);
  for (uint64_t round = 0; round < rounds; ++round) each<0, kSums>(step);
}

}  // namespace
}  // namespace syshax
