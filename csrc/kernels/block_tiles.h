// Register tiles of 32-value integer blocks against q8 activations. A block's products are summed exactly, then
// acc = fma(float(isum), w_scale * a_scale, acc), blocks ascending, one accumulator a lane: every ISA gives the scalar
// kernel's bits. Include after a vec_*.h.
#pragma once
#include "kernels/activations.h"
#include "kernels/tiles.h"

namespace syshax {
namespace {

// Terms: q8 rows that one activation row consists of; their products go into the same sum, a block's first term first.
template <class Weights, int Terms = 1>
struct BlockTile {
  using F = Vec::F;
  using I = Vec::I;
  using Sum = decltype(Weights::begin(0));
  static constexpr int kPanelVecs = int(kPanelRows) / Vec::kLanes;
  static constexpr int kGroups = 8 / Weights::kParts;  // of 64 bytes in a panel's block
  static constexpr int kMaxTokens = Weights::kTokens / Terms;
  static constexpr size_t kStepBytes = kScaleBytes + 2 * kGroups * kGroupBytes;

  static constexpr int panels_for(int tokens) {
    const int fitting = Weights::kMaxSums / (kPanelVecs * tokens * Terms);
    return fitting >= 4 ? 4 : fitting >= 2 ? 2 : 1;
  }
  static size_t panel_bytes(size_t k_padded) { return k_padded / kStepValues * kStepBytes; }

  template <int T>
  struct Rows {
    const int8_t* q[T];
    const float* scales[T];
    const int32_t* sums[T];
  };

  // Four k (of each part) of all rows and tokens.
  template <int Part, int R, int T>
  static void multiply(Sum (&sum)[R][T], const char* group, size_t panel_bytes, const Rows<T>& rows, size_t k,
                       size_t ahead) {
    if constexpr (Part == 0) {
#pragma GCC unroll 16
      for (int r = 0; r < R; r += kPanelVecs) prefetch<R / kPanelVecs>(group + r / kPanelVecs * panel_bytes, ahead);
    }
    decltype(Weights::template get<Part>(group)) w[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      w[r] = Weights::template get<Part>(group + r / kPanelVecs * panel_bytes + r % kPanelVecs * (Vec::kLanes * 4));
    }
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) {
      int32_t four;
      __builtin_memcpy(&four, rows.q[t] + k + Part * 16, 4);
      const I x = Vec::set1i(four);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r][t] = Weights::dot(sum[r][t], w[r], x);
    }
  }

  template <int R, int T, int A>
  static void block(F (&acc)[R][A], const char* groups, const char* scales, size_t panel_bytes, const Rows<T>& rows,
                    size_t index, size_t ahead) {
    Sum sum[R][T];
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r][t] = Weights::begin(rows.sums[t][index]);
    }
#pragma GCC unroll 16
    for (int g = 0; g < kGroups; ++g) {
      multiply<0, R, T>(sum, groups + g * kGroupBytes, panel_bytes, rows, index * 32 + g * 4, ahead);
      if constexpr (Weights::kParts == 2) {
        multiply<1, R, T>(sum, groups + g * kGroupBytes, panel_bytes, rows, index * 32 + g * 4, ahead);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const F w_scale = Vec::load_fp16(scales + r / kPanelVecs * panel_bytes + r % kPanelVecs * (Vec::kLanes * 2));
#pragma GCC unroll 12
      for (int t = 0; t < T; ++t) {
        const F exact = Vec::to_float(Weights::finish(sum[r][t], rows.sums[t][index]));
        acc[r][t / Terms] = Vec::fma(exact, Vec::mul(w_scale, Vec::set1(rows.scales[t][index])), acc[r][t / Terms]);
      }
    }
  }

  template <int P, int T>
  __attribute__((noinline)) static void run(const TilePlace& place) {
    constexpr int R = P * kPanelVecs;
    F acc[R][T];
    Rows<T * Terms> rows;
#pragma GCC unroll 12
    for (int t = 0; t < T * Terms; ++t) {
      const char* row =
          static_cast<const char*>(place.activations[t / Terms]) + t % Terms * q8_row_bytes(place.k_padded);
      rows.q[t] = reinterpret_cast<const int8_t*>(row);
      rows.scales[t] = q8_scales(row, place.k_padded);
      rows.sums[t] = q8_sums(row, place.k_padded);
    }
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r][t] = Vec::zero();
    }
    const char* step = place.panel;
    for (size_t k = 0; k < place.k_padded; k += kStepValues) {
      const char* groups = step + kScaleBytes;
      block<R, T * Terms, T>(acc, groups, step, place.panel_bytes, rows, k / 32, place.ahead);
      block<R, T * Terms, T>(acc, groups + kGroups * kGroupBytes, step + kPanelRows * 2, place.panel_bytes, rows,
                             k / 32 + 1, place.ahead);
      step += kStepBytes;
    }
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) Vec::store(place.out + t * place.out_stride + r * Vec::kLanes, acc[r][t]);
    }
  }
};

}  // namespace
}  // namespace syshax
