/* A library without a format: a kernel for the built-in bf16, over bf16's own packing, with a rank that takes the
 * built-in kernels' place. */
#include <math.h>
#include <string.h>

#include "syshax/matmul_base.h"

static size_t panel_bytes(size_t k_padded) { return 32 * k_padded; }

static size_t place(size_t row, size_t k) { return k / 2 * 64 + 4 * row + 2 * (k % 2); }

static void pack(const void* blocks, size_t row_bytes, uint32_t rows, size_t k_padded, void* panel) {
  memset(panel, 0, panel_bytes(k_padded));
  for (uint32_t row = 0; row < rows; ++row) {
    for (size_t k = 0; k < k_padded; ++k) {
      memcpy((char*)panel + place(row, k), (const char*)blocks + row * row_bytes + 2 * k, 2);
    }
  }
}

static void unpack(const void* panel, size_t k_padded, uint32_t rows, void* blocks, size_t row_bytes) {
  for (uint32_t row = 0; row < rows; ++row) {
    for (size_t k = 0; k < k_padded; ++k) {
      memcpy((char*)blocks + row * row_bytes + 2 * k, (const char*)panel + place(row, k), 2);
    }
  }
}

static size_t row_bytes(size_t k_padded) { return 4 * k_padded; }

static void pack_activation(const float* src, size_t values, size_t k_begin, size_t k_padded, void* row) {
  (void)k_padded;
  memcpy((float*)row + k_begin, src, values * 4);
  memset((float*)row + k_begin + values, 0, (64 - values % 64) % 64 * 4);
}

static void run(const syshax_matmul_args* args) {
  for (uint32_t row = 0; row < 16 * args->num_panels; ++row) {
    const char* panel = (const char*)args->panels + row / 16 * panel_bytes(args->k_padded);
    for (uint32_t t = 0; t < args->num_tokens; ++t) {
      float sum = 0.0f;
      for (size_t k = 0; k < args->k_padded; ++k) {
        float w = 0.0f;
        memcpy((char*)&w + 2, panel + place(row % 16, k), 2);
        sum = fmaf(w, ((const float*)args->activations[t])[k], sum);
      }
      args->out[t * args->out_stride + row] = sum;
    }
  }
}

static const syshax_packing packing = {
    SYSHAX_OPERATOR_ABI, sizeof(syshax_packing), "bf16/p16k2/1", "bf16", 16, 64, panel_bytes, pack, unpack,
};
static const syshax_activation activation = {SYSHAX_OPERATOR_ABI, sizeof(syshax_activation), "f32", row_bytes,
                                             pack_activation,     0};
static const syshax_kernel kernel = {
    SYSHAX_OPERATOR_ABI, sizeof(syshax_kernel), "bf16_f32_vendor", "scalar", &packing, &activation, 0, 7, 1000, run,
};
static const syshax_kernel* const kernels[] = {&kernel};
static const syshax_operator_library library = {
    SYSHAX_OPERATOR_ABI, sizeof(syshax_operator_library), "replacement", "1.0", 0, 0, 1, kernels,
};

#ifdef __cplusplus
extern "C"
#endif
    __attribute__((visibility("default"))) const syshax_operator_library*
    syshax_operators_v1(void) {
  return &library;
}
