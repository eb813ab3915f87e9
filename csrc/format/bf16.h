// bf16: the upper half of a float32, rounded to nearest even. A block is one value.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/float16.h"

namespace syshax::bf16 {

static inline void encode(const float* src, size_t values, void* dst) {
  auto* out = static_cast<unsigned char*>(dst);
  for (size_t i = 0; i < values; ++i) {
    const uint16_t value = bf16_from_float(src[i]);
    std::memcpy(out + 2 * i, &value, 2);
  }
}

static inline void decode(const void* src, size_t values, float* dst) {
  const auto* in = static_cast<const unsigned char*>(src);
  for (size_t i = 0; i < values; ++i) {
    uint16_t value;
    std::memcpy(&value, in + 2 * i, 2);
    dst[i] = bf16_to_float(value);
  }
}

}  // namespace syshax::bf16
