// Stands in for the compiler's <immintrin.h> when the *_avx512*.cc files are built for a CPU without AVX-512: the
// intrinsics they use, in plain C++ over the compiler's vector types, after the "Operation" sections of Intel's
// Intrinsics Guide. An intrinsic that a kernel starts to use and that is missing here fails to compile. Loops are kept
// out of line, since kernels unroll everything that they inline.
#pragma once
#include <cstdint>
#include <cstring>

typedef float __m512 __attribute__((vector_size(64)));
typedef int32_t __m512i __attribute__((vector_size(64)));
typedef int32_t __m512bh __attribute__((vector_size(64)));
typedef int32_t __m256i __attribute__((vector_size(32)));
typedef int32_t __m128i __attribute__((vector_size(16)));
using __mmask16 = uint16_t;
using __mmask64 = uint64_t;

constexpr int _MM_FROUND_TO_NEAREST_INT = 0;

#define SYSHAX_LOOP __attribute__((noinline, unused)) static

namespace emulated {

template <class To, class From>
inline To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

struct Words {
  uint16_t lane[16];
};
struct Bytes {
  uint8_t lane[16];
};
typedef int8_t Int8s __attribute__((vector_size(64)));
typedef int16_t Int16s __attribute__((vector_size(64)));
typedef uint16_t Uint16s __attribute__((vector_size(64)));

SYSHAX_LOOP float half_to_float(uint16_t h) {
  const uint32_t sign = uint32_t(h >> 15) << 31, exponent = h >> 10 & 31, fraction = h & 1023;
  if (exponent == 31) return as<float>(sign | 0x7f800000u | (fraction ? 0x00400000u | fraction << 13 : 0u));
  const float magnitude =
      exponent ? __builtin_ldexpf(float(1024 + fraction), int(exponent) - 25) : __builtin_ldexpf(float(fraction), -24);
  return sign ? -magnitude : magnitude;
}

SYSHAX_LOOP uint16_t half_from_float(float x) {
  const uint32_t bits = as<uint32_t>(x);
  const uint16_t sign = uint16_t(bits >> 31 << 15);
  if (x != x) return uint16_t(sign | 0x7e00u | (bits >> 13 & 0x3ffu));
  const double magnitude = __builtin_fabs(double(x));
  if (magnitude >= 65520.0) return uint16_t(sign | 0x7c00u);
  int exponent = -14;
  while (exponent < 15 && magnitude >= __builtin_ldexp(1.0, exponent + 1)) ++exponent;
  // Subnormals and the first binade share their unit of the last place, so carries into the exponent come out right.
  const double units = __builtin_nearbyint(magnitude / __builtin_ldexp(1.0, exponent - 10));
  return uint16_t(sign | (uint32_t(exponent + 14) * 1024u + uint32_t(units)));
}

inline float flushed(float x) { return __builtin_fabsf(x) < 0x1p-126f ? x * 0.0f : x; }

inline float bf16(uint32_t bits) { return flushed(as<float>(bits << 16)); }

}  // namespace emulated

// ---- float32 ----
inline __m512 _mm512_setzero_ps() { return __m512{}; }
inline __m512 _mm512_set1_ps(float x) { return __m512{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline __m512 _mm512_loadu_ps(const void* p) { return emulated::load<__m512>(p); }
inline void _mm512_storeu_ps(void* p, __m512 a) { std::memcpy(p, &a, sizeof a); }
inline __m512 _mm512_add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 _mm512_mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 _mm512_div_ps(__m512 a, __m512 b) { return a / b; }
inline __m512 _mm512_min_ps(__m512 a, __m512 b) { return a < b ? a : b; }
inline __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
SYSHAX_LOOP __m512 _mm512_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  for (int i = 0; i < 16; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
SYSHAX_LOOP __m512 _mm512_mask_blend_ps(__mmask16 k, __m512 a, __m512 b) {
  for (int i = 0; i < 16; ++i) a[i] = k >> i & 1 ? b[i] : a[i];
  return a;
}

// ---- int32 ----
inline __m512i _mm512_set1_epi32(int x) { return __m512i{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline __m512i _mm512_loadu_si512(const void* p) { return emulated::load<__m512i>(p); }
inline __m256i _mm256_loadu_si256(const __m256i* p) { return emulated::load<__m256i>(p); }
inline void _mm256_storeu_si256(__m256i* p, __m256i a) { std::memcpy(p, &a, sizeof a); }
inline void _mm_storeu_si128(__m128i* p, __m128i a) { std::memcpy(p, &a, sizeof a); }
inline __m512i _mm512_add_epi32(__m512i a, __m512i b) { return a + b; }
inline __m512i _mm512_sub_epi32(__m512i a, __m512i b) { return a - b; }
inline __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
inline __m512i _mm512_max_epi32(__m512i a, __m512i b) { return a > b ? a : b; }
SYSHAX_LOOP __m512i _mm512_slli_epi32(__m512i a, unsigned n) {
  for (int i = 0; i < 16; ++i) a[i] = int32_t(uint32_t(a[i]) << n);
  return a;
}
SYSHAX_LOOP __m512i _mm512_srli_epi32(__m512i a, unsigned n) {
  for (int i = 0; i < 16; ++i) a[i] = int32_t(uint32_t(a[i]) >> n);
  return a;
}
SYSHAX_LOOP __m512i _mm512_srai_epi32(__m512i a, unsigned n) {
  for (int i = 0; i < 16; ++i) a[i] >>= n;
  return a;
}
SYSHAX_LOOP __mmask16 _mm512_cmplt_epi32_mask(__m512i a, __m512i b) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) mask = __mmask16(mask | (a[i] < b[i]) << i);
  return mask;
}
SYSHAX_LOOP __m512i _mm512_mask_blend_epi32(__mmask16 k, __m512i a, __m512i b) {
  for (int i = 0; i < 16; ++i) a[i] = k >> i & 1 ? b[i] : a[i];
  return a;
}
SYSHAX_LOOP int _mm512_reduce_add_epi32(__m512i a) {
  uint32_t sum = 0;
  for (int i = 0; i < 16; ++i) sum += uint32_t(a[i]);
  return int32_t(sum);
}
SYSHAX_LOOP int _mm512_reduce_max_epi32(__m512i a) {
  int32_t largest = a[0];
  for (int i = 1; i < 16; ++i) largest = a[i] > largest ? a[i] : largest;
  return largest;
}

// ---- int8 and int16 ----
inline __m512i _mm512_set1_epi8(int x) { return _mm512_set1_epi32(int(uint32_t(uint8_t(x)) * 0x01010101u)); }
inline __m512i _mm512_set1_epi16(int x) { return _mm512_set1_epi32(int(uint32_t(uint16_t(x)) * 0x00010001u)); }
inline __m512i _mm512_xor_si512(__m512i a, __m512i b) { return a ^ b; }
inline __m512i _mm512_add_epi16(__m512i a, __m512i b) {
  return emulated::as<__m512i>(emulated::as<emulated::Uint16s>(a) + emulated::as<emulated::Uint16s>(b));
}
SYSHAX_LOOP __m512i _mm512_abs_epi8(__m512i a) {
  auto bytes = emulated::as<emulated::Int8s>(a);
  for (int i = 0; i < 64; ++i) bytes[i] = int8_t(bytes[i] < 0 ? -bytes[i] : bytes[i]);
  return emulated::as<__m512i>(bytes);
}
SYSHAX_LOOP __mmask64 _mm512_movepi8_mask(__m512i a) {
  const auto bytes = emulated::as<emulated::Int8s>(a);
  __mmask64 mask = 0;
  for (int i = 0; i < 64; ++i) mask |= uint64_t(bytes[i] < 0) << i;
  return mask;
}
SYSHAX_LOOP __m512i _mm512_mask_sub_epi8(__m512i otherwise, __mmask64 k, __m512i a, __m512i b) {
  const auto x = emulated::as<emulated::Int8s>(a), y = emulated::as<emulated::Int8s>(b);
  auto result = emulated::as<emulated::Int8s>(otherwise);
  for (int i = 0; i < 64; ++i) {
    if (k >> i & 1) result[i] = int8_t(x[i] - y[i]);
  }
  return emulated::as<__m512i>(result);
}
// Unsigned bytes of a, signed bytes of b, two products a word, saturated.
SYSHAX_LOOP __m512i _mm512_maddubs_epi16(__m512i a, __m512i b) {
  const auto x = emulated::as<emulated::Int8s>(a), y = emulated::as<emulated::Int8s>(b);
  emulated::Int16s words{};
  for (int i = 0; i < 32; ++i) {
    const int sum = uint8_t(x[2 * i]) * y[2 * i] + uint8_t(x[2 * i + 1]) * y[2 * i + 1];
    words[i] = int16_t(sum > 32767 ? 32767 : sum < -32768 ? -32768 : sum);
  }
  return emulated::as<__m512i>(words);
}
SYSHAX_LOOP __m512i _mm512_madd_epi16(__m512i a, __m512i b) {
  const auto x = emulated::as<emulated::Int16s>(a), y = emulated::as<emulated::Int16s>(b);
  for (int i = 0; i < 16; ++i) a[i] = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
  return a;
}

// ---- conversions ----
inline __m512i _mm512_castps_si512(__m512 a) { return emulated::as<__m512i>(a); }
inline __m512 _mm512_castsi512_ps(__m512i a) { return emulated::as<__m512>(a); }
SYSHAX_LOOP __m512i _mm512_cvtps_epi32(__m512 a) {
  __m512i v;
  for (int i = 0; i < 16; ++i) {
    v[i] = a[i] >= -0x1p31f && a[i] < 0x1p31f ? int32_t(__builtin_nearbyintf(a[i])) : INT32_MIN;
  }
  return v;
}
inline __m512 _mm512_cvtepi32_ps(__m512i a) { return __builtin_convertvector(a, __m512); }
SYSHAX_LOOP __m512 _mm512_cvtph_ps(__m256i a) {
  const auto halves = emulated::as<emulated::Words>(a);
  __m512 v;
  for (int i = 0; i < 16; ++i) v[i] = emulated::half_to_float(halves.lane[i]);
  return v;
}
SYSHAX_LOOP __m256i _mm512_cvtps_ph(__m512 a, int) {
  emulated::Words halves;
  for (int i = 0; i < 16; ++i) halves.lane[i] = emulated::half_from_float(a[i]);
  return emulated::as<__m256i>(halves);
}
SYSHAX_LOOP __m512i _mm512_cvtepu16_epi32(__m256i a) {
  const auto words = emulated::as<emulated::Words>(a);
  __m512i v;
  for (int i = 0; i < 16; ++i) v[i] = words.lane[i];
  return v;
}
SYSHAX_LOOP __m256i _mm512_cvtepi32_epi16(__m512i a) {
  emulated::Words words;
  for (int i = 0; i < 16; ++i) words.lane[i] = uint16_t(a[i]);
  return emulated::as<__m256i>(words);
}
SYSHAX_LOOP __m128i _mm512_cvtepi32_epi8(__m512i a) {
  emulated::Bytes bytes;
  for (int i = 0; i < 16; ++i) bytes.lane[i] = uint8_t(a[i]);
  return emulated::as<__m128i>(bytes);
}

// ---- dot products ----
// Unsigned bytes of a, signed bytes of b, four products a lane, no saturation.
SYSHAX_LOOP __m512i _mm512_dpbusd_epi32(__m512i sum, __m512i a, __m512i b) {
  for (int i = 0; i < 16; ++i) {
    uint32_t total = uint32_t(sum[i]);
    for (int byte = 0; byte < 4; ++byte) {
      const int x = uint8_t(uint32_t(a[i]) >> 8 * byte), y = int8_t(uint32_t(b[i]) >> 8 * byte);
      total += uint32_t(x * y);
    }
    sum[i] = int32_t(total);
  }
  return sum;
}
// The odd (upper) product is added first; subnormal inputs and results are zero; each step is a fused multiply-add.
SYSHAX_LOOP __m512 _mm512_dpbf16_ps(__m512 sum, __m512bh a, __m512bh b) {
  using namespace emulated;
  for (int i = 0; i < 16; ++i) {
    const uint32_t x = uint32_t(a[i]), y = uint32_t(b[i]);
    const float odd = flushed(__builtin_fmaf(bf16(x >> 16), bf16(y >> 16), flushed(sum[i])));
    sum[i] = flushed(__builtin_fmaf(bf16(x & 0xffff), bf16(y & 0xffff), odd));
  }
  return sum;
}

// ---- tiles ----
namespace emulated {

// What LDTILECFG reads, and eight registers of 16 rows of 64 bytes. Rows and bytes beyond the configured ones are zero
// after every instruction that writes a tile; an instruction on tiles that are not configured ends the process, as the
// hardware's fault would.
struct TileState {
  bool configured = false;
  uint8_t rows[16];
  uint16_t row_bytes[16];
  alignas(64) uint8_t data[8][16][64];
};
inline thread_local TileState tiles;

SYSHAX_LOOP void require_tiles(bool good) {
  if (!good) __builtin_trap();
}
SYSHAX_LOOP void require_shapes(int sum, int a, int b) {
  const auto& t = tiles;
  require_tiles(t.configured && t.rows[sum] == t.rows[a] && t.row_bytes[sum] == t.row_bytes[b] &&
                t.row_bytes[a] == 4 * t.rows[b] && sum != a && sum != b && a != b);
}
SYSHAX_LOOP uint32_t tile_word(int tile, int row, int word) {
  uint32_t value;
  std::memcpy(&value, &tiles.data[tile][row][4 * word], 4);
  return value;
}

}  // namespace emulated

SYSHAX_LOOP void _tile_loadconfig(const void* p) {
  const auto* bytes = static_cast<const uint8_t*>(p);
  auto& t = emulated::tiles;
  emulated::require_tiles(bytes[0] == 1 && bytes[1] == 0);
  for (int i = 2; i < 16; ++i) emulated::require_tiles(bytes[i] == 0);
  std::memcpy(t.row_bytes, bytes + 16, 32);
  std::memcpy(t.rows, bytes + 48, 16);
  for (int i = 0; i < 16; ++i)
    emulated::require_tiles(t.rows[i] <= 16 && t.row_bytes[i] <= 64 && t.row_bytes[i] % 4 == 0);
  std::memset(t.data, 0, sizeof t.data);
  t.configured = true;
}
SYSHAX_LOOP void _tile_release() { emulated::tiles.configured = false; }
SYSHAX_LOOP void _tile_zero(int tile) {
  emulated::require_tiles(emulated::tiles.configured);
  std::memset(emulated::tiles.data[tile], 0, sizeof emulated::tiles.data[tile]);
}
SYSHAX_LOOP void _tile_loadd(int tile, const void* base, size_t stride) {
  auto& t = emulated::tiles;
  emulated::require_tiles(t.configured && t.rows[tile] > 0);
  std::memset(t.data[tile], 0, sizeof t.data[tile]);
  for (int row = 0; row < t.rows[tile]; ++row)
    std::memcpy(t.data[tile][row], static_cast<const char*>(base) + row * stride, t.row_bytes[tile]);
}
SYSHAX_LOOP void _tile_stored(int tile, void* base, size_t stride) {
  auto& t = emulated::tiles;
  emulated::require_tiles(t.configured && t.rows[tile] > 0);
  for (int row = 0; row < t.rows[tile]; ++row)
    std::memcpy(static_cast<char*>(base) + row * stride, t.data[tile][row], t.row_bytes[tile]);
}
// Signed bytes of a, unsigned bytes of b.
SYSHAX_LOOP void _tile_dpbsud(int sum, int a, int b) {
  using namespace emulated;
  require_shapes(sum, a, b);
  for (int m = 0; m < tiles.rows[sum]; ++m) {
    for (int n = 0; n < tiles.row_bytes[sum] / 4; ++n) {
      uint32_t total = tile_word(sum, m, n);
      for (int k = 0; k < 4 * tiles.rows[b]; ++k) {
        const int x = int8_t(tiles.data[a][m][k]), y = tiles.data[b][k / 4][4 * n + k % 4];
        total += uint32_t(x * y);
      }
      std::memcpy(&tiles.data[sum][m][4 * n], &total, 4);
    }
  }
}
// Even and odd products are summed apart, then added; subnormals are zero.
SYSHAX_LOOP void _tile_dpbf16ps(int sum, int a, int b) {
  using namespace emulated;
  require_shapes(sum, a, b);
  for (int m = 0; m < tiles.rows[sum]; ++m) {
    for (int n = 0; n < tiles.row_bytes[sum] / 4; ++n) {
      float even = 0, odd = 0;
      for (int k = 0; k < tiles.rows[b]; ++k) {
        const uint32_t x = tile_word(a, m, k), y = tile_word(b, k, n);
        even = flushed(__builtin_fmaf(bf16(x & 0xffff), bf16(y & 0xffff), even));
        odd = flushed(__builtin_fmaf(bf16(x >> 16), bf16(y >> 16), odd));
      }
      const float total = flushed(flushed(as<float>(tile_word(sum, m, n))) + flushed(even + odd));
      std::memcpy(&tiles.data[sum][m][4 * n], &total, 4);
    }
  }
}

#undef SYSHAX_LOOP
