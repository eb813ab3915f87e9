// The element-wise operations with NEON.
#include "kernels/vec_neon.h"

#include "kernels/vector_ops_simd.h"
#include "kernels/vector_tables.h"

namespace syshax {

const VectorOps vector_ops_neon = {"neon", silu_mul, accumulate, widen, narrow};

}  // namespace syshax
