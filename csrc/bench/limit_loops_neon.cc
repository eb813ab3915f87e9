// Advanced SIMD: 128-bit multiply-adds and loads.
#include <arm_neon.h>

#include "bench/limit_chains.h"
#include "bench/limit_loops.h"
#include "bench/limit_reads.h"

namespace syshax {
namespace {

struct Line {
  using Register = uint64x2_t;
  static Register zero() { return vdupq_n_u64(0); }
  static Register mix(Register sum, const char* line) {
    const uint64_t* p = reinterpret_cast<const uint64_t*>(line);
    const Register front = veorq_u64(vld1q_u64(p), vld1q_u64(p + 2));
    return veorq_u64(sum, veorq_u64(front, veorq_u64(vld1q_u64(p + 4), vld1q_u64(p + 6))));
  }
  static void keep(Register sum) { asm volatile("" ::"w"(sum)); }
};

struct MultiplyAdd {
  using Sum = float32x4_t;
  static Sum zero() { return vdupq_n_f32(0); }
  static void hide(Sum& sum) { asm volatile("" : "+w"(sum)); }
  void step(Sum& sum) {
    sum = vfmaq_f32(sum, a, b);
    hide(sum);
  }
  Sum a = vdupq_n_f32(1.5f), b = vdupq_n_f32(0.001f);
};

constexpr ComputeLoop kCompute[] = {
    {"neon, 12 chains of fmla", kFloatLimits, SYSHAX_CPU_NEON, 12 * 4 * 2, run_chains<MultiplyAdd, 12>},
    {"neon, 24 chains of fmla", kFloatLimits, SYSHAX_CPU_NEON, 24 * 4 * 2, run_chains<MultiplyAdd, 24>},
};

constexpr ReadLoop kRead[] = {SYSHAX_READ_LOOPS(Line, "neon", SYSHAX_CPU_NEON)};

}  // namespace

IsaLoops limit_loops_neon() {
  return {{kCompute, sizeof(kCompute) / sizeof(*kCompute)}, {kRead, sizeof(kRead) / sizeof(*kRead)}};
}

}  // namespace syshax
