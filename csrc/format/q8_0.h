// q8_0: blocks of 32 values, ggml's contents: fp16 scale d, then 32 int8 q = round(x / d); value = q * d. The encoder
// takes the d of least squared error among 16, the largest value being 127 to 119.5 steps. A block with a NaN or an
// infinity gets a NaN scale, so that it can never pass for numbers.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/float16.h"
#include "format/block_scale.h"

namespace syshax::q8_0 {

constexpr size_t kValues = 32;

struct Block {
  uint16_t scale;
  int8_t q[kValues];
};
static_assert(sizeof(Block) == 34);

constexpr float kDivisors[16] = {127.0f, 126.5f, 126.0f, 125.5f, 125.0f, 124.5f, 124.0f, 123.5f,
                                 123.0f, 122.5f, 122.0f, 121.5f, 121.0f, 120.5f, 120.0f, 119.5f};

static inline Block encode_block(const float* x) {
  Block block{};
  float extreme, q[kValues];
  if (!find_extreme(x, &extreme)) {
    block.scale = 0x7e00;
    return block;
  }
  block.scale = best_scale<false>(x, std::fabs(extreme), kDivisors, q);
  for (size_t i = 0; i < kValues; ++i) block.q[i] = int8_t(q[i]);
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
    for (size_t j = 0; j < kValues; ++j) dst[i * kValues + j] = float(block.q[j]) * d;
  }
}

}  // namespace syshax::q8_0
