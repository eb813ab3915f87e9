// The AVX-512 kernels that need no extension: float weights.
#include "kernels/vec_avx512.h"

#include "kernels/float_tiles.h"
#include "kernels/float_weights.h"
#include "kernels/kernels.h"

namespace syshax {

void run_bf16_f32_avx512(const syshax_matmul_args* args) { run_tiles<FloatTile<WeightsBf16>>(args); }
void run_fp16_f32_avx512(const syshax_matmul_args* args) { run_tiles<FloatTile<WeightsFp16>>(args); }

}  // namespace syshax
