// The aarch64 kernels for integer blocks with 8-bit matrix products.
#include "kernels/vec_neon.h"

#include "kernels/block_weights_dotprod.h"
#include "kernels/kernels.h"
#include "kernels/matrix_tiles_i8mm.h"

namespace syshax {

void run_q8_0_q8_i8mm(const syshax_matmul_args* args) { run_tiles<MatrixTile<WeightsQ8>>(args); }
void run_q4_0_q8_i8mm(const syshax_matmul_args* args) { run_tiles<MatrixTile<WeightsQ4>>(args); }

}  // namespace syshax
