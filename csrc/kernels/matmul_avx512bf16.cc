// bf16 weights against bf16 activations with vdpbf16ps, for requests whose activations are bf16 anyway. It adds two
// products a step, rounds each and takes subnormals as zero: within the bound the tests compute, not the scalar's bits.
#include "kernels/vec_avx512.h"

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
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(a));
  }
};

}  // namespace

void run_bf16_bf16_avx512bf16(const syshax_matmul_args* args) { run_tiles<FloatTile<WeightsBf16Dot>>(args); }

}  // namespace syshax
