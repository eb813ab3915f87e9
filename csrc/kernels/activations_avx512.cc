// q8 and bf16 activation rows with AVX-512.
#include "kernels/vec_avx512.h"

#include "kernels/activations_simd.h"

namespace syshax {

const syshax_activation activation_q8_avx512 = {
    SYSHAX_OPERATOR_ABI, sizeof(syshax_activation), "q8", q8_row_bytes, pack_q8, nullptr};
const syshax_activation activation_q8x2_avx512 = {
    SYSHAX_OPERATOR_ABI, sizeof(syshax_activation), "q8x2", q8x2_row_bytes, pack_q8x2, nullptr};
const syshax_activation activation_bf16_avx512 = {
    SYSHAX_OPERATOR_ABI, sizeof(syshax_activation), "bf16", bf16_row_bytes, pack_bf16, nullptr};

}  // namespace syshax
