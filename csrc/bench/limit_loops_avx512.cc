// AVX-512 without its dot products: 512-bit multiply-adds and loads.
#include <immintrin.h>

#include "bench/limit_chains.h"
#include "bench/limit_loops.h"
#include "bench/limit_reads.h"

namespace syshax {
namespace {

struct Line {
  using Register = __m512i;
  static Register zero() { return _mm512_setzero_si512(); }
  static Register mix(Register sum, const char* line) { return _mm512_xor_si512(sum, _mm512_load_si512(line)); }
  static void keep(Register sum) { asm volatile("" ::"v"(sum)); }
};

struct MultiplyAdd {
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
  static void hide(Sum& sum) { asm volatile("" : "+v"(sum)); }
  void step(Sum& sum) {
    sum = _mm512_fmadd_ps(a, b, sum);
    hide(sum);
  }
  Sum a = _mm512_set1_ps(1.5f), b = _mm512_set1_ps(0.001f);
};

// Bytes of full range: 16-bit sums of pairs must be widened at once.
struct BytesByMaddubs {
  using Sum = __m512i;
  static Sum zero() { return _mm512_setzero_si512(); }
  static void hide(Sum& sum) { asm volatile("" : "+v"(sum)); }
  void step(Sum& sum) {
    hide(w);  // or the product would be computed once
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(w, a), ones));
    hide(sum);
  }
  Sum w = _mm512_set1_epi8(77), a = _mm512_set1_epi8(-55), ones = _mm512_set1_epi16(1);
};

constexpr ComputeLoop kCompute[] = {
    {"avx512, 12 chains of vfmadd", kFloatLimits, SYSHAX_CPU_AVX512, 12 * 16 * 2, run_chains<MultiplyAdd, 12>},
    {"avx512, 24 chains of vfmadd", kFloatLimits, SYSHAX_CPU_AVX512, 24 * 16 * 2, run_chains<MultiplyAdd, 24>},
    {"avx512, vpmaddubsw and vpmaddwd", kByteLimits, SYSHAX_CPU_AVX512, 16 * 64 * 2, run_chains<BytesByMaddubs, 16>},
};

constexpr ReadLoop kRead[] = {SYSHAX_READ_LOOPS(Line, "avx512", SYSHAX_CPU_AVX512)};

}  // namespace

IsaLoops limit_loops_avx512() {
  return {{kCompute, sizeof(kCompute) / sizeof(*kCompute)}, {kRead, sizeof(kRead) / sizeof(*kRead)}};
}

}  // namespace syshax
