// q4_0: blocks of 32 values, ggml's contents: fp16 scale d = max / -8 (max: the value of largest magnitude, with its
// sign), then 16 bytes whose low nibbles are values 0..15 and high nibbles values 16..31; value = (nibble - 8) * d.
// A block with a NaN or an infinity gets a NaN scale, so that it can never pass for numbers.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/float16.h"

namespace syshax::q4_0 {

constexpr size_t kValues = 32;

struct Block {
  uint16_t scale;
  uint8_t q[kValues / 2];
};
static_assert(sizeof(Block) == 18);

// In double the product is exact and the sum rounds once, as with a fused multiply-add.
static inline uint8_t nibble(float x, float inverse) {
  const int level = int(double(x) * double(inverse) + 8.5);
  return uint8_t(level < 15 ? level : 15);
}

static inline Block encode_block(const float* x) {
  Block block{};
  float amax = 0.0f, max = 0.0f;
  bool finite = true;
  for (size_t i = 0; i < kValues; ++i) {
    const float magnitude = std::fabs(x[i]);
    finite &= magnitude <= 3.402823466e38f;
    max = magnitude > amax ? x[i] : max;
    amax = magnitude > amax ? magnitude : amax;
  }
  const float d = max / -8.0f;
  const float inverse = finite && std::fabs(d) >= 0x1p-126f ? 1.0f / d : 0.0f;  // a smaller d is zero as fp16
  block.scale = finite ? fp16_from_float(d) : 0x7e00;
  for (size_t j = 0; j < kValues / 2; ++j) {
    const uint8_t low = finite ? nibble(x[j], inverse) : 8;
    const uint8_t high = finite ? nibble(x[j + kValues / 2], inverse) : 8;
    block.q[j] = uint8_t(low | (high << 4));
  }
  return block;
}

static inline void encode(const float* src, size_t values, void* dst) {
  auto* out = static_cast<unsigned char*>(dst);
  for (size_t i = 0; i < values / kValues; ++i) {
    const Block block = encode_block(src + i * kValues);
    std::memcpy(out + i * sizeof block, &block, sizeof block);
  }
}

static inline void decode(const void* src, size_t values, float* dst) {
  const auto* in = static_cast<const unsigned char*>(src);
  for (size_t i = 0; i < values / kValues; ++i) {
    Block block;
    std::memcpy(&block, in + i * sizeof block, sizeof block);
    const float d = fp16_to_float(block.scale);
    for (size_t j = 0; j < kValues / 2; ++j) {
      dst[i * kValues + j] = float(int(block.q[j] & 15) - 8) * d;
      dst[i * kValues + j + kValues / 2] = float(int(block.q[j] >> 4) - 8) * d;
    }
  }
}

}  // namespace syshax::q4_0
