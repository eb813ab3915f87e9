// The kernels that every aarch64 CPU can run, and how NEON multiplies bytes without dot products.
#include "kernels/vec_neon.h"

#include "kernels/block_tiles.h"
#include "kernels/float_tiles.h"
#include "kernels/float_weights.h"
#include "kernels/kernels.h"

namespace syshax {
namespace {

// Two products of neighbours fit int16 (128 * 127 * 2 = 32512), so pairs are added there and then widened.
struct WeightsQ8 {
  static constexpr int kTokens = 3;
  static constexpr int kMaxSums = 12;
  static constexpr int kParts = 1;
  static Vec::I begin(int32_t) { return vdupq_n_s32(0); }
  template <int Part>
  static int8x16_t get(const void* p) {
    return vreinterpretq_s8_u8(veorq_u8(vld1q_u8(static_cast<const uint8_t*>(p)), vdupq_n_u8(0x80)));
  }
  static Vec::I dot(Vec::I sum, int8x16_t w, Vec::I a) {
    const int8x16_t x = vreinterpretq_s8_s32(a);
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_high_s8(w, x);
    return vpadalq_s16(sum, vpaddq_s16(low, high));
  }
  static Vec::I finish(Vec::I sum, int32_t) { return sum; }
};

// A block's 8 products of a nibble fit int16 (15 * 127 * 8 = 15240), and so do two such sums: they are widened once.
struct WeightsQ4 {
  static constexpr int kTokens = 2;
  static constexpr int kMaxSums = 8;
  static constexpr int kParts = 2;
  struct Sums {
    int16x8_t low, high;
  };
  static Sums begin(int32_t) { return {vdupq_n_s16(0), vdupq_n_s16(0)}; }
  template <int Part>
  static int8x16_t get(const void* p) {
    const uint8x16_t both = vld1q_u8(static_cast<const uint8_t*>(p));
    return vreinterpretq_s8_u8(Part == 0 ? vandq_u8(both, vdupq_n_u8(15)) : vshrq_n_u8(both, 4));
  }
  static Sums dot(Sums sum, int8x16_t w, Vec::I a) {
    const int8x16_t x = vreinterpretq_s8_s32(a);
    return {vmlal_s8(sum.low, vget_low_s8(w), vget_low_s8(x)), vmlal_high_s8(sum.high, w, x)};
  }
  static Vec::I finish(Sums sum, int32_t activation_sum) {
    return vsubq_s32(vpaddlq_s16(vpaddq_s16(sum.low, sum.high)), vdupq_n_s32(8 * activation_sum));
  }
};

}  // namespace

void run_bf16_f32_neon(const syshax_matmul_args* args) { run_tiles<FloatTile<WeightsBf16>>(args); }
void run_fp16_f32_neon(const syshax_matmul_args* args) { run_tiles<FloatTile<WeightsFp16>>(args); }
void run_q8_0_q8_neon(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ8>>(args); }
void run_q4_0_q8_neon(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ4>>(args); }
void run_q8_0_q8x2_neon(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ8, 2>>(args); }
void run_q4_0_q8x2_neon(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ4, 2>>(args); }

}  // namespace syshax
