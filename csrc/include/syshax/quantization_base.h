/* Weight formats: how one row of numbers is stored in blocks.
 *
 * Owns the C ABI of a format (encode, decode, block geometry). A format knows
 * nothing of kernels, packings or experts. Built-in formats and those of vendor
 * libraries are described by the same struct. Functions must be thread-safe.
 */
#ifndef SYSHAX_QUANTIZATION_BASE_H
#define SYSHAX_QUANTIZATION_BASE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised when a struct below changes incompatibly; structs grow at their end only. */
#define SYSHAX_OPERATOR_ABI 1u

/* Element types of activations in the ring and of checkpoint tensors. */
typedef enum syshax_dtype { SYSHAX_FLOAT32 = 0, SYSHAX_FLOAT16 = 1, SYSHAX_BFLOAT16 = 2 } syshax_dtype;

typedef struct syshax_format {
  uint32_t abi;          /* SYSHAX_OPERATOR_ABI */
  uint32_t struct_size;  /* sizeof(syshax_format) as the author compiled it */
  const char* name;      /* "bf16", "fp16", "q8_0", "q4_0", ... */
  uint32_t block_values; /* values in one block: 1 or 32; 0: a block is a whole row, of any multiple of 64 values */
  uint32_t block_bytes;  /* bytes of one block: 2, 2, 34, 18; 0 where a block is a whole row */
  /* `values` is a multiple of block_values; where a block is a whole row, exactly one row. src and dst do not overlap,
   * any alignment. */
  void (*encode)(const float* src, size_t values, void* dst);
  void (*decode)(const void* src, size_t values, float* dst);
  /* Bytes of a row of `values` values. NULL (values / block_values * block_bytes) unless a block is a whole row. */
  size_t (*row_bytes)(size_t values);
} syshax_format;

/* Bytes that a row of `values` values takes in a format. */
static inline size_t syshax_row_bytes(const syshax_format* format, size_t values) {
  return format->row_bytes ? format->row_bytes(values) : values / format->block_values * format->block_bytes;
}

#ifdef __cplusplus
}
#endif
#endif
