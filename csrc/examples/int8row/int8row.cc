// The library's table: the format, its packing, its activation, and the scalar kernel that defines every other kernel's
// bits: the products of a segment are summed as integers, the segments' sums as floats, then multiplied once with the
// product of the row's and the token's scale.
#include "int8row.h"

#include <math.h>
#include <string.h>

namespace int8row {
namespace {

// ---- the format ---------------------------------------------------------------------------------------------------

size_t row_bytes(size_t values) { return sizeof(float) + values; }

// The scale that brings the largest magnitude to 127; NaN where a value is no number.
float scale_of(const float* x, size_t values) {
  float largest = 0.0f;
  bool finite = true;
  for (size_t i = 0; i < values; ++i) {
    const float magnitude = fabsf(x[i]);
    finite &= magnitude <= 3.402823466e38f;
    largest = magnitude > largest ? magnitude : largest;
  }
  return finite ? largest / 127.0f : nanf("");
}

// To nearest even: adding 1.5 * 2^23 leaves no bits for a fraction. Plain operations, so that loops become vectors.
int quantize(float x, float scale) {
  const float q = x / scale, below = q > 127.0f ? 127.0f : q, clamped = below < -127.0f ? -127.0f : below;
  return int((clamped + 0x1.8p23f) - 0x1.8p23f);
}

void encode(const float* src, size_t values, void* dst) {
  const float scale = scale_of(src, values);
  memcpy(dst, &scale, sizeof scale);
  int8_t* q = static_cast<int8_t*>(dst) + sizeof scale;
  if (!(scale > 0.0f)) {
    memset(q, 0, values);
    return;
  }
  for (size_t i = 0; i < values; ++i) q[i] = int8_t(quantize(src[i], scale));
}

void decode(const void* src, size_t values, float* dst) {
  float scale;
  memcpy(&scale, src, sizeof scale);
  const int8_t* q = static_cast<const int8_t*>(src) + sizeof scale;
  for (size_t i = 0; i < values; ++i) dst[i] = float(q[i]) * scale;
}

// ---- the packing --------------------------------------------------------------------------------------------------

void pack(const void* blocks, size_t row_bytes, uint32_t rows, size_t k_padded, void* panel) {
  char* const out = static_cast<char*>(panel);
  memset(out, 0, panel_bytes(k_padded));
  for (uint32_t r = 0; r < rows; ++r) {
    const char* row = static_cast<const char*>(blocks) + r * row_bytes;
    memcpy(out + r * 4, row, 4);
    for (size_t k = 0; k < k_padded; k += 4) memcpy(out + kScaleBytes + k * kPanelRows + r * 4, row + 4 + k, 4);
  }
}

void unpack(const void* panel, size_t k_padded, uint32_t rows, void* blocks, size_t row_bytes) {
  const char* const in = static_cast<const char*>(panel);
  for (uint32_t r = 0; r < rows; ++r) {
    char* row = static_cast<char*>(blocks) + r * row_bytes;
    memcpy(row, in + r * 4, 4);
    for (size_t k = 0; k < k_padded; k += 4) memcpy(row + 4 + k, in + kScaleBytes + k * kPanelRows + r * 4, 4);
  }
}

// ---- the activation -----------------------------------------------------------------------------------------------

// The scale needs the whole token, so a range only leaves its floats behind; finish quantises them in place.
void pack_token(const float* src, size_t values, size_t k_begin, size_t, void* row) {
  char* out = static_cast<char*>(row) + sizeof(Token) + k_begin * 4;
  memcpy(out, src, values * 4);
  memset(out + values * 4, 0, (64 - values % 64) % 64 * 4);
}

}  // namespace

void finish_scalar(size_t k_padded, void* row) {
  char* const values = static_cast<char*>(row) + sizeof(Token);
  const float scale = scale_of(reinterpret_cast<const float*>(values), k_padded);
  Token header = {scale, {}};
  for (size_t k = 0; k < k_padded; ++k) {  // writes never overtake reads
    float x;
    memcpy(&x, values + 4 * k, 4);
    const int16_t q = scale > 0.0f ? int16_t(quantize(x, scale)) : 0;
    memcpy(values + 2 * k, &q, 2);
    header.sums[k / kSegment] += q;
  }
  for (size_t k = 0; k < k_padded; ++k) {
    int16_t q;
    memcpy(&q, values + 2 * k, 2);
    values[2 * k_padded + k] = char(q);
  }
  memcpy(row, &header, sizeof header);
}

void run_scalar(const syshax_matmul_args* args) {
  const size_t k_padded = args->k_padded;
  for (uint32_t p = 0; p < args->num_panels; ++p) {
    const char* panel = static_cast<const char*>(args->panels) + p * panel_bytes(k_padded);
    for (uint32_t t = 0; t < args->num_tokens; ++t) {
      const char* a = narrow_values(args->activations[t], k_padded);
      for (size_t r = 0; r < kPanelRows; ++r) {
        float sum = 0.0f;
        int32_t exact = 0;
        for (size_t k = 0; k < k_padded; ++k) {
          exact += int8_t(panel[kScaleBytes + k / 4 * kGroupBytes + r * 4 + k % 4]) * int8_t(a[k]);
          if ((k + 1) % kSegment && k + 1 < k_padded) continue;
          sum += float(exact);
          exact = 0;
        }
        float scale;
        memcpy(&scale, panel + r * 4, 4);
        args->out[t * args->out_stride + p * kPanelRows + r] = sum * (scale * token(args->activations[t]).scale);
      }
    }
  }
}

namespace {

// ---- the table ----------------------------------------------------------------------------------------------------

constexpr uint32_t kAbi = SYSHAX_OPERATOR_ABI;
constexpr uint32_t kDtypes = 1u << SYSHAX_FLOAT32 | 1u << SYSHAX_FLOAT16 | 1u << SYSHAX_BFLOAT16;

const syshax_format format = {kAbi, sizeof format, "int8row", 0, 0, encode, decode, row_bytes};
const syshax_packing packing = {kAbi, sizeof packing, "int8row/p16k4/1", "int8row", kPanelRows, 64, panel_bytes,
                                pack, unpack};
const syshax_activation activation_scalar = {kAbi,         sizeof activation_scalar, "q8token", token_bytes, pack_token,
                                             finish_scalar};
const syshax_kernel kernel_scalar = {
    kAbi,      sizeof kernel_scalar, "int8row_q8token_scalar", "scalar", &packing, &activation_scalar, 0, kDtypes, 0,
    run_scalar};
#if defined(__x86_64__)
constexpr uint64_t kAvx512 = SYSHAX_CPU_AVX2 | SYSHAX_CPU_AVX512 | SYSHAX_CPU_AVX512VNNI;
const syshax_activation activation_avx2 = {kAbi,       sizeof activation_avx2, "q8token", token_bytes, pack_token,
                                           finish_avx2};
const syshax_kernel kernel_avx2 = {kAbi,
                                   sizeof kernel_avx2,
                                   "int8row_q8token_avx2",
                                   "avx2",
                                   &packing,
                                   &activation_avx2,
                                   SYSHAX_CPU_AVX2,
                                   kDtypes,
                                   20,
                                   run_avx2};
const syshax_kernel kernel_avx512vnni = {kAbi,
                                         sizeof kernel_avx512vnni,
                                         "int8row_q8token_avx512vnni",
                                         "avx512vnni",
                                         &packing,
                                         &activation_avx2,
                                         kAvx512,
                                         kDtypes,
                                         40,
                                         run_avx512vnni};
const syshax_kernel* const kernels[] = {&kernel_scalar, &kernel_avx2, &kernel_avx512vnni};
#else
const syshax_kernel* const kernels[] = {&kernel_scalar};
#endif

const syshax_format* const formats[] = {&format};
const syshax_operator_library library = {
    kAbi, sizeof library, "syshax-example", "1.0", formats, 1, sizeof kernels / sizeof kernels[0], kernels};

}  // namespace
}  // namespace int8row

extern "C" __attribute__((visibility("default"))) const syshax_operator_library* syshax_operators_v1(void) {
  return &int8row::library;
}
