// The 8-bit matrix product: 2 x 8 by 8 x 2.
#include <arm_neon.h>

#include "bench/limit_chains.h"
#include "bench/limit_loops.h"

namespace syshax {
namespace {

struct ByteMatrix {
  using Sum = int32x4_t;
  static Sum zero() { return vdupq_n_s32(0); }
  static void hide(Sum& sum) { asm volatile("" : "+w"(sum)); }
  void step(Sum& sum) {
    sum = vmmlaq_s32(sum, w, a);
    hide(sum);
  }
  int8x16_t w = vdupq_n_s8(77), a = vdupq_n_s8(-55);
};

constexpr uint64_t kNeeds = SYSHAX_CPU_NEON | SYSHAX_CPU_I8MM;
constexpr ComputeLoop kCompute[] = {
    {"i8mm, 12 chains of smmla", kByteLimits, kNeeds, 12 * 32 * 2, run_chains<ByteMatrix, 12>},
    {"i8mm, 24 chains of smmla", kByteLimits, kNeeds, 24 * 32 * 2, run_chains<ByteMatrix, 24>},
};

}  // namespace

IsaLoops limit_loops_i8mm() { return {{kCompute, sizeof(kCompute) / sizeof(*kCompute)}, {nullptr, 0}}; }

}  // namespace syshax
