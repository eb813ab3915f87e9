// q8_0: blocks of 32 values, ggml's contents: fp16 scale d = amax / 127, then 32 int8 q = round(x / d); value = q * d.
// A block with a NaN or an infinity gets a NaN scale, so that it can never pass for numbers.
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

static inline Block encode_block(const float* x) {
  Block block{};
  float extreme;
  if (!find_extreme(x, &extreme)) {
    block.scale = 0x7e00;
    return block;
  }
  const float d = std::fabs(extreme) / 127.0f;
  const float inverse = d >= 0x1p-126f ? 1.0f / d : 0.0f;  // a smaller d is zero as fp16
  block.scale = fp16_from_float(d);
  for (size_t i = 0; i < kValues; ++i) {  // half away from zero, as ggml rounds
    const float scaled = x[i] * inverse;
    const int whole = int(scaled);
    const float rest = scaled - float(whole);
    block.q[i] = int8_t(whole + (rest >= 0.5f) - (rest <= -0.5f));
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
    for (size_t j = 0; j < kValues; ++j) dst[i * kValues + j] = float(block.q[j]) * d;
  }
}

}  // namespace syshax::q8_0
