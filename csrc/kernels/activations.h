// How kernels want activation rows. A name stands for one layout; the ISA variants of a name write the same bytes and
// differ in speed alone.
//
//   f32    float[k_padded]
//   bf16   uint16[k_padded], rounded to nearest even
//   q8     int8 q[k_padded], then per block of 32: float d[k_padded / 32], then int32 sum[k_padded / 32] of the q
//          d = amax / 127 and q = x / d rounded to nearest even, in [-127, 127]; a block of zeros has d = 0, q = 0.
//          A block with a NaN or an infinity has d = NaN, q = 0: every product with it is NaN.
//   q8x2   a q8 row of x, then a q8 row of what the first leaves over, x - q d (one rounding): about 15 bits of
//          every value
#pragma once
#include <cstddef>
#include <cstdint>

#include "syshax/matmul_base.h"

namespace syshax {

extern const syshax_activation activation_f32_scalar, activation_q8_scalar, activation_q8x2_scalar;
extern const syshax_activation activation_q8_avx2, activation_q8x2_avx2;
extern const syshax_activation activation_q8_avx512, activation_q8x2_avx512, activation_bf16_avx512;
extern const syshax_activation activation_q8_neon, activation_q8x2_neon, activation_bf16_neon;

static inline size_t round_to_64(size_t bytes) { return (bytes + 63) / 64 * 64; }

static inline size_t f32_row_bytes(size_t k_padded) { return k_padded * 4; }
static inline size_t bf16_row_bytes(size_t k_padded) { return round_to_64(k_padded * 2); }
static inline size_t q8_row_bytes(size_t k_padded) { return round_to_64(k_padded + k_padded / 32 * 8); }

static inline size_t q8x2_row_bytes(size_t k_padded) { return 2 * q8_row_bytes(k_padded); }

static inline float* q8_scales(void* row, size_t k_padded) {
  return reinterpret_cast<float*>(static_cast<char*>(row) + k_padded);
}
static inline int32_t* q8_sums(void* row, size_t k_padded) {
  return reinterpret_cast<int32_t*>(static_cast<char*>(row) + k_padded + k_padded / 32 * 4);
}
static inline const float* q8_scales(const void* row, size_t k_padded) {
  return q8_scales(const_cast<void*>(row), k_padded);
}
static inline const int32_t* q8_sums(const void* row, size_t k_padded) {
  return q8_sums(const_cast<void*>(row), k_padded);
}

}  // namespace syshax
