// The element-wise operations with AVX2.
#include "kernels/vec_avx2.h"

#include "kernels/vector_ops_simd.h"
#include "kernels/vector_tables.h"

namespace syshax {

const VectorOps vector_ops_avx2 = {"avx2", silu_mul, accumulate, widen, narrow};

}  // namespace syshax
