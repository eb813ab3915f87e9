// The packings of the built-in formats. All have panels of 16 rows whose lanes are rows, so that kernels need no
// horizontal sums, and one address stream per panel; every ISA reads the same bytes. k is padded to 64.
//
//   bf16/p16k2/1   per 2 k:  64 bytes, row r at 4 r: (k, k + 1)
//   fp16/p16k1/1   per k:    32 bytes, row r at 2 r
//   q8_0/p16k4/1   per 64 k: 1088 bytes: scales[2 blocks][16 rows] fp16, then for each of the 2 blocks 8 groups of 64
//                  bytes, row r's four values k = 4 g .. 4 g + 3 at 4 r, as unsigned value + 128
//   q4_0/p16k4/1   per 64 k: 576 bytes: scales[2 blocks][16 rows] fp16, then for each of the 2 blocks 4 groups of 64
//                  bytes, row r at 4 r: byte i has value 4 g + i in its low and 16 + 4 g + i in its high nibble, as in
//                  the format's block
#pragma once
#include <cstddef>
#include <cstdint>

#include "syshax/matmul_base.h"

namespace syshax {

extern const syshax_packing packing_bf16, packing_fp16, packing_q8_0, packing_q4_0;

constexpr size_t kPanelRows = 16;
constexpr size_t kStepValues = 64;                  // k of one step of the packings with scales
constexpr size_t kScaleBytes = 2 * kPanelRows * 2;  // the scales that open such a step
constexpr size_t kGroupBytes = kPanelRows * 4;      // 16 rows x 4 bytes
constexpr size_t kQ8StepBytes = kScaleBytes + 16 * kGroupBytes;
constexpr size_t kQ4StepBytes = kScaleBytes + 8 * kGroupBytes;

}  // namespace syshax
