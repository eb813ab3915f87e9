// The reference element-wise operations. silu goes through double; its limits are -0 at -inf and +inf at +inf.
#include <cmath>
#include <cstring>

#include "base/float16.h"
#include "kernels/vector_tables.h"

namespace syshax {
namespace {

float silu(float x) {
  const double clamped = x < -800.0f ? -800.0 : double(x);
  return float(clamped / (1.0 + std::exp(-clamped)));
}

void silu_mul(const float* tile, size_t pairs, float* out) {
  for (size_t p = 0; p < pairs; ++p) {
    for (size_t i = 0; i < 16; ++i) out[16 * p + i] = silu(tile[32 * p + i]) * tile[32 * p + 16 + i];
  }
}

void accumulate(float weight, const float* src, size_t values, float* dst) {
  for (size_t i = 0; i < values; ++i) dst[i] = std::fma(weight, src[i], dst[i]);
}

void widen(const void* src, syshax_dtype dtype, size_t values, float* dst) {
  if (dtype == SYSHAX_FLOAT32) {
    std::memcpy(dst, src, values * 4);
    return;
  }
  for (size_t i = 0; i < values; ++i) {
    uint16_t value;
    std::memcpy(&value, static_cast<const char*>(src) + 2 * i, 2);
    dst[i] = dtype == SYSHAX_FLOAT16 ? fp16_to_float(value) : bf16_to_float(value);
  }
}

void narrow(const float* src, size_t values, syshax_dtype dtype, void* dst) {
  if (dtype == SYSHAX_FLOAT32) {
    std::memcpy(dst, src, values * 4);
    return;
  }
  for (size_t i = 0; i < values; ++i) {
    const uint16_t value = dtype == SYSHAX_FLOAT16 ? fp16_from_float(src[i]) : bf16_from_float(src[i]);
    std::memcpy(static_cast<char*>(dst) + 2 * i, &value, 2);
  }
}

}  // namespace

const VectorOps vector_ops_scalar = {"scalar", silu_mul, accumulate, widen, narrow};

}  // namespace syshax
