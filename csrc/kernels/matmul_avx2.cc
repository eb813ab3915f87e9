// The AVX2 kernels, and how AVX2 multiplies bytes.
#include "kernels/vec_avx2.h"

#include "kernels/block_tiles.h"
#include "kernels/float_tiles.h"
#include "kernels/float_weights.h"
#include "kernels/kernels.h"

namespace syshax {
namespace {

// Signed weights through |w| * (sign of w applied to a): 128 * 127 * 2 fits int16, so nothing saturates.
struct WeightsQ8 {
  static constexpr int kTokens = 4;
  static constexpr int kMaxSums = 8;
  static constexpr int kParts = 1;
  struct W {
    __m256i magnitude, value;
  };
  static Vec::I begin(int32_t) { return _mm256_setzero_si256(); }
  template <int Part>
  static W get(const void* p) {
    const __m256i value = _mm256_xor_si256(Vec::loadi(p), _mm256_set1_epi8(-128));
    return {_mm256_abs_epi8(value), value};
  }
  static Vec::I dot(Vec::I sum, W w, Vec::I a) {
    const __m256i pairs = _mm256_maddubs_epi16(w.magnitude, _mm256_sign_epi8(a, w.value));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static Vec::I finish(Vec::I sum, int32_t) { return sum; }
};

// Nibbles are unsigned; a block's 8 pair sums fit int16 (15 * 127 * 2 * 8 = 30480), so they are widened once.
struct WeightsQ4 {
  static constexpr int kTokens = 4;
  static constexpr int kMaxSums = 8;
  static constexpr int kParts = 2;
  static Vec::I begin(int32_t) { return _mm256_setzero_si256(); }
  template <int Part>
  static Vec::I get(const void* p) {
    const __m256i both = Vec::loadi(p);
    return _mm256_and_si256(Part == 0 ? both : _mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
  }
  static Vec::I dot(Vec::I sum, Vec::I w, Vec::I a) { return _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, a)); }
  static Vec::I finish(Vec::I sum, int32_t activation_sum) {
    return _mm256_sub_epi32(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)), _mm256_set1_epi32(8 * activation_sum));
  }
};

}  // namespace

void run_bf16_f32_avx2(const syshax_matmul_args* args) { run_tiles<FloatTile<WeightsBf16>>(args); }
void run_fp16_f32_avx2(const syshax_matmul_args* args) { run_tiles<FloatTile<WeightsFp16>>(args); }
void run_q8_0_q8_avx2(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ8>>(args); }
void run_q4_0_q8_avx2(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ4>>(args); }
void run_q8_0_q8x2_avx2(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ8, 2>>(args); }
void run_q4_0_q8x2_avx2(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ4, 2>>(args); }

}  // namespace syshax
