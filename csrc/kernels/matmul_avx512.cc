// The AVX-512 kernels that need no extension: float weights, and integer blocks on CPUs without VNNI.
#include "kernels/vec_avx512.h"

#include "kernels/block_tiles.h"
#include "kernels/float_tiles.h"
#include "kernels/float_weights.h"
#include "kernels/kernels.h"

namespace syshax {
namespace {

Vec::I pair_sums(Vec::I words) { return _mm512_madd_epi16(words, _mm512_set1_epi16(1)); }

// Signed weights through |w| * (sign of w applied to a): 128 * 127 * 2 fits int16, so nothing saturates.
struct WeightsQ8 {
  static constexpr int kTokens = 6;
  static constexpr int kMaxSums = 12;
  static constexpr int kParts = 1;
  struct W {
    __m512i magnitude;
    __mmask64 negative;
  };
  static Vec::I begin(int32_t) { return Vec::set1i(0); }
  template <int Part>
  static W get(const void* p) {
    const __m512i value = _mm512_xor_si512(Vec::loadi(p), _mm512_set1_epi8(-128));
    return {_mm512_abs_epi8(value), _mm512_movepi8_mask(value)};
  }
  static Vec::I dot(Vec::I sum, W w, Vec::I a) {
    const __m512i signed_a = _mm512_mask_sub_epi8(a, w.negative, Vec::set1i(0), a);
    return Vec::addi(sum, pair_sums(_mm512_maddubs_epi16(w.magnitude, signed_a)));
  }
  static Vec::I finish(Vec::I sum, int32_t) { return sum; }
};

// Nibbles are unsigned; a block's 8 pair sums fit int16 (15 * 127 * 2 * 8 = 30480), so they are widened once.
struct WeightsQ4 {
  static constexpr int kTokens = 6;
  static constexpr int kMaxSums = 12;
  static constexpr int kParts = 2;
  static Vec::I begin(int32_t) { return Vec::set1i(0); }
  template <int Part>
  static Vec::I get(const void* p) {
    const Vec::I both = Vec::loadi(p);
    return Vec::andi(Part == 0 ? both : Vec::shift_right<4>(both), Vec::set1i(0x0f0f0f0f));
  }
  static Vec::I dot(Vec::I sum, Vec::I w, Vec::I a) { return _mm512_add_epi16(sum, _mm512_maddubs_epi16(w, a)); }
  static Vec::I finish(Vec::I sum, int32_t activation_sum) {
    return Vec::subi(pair_sums(sum), Vec::set1i(8 * activation_sum));
  }
};

}  // namespace

void run_bf16_f32_avx512(const syshax_matmul_args* args) { run_tiles<FloatTile<WeightsBf16>>(args); }
void run_fp16_f32_avx512(const syshax_matmul_args* args) { run_tiles<FloatTile<WeightsFp16>>(args); }
void run_q8_0_q8_avx512(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ8>>(args); }
void run_q4_0_q8_avx512(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ4>>(args); }
void run_q8_0_q8x2_avx512(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ8, 2>>(args); }
void run_q4_0_q8x2_avx512(const syshax_matmul_args* args) { run_tiles<BlockTile<WeightsQ4, 2>>(args); }

}  // namespace syshax
