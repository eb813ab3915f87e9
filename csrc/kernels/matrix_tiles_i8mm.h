// Register tiles of 32-value integer blocks for smmla, which multiplies 2 rows x 8 k with 8 k x 2 tokens. The packing
// has 4 k of 4 rows in a vector; zipping the vectors of two neighbouring groups gives 2 x 8, once for all tokens. One
// token gains nothing from it and takes the dot-product tile. The same sums in the same order as block_tiles.h, so the
// same bits. Include after block_tiles.h.
#pragma once
#include "kernels/block_tiles.h"

namespace syshax {
namespace {

template <class Weights>
struct MatrixTile {
  using Dots = BlockTile<Weights>;
  static constexpr int kMaxTokens = 6;
  static constexpr int kGroups = Dots::kGroups;

  static constexpr int panels_for(int tokens) { return tokens == 1 ? Dots::panels_for(1) : 1; }
  static size_t panel_bytes(size_t k_padded) { return Dots::panel_bytes(k_padded); }

  // Tokens 2 p and 2 p + 1; an odd number of tokens ends with the last one twice.
  template <int Pairs>
  struct Tokens {
    const int8_t* q[2 * Pairs];
    const float* scales[2 * Pairs];
    const int32_t* sums[2 * Pairs];
  };

  template <int Part, int Quads, int Pairs>
  static void multiply(int32x4_t (&sum)[2 * Quads][Pairs], const uint8x16_t (&stored)[2 * Quads],
                       const Tokens<Pairs>& tokens, size_t k) {
    int8x16_t x[Pairs];
#pragma GCC unroll 4
    for (int p = 0; p < Pairs; ++p) {
      x[p] = vcombine_s8(vld1_s8(tokens.q[2 * p] + k + Part * 16), vld1_s8(tokens.q[2 * p + 1] + k + Part * 16));
    }
#pragma GCC unroll 8
    for (int r = 0; r < 2 * Quads; ++r) {
      const int8x16_t w = Weights::template part<Part>(stored[r]);
#pragma GCC unroll 4
      for (int p = 0; p < Pairs; ++p) sum[r][p] = vmmlaq_s32(sum[r][p], w, x[p]);
    }
  }

  // acc[2 q + h][p]: rows 4 q + 2 h and the next one, tokens of pair p: (row, token), (row, next), (next, token), ...
  template <int Quads, int Pairs>
  static void block(float32x4_t (&acc)[2 * Quads][Pairs], const char* groups, const char* scales,
                    const Tokens<Pairs>& tokens, size_t index) {
    int32x4_t sum[2 * Quads][Pairs];
#pragma GCC unroll 4
    for (int p = 0; p < Pairs; ++p) {
      const int32x4_t begin = vzip1q_s32(Weights::begin(tokens.sums[2 * p][index]),  //
                                         Weights::begin(tokens.sums[2 * p + 1][index]));
#pragma GCC unroll 8
      for (int r = 0; r < 2 * Quads; ++r) sum[r][p] = begin;
    }
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; g += 2) {
      uint8x16_t stored[2 * Quads];
#pragma GCC unroll 4
      for (int q = 0; q < Quads; ++q) {
        const int32x4_t low = Vec::loadi(groups + g * kGroupBytes + q * 16);
        const int32x4_t high = Vec::loadi(groups + (g + 1) * kGroupBytes + q * 16);
        stored[2 * q] = vreinterpretq_u8_s32(vzip1q_s32(low, high));
        stored[2 * q + 1] = vreinterpretq_u8_s32(vzip2q_s32(low, high));
      }
      multiply<0, Quads, Pairs>(sum, stored, tokens, index * 32 + g * 4);
      if constexpr (Weights::kParts == 2) multiply<1, Quads, Pairs>(sum, stored, tokens, index * 32 + g * 4);
    }
    float32x4_t a_scale[Pairs];
#pragma GCC unroll 4
    for (int p = 0; p < Pairs; ++p) {
      a_scale[p] = vzip1q_f32(Vec::set1(tokens.scales[2 * p][index]), Vec::set1(tokens.scales[2 * p + 1][index]));
    }
#pragma GCC unroll 4
    for (int q = 0; q < Quads; ++q) {
      const float32x4_t four = Vec::load_fp16(scales + q * 8);
      const float32x4_t w_scale[2] = {vzip1q_f32(four, four), vzip2q_f32(four, four)};
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
#pragma GCC unroll 4
        for (int p = 0; p < Pairs; ++p) {
          acc[2 * q + h][p] =
              Vec::fma(Vec::to_float(sum[2 * q + h][p]), Vec::mul(w_scale[h], a_scale[p]), acc[2 * q + h][p]);
        }
      }
    }
  }

  // 4 * Quads rows of the panel, from row first_row.
  template <int Quads, int T>
  static void run_rows(const TilePlace& place, size_t first_row) {
    constexpr int Pairs = (T + 1) / 2;
    float32x4_t acc[2 * Quads][Pairs];
    Tokens<Pairs> tokens;
#pragma GCC unroll 8
    for (int t = 0; t < 2 * Pairs; ++t) {
      const void* row = place.activations[t < T ? t : T - 1];
      tokens.q[t] = static_cast<const int8_t*>(row);
      tokens.scales[t] = q8_scales(row, place.k_padded);
      tokens.sums[t] = q8_sums(row, place.k_padded);
    }
#pragma GCC unroll 8
    for (int r = 0; r < 2 * Quads; ++r) {
#pragma GCC unroll 4
      for (int p = 0; p < Pairs; ++p) acc[r][p] = Vec::zero();
    }
    const char* step = place.panel;
    for (size_t k = 0; k < place.k_padded; k += kStepValues) {
      const char* groups = step + kScaleBytes + first_row * 4;
      const char* scales = step + first_row * 2;
      block<Quads, Pairs>(acc, groups, scales, tokens, k / 32);
      block<Quads, Pairs>(acc, groups + kGroups * kGroupBytes, scales + kPanelRows * 2, tokens, k / 32 + 1);
      step += Dots::kStepBytes;
    }
#pragma GCC unroll 4
    for (int q = 0; q < Quads; ++q) {
#pragma GCC unroll 4
      for (int p = 0; p < Pairs; ++p) {
        float* out = place.out + 2 * p * place.out_stride + first_row + 4 * q;
        Vec::store(out, vuzp1q_f32(acc[2 * q][p], acc[2 * q + 1][p]));
        if (2 * p + 1 < T) Vec::store(out + place.out_stride, vuzp2q_f32(acc[2 * q][p], acc[2 * q + 1][p]));
      }
    }
  }

  // The registers hold the sums of 16 rows x 2 tokens or of 8 rows x 6 tokens.
  template <int P, int T>
  static void run(const TilePlace& place) {
    if constexpr (T == 1) {
      Dots::template run<P, 1>(place);
    } else if constexpr (T == 2) {
      run_rows<4, T>(place, 0);
    } else {
      run_rows<2, T>(place, 0);
      run_rows<2, T>(place, 8);
    }
  }
};

}  // namespace
}  // namespace syshax
