// q4_0: blocks of 32 values, ggml's contents: fp16 scale d, then 16 bytes whose low nibbles are values 0..15 and high
// nibbles values 16..31; value = (nibble - 8) * d. The encoder takes the d of least squared error among 8, the value
// of largest magnitude being -8.75 to -7 steps (-8 is the lowest stored). A block with a NaN or an infinity gets a NaN
// scale, so that it can never pass for numbers.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/float16.h"
#include "format/block_scale.h"

namespace syshax::q4_0 {

constexpr size_t kValues = 32;

struct Block {
  uint16_t scale;
  uint8_t q[kValues / 2];
};
static_assert(sizeof(Block) == 18);

constexpr float kDivisors[8] = {-8.0f, -7.0f, -7.25f, -7.5f, -7.75f, -8.25f, -8.5f, -8.75f};

static inline Block encode_block(const float* x) {
  Block block{};
  float extreme, q[kValues] = {};
  block.scale = find_extreme(x, &extreme) ? best_nibble_scale(x, extreme, kDivisors, q) : 0x7e00;
  for (size_t j = 0; j < kValues / 2; ++j) block.q[j] = uint8_t((int(q[j]) + 8) | ((int(q[j + kValues / 2]) + 8) << 4));
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
