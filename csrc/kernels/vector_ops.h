// The element-wise operations of a MoE layer that are not matrix products, one table per ISA. Same numbers on
// every ISA up to the last bits; widen and narrow are exact (round to nearest even, NaN stays NaN).
#pragma once
#include <cstddef>
#include <vector>

#include "base/cpu_features.h"
#include "syshax/quantization_base.h"

namespace syshax {

struct VectorOps {
  const char* isa;
  // tile: `pairs` pairs of 16-lane panels (gate, up); out[16 * p + i] = silu(gate[p][i]) * up[p][i].
  void (*silu_mul)(const float* tile, size_t pairs, float* out);
  // dst[i] += weight * src[i]
  void (*accumulate)(float weight, const float* src, size_t values, float* dst);
  // dst[i] = float(src[i])
  void (*widen)(const void* src, syshax_dtype dtype, size_t values, float* dst);
  // dst[i] = dtype(src[i])
  void (*narrow)(const float* src, size_t values, syshax_dtype dtype, void* dst);
};

const VectorOps& select_vector_ops(const CpuFeatures& features);
// Those that the features allow, weakest first.
std::vector<const VectorOps*> usable_vector_ops(const CpuFeatures& features);

}  // namespace syshax
