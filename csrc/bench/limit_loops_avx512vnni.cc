// The byte dot product of AVX-512 VNNI.
#include <immintrin.h>

#include "bench/limit_chains.h"
#include "bench/limit_loops.h"

namespace syshax {
namespace {

struct ByteDot {
  using Sum = __m512i;
  static Sum zero() { return _mm512_setzero_si512(); }
  static void hide(Sum& sum) { asm volatile("" : "+v"(sum)); }
  void step(Sum& sum) {
    sum = _mm512_dpbusd_epi32(sum, w, a);
    hide(sum);
  }
  Sum w = _mm512_set1_epi8(77), a = _mm512_set1_epi8(-55);
};

constexpr uint64_t kNeeds = SYSHAX_CPU_AVX512 | SYSHAX_CPU_AVX512VNNI;
constexpr ComputeLoop kCompute[] = {
    {"avx512vnni, 12 chains of vpdpbusd", kByteLimits, kNeeds, 12 * 64 * 2, run_chains<ByteDot, 12>},
    {"avx512vnni, 24 chains of vpdpbusd", kByteLimits, kNeeds, 24 * 64 * 2, run_chains<ByteDot, 24>},
};

}  // namespace

IsaLoops limit_loops_avx512vnni() { return {{kCompute, sizeof(kCompute) / sizeof(*kCompute)}, {nullptr, 0}}; }

}  // namespace syshax
