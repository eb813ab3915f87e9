// The loops whose best result is a limit of this machine. One file for each ISA holds that ISA's loops; limits.cc runs
// them. A loop does nothing but what its name says: no result is used, none is optimised away.
#pragma once
#include <cstddef>
#include <cstdint>

#include "syshax/matmul_base.h"

namespace syshax {

enum class Limit : uint32_t { kRead, kFp32, kBf16, kInt8, kInt4 };
constexpr uint32_t kNumLimits = 5;
constexpr const char* kLimitNames[kNumLimits] = {"read", "fp32", "bf16", "int8", "int4"};

constexpr uint32_t limit_bit(Limit limit) { return 1u << static_cast<uint32_t>(limit); }
constexpr uint32_t kFloatLimits = limit_bit(Limit::kFp32) | limit_bit(Limit::kBf16);  // bf16 can always be widened
constexpr uint32_t kByteLimits = limit_bit(Limit::kInt8) | limit_bit(Limit::kInt4);   // nibbles can always be widened

struct ComputeLoop {
  const char* name;
  uint32_t limits;      // bits of the limits that it may set
  uint64_t needs;       // SYSHAX_CPU_*
  uint32_t operations;  // of one round; a product and its sum are two
  void (*run)(uint64_t rounds);
};

struct ReadLoop {
  const char* name;
  uint64_t needs;
  void (*run)(const char* data, size_t bytes);  // reads every line once; bytes a multiple of kReadGrain
};
constexpr size_t kReadGrain = 4096;

template <class Loop>
struct LoopList {
  const Loop* first;
  size_t count;
  const Loop* begin() const { return first; }
  const Loop* end() const { return first + count; }
};

struct IsaLoops {
  LoopList<ComputeLoop> compute;
  LoopList<ReadLoop> read;
};

IsaLoops limit_loops_portable();
#if defined(__x86_64__)
IsaLoops limit_loops_avx2();
IsaLoops limit_loops_avx512();
IsaLoops limit_loops_avx512vnni();
IsaLoops limit_loops_avx512bf16();
#elif defined(__aarch64__)
IsaLoops limit_loops_neon();
IsaLoops limit_loops_dotprod();
IsaLoops limit_loops_i8mm();
IsaLoops limit_loops_armbf16();
#endif

}  // namespace syshax
