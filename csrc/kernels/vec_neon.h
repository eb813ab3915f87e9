// The vector header of NEON, which every aarch64 CPU has: 4 lanes. Internal linkage, for the aarch64 files alone.
// The same members as vec_avx2.h.
#pragma once
#include <arm_neon.h>

#include <cstdint>

namespace syshax {
namespace {

struct Vec {
  using F = float32x4_t;
  using I = int32x4_t;
  static constexpr int kLanes = 4;
  static constexpr int kRegisters = 32;

  static F zero() { return vdupq_n_f32(0.0f); }
  static F set1(float x) { return vdupq_n_f32(x); }
  static F load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, F x) { vst1q_f32(p, x); }
  static F add(F a, F b) { return vaddq_f32(a, b); }
  static F mul(F a, F b) { return vmulq_f32(a, b); }
  static F div(F a, F b) { return vdivq_f32(a, b); }
  static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
  // fma(a, b, sum) of a tile.
  static F add_product(F a, F b, F sum) { return fma(a, b, sum); }
  // NaN where either is NaN; callers put only numbers into the first operand.
  static F min(F a, F b) { return vminq_f32(a, b); }
  static F max(F a, F b) { return vmaxq_f32(a, b); }
  // `negative` where x has its sign bit set, `otherwise` elsewhere.
  static F by_sign(F x, F negative, F otherwise) {
    return vbslq_f32(vreinterpretq_u32_s32(vshrq_n_s32(bits(x), 31)), negative, otherwise);
  }

  static I set1i(int32_t x) { return vdupq_n_s32(x); }
  static I loadi(const void* p) { return vreinterpretq_s32_u8(vld1q_u8(static_cast<const uint8_t*>(p))); }
  static I addi(I a, I b) { return vaddq_s32(a, b); }
  static I subi(I a, I b) { return vsubq_s32(a, b); }
  static I andi(I a, I b) { return vandq_s32(a, b); }
  static I ori(I a, I b) { return vorrq_s32(a, b); }
  static I maxi(I a, I b) { return vmaxq_s32(a, b); }
  template <int Bits>
  static I shift_left(I a) {
    return vshlq_n_s32(a, Bits);
  }
  template <int Bits>
  static I shift_right(I a) {
    return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), Bits));
  }
  static I half(I a) { return vshrq_n_s32(a, 1); }
  static I bits(F x) { return vreinterpretq_s32_f32(x); }
  static F from_bits(I x) { return vreinterpretq_f32_s32(x); }
  static I round(F x) { return vcvtnq_s32_f32(x); }  // to nearest even
  static F to_float(I x) { return vcvtq_f32_s32(x); }
  // `yes` where a > b (signed), `no` elsewhere.
  static I if_greater(I a, I b, I yes, I no) { return vbslq_s32(vcgtq_s32(a, b), yes, no); }

  static uint16x4_t load_words(const void* p) { return vreinterpret_u16_u8(vld1_u8(static_cast<const uint8_t*>(p))); }
  static void store_words(void* p, uint16x4_t x) { vst1_u8(static_cast<uint8_t*>(p), vreinterpret_u8_u16(x)); }
  static F load_fp16(const void* p) { return vcvt_f32_f16(vreinterpret_f16_u16(load_words(p))); }
  static void store_fp16(void* p, F x) { store_words(p, vreinterpret_u16_f16(vcvt_f16_f32(x))); }
  static I load_u16(const void* p) { return vreinterpretq_s32_u32(vmovl_u16(load_words(p))); }
  // Lanes in [0, 65535] as uint16.
  static void store_u16(void* p, I x) { store_words(p, vmovn_u32(vreinterpretq_u32_s32(x))); }
  // Lanes in [-128, 127] as int8.
  static void store_i8(void* p, I x) {
    const int16x4_t words = vmovn_s32(x);
    const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
    const int32_t four = vget_lane_s32(vreinterpret_s32_s8(bytes), 0);
    __builtin_memcpy(p, &four, 4);
  }
  static int32_t sum(I x) { return vaddvq_s32(x); }
  static int32_t largest(I x) { return vmaxvq_s32(x); }
};

}  // namespace
}  // namespace syshax
