/* Matrix kernels: the one operator interface, for built-in and vendor kernels alike.
 *
 * A weight matrix [rows, k] is packed once, at load time, into panels of panel_rows rows;
 * a kernel multiplies consecutive panels with any number of activation rows. Kernels know
 * neither experts nor threads: callers split panels between threads. All functions must be
 * thread-safe, must not allocate, lock, log or throw, and touch only the memory described.
 */
#ifndef SYSHAX_MATMUL_BASE_H
#define SYSHAX_MATMUL_BASE_H

#include "syshax/quantization_base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How the blocks of panel_rows consecutive rows lie in memory. The packing, not the kernel, is
 * what stored experts depend on: every ISA of an architecture reads the same packing. Panels
 * start 64-byte aligned and panel_bytes is a multiple of 64. */
typedef struct syshax_packing {
  uint32_t abi;
  uint32_t struct_size;
  const char* name;   /* unique, versioned: "q8_0/p16k4/1" */
  const char* format; /* name of the format whose blocks it permutes */
  uint32_t panel_rows;
  uint32_t k_multiple; /* k is zero-padded to a multiple of this; a multiple of 64 */
  size_t (*panel_bytes)(size_t k_padded);
  /* blocks: `rows` (<= panel_rows) rows of format blocks, row_bytes apart, each holding
   * k_padded values. Missing rows become rows of zeros. */
  void (*pack)(const void* blocks, size_t row_bytes, uint32_t rows, size_t k_padded, void* panel);
  /* The exact inverse: the same block bytes come back. */
  void (*unpack)(const void* panel, size_t k_padded, uint32_t rows, void* blocks, size_t row_bytes);
} syshax_packing;

/* How a kernel wants one row of activations (one token): "f32", "bf16", "q8". */
typedef struct syshax_activation {
  uint32_t abi;
  uint32_t struct_size;
  const char* name;
  size_t (*row_bytes)(size_t k_padded); /* a multiple of 64 */
  /* Packs values [k_begin, k_begin + values) of a row of k_padded values; k_begin is a multiple of
   * 64. When `values` is no multiple of 64 the rest of that group of 64 is packed as zeros.
   * Different ranges of one row may be packed by different threads at the same time. */
  void (*pack)(const float* src, size_t values, size_t k_begin, size_t k_padded, void* row);
  /* NULL, or called once for a row after all its ranges are packed and before a kernel reads it: for layouts that need
   * the whole row, such as one scale a token. May rewrite the row. */
  void (*finish)(size_t k_padded, void* row);
} syshax_activation;

/* Packs a whole row of k_padded values. */
static inline void syshax_pack_row(const syshax_activation* activation, const float* src, size_t k_padded, void* row) {
  activation->pack(src, k_padded, 0, k_padded, row);
  if (activation->finish) activation->finish(k_padded, row);
}

/* out[t * out_stride + p * panel_rows + r] = sum over k of W[p, r, k] * activation[t, k] */
typedef struct syshax_matmul_args {
  const void* panels; /* num_panels consecutive panels, 64-byte aligned */
  uint32_t num_panels;
  uint32_t num_tokens; /* >= 1 */
  size_t k_padded;
  const void* const* activations; /* num_tokens pointers to packed rows, 64-byte aligned */
  float* out;                     /* overwritten; 64-byte aligned */
  size_t out_stride;              /* in floats, a multiple of 16 */
} syshax_matmul_args;

typedef struct syshax_kernel {
  uint32_t abi;
  uint32_t struct_size;
  const char* name; /* <weight>_<activation>_<isa>: "q8_0_q8_avx512vnni" */
  const char* isa;  /* "scalar", "avx2", "avx512", "avx512vnni", "avx512bf16", ... */
  const syshax_packing* packing;
  const syshax_activation* activation;
  uint64_t required_features; /* bits SYSHAX_CPU_* ; the CPU must have all of them */
  uint32_t dtypes;            /* bit (1 << syshax_dtype): ring dtypes this kernel may serve */
  uint32_t rank;              /* among usable kernels of a format and dtype the highest wins */
  void (*run)(const syshax_matmul_args* args);
} syshax_kernel;

/* CPU features by bit, each meaning "present and enabled by the operating system". */
#define SYSHAX_CPU_AVX2 (1ull << 0)   /* with FMA, F16C, BMI2 */
#define SYSHAX_CPU_AVX512 (1ull << 1) /* F, BW, VL, DQ, CD */
#define SYSHAX_CPU_AVX512VNNI (1ull << 2)
#define SYSHAX_CPU_AVX512BF16 (1ull << 3)
#define SYSHAX_CPU_AVXVNNI (1ull << 4)
#define SYSHAX_CPU_AVX512FP16 (1ull << 5)
#define SYSHAX_CPU_AMX_INT8 (1ull << 6)
#define SYSHAX_CPU_AMX_BF16 (1ull << 7)
#define SYSHAX_CPU_NEON (1ull << 16)
#define SYSHAX_CPU_DOTPROD (1ull << 17)
#define SYSHAX_CPU_I8MM (1ull << 18)
#define SYSHAX_CPU_ARM_BF16 (1ull << 19)

/* A vendor library exports this one function, `syshax_operators_v1`; the returned table and all
 * it points to live as long as the process. */
typedef struct syshax_operator_library {
  uint32_t abi;
  uint32_t struct_size;
  const char* vendor;
  const char* version;
  const syshax_format* const* formats;
  uint32_t num_formats;
  uint32_t num_kernels;
  const syshax_kernel* const* kernels;
} syshax_operator_library;

typedef const syshax_operator_library* (*syshax_operators_v1_fn)(void);

#ifdef __cplusplus
}
#endif
#endif
