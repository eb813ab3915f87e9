// What the files of this library share: how panels and tokens lie in memory, and the declarations of each ISA's part.
// Everything inline here has internal linkage, since the files are compiled for different ISAs.
//
//   stored row   float32 scale d, then k int8 q; value = q * d, d = largest magnitude / 127
//   panel        16 rows: 16 float32 scales, then for every 4 k 64 bytes: row r's four q at 4 r
//   token        128 bytes of header (Token), k int16, k int8: the same integers twice, since AVX2 multiplies 16-bit
//                and AVX-512 8-bit integers. Until it is finished, the token's floats lie behind the header.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "syshax/matmul_base.h"

namespace int8row {

constexpr size_t kPanelRows = 16;
constexpr size_t kScaleBytes = kPanelRows * sizeof(float);
constexpr size_t kGroupBytes = kPanelRows * 4;
constexpr size_t kSegment = 65536;  // so many products of int8 an int32 holds: 128 * 127 * 65536 < 2^31

struct Token {
  float scale;       // NaN where a value is no number: all outputs of the token are NaN
  int32_t sums[31];  // of each segment's integers; k is at most 2^20
};
static_assert(sizeof(Token) == 128, "the values behind it stay aligned");

static inline size_t panel_bytes(size_t k) { return kScaleBytes + kPanelRows * k; }
static inline size_t token_bytes(size_t k) { return sizeof(Token) + 4 * k; }
static inline const Token& token(const void* row) { return *static_cast<const Token*>(row); }
static inline const char* wide_values(const void* row) { return static_cast<const char*>(row) + sizeof(Token); }
static inline const char* narrow_values(const void* row, size_t k) { return wide_values(row) + 2 * k; }

void finish_scalar(size_t k_padded, void* row);
void run_scalar(const syshax_matmul_args* args);
#if defined(__x86_64__)
void finish_avx2(size_t k_padded, void* row);
void run_avx2(const syshax_matmul_args* args);
void run_avx512vnni(const syshax_matmul_args* args);
#endif

}  // namespace int8row
