// bfloat16 of Arm: the dot product of pairs, and the matrix product 2 x 4 by 4 x 2. Constants are made of their bits:
// g++ 12 encodes constant vectors of bfloat16 wrongly.
#include <arm_neon.h>

#include "bench/limit_chains.h"
#include "bench/limit_loops.h"

namespace syshax {
namespace {

struct Operands {
  using Sum = float32x4_t;
  static Sum zero() { return vdupq_n_f32(0); }
  static void hide(Sum& sum) { asm volatile("" : "+w"(sum)); }
  static bfloat16x8_t repeated(uint16_t bits) {
    uint16x8_t vector = vdupq_n_u16(bits);
    asm volatile("" : "+w"(vector));
    return vreinterpretq_bf16_u16(vector);
  }
  bfloat16x8_t w = repeated(0x3fc0), a = repeated(0x3a83);  // 1.5 and about 0.001
};

struct PairDot : Operands {
  void step(Sum& sum) {
    sum = vbfdotq_f32(sum, w, a);
    hide(sum);
  }
};

struct Matrix : Operands {
  void step(Sum& sum) {
    sum = vbfmmlaq_f32(sum, w, a);
    hide(sum);
  }
};

constexpr uint64_t kNeeds = SYSHAX_CPU_NEON | SYSHAX_CPU_ARM_BF16;
constexpr uint32_t kBf16 = limit_bit(Limit::kBf16);
constexpr ComputeLoop kCompute[] = {
    {"armbf16, 24 chains of bfdot", kBf16, kNeeds, 24 * 8 * 2, run_chains<PairDot, 24>},
    {"armbf16, 12 chains of bfmmla", kBf16, kNeeds, 12 * 16 * 2, run_chains<Matrix, 12>},
    {"armbf16, 24 chains of bfmmla", kBf16, kNeeds, 24 * 16 * 2, run_chains<Matrix, 24>},
};

}  // namespace

IsaLoops limit_loops_armbf16() { return {{kCompute, sizeof(kCompute) / sizeof(*kCompute)}, {nullptr, 0}}; }

}  // namespace syshax
