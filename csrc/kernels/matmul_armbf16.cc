// bf16 weights against bf16 activations with bfdot, for requests whose activations are bf16 anyway. It adds two
// products a step in the hardware's own way: within the bound the tests compute, not the scalar's bits.
#include "kernels/vec_neon.h"

#include "kernels/float_tiles.h"
#include "kernels/kernels.h"

namespace syshax {
namespace {

struct WeightsBf16Dot {
  static constexpr int kValues = 2;
  static constexpr int kSteps = 1;
  static constexpr int kLaneBytes = 4;
  template <int>
  static Vec::I get(const void* p) {
    return Vec::loadi(p);
  }
  template <int>
  static Vec::I activation(const void* row, size_t k) {
    int32_t pair;
    __builtin_memcpy(&pair, static_cast<const char*>(row) + 2 * k, 4);
    return Vec::set1i(pair);
  }
  static Vec::F multiply_add(Vec::I w, Vec::I a, Vec::F acc) {
    return vbfdotq_f32(acc, vreinterpretq_bf16_s32(w), vreinterpretq_bf16_s32(a));
  }
};

}  // namespace

void run_bf16_bf16_armbf16(const syshax_matmul_args* args) { run_tiles<FloatTile<WeightsBf16Dot>>(args); }

}  // namespace syshax
