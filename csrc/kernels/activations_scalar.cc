// The reference packing of activation rows, one value at a time.
#include <cmath>
#include <cstring>

#include "kernels/activations.h"

namespace syshax {
namespace {

void pack_f32(const float* src, size_t values, size_t k_begin, size_t, void* row) {
  float* out = static_cast<float*>(row) + k_begin;
  std::memcpy(out, src, values * 4);
  std::memset(out + values, 0, (round_to_64(values) - values) * 4);
}

// x: 32 values, the last of them padded with zeros.
void pack_q8_block(const float* x, int8_t* q, float* scale, int32_t* sum) {
  float amax = 0.0f;
  bool finite = true;
  for (int i = 0; i < 32; ++i) {
    finite = finite && std::isfinite(x[i]);
    amax = std::fmax(amax, std::fabs(x[i]));
  }
  const float d = amax / 127.0f;
  *scale = finite ? d : std::nanf("");
  *sum = 0;
  for (int i = 0; i < 32; ++i) {
    q[i] = 0;
    if (finite && d > 0.0f) q[i] = int8_t(std::fmin(std::fmax(std::nearbyint(x[i] / d), -127.0f), 127.0f));
    *sum += q[i];
  }
}

void pack_q8(const float* src, size_t values, size_t k_begin, size_t k_padded, void* row) {
  for (size_t i = 0; i < round_to_64(values); i += 32) {
    float x[32] = {};
    if (i < values) std::memcpy(x, src + i, (values - i < 32 ? values - i : 32) * 4);
    const size_t k = k_begin + i;
    pack_q8_block(x, static_cast<int8_t*>(row) + k, q8_scales(row, k_padded) + k / 32, q8_sums(row, k_padded) + k / 32);
  }
}

void pack_q8x2(const float* src, size_t values, size_t k_begin, size_t k_padded, void* row) {
  pack_q8(src, values, k_begin, k_padded, row);
  for (size_t i = 0; i < values; i += 64) {
    float rest[64];
    const size_t count = values - i < 64 ? values - i : 64;
    for (size_t j = 0; j < count; ++j) {
      const size_t k = k_begin + i + j;
      const float q = static_cast<const int8_t*>(row)[k];
      rest[j] = std::fma(-q, q8_scales(row, k_padded)[k / 32], src[i + j]);
    }
    pack_q8(rest, count, k_begin + i, k_padded, static_cast<char*>(row) + q8_row_bytes(k_padded));
  }
}

constexpr uint32_t kSize = sizeof(syshax_activation);

}  // namespace

const syshax_activation activation_f32_scalar = {SYSHAX_OPERATOR_ABI, kSize, "f32", f32_row_bytes, pack_f32, nullptr};
const syshax_activation activation_q8_scalar = {SYSHAX_OPERATOR_ABI, kSize, "q8", q8_row_bytes, pack_q8, nullptr};
const syshax_activation activation_q8x2_scalar = {SYSHAX_OPERATOR_ABI, kSize,     "q8x2",
                                                  q8x2_row_bytes,      pack_q8x2, nullptr};

}  // namespace syshax
