// AVX-512 VNNI: vpdpbusd multiplies unsigned with signed bytes, so weights are taken as q + 128 (their sign bit
// flipped) and the sums start at -128 times the token's sum.
#include <immintrin.h>
#include <string.h>

#include "int8row.h"
#include "int8row_tiles.h"

// Keeps g++ from copying every sum around its product: with the copies the loop has twice the instructions.
#ifndef INT8ROW_STAYS
#define INT8ROW_STAYS(sum) __asm__ volatile("" : "+v"(sum))
#endif

namespace int8row {
namespace {

struct Avx512Vnni {
  static constexpr uint32_t kUnitRows = 16;
  static constexpr int kTokens = 6;
  static constexpr int units_for(int tokens) { return tokens <= 3 ? 4 : 2; }

  template <int U, int T>
  static void tile(const Place& place) {
    __m512i sum[U][T];
    const char* weights[U];
    const char* values[T];
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) {
      weights[u] =
          place.panels + (place.unit + uint32_t(u)) * place.panel_bytes + kScaleBytes + place.begin * kPanelRows;
    }
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
      values[t] = narrow_values(place.tokens[t], place.k_padded) + place.begin;
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) {
        sum[u][t] = _mm512_set1_epi32(-128 * token(place.tokens[t]).sums[place.begin / kSegment]);
      }
    }
    const size_t groups = (place.end - place.begin) / 4;
    for (size_t g = 0; g < groups; ++g) {
      __m512i w[U];
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) {
        __builtin_prefetch(weights[u] + g * kGroupBytes + kAhead);
        w[u] = _mm512_xor_si512(_mm512_loadu_si512(weights[u] + g * kGroupBytes), _mm512_set1_epi32(int(0x80808080u)));
      }
#pragma GCC unroll 6
      for (int t = 0; t < T; ++t) {
        int32_t four;
        memcpy(&four, values[t] + 4 * g, 4);
        const __m512i x = _mm512_set1_epi32(four);
#pragma GCC unroll 4
        for (int u = 0; u < U; ++u) {
          sum[u][t] = _mm512_dpbusd_epi32(sum[u][t], w[u], x);
          INT8ROW_STAYS(sum[u][t]);
        }
      }
    }
#pragma GCC unroll 6
    for (int t = 0; t < T; ++t) {
#pragma GCC unroll 4
      for (int u = 0; u < U; ++u) store(place, u, t, sum[u][t]);
    }
  }

  static void store(const Place& place, int u, int t, __m512i rows) {
    const size_t unit = place.unit + uint32_t(u);
    float* out = place.out + size_t(t) * place.out_stride + unit * kUnitRows;
    __m512 value = _mm512_cvtepi32_ps(rows);
    if (place.begin) value = _mm512_add_ps(_mm512_loadu_ps(out), value);
    if (place.end == place.k_padded) {
      const char* scales = place.panels + unit * place.panel_bytes;
      const __m512 token_scale = _mm512_set1_ps(token(place.tokens[t]).scale);
      value = _mm512_mul_ps(value, _mm512_mul_ps(_mm512_loadu_ps(scales), token_scale));
    }
    _mm512_storeu_ps(out, value);
  }
};

}  // namespace

void run_avx512vnni(const syshax_matmul_args* args) { run_tiles<Avx512Vnni>(args); }

}  // namespace int8row
