// How the integer formats' weights meet activations in sdot: four products a lane, exact. Needs the dot-product
// extension; for matmul_dotprod.cc and matmul_i8mm.cc. Include after vec_neon.h.
#pragma once
#include <cstdint>

namespace syshax {
namespace {

// Stored as value + 128: one exclusive or makes them signed, for all tokens of the tile.
struct WeightsQ8 {
  static constexpr int kTokens = 3;
  static constexpr int kMaxSums = 12;
  static constexpr int kParts = 1;
  static Vec::I begin(int32_t) { return vdupq_n_s32(0); }
  template <int>
  static int8x16_t part(uint8x16_t stored) {
    return vreinterpretq_s8_u8(veorq_u8(stored, vdupq_n_u8(0x80)));
  }
  template <int Part>
  static int8x16_t get(const void* p) {
    return part<Part>(vld1q_u8(static_cast<const uint8_t*>(p)));
  }
  static Vec::I dot(Vec::I sum, int8x16_t w, Vec::I a) { return vdotq_s32(sum, w, vreinterpretq_s8_s32(a)); }
  static Vec::I finish(Vec::I sum, int32_t) { return sum; }
};

// Nibbles are small enough to pass for signed bytes; -8 times the activations' sum is where the sum begins.
struct WeightsQ4 {
  static constexpr int kTokens = 3;
  static constexpr int kMaxSums = 12;
  static constexpr int kParts = 2;
  static Vec::I begin(int32_t activation_sum) { return vdupq_n_s32(-8 * activation_sum); }
  template <int Part>
  static int8x16_t part(uint8x16_t both) {
    return vreinterpretq_s8_u8(Part == 0 ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4));
  }
  template <int Part>
  static int8x16_t get(const void* p) {
    return part<Part>(vld1q_u8(static_cast<const uint8_t*>(p)));
  }
  static Vec::I dot(Vec::I sum, int8x16_t w, Vec::I a) { return vdotq_s32(sum, w, vreinterpretq_s8_s32(a)); }
  static Vec::I finish(Vec::I sum, int32_t) { return sum; }
};

}  // namespace
}  // namespace syshax
