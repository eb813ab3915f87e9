// The element-wise operations with AVX-512.
#include "kernels/vec_avx512.h"

#include "kernels/vector_ops_simd.h"
#include "kernels/vector_tables.h"

namespace syshax {

const VectorOps vector_ops_avx512 = {"avx512", silu_mul, accumulate, widen, narrow};

}  // namespace syshax
