// Packs activation rows with the vector header's operations; the same bytes as activations_scalar.cc. Include after a
// vec_*.h.
#pragma once
#include <cstring>

#include "base/float16.h"
#include "kernels/activations.h"
#include "kernels/bf16_simd.h"

namespace syshax {
namespace {

// x: 32 values.
void pack_q8_block(const float* x, int8_t* q, float* scale, int32_t* sum) {
  constexpr int kVecs = 32 / Vec::kLanes;
  // Magnitudes order as integers do, with infinity and then NaN above all numbers.
  Vec::I magnitude = Vec::set1i(0);
  for (int v = 0; v < kVecs; ++v) {
    magnitude = Vec::maxi(magnitude, Vec::andi(Vec::bits(Vec::load(x + v * Vec::kLanes)), Vec::set1i(0x7fffffff)));
  }
  const int32_t amax_bits = Vec::largest(magnitude);
  float amax;
  std::memcpy(&amax, &amax_bits, 4);
  const bool finite = amax_bits < 0x7f800000;
  const float d = amax / 127.0f;
  *scale = finite ? d : __builtin_nanf("");
  *sum = 0;
  if (!finite || !(d > 0.0f)) {
    std::memset(q, 0, 32);
    return;
  }
  Vec::I sums = Vec::set1i(0);
  for (int v = 0; v < kVecs; ++v) {
    Vec::F scaled = Vec::div(Vec::load(x + v * Vec::kLanes), Vec::set1(d));
    scaled = Vec::min(Vec::set1(127.0f), Vec::max(Vec::set1(-127.0f), scaled));
    const Vec::I rounded = Vec::round(scaled);
    sums = Vec::addi(sums, rounded);
    Vec::store_i8(q + v * Vec::kLanes, rounded);
  }
  *sum = Vec::sum(sums);
}

void pack_q8(const float* src, size_t values, size_t k_begin, size_t k_padded, void* row) {
  for (size_t i = 0; i < round_to_64(values); i += 32) {
    float padded[32];
    const float* x = src + i;
    if (i + 32 > values) {
      std::memset(padded, 0, sizeof padded);
      if (i < values) std::memcpy(padded, x, (values - i) * 4);
      x = padded;
    }
    const size_t k = k_begin + i;
    pack_q8_block(x, static_cast<int8_t*>(row) + k, q8_scales(row, k_padded) + k / 32, q8_sums(row, k_padded) + k / 32);
  }
}

void pack_q8x2(const float* src, size_t values, size_t k_begin, size_t k_padded, void* row) {
  pack_q8(src, values, k_begin, k_padded, row);
  char* second = static_cast<char*>(row) + q8_row_bytes(k_padded);
  for (size_t i = 0; i < values; i += 64) {
    float rest[64];
    const size_t count = values - i < 64 ? values - i : 64;
    const int8_t* q = static_cast<const int8_t*>(row) + k_begin + i;
    const float* d = q8_scales(row, k_padded) + (k_begin + i) / 32;
    for (size_t j = 0; j < count; ++j) rest[j] = __builtin_fmaf(-float(q[j]), d[j / 32], src[i + j]);
    pack_q8(rest, count, k_begin + i, k_padded, second);
  }
}

[[maybe_unused]] void pack_bf16(const float* src, size_t values, size_t k_begin, size_t, void* row) {
  uint16_t* out = static_cast<uint16_t*>(row) + k_begin;
  size_t i = 0;
  for (; i + Vec::kLanes <= values; i += Vec::kLanes) Vec::store_u16(out + i, bf16_bits(Vec::load(src + i)));
  for (; i < values; ++i) out[i] = bf16_from_float(src[i]);
  std::memset(out + values, 0, (round_to_64(values) - values) * 2);
}

}  // namespace
}  // namespace syshax
