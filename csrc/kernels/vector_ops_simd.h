// The element-wise operations over the vector header. Include after a vec_*.h.
//
// silu(x) = x * sigmoid(x) with e = exp(-|x|) in (0, 1]: sigmoid is 1 / (1 + e) for x >= 0 and e / (1 + e) below, which
// loses nothing anywhere. exp: e = 2^n * P(r), r = y - n ln 2 in [-0.35, 0.35], P the Taylor polynomial to r^7 (error
// 6e-9); 2^n is applied in two halves, so that subnormal results come out right.
#pragma once
#include <cstring>

#include "base/float16.h"
#include "kernels/bf16_simd.h"
#include "kernels/vector_ops.h"

namespace syshax {
namespace {

using F = Vec::F;
using I = Vec::I;

F power_of_two(I n) { return Vec::from_bits(Vec::shift_left<23>(Vec::addi(n, Vec::set1i(127)))); }

// exp(y) for y <= 0 (or NaN).
F exp_negative(F y) {
  y = Vec::max(Vec::set1(-104.0f), y);  // exp(-104) is 0 in float32
  const I n = Vec::round(Vec::mul(y, Vec::set1(1.44269504f)));
  const F nf = Vec::to_float(n);
  F r = Vec::fma(nf, Vec::set1(-0x1.62e4p-1f), y);  // ln 2 in two parts, the first short enough for exact products
  r = Vec::fma(nf, Vec::set1(-0x1.7f7d1cp-20f), r);
  F p = Vec::set1(1.0f / 5040);
  p = Vec::fma(p, r, Vec::set1(1.0f / 720));
  p = Vec::fma(p, r, Vec::set1(1.0f / 120));
  p = Vec::fma(p, r, Vec::set1(1.0f / 24));
  p = Vec::fma(p, r, Vec::set1(1.0f / 6));
  p = Vec::fma(p, r, Vec::set1(0.5f));
  p = Vec::fma(p, r, Vec::set1(1.0f));
  p = Vec::fma(p, r, Vec::set1(1.0f));
  const I half = Vec::half(n);
  return Vec::mul(Vec::mul(p, power_of_two(half)), power_of_two(Vec::subi(n, half)));
}

F silu(F x) {
  const F one = Vec::set1(1.0f);
  const F e = exp_negative(Vec::from_bits(Vec::ori(Vec::bits(x), Vec::set1i(int32_t(0x80000000)))));
  const F sigmoid = Vec::div(Vec::by_sign(x, e, one), Vec::add(one, e));
  return Vec::mul(Vec::max(Vec::set1(-200.0f), x), sigmoid);  // -infinity * 0 would be NaN
}

void silu_mul(const float* tile, size_t pairs, float* out) {
  for (size_t p = 0; p < pairs; ++p) {
    for (int i = 0; i < 16; i += Vec::kLanes) {
      const F gate = Vec::load(tile + 32 * p + i), up = Vec::load(tile + 32 * p + 16 + i);
      Vec::store(out + 16 * p + i, Vec::mul(silu(gate), up));
    }
  }
}

void accumulate(float weight, const float* src, size_t values, float* dst) {
  const F w = Vec::set1(weight);
  size_t i = 0;
  for (; i + Vec::kLanes <= values; i += Vec::kLanes) {
    Vec::store(dst + i, Vec::fma(w, Vec::load(src + i), Vec::load(dst + i)));
  }
  for (; i < values; ++i) dst[i] = __builtin_fmaf(weight, src[i], dst[i]);
}

void widen(const void* src, syshax_dtype dtype, size_t values, float* dst) {
  if (dtype == SYSHAX_FLOAT32) {
    std::memcpy(dst, src, values * 4);
    return;
  }
  const char* in = static_cast<const char*>(src);
  const bool fp16 = dtype == SYSHAX_FLOAT16;
  size_t i = 0;
  for (; i + Vec::kLanes <= values; i += Vec::kLanes) {
    const void* at = in + 2 * i;
    Vec::store(dst + i, fp16 ? Vec::load_fp16(at) : Vec::from_bits(Vec::shift_left<16>(Vec::load_u16(at))));
  }
  for (; i < values; ++i) {
    uint16_t value;
    std::memcpy(&value, in + 2 * i, 2);
    dst[i] = fp16 ? fp16_to_float(value) : bf16_to_float(value);
  }
}

void narrow(const float* src, size_t values, syshax_dtype dtype, void* dst) {
  if (dtype == SYSHAX_FLOAT32) {
    std::memcpy(dst, src, values * 4);
    return;
  }
  char* out = static_cast<char*>(dst);
  const bool fp16 = dtype == SYSHAX_FLOAT16;
  size_t i = 0;
  for (; i + Vec::kLanes <= values; i += Vec::kLanes) {
    if (fp16) {
      Vec::store_fp16(out + 2 * i, Vec::load(src + i));
    } else {
      Vec::store_u16(out + 2 * i, bf16_bits(Vec::load(src + i)));
    }
  }
  for (; i < values; ++i) {
    const uint16_t value = fp16 ? fp16_from_float(src[i]) : bf16_from_float(src[i]);
    std::memcpy(out + 2 * i, &value, 2);
  }
}

}  // namespace
}  // namespace syshax
