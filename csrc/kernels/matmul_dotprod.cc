// The aarch64 kernels for integer blocks with the dot-product extension.
#include "kernels/vec_neon.h"

#include "kernels/block_tiles.h"
#include "kernels/block_weights_dotprod.h"
#include "kernels/kernels.h"

namespace syshax {

void run_q8_0_q8_dotprod(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ8>>(args); }
void run_q4_0_q8_dotprod(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ4>>(args); }
void run_q8_0_q8x2_dotprod(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ8, 2>>(args); }
void run_q4_0_q8x2_dotprod(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ4, 2>>(args); }

}  // namespace syshax
