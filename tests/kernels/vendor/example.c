/* The smallest useful vendor library: a format of its own ("ex8": one signed byte a value, scale 1/16) with one scalar
 * kernel. Also the template for authors. -DBREAK=n makes one mistake, which the loader must find. */
#include <string.h>

#include "syshax/matmul_base.h"

#ifndef BREAK
#define BREAK 0
#endif

static void encode(const float* src, size_t values, void* dst) {
  signed char* out = (signed char*)dst;
  for (size_t i = 0; i < values; ++i) {
    float x = src[i] * 16.0f;
    out[i] = (signed char)(x > 127.0f ? 127.0f : x < -128.0f ? -128.0f : x);
  }
}

static void decode(const void* src, size_t values, float* dst) {
  const signed char* in = (const signed char*)src;
  for (size_t i = 0; i < values; ++i) dst[i] = (float)in[i] / 16.0f;
}

static size_t panel_bytes(size_t k_padded) { return BREAK == 5 ? 16 * k_padded + 1 : 16 * k_padded; }

static void pack(const void* blocks, size_t row_bytes, uint32_t rows, size_t k_padded, void* panel) {
  memset(panel, 0, 16 * k_padded);
  for (uint32_t row = 0; row < rows; ++row) {
    memcpy((char*)panel + row * k_padded, (const char*)blocks + row * row_bytes, k_padded);
  }
}

static void unpack(const void* panel, size_t k_padded, uint32_t rows, void* blocks, size_t row_bytes) {
  for (uint32_t row = 0; row < rows; ++row) {
    memcpy((char*)blocks + row * row_bytes, (const char*)panel + row * k_padded, k_padded);
  }
}

static size_t row_bytes(size_t k_padded) { return 4 * k_padded; }

static void pack_activation(const float* src, size_t values, size_t k_begin, size_t k_padded, void* row) {
  float* out = (float*)row + k_begin;
  (void)k_padded;
  memcpy(out, src, values * 4);
  for (; values % 64; ++values) out[values] = 0.0f;
}

static void run(const syshax_matmul_args* args) {
  for (uint32_t row = 0; row < 16 * args->num_panels; ++row) {
    const signed char* w = (const signed char*)args->panels + row * args->k_padded;
    for (uint32_t t = 0; t < args->num_tokens; ++t) {
      const float* a = (const float*)args->activations[t];
      float sum = 0.0f;
      for (size_t k = 0; k < args->k_padded; ++k) sum += (float)w[k] * a[k];
      args->out[t * args->out_stride + row] = sum / 16.0f;
    }
  }
}

static const syshax_format format = {
    BREAK == 1 ? SYSHAX_OPERATOR_ABI + 1 : SYSHAX_OPERATOR_ABI, sizeof(syshax_format), "ex8", 1, 1, encode, decode, 0,
};
static const syshax_packing packing = {
    SYSHAX_OPERATOR_ABI,
    sizeof(syshax_packing),
    "ex8/rows/1",
    BREAK == 2   ? "ex9"
    : BREAK == 3 ? "q8_0"
                 : "ex8",
    BREAK == 4 ? 32 : 16,
    64,
    panel_bytes,
    pack,
    unpack,
};
static const syshax_activation activation = {SYSHAX_OPERATOR_ABI, sizeof(syshax_activation), "f32", row_bytes,
                                             pack_activation, 0};
static const syshax_kernel kernel = {
    SYSHAX_OPERATOR_ABI,
    BREAK == 6 ? 8 : sizeof(syshax_kernel),
    BREAK == 7 ? "q8_0_q8_scalar" : "ex8_f32_example",
    "scalar",
    &packing,
    &activation,
    0,
    BREAK == 8 ? 0 : 7,
    0,
    BREAK == 9 ? 0 : run,
};
static const syshax_format* const formats[] = {&format};
static const syshax_kernel* const kernels[] = {&kernel};
static const syshax_operator_library library = {
    SYSHAX_OPERATOR_ABI, sizeof(syshax_operator_library), "example", "1.0", formats, 1, 1, kernels,
};

#if BREAK == 10
#define ENTRY syshax_operators_v0
#else
#define ENTRY syshax_operators_v1
#endif
#ifdef __cplusplus
extern "C"
#endif
    __attribute__((visibility("default"))) const syshax_operator_library*
    ENTRY(void) {
  return BREAK == 11 ? 0 : &library;
}
