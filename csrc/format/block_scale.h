// What the block formats have in common when they encode: a block's largest value, and the scale of 4-bit blocks, of a
// few candidates the one whose values lie nearest to the block's. With 15 steps the largest value alone is a poor
// guide: a slightly smaller or larger step often fits the other 31 better.
//
// Four lanes by the compilers' vector extension: SSE and NEON, which every CPU of the architectures has.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/float16.h"

namespace syshax {

constexpr size_t kScaleBlock = 32;

// True when all 32 are numbers; *extreme is the first of those with the largest magnitude.
static inline bool find_extreme(const float* x, float* extreme) {
  float amax = 0.0f;
  bool finite = true;
  *extreme = 0.0f;
  for (size_t i = 0; i < kScaleBlock; ++i) {
    const float magnitude = std::fabs(x[i]);
    finite &= magnitude <= 3.402823466e38f;
    *extreme = magnitude > amax ? x[i] : *extreme;
    amax = magnitude > amax ? magnitude : amax;
  }
  return finite;
}

typedef float FourFloats __attribute__((vector_size(16), aligned(4), may_alias));

// q = x * inverse rounded to nearest even, within -8 and 7. Returns the sum of squares of q * scale - x.
static inline float round_to_nibbles(const float* x, float inverse, float scale, float* q) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves no room for fractions
  FourFloats sums{};
  for (size_t i = 0; i < kScaleBlock; i += 4) {
    const FourFloats value = *reinterpret_cast<const FourFloats*>(x + i);
    FourFloats level = (value * inverse + kRound) - kRound;
    level = level < -8.0f ? FourFloats{} - 8.0f : level;
    level = level > 7.0f ? FourFloats{} + 7.0f : level;
    const FourFloats error = level * scale - value;
    sums += error * error;
    *reinterpret_cast<FourFloats*>(q + i) = level;
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Tries steps of extreme / divisors[i], stored as fp16; the first wins a tie. Fills q for the best, returns its scale.
template <int Candidates>
static inline uint16_t best_nibble_scale(const float* x, float extreme, const float (&divisors)[Candidates], float* q) {
  const bool tiny = std::fabs(extreme) < 1e-30f;  // no fp16 scale but 0, and a divisor over it might not be finite
  uint16_t best = 0;
  float least = 0.0f, tried[kScaleBlock];
  for (int i = 0; i < Candidates && (i == 0 || least > 0.0f); ++i) {
    const uint16_t scale = fp16_from_float(extreme / divisors[i]);
    const float inverse = tiny ? 0.0f : divisors[i] / extreme;
    const float error = round_to_nibbles(x, inverse, fp16_to_float(scale), tried);
    if (i > 0 && !(error < least)) continue;
    least = error;
    best = scale;
    std::memcpy(q, tried, sizeof tried);
  }
  return best;
}

}  // namespace syshax
