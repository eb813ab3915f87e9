// Register tiles of float weights against float activations, k ascending, one accumulator a lane. With multiply-adds in
// float32 every ISA gives the scalar kernel's bits. Include after a vec_*.h.
#pragma once
#include "kernels/tiles.h"

namespace syshax {
namespace {

template <class Weights>
struct FloatTile {
  using F = Vec::F;
  static constexpr int kPanelVecs = int(kPanelRows) / Vec::kLanes;
  static constexpr int kVecBytes = Vec::kLanes * Weights::kLaneBytes;
  static constexpr int kSums = Vec::kRegisters * 3 / 4;
  static constexpr int kMaxTokens = kSums / (kPanelVecs > 2 ? kPanelVecs : 2);

  static constexpr int panels_for(int tokens) {
    const int fitting = kSums / (kPanelVecs * tokens);
    return fitting >= 4 ? 4 : fitting >= 2 ? 2 : 1;
  }
  static size_t panel_bytes(size_t k_padded) { return k_padded * kPanelRows * 2; }

  template <int Step, int R, int T>
  static void multiply(F (&acc)[R][T], const char* panel, size_t panel_bytes, const void* const (&rows)[T], size_t k,
                       size_t ahead) {
    if constexpr (Step == 0) {
#pragma GCC unroll 16
      for (int r = 0; r < R; r += kPanelVecs) prefetch<R / kPanelVecs>(panel + r / kPanelVecs * panel_bytes, ahead);
    }
    decltype(Weights::template get<Step>(panel)) w[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      w[r] = Weights::template get<Step>(panel + r / kPanelVecs * panel_bytes + r % kPanelVecs * kVecBytes);
    }
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) {
      const auto a = Weights::template activation<Step>(rows[t], k);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r][t] = Weights::multiply_add(w[r], a, acc[r][t]);
    }
  }

  template <int P, int T>
  __attribute__((noinline)) static void run(const TilePlace& place) {
    constexpr int R = P * kPanelVecs;
    F acc[R][T];
    const void* rows[T];
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t) {
      rows[t] = place.activations[t];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) acc[r][t] = Vec::zero();
    }
    const char* panel = place.panel;
    for (size_t k = 0; k < place.k_padded; k += Weights::kValues) {
      multiply<0, R, T>(acc, panel, place.panel_bytes, rows, k, place.ahead);
      if constexpr (Weights::kSteps == 2) multiply<1, R, T>(acc, panel, place.panel_bytes, rows, k, place.ahead);
      panel += kPanelVecs * kVecBytes;
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
