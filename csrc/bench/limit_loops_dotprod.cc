// The byte dot product: four products a lane.
#include <arm_neon.h>

#include "bench/limit_chains.h"
#include "bench/limit_loops.h"

namespace syshax {
namespace {

struct ByteDot {
  using Sum = int32x4_t;
  static Sum zero() { return vdupq_n_s32(0); }
  static void hide(Sum& sum) { asm volatile("" : "+w"(sum)); }
  void step(Sum& sum) {
    sum = vdotq_s32(sum, w, a);
    hide(sum);
  }
  int8x16_t w = vdupq_n_s8(77), a = vdupq_n_s8(-55);
};

constexpr uint64_t kNeeds = SYSHAX_CPU_NEON | SYSHAX_CPU_DOTPROD;
constexpr ComputeLoop kCompute[] = {
    {"dotprod, 12 chains of sdot", kByteLimits, kNeeds, 12 * 16 * 2, run_chains<ByteDot, 12>},
    {"dotprod, 24 chains of sdot", kByteLimits, kNeeds, 24 * 16 * 2, run_chains<ByteDot, 24>},
};

}  // namespace

IsaLoops limit_loops_dotprod() { return {{kCompute, sizeof(kCompute) / sizeof(*kCompute)}, {nullptr, 0}}; }

}  // namespace syshax
