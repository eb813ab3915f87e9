// AVX2: weights are widened to 16 bits as they are loaded and multiplied with vpmaddwd, which sums pairs of products
// exactly. Two multiplications do 32 products, as with the byte instructions' sign trick, but without its two other
// operations for each token.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "int8row.h"
#include "int8row_tiles.h"

namespace int8row {
namespace {

struct Avx2 {
  static constexpr uint32_t kUnitRows = 8;
  static constexpr int kTokens = 6;
  static constexpr int units_for(int tokens) { return tokens == 1 ? 8 : tokens == 2 ? 4 : 1; }

  // Four rows a vector: (k, k + 1) and (k + 2, k + 3) of a row are neighbours until the end.
  template <int U, int T>
  static void tile(const Place& place) {
    __m256i sum[2 * U][T];
    const char* weights[U];
    const char* values[T];
#pragma GCC unroll 8
    for (int u = 0; u < U; ++u) {
      const uint32_t unit = place.unit + uint32_t(u);
      weights[u] = place.panels + unit / 2 * place.panel_bytes + kScaleBytes + unit % 2 * (kGroupBytes / 2) +
                   place.begin * kPanelRows;
    }
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
      values[t] = wide_values(place.tokens[t]) + 2 * place.begin;
#pragma GCC unroll 16
      for (int v = 0; v < 2 * U; ++v) sum[v][t] = _mm256_setzero_si256();
    }
    const size_t groups = (place.end - place.begin) / 4;
    for (size_t g = 0; g < groups; ++g) {
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) {
        const __m128i* from = reinterpret_cast<const __m128i*>(weights[u] + g * kGroupBytes);
        __builtin_prefetch(weights[u] + g * kGroupBytes + kAhead);
        const __m256i low = _mm256_cvtepi8_epi16(_mm_loadu_si128(from));
        const __m256i high = _mm256_cvtepi8_epi16(_mm_loadu_si128(from + 1));
#pragma GCC unroll 6
        for (int t = 0; t < T; ++t) {
          long long four;
          memcpy(&four, values[t] + 8 * g, 8);
          const __m256i x = _mm256_set1_epi64x(four);
          sum[2 * u][t] = _mm256_add_epi32(sum[2 * u][t], _mm256_madd_epi16(low, x));
          sum[2 * u + 1][t] = _mm256_add_epi32(sum[2 * u + 1][t], _mm256_madd_epi16(high, x));
          // Keeps g++ from hoisting all products before the sums, which then spill.
          __asm__ volatile("" : "+x"(sum[2 * u][t]), "+x"(sum[2 * u + 1][t]));
        }
      }
    }
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 8
      for (int u = 0; u < U; ++u) store(place, u, t, sum[2 * u][t], sum[2 * u + 1][t]);
    }
  }

  static void store(const Place& place, int u, int t, __m256i low, __m256i high) {
    const uint32_t unit = place.unit + uint32_t(u);
    const __m256i rows = _mm256_permute4x64_epi64(_mm256_hadd_epi32(low, high), 0xd8);
    float* out = place.out + size_t(t) * place.out_stride + unit * kUnitRows;
    __m256 value = _mm256_cvtepi32_ps(rows);
    if (place.begin) value = _mm256_add_ps(_mm256_loadu_ps(out), value);
    if (place.end == place.k_padded) {
      const char* scales = place.panels + unit / 2 * place.panel_bytes + unit % 2 * 32;
      const __m256 token_scale = _mm256_set1_ps(token(place.tokens[t]).scale);
      value = _mm256_mul_ps(value, _mm256_mul_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(scales)), token_scale));
    }
    _mm256_storeu_ps(out, value);
  }
};

// The largest of the floats' magnitudes as bits, which order as integers do; infinity and NaN are the largest.
int32_t largest_bits(const char* values, size_t k) {
  __m256i most = _mm256_setzero_si256();
  for (size_t i = 0; i < k; i += 8) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + 4 * i));
    most = _mm256_max_epi32(most, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  }
  int32_t lanes[8], largest = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), most);
  for (const int32_t lane : lanes) largest = lane > largest ? lane : largest;
  return largest;
}

__m256i quantized(const char* values, __m256 scale) {
  __m256 x = _mm256_div_ps(_mm256_loadu_ps(reinterpret_cast<const float*>(values)), scale);
  x = _mm256_min_ps(_mm256_set1_ps(127.0f), _mm256_max_ps(_mm256_set1_ps(-127.0f), x));
  return _mm256_cvtps_epi32(x);
}

// Quantises values [begin, end) in place, to 16 bits at the front of the row; their sum.
int32_t quantize_segment(char* values, size_t begin, size_t end, __m256 scale) {
  __m256i sums = _mm256_setzero_si256();
  for (size_t i = begin; i < end; i += 16) {
    const __m256i low = quantized(values + 4 * i, scale), high = quantized(values + 4 * i + 32, scale);
    sums = _mm256_add_epi32(sums, _mm256_add_epi32(low, high));
    const __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + 2 * i), both);
  }
  int32_t lanes[8], sum = 0;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), sums);
  for (const int32_t lane : lanes) sum += lane;
  return sum;
}

}  // namespace

void finish_avx2(size_t k_padded, void* row) {
  char* const values = static_cast<char*>(row) + sizeof(Token);
  const int32_t bits = largest_bits(values, k_padded);
  float largest;
  memcpy(&largest, &bits, 4);
  const bool finite = bits < 0x7f800000;
  Token header = {finite ? largest / 127.0f : nanf(""), {}};
  if (finite && header.scale > 0.0f) {
    for (size_t begin = 0; begin < k_padded; begin += kSegment) {
      const size_t end = k_padded - begin < kSegment ? k_padded : begin + kSegment;
      header.sums[begin / kSegment] = quantize_segment(values, begin, end, _mm256_set1_ps(header.scale));
    }
  } else {
    memset(values, 0, 2 * k_padded);
  }
  for (size_t i = 0; i < k_padded; i += 32) {
    const __m256i* from = reinterpret_cast<const __m256i*>(values + 2 * i);
    const __m256i both = _mm256_packs_epi16(_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(values + 2 * k_padded + i), _mm256_permute4x64_epi64(both, 0xd8));
  }
  memcpy(row, &header, sizeof header);
}

void run_avx2(const syshax_matmul_args* args) { run_tiles<Avx2>(args); }

}  // namespace int8row
