// q8 activation rows with AVX2.
#include "kernels/vec_avx2.h"

#include "kernels/activations_simd.h"

namespace syshax {

const syshax_activation activation_q8_avx2 = {
    SYSHAX_OPERATOR_ABI, sizeof(syshax_activation), "q8", q8_row_bytes, pack_q8, nullptr};
const syshax_activation activation_q8x2_avx2 = {
    SYSHAX_OPERATOR_ABI, sizeof(syshax_activation), "q8x2", q8x2_row_bytes, pack_q8x2, nullptr};

}  // namespace syshax
