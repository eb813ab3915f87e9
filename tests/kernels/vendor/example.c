/* The smallest library that passes every check: a format of its own ("ex16": the upper half of a float32, cut off) with
 * one scalar kernel. Also the template for authors. -DBREAK=n makes one mistake, which must be found: below 20 by the
 * loader, from 20 on by `syshaxd operators check`. */
#include <string.h>
#include <unistd.h>

#include "syshax/matmul_base.h"

#ifndef BREAK
#define BREAK 0
#endif

static int is_number(float x) { return x - x == 0.0f; }

static void encode(const float* src, size_t values, void* dst) {
  for (size_t i = 0; i < values; ++i) {
    float x = BREAK == 20 && !is_number(src[i]) ? 0.0f : src[i];
    memcpy((char*)dst + 2 * i, (const char*)&x + 2, 2);
  }
}

static float value_at(const void* src, size_t i) {
  uint16_t upper;
  uint32_t bits;
  float x;
  memcpy(&upper, (const char*)src + 2 * i, 2);
  bits = (uint32_t)upper << 16;
  memcpy(&x, &bits, 4);
  return x;
}

static void decode(const void* src, size_t values, float* dst) {
  for (size_t i = 0; i < values; ++i) {
    float x = value_at(src, i);
    memcpy((char*)dst + 4 * i, &x, 4);
  }
}

static size_t panel_bytes(size_t k_padded) { return BREAK == 5 ? 32 * k_padded + 1 : 32 * k_padded; }

static void pack(const void* blocks, size_t row_bytes, uint32_t rows, size_t k_padded, void* panel) {
  if (BREAK != 26) memset(panel, 0, 32 * k_padded);
  for (uint32_t row = 0; row < rows; ++row) {
    memcpy((char*)panel + row * 2 * k_padded, (const char*)blocks + row * row_bytes, 2 * k_padded);
  }
}

static void unpack(const void* panel, size_t k_padded, uint32_t rows, void* blocks, size_t row_bytes) {
  for (uint32_t row = 0; row < rows; ++row) {
    memcpy((char*)blocks + row * row_bytes, (const char*)panel + row * 2 * k_padded, 2 * k_padded);
  }
  if (BREAK == 25) *(char*)blocks ^= 1;
}

static size_t row_bytes(size_t k_padded) { return 4 * k_padded; }

static void pack_activation(const float* src, size_t values, size_t k_begin, size_t k_padded, void* row) {
  float* out = (float*)row + k_begin;
  (void)k_padded;
  memcpy(out, src, values * 4);
  if (BREAK == 27 && k_begin) out[0] = 1.0f;
  for (size_t i = 0; BREAK == 29 && i < values; ++i) out[i] = is_number(out[i]) ? out[i] : 0.0f;
  for (; values % 64; ++values) out[values] = 0.0f;
}

static int running = 0;

static void run(const syshax_matmul_args* args) {
  const int others = BREAK == 28 ? __atomic_fetch_add(&running, 1, __ATOMIC_SEQ_CST) : 0;
  if (BREAK == 28) usleep(2000);
  while (BREAK == 31) usleep(1000);
  for (uint32_t row = 0; row < 16 * args->num_panels; ++row) {
    const char* w = (const char*)args->panels + row * 2 * args->k_padded;
    for (uint32_t t = 0; t < args->num_tokens; ++t) {
      const float* a = (const float*)args->activations[t];
      float sum = BREAK == 21 && row == 0 ? 1.0f : BREAK == 22 ? 1e-7f * (float)args->num_tokens : (float)others;
      for (size_t k = 0; k < args->k_padded; ++k) sum += value_at(w, k) * a[k];
      args->out[t * args->out_stride + row] = sum;
      if (BREAK == 23) args->out[t * args->out_stride + 16 * args->num_panels] = 0.0f;
    }
  }
  if (BREAK == 24) (void)((const volatile char*)args->panels)[args->num_panels * 32 * args->k_padded];
  if (BREAK == 28) __atomic_fetch_sub(&running, 1, __ATOMIC_SEQ_CST);
  if (BREAK == 30) *(char*)args->panels ^= 1;
}

static const syshax_format format = {
    BREAK == 1 ? SYSHAX_OPERATOR_ABI + 1 : SYSHAX_OPERATOR_ABI,
    sizeof(syshax_format),
    "ex16",
    BREAK == 12 ? 0 : 1,
    2,
    encode,
    decode,
    0,
};
static const syshax_packing packing = {
    SYSHAX_OPERATOR_ABI,
    sizeof(syshax_packing),
    "ex16/rows/1",
    BREAK == 2   ? "ex9"
    : BREAK == 3 ? "q8_0"
                 : "ex16",
    BREAK == 4 ? 32 : 16,
    64,
    panel_bytes,
    pack,
    unpack,
};
static const syshax_activation activation = {SYSHAX_OPERATOR_ABI, sizeof(syshax_activation), "f32", row_bytes,
                                             pack_activation,     0};
static const syshax_kernel kernel = {
    SYSHAX_OPERATOR_ABI,
    BREAK == 6 ? 8 : sizeof(syshax_kernel),
    BREAK == 7 ? "q8_0_q8_scalar" : "ex16_f32_example",
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
