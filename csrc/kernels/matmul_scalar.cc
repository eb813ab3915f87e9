// The reference kernels: one value at a time, in the order that defines every other kernel's result. Float kernels
// fuse each product into the sum, k ascending; integer kernels sum a block exactly, then
// acc = fma(float(isum), w_scale * a_scale, acc), blocks ascending. Slow on purpose.
#include <cmath>
#include <cstring>

#include "base/float16.h"
#include "kernels/activations.h"
#include "kernels/kernels.h"
#include "kernels/packings.h"

namespace syshax {
namespace {

using Byte = unsigned char;

uint16_t load16(const Byte* at) {
  uint16_t value;
  std::memcpy(&value, at, 2);
  return value;
}

// Calls dot(panel, row, activation) for every output.
template <class Dot>
void for_each_output(const syshax_matmul_args* args, size_t panel_bytes, Dot dot) {
  for (uint32_t p = 0; p < args->num_panels; ++p) {
    const Byte* panel = static_cast<const Byte*>(args->panels) + p * panel_bytes;
    for (uint32_t t = 0; t < args->num_tokens; ++t) {
      float* out = args->out + t * args->out_stride + p * kPanelRows;
      for (size_t row = 0; row < kPanelRows; ++row) out[row] = dot(panel, row, args->activations[t]);
    }
  }
}

template <class Weight>
void run_float(const syshax_matmul_args* args, Weight weight) {
  const size_t k_padded = args->k_padded;
  for_each_output(args, k_padded * kPanelRows * 2, [=](const Byte* panel, size_t row, const void* activation) {
    const float* a = static_cast<const float*>(activation);
    float acc = 0.0f;
    for (size_t k = 0; k < k_padded; ++k) acc = std::fma(weight(panel, row, k), a[k], acc);
    return acc;
  });
}

// value(step's groups of one block, row, k in block) gives the integer weight; terms: q8 rows in an activation row.
template <class Value>
void run_blocks(const syshax_matmul_args* args, size_t step_bytes, int terms, Value value) {
  const size_t k_padded = args->k_padded;
  const size_t block_bytes = (step_bytes - kScaleBytes) / 2;
  for_each_output(args, k_padded / 64 * step_bytes, [=](const Byte* panel, size_t row, const void* activation) {
    float acc = 0.0f;
    for (size_t block = 0; block < k_padded / 32; ++block) {
      const Byte* step = panel + block / 2 * step_bytes;
      const Byte* groups = step + kScaleBytes + block % 2 * block_bytes;
      const float w_scale = fp16_to_float(load16(step + (block % 2 * kPanelRows + row) * 2));
      for (int term = 0; term < terms; ++term) {
        const char* a = static_cast<const char*>(activation) + term * q8_row_bytes(k_padded);
        int32_t sum = 0;
        for (size_t k = 0; k < 32; ++k) sum += value(groups, row, k) * int8_t(a[block * 32 + k]);
        acc = std::fma(float(sum), w_scale * q8_scales(a, k_padded)[block], acc);
      }
    }
    return acc;
  });
}

int q8_0_value(const Byte* groups, size_t row, size_t k) {
  return int(groups[k / 4 * kGroupBytes + row * 4 + k % 4]) - 128;
}

int q4_0_value(const Byte* groups, size_t row, size_t k) {
  const int pair = groups[k % 16 / 4 * kGroupBytes + row * 4 + k % 4];
  return (k < 16 ? pair & 15 : pair >> 4) - 8;
}

}  // namespace

void run_bf16_f32_scalar(const syshax_matmul_args* args) {
  run_float(args, [](const Byte* panel, size_t row, size_t k) {
    return bf16_to_float(load16(panel + k / 2 * kGroupBytes + row * 4 + k % 2 * 2));
  });
}

void run_fp16_f32_scalar(const syshax_matmul_args* args) {
  run_float(args, [](const Byte* panel, size_t row, size_t k) {
    return fp16_to_float(load16(panel + (k * kPanelRows + row) * 2));
  });
}

void run_q8_0_q8_scalar(const syshax_matmul_args* args) { run_blocks(args, kQ8StepBytes, 1, q8_0_value); }
void run_q4_0_q8_scalar(const syshax_matmul_args* args) { run_blocks(args, kQ4StepBytes, 1, q4_0_value); }
void run_q8_0_q8x2_scalar(const syshax_matmul_args* args) { run_blocks(args, kQ8StepBytes, 2, q8_0_value); }
void run_q4_0_q8x2_scalar(const syshax_matmul_args* args) { run_blocks(args, kQ4StepBytes, 2, q4_0_value); }

}  // namespace syshax
