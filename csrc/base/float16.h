// Exact conversions between float32 and the two 16-bit float types, in integer arithmetic, with the numbers the
// hardware instructions give (round to nearest even, NaN stays NaN and is made quiet). All functions have internal
// linkage, so that files compiled for different ISAs may include this without sharing code.
#pragma once
#include <cstdint>
#include <cstring>

namespace syshax {

static inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float bf16_to_float(uint16_t value) { return float_from_bits(uint32_t(value) << 16); }

static inline uint16_t bf16_from_float(float value) {
  const uint32_t bits = float_bits(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return uint16_t((nan ? bits | 0x00400000u : rounded) >> 16);
}

static inline float fp16_to_float(uint16_t value) {
  const uint32_t sign = uint32_t(value & 0x8000u) << 16;
  const uint32_t magnitude = value & 0x7fffu;
  if (magnitude < 0x0400u) {  // zero or subnormal: magnitude * 2^-24, exact in float32
    return float_from_bits(sign | float_bits(float(magnitude) * 0x1p-24f));
  }
  if (magnitude < 0x7c00u) return float_from_bits(sign | ((magnitude << 13) + (112u << 23)));
  const uint32_t quiet = magnitude > 0x7c00u ? 0x00400000u : 0u;
  return float_from_bits(sign | 0x7f800000u | ((magnitude & 0x03ffu) << 13) | quiet);
}

static inline uint16_t fp16_from_float(float value) {
  const uint32_t bits = float_bits(value);
  const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((magnitude >> 13) & 0x03ffu));
  if (magnitude >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // rounds to 2^16 or more: infinity
  if (magnitude < 0x38800000u) {  // below 2^-14: the sum's rounding leaves magnitude / 2^-24 in the low bits
    return uint16_t(sign | (float_bits(float_from_bits(magnitude) + 0.5f) - float_bits(0.5f)));
  }
  const uint32_t rounded = magnitude + 0x0fffu + ((magnitude >> 13) & 1u);
  return uint16_t(sign | ((rounded - (112u << 23)) >> 13));
}

}  // namespace syshax
