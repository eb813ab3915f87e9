// bf16 weights against bf16 activations with vdpbf16ps, for requests whose activations are bf16 anyway. It adds two
// products a step, rounds each and takes subnormals as zero: within the bound the tests compute, not the scalar's bits.
#include "kernels/vec_avx512.h"

namespace syshax {
namespace {

Vec::F bf16_dot(Vec::I w, Vec::I a, Vec::F acc) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(a));
}

}  // namespace
}  // namespace syshax

#include "kernels/bf16_dot_weights.h"
#include "kernels/kernels.h"

namespace syshax {

void run_bf16_bf16_avx512bf16(const syshax_matmul_args* args) { run_tiles<FloatTile<WeightsBf16Dot>>(args); }

}  // namespace syshax
