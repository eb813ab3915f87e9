// q8 and bf16 activation rows with NEON.
#include "kernels/vec_neon.h"

#include "kernels/activations_simd.h"

namespace syshax {

const syshax_activation activation_q8_neon = {
    SYSHAX_OPERATOR_ABI, sizeof(syshax_activation), "q8", q8_row_bytes, pack_q8, nullptr};
const syshax_activation activation_q8x2_neon = {
    SYSHAX_OPERATOR_ABI, sizeof(syshax_activation), "q8x2", q8x2_row_bytes, pack_q8x2, nullptr};
const syshax_activation activation_bf16_neon = {
    SYSHAX_OPERATOR_ABI, sizeof(syshax_activation), "bf16", bf16_row_bytes, pack_bf16, nullptr};

}  // namespace syshax
