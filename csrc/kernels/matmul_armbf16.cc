// bf16 weights against bf16 activations with bfdot, for requests whose activations are bf16 anyway. It adds two
// products a step in the hardware's own way: within the bound the tests compute, not the scalar's bits.
#include "kernels/vec_neon.h"

namespace syshax {
namespace {

Vec::F bf16_dot(Vec::I w, Vec::I a, Vec::F acc) {
  return vbfdotq_f32(acc, vreinterpretq_bf16_s32(w), vreinterpretq_bf16_s32(a));
}

}  // namespace
}  // namespace syshax

#include "kernels/bf16_dot_weights.h"
#include "kernels/kernels.h"

namespace syshax {

void run_bf16_bf16_armbf16(const syshax_matmul_args* args) { run_tiles<FloatTile<WeightsBf16Dot>>(args); }

}  // namespace syshax
