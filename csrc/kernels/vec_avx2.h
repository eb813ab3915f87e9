// The vector header of AVX2 with FMA and F16C: 8 lanes. Internal linkage, for *_avx2.cc alone. Every ISA's struct has
// the same members; the templates in *_tiles.h and *_simd.h are written against them.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace syshax {
namespace {

struct Vec {
  using F = __m256;
  using I = __m256i;
  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  // fma(a, b, sum) that stays in sum's register: left to itself g++ moves a tile's 12 sums about, and spills.
  static F add_product(F a, F b, F sum) {
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    return sum;
  }
  // The second operand where either is NaN.
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  // 1 where x is negative (by its sign bit), `otherwise` elsewhere: by_sign(x, negative, otherwise).
  static F by_sign(F x, F negative, F otherwise) { return _mm256_blendv_ps(otherwise, negative, x); }

  static I set1i(int32_t x) { return _mm256_set1_epi32(x); }
  static I loadi(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static I addi(I a, I b) { return _mm256_add_epi32(a, b); }
  static I subi(I a, I b) { return _mm256_sub_epi32(a, b); }
  static I andi(I a, I b) { return _mm256_and_si256(a, b); }
  static I ori(I a, I b) { return _mm256_or_si256(a, b); }
  static I maxi(I a, I b) { return _mm256_max_epi32(a, b); }
  template <int Bits>
  static I shift_left(I a) {
    return _mm256_slli_epi32(a, Bits);
  }
  template <int Bits>
  static I shift_right(I a) {
    return _mm256_srli_epi32(a, Bits);
  }
  static I half(I a) { return _mm256_srai_epi32(a, 1); }
  static I bits(F x) { return _mm256_castps_si256(x); }
  static F from_bits(I x) { return _mm256_castsi256_ps(x); }
  static I round(F x) { return _mm256_cvtps_epi32(x); }  // to nearest even
  static F to_float(I x) { return _mm256_cvtepi32_ps(x); }
  // `yes` where a > b (signed), `no` elsewhere.
  static I if_greater(I a, I b, I yes, I no) { return _mm256_blendv_epi8(no, yes, _mm256_cmpgt_epi32(a, b)); }

  static F load_fp16(const void* p) { return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
  static void store_fp16(void* p, F x) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static I load_u16(const void* p) { return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
  static __m128i low16(I x) { return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); }
  // Lanes in [0, 65535] as uint16.
  static void store_u16(void* p, I x) { _mm_storeu_si128(static_cast<__m128i*>(p), low16(x)); }
  // Lanes in [-128, 127] as int8.
  static void store_i8(void* p, I x) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packs_epi16(words, words));
  }
  static int32_t sum(I x) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
  }
  static int32_t largest(I x) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
  }
};

}  // namespace
}  // namespace syshax
