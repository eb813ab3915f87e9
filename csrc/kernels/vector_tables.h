// The tables of VectorOps that exist, for vector_ops.cc alone.
#pragma once
#include "kernels/vector_ops.h"

namespace syshax {

extern const VectorOps vector_ops_scalar, vector_ops_avx2, vector_ops_avx512, vector_ops_neon;

}  // namespace syshax
