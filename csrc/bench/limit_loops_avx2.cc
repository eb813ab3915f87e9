// AVX2 with FMA: what multiplies and adds fastest in 256-bit registers, and reads with 256-bit loads.
#include <immintrin.h>

#include "bench/limit_chains.h"
#include "bench/limit_loops.h"
#include "bench/limit_reads.h"

namespace syshax {
namespace {

struct Line {
  using Register = __m256i;
  static Register zero() { return _mm256_setzero_si256(); }
  static Register mix(Register sum, const char* line) {
    const __m256i* p = reinterpret_cast<const __m256i*>(line);
    return _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_load_si256(p)), _mm256_load_si256(p + 1));
  }
  static void keep(Register sum) { asm volatile("" ::"x"(sum)); }
};

void hide_register(__m256i& value) { asm volatile("" : "+x"(value)); }

struct MultiplyAdd {
  using Sum = __m256;
  static Sum zero() { return _mm256_setzero_ps(); }
  static void hide(Sum& sum) { asm volatile("" : "+x"(sum)); }
  void step(Sum& sum) {
    sum = _mm256_fmadd_ps(a, b, sum);
    hide(sum);
  }
  Sum a = _mm256_set1_ps(1.5f), b = _mm256_set1_ps(0.001f);
};

struct Integers {
  using Sum = __m256i;
  static Sum zero() { return _mm256_setzero_si256(); }
  static void hide(Sum& sum) { hide_register(sum); }
  // Or products of what does not change would be computed once.
  void hide_operands() {
    hide_register(w);
    hide_register(a);
  }
  Sum w = _mm256_set1_epi8(7), a = _mm256_set1_epi8(-55), ones = _mm256_set1_epi16(1);
};

// Bytes of full range: 16-bit sums of pairs must be widened at once.
struct BytesByMaddubs : Integers {
  void step(Sum& sum) {
    hide_operands();
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), ones));
    hide(sum);
  }
};

// Both operands widened to 16 bits beforehand.
struct BytesByMadd : Integers {
  void step(Sum& sum) {
    hide_operands();
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w, a));
    hide(sum);
  }
};

// Weights of 4 bits: eight sums of pairs fit 16 bits, so they are widened once a block of 32.
struct NibblesByMaddubs : Integers {
  void step(Sum& sum) {
    Sum pairs = zero();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      hide_operands();
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w, a));
      hide(pairs);
    }
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    hide(sum);
  }
};

constexpr uint64_t kNeeds = SYSHAX_CPU_AVX2;
constexpr ComputeLoop kCompute[] = {
    {"avx2, 8 chains of vfmadd", kFloatLimits, kNeeds, 8 * 8 * 2, run_chains<MultiplyAdd, 8>},
    {"avx2, 12 chains of vfmadd", kFloatLimits, kNeeds, 12 * 8 * 2, run_chains<MultiplyAdd, 12>},
    {"avx2, vpmaddubsw and vpmaddwd", kByteLimits, kNeeds, 8 * 32 * 2, run_chains<BytesByMaddubs, 8>},
    {"avx2, vpmaddwd of widened bytes", kByteLimits, kNeeds, 10 * 16 * 2, run_chains<BytesByMadd, 10>},
    {"avx2, vpmaddubsw, widened once a block", limit_bit(Limit::kInt4), kNeeds, 4 * 8 * 32 * 2,
     run_chains<NibblesByMaddubs, 4>},
};

constexpr ReadLoop kRead[] = {SYSHAX_READ_LOOPS(Line, "avx2", kNeeds)};

}  // namespace

IsaLoops limit_loops_avx2() {
  return {{kCompute, sizeof(kCompute) / sizeof(*kCompute)}, {kRead, sizeof(kRead) / sizeof(*kRead)}};
}

}  // namespace syshax
