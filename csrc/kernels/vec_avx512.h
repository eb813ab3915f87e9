// The vector header of AVX-512 (F, BW, VL, DQ): 16 lanes, one vector a panel. Internal linkage, for *_avx512*.cc alone.
// The same members as vec_avx2.h.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace syshax {
namespace {

struct Vec {
  using F = __m512;
  using I = __m512i;
  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  // fma(a, b, sum) of a tile.
  static F add_product(F a, F b, F sum) { return fma(a, b, sum); }
  // The second operand where either is NaN.
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  // `negative` where x has its sign bit set, `otherwise` elsewhere.
  static F by_sign(F x, F negative, F otherwise) {
    return _mm512_mask_blend_ps(_mm512_cmplt_epi32_mask(bits(x), set1i(0)), otherwise, negative);
  }

  static I set1i(int32_t x) { return _mm512_set1_epi32(x); }
  static I loadi(const void* p) { return _mm512_loadu_si512(p); }
  static I addi(I a, I b) { return _mm512_add_epi32(a, b); }
  static I subi(I a, I b) { return _mm512_sub_epi32(a, b); }
  static I andi(I a, I b) { return _mm512_and_si512(a, b); }
  static I ori(I a, I b) { return _mm512_or_si512(a, b); }
  static I maxi(I a, I b) { return _mm512_max_epi32(a, b); }
  template <int Bits>
  static I shift_left(I a) {
    return _mm512_slli_epi32(a, Bits);
  }
  template <int Bits>
  static I shift_right(I a) {
    return _mm512_srli_epi32(a, Bits);
  }
  static I half(I a) { return _mm512_srai_epi32(a, 1); }
  static I bits(F x) { return _mm512_castps_si512(x); }
  static F from_bits(I x) { return _mm512_castsi512_ps(x); }
  static I round(F x) { return _mm512_cvtps_epi32(x); }  // to nearest even
  static F to_float(I x) { return _mm512_cvtepi32_ps(x); }
  // `yes` where a > b (signed), `no` elsewhere.
  static I if_greater(I a, I b, I yes, I no) { return _mm512_mask_blend_epi32(_mm512_cmplt_epi32_mask(b, a), no, yes); }

  static F load_fp16(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
  static void store_fp16(void* p, F x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  }
  static I load_u16(const void* p) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
  // Lanes in [0, 65535] as uint16.
  static void store_u16(void* p, I x) { _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x)); }
  // Lanes in [-128, 127] as int8.
  static void store_i8(void* p, I x) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x)); }
  static int32_t sum(I x) { return _mm512_reduce_add_epi32(x); }
  static int32_t largest(I x) { return _mm512_reduce_max_epi32(x); }
};

}  // namespace
}  // namespace syshax
