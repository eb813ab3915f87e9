// The bfloat16 dot product of AVX-512 BF16.
#include <immintrin.h>

#include "bench/limit_chains.h"
#include "bench/limit_loops.h"

namespace syshax {
namespace {

struct PairDot {
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static void hide(Sum& sum) { asm volatile("" : "+v"(sum)); }
  void step(Sum& sum) {
    sum = _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)a);
    hide(sum);
  }
  __m512i w = _mm512_set1_epi16(0x3fc0), a = _mm512_set1_epi16(0x3a83);  // 1.5 and about 0.001
};

constexpr uint64_t kNeeds = SYSHAX_CPU_AVX512 | SYSHAX_CPU_AVX512BF16;
constexpr ComputeLoop kCompute[] = {
    {"avx512bf16, 12 chains of vdpbf16ps", limit_bit(Limit::kBf16), kNeeds, 12 * 32 * 2, run_chains<PairDot, 12>},
    {"avx512bf16, 24 chains of vdpbf16ps", limit_bit(Limit::kBf16), kNeeds, 24 * 32 * 2, run_chains<PairDot, 24>},
};

}  // namespace

IsaLoops limit_loops_avx512bf16() { return {{kCompute, sizeof(kCompute) / sizeof(*kCompute)}, {nullptr, 0}}; }

}  // namespace syshax
