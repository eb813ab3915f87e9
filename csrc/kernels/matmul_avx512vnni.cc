// The AVX-512 kernels for integer blocks: vpdpbusd, weights as the unsigned operand (q8_0's are stored as value + 128,
// q4_0's nibbles as they are) and activations as the signed one. The correction, -128 or -8 times the activations' sum,
// is the accumulator's start value, so it costs nothing.
#include "kernels/vec_avx512.h"

#include "kernels/block_tiles.h"
#include "kernels/kernels.h"

namespace syshax {
namespace {

struct WeightsQ8 {
  static constexpr int kTokens = 6;
  static constexpr int kMaxSums = 12;
  static constexpr int kParts = 1;
  static Vec::I begin(int32_t activation_sum) { return Vec::set1i(-128 * activation_sum); }
  template <int>
  static Vec::I get(const void* p) {
    return Vec::loadi(p);
  }
  static Vec::I dot(Vec::I sum, Vec::I w, Vec::I a) { return _mm512_dpbusd_epi32(sum, w, a); }
  static Vec::I finish(Vec::I sum, int32_t) { return sum; }
};

struct WeightsQ4 {
  static constexpr int kTokens = 6;
  static constexpr int kMaxSums = 12;
  static constexpr int kParts = 2;
  static Vec::I begin(int32_t activation_sum) { return Vec::set1i(-8 * activation_sum); }
  template <int Part>
  static Vec::I get(const void* p) {
    const Vec::I both = Vec::loadi(p);
    return Vec::andi(Part == 0 ? both : Vec::shift_right<4>(both), Vec::set1i(0x0f0f0f0f));
  }
  static Vec::I dot(Vec::I sum, Vec::I w, Vec::I a) { return _mm512_dpbusd_epi32(sum, w, a); }
  static Vec::I finish(Vec::I sum, int32_t) { return sum; }
};

}  // namespace

void run_q8_0_q8_avx512vnni(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ8>>(args); }
void run_q4_0_q8_avx512vnni(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ4>>(args); }
void run_q8_0_q8x2_avx512vnni(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ8, 2>>(args); }
void run_q4_0_q8x2_avx512vnni(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ4, 2>>(args); }

}  // namespace syshax
