// The AMX kernels: products of 16 tokens with a panel's 16 rows in tile registers. A panel's 64-byte lines are the rows
// of a B tile as they lie; the tokens' rows are scattered and gathered into A tiles, once for kChunkPanels panels.
//
// Integer blocks: a tile product sums a block of 32 exactly, AVX-512 then scales it in the scalar kernel's order, so
// the bits are the scalar kernel's. bf16: sums stay in tiles; rounding is the hardware's own (subnormals count as
// zero). Few tokens would leave tiles empty: they go to the AVX-512 kernels. Register numbers are literals because the
// compilers' intrinsics want them so.
#include "kernels/vec_avx512.h"

#include "kernels/activations.h"
#include "kernels/kernels.h"
#include "kernels/packings.h"

namespace syshax {
namespace {

constexpr uint32_t kTileTokens = 16, kFewTokens = 8, kChunkPanels = 4;
constexpr size_t kChunkValues = 1024;  // of k: what is gathered at once stays in the first-level cache

// What tile instructions read must have been written: g++ 12's intrinsics do not say that they read memory.
inline void finish_writes() { __asm__ volatile("" ::: "memory"); }

// The layout that LDTILECFG reads.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, uint8_t num_rows, uint16_t bytes) {
    rows[tile] = num_rows;
    row_bytes[tile] = bytes;
  }
};

// 16 tokens and up to kChunkPanels panels. Where there are fewer tokens the last one stands for the missing ones.
struct Pass {
  const char* rows[kTileTokens];
  const char* panels;
  size_t panel_bytes, k_padded;
  uint32_t num_panels;
};

using Sums = float[kTileTokens][kChunkPanels * kPanelRows];

template <class Tiles>
void run_amx(const syshax_matmul_args* args) {
  const TileConfig config = Tiles::config();
  finish_writes();
  _tile_loadconfig(&config);
  alignas(64) Sums sums;
  Pass pass;
  pass.k_padded = args->k_padded;
  pass.panel_bytes = Tiles::panel_bytes(args->k_padded);
  for (uint32_t p = 0; p < args->num_panels; p += kChunkPanels) {
    pass.panels = static_cast<const char*>(args->panels) + p * pass.panel_bytes;
    pass.num_panels = args->num_panels - p < kChunkPanels ? args->num_panels - p : kChunkPanels;
    for (uint32_t begin = 0; begin < args->num_tokens; begin += kTileTokens) {
      const uint32_t tokens = args->num_tokens - begin < kTileTokens ? args->num_tokens - begin : kTileTokens;
      for (uint32_t t = 0; t < kTileTokens; ++t)
        pass.rows[t] = static_cast<const char*>(args->activations[begin + (t < tokens ? t : tokens - 1)]);
      Tiles::run(pass, sums);
      for (uint32_t t = 0; t < tokens; ++t) {
        float* out = args->out + (begin + t) * args->out_stride + p * kPanelRows;
        for (uint32_t panel = 0; panel < pass.num_panels; ++panel)
          Vec::store(out + panel * kPanelRows, Vec::load(sums[t] + panel * kPanelRows));
      }
    }
  }
  _tile_release();
}

// tiles[step][token][Bytes]: of each row the bytes from `begin` on.
template <size_t Bytes>
void gather(const Pass& pass, size_t begin, size_t steps, char* tiles) {
  for (size_t step = 0; step < steps; ++step) {
    for (uint32_t t = 0; t < kTileTokens; ++t)
      __builtin_memcpy(tiles + (step * kTileTokens + t) * Bytes, pass.rows[t] + begin + step * Bytes, Bytes);
  }
  finish_writes();
}

size_t chunk_of(size_t rest) { return rest < kChunkValues ? rest : kChunkValues; }

// ---- integer blocks: tiles 0 and 3 are sums, 1 and 4 tokens, 2 and 5 weights ---------------------------------------

struct Q8Lines {
  static constexpr size_t kBlockBytes = 8 * kGroupBytes;
  static constexpr int32_t kOffset = 128;
  static const char* lines(const char* groups, char*) { return groups; }
};

struct Q4Lines {
  static constexpr size_t kBlockBytes = 4 * kGroupBytes;
  static constexpr int32_t kOffset = 8;
  // Low nibbles are the first 16 values, high ones the others.
  static const char* lines(const char* groups, char* room) {
    const Vec::I low = Vec::set1i(0x0f0f0f0f);
    for (size_t g = 0; g < 4; ++g) {
      const Vec::I both = Vec::loadi(groups + g * kGroupBytes);
      Vec::store(reinterpret_cast<float*>(room + g * kGroupBytes), Vec::from_bits(Vec::andi(both, low)));
      Vec::store(reinterpret_cast<float*>(room + (g + 4) * kGroupBytes),
                 Vec::from_bits(Vec::andi(Vec::shift_right<4>(both), low)));
    }
    finish_writes();
    return room;
  }
};

template <class Lines>
struct BlockTiles {
  static constexpr size_t kStepBytes = kScaleBytes + 2 * Lines::kBlockBytes;
  static size_t panel_bytes(size_t k_padded) { return k_padded / kStepValues * kStepBytes; }

  static TileConfig config() {
    TileConfig config;
    for (int first = 0; first <= 3; first += 3) {
      config.set(first, kTileTokens, 64);
      config.set(first + 1, kTileTokens, 32);
      config.set(first + 2, 8, 64);
    }
    return config;
  }

  static void run(const Pass& pass, Sums& sums) {
    alignas(64) char tokens[kChunkValues * kTileTokens];
    __builtin_memset(&sums, 0, sizeof sums);
    for (size_t k = 0; k < pass.k_padded; k += kChunkValues) {
      const size_t values = chunk_of(pass.k_padded - k);
      gather<32>(pass, k, values / 32, tokens);
      for (uint32_t p = 0; p < pass.num_panels; ++p) {
        const char* steps = pass.panels + p * pass.panel_bytes + k / kStepValues * kStepBytes;
        panel(pass, steps, k, values, tokens, sums[0] + p * kPanelRows);
      }
    }
  }

  static void panel(const Pass& pass, const char* step, size_t k, size_t values, const char* tokens, float* sums) {
    constexpr size_t kStride = kChunkPanels * kPanelRows;
    alignas(64) int32_t even[kTileTokens * kPanelRows], odd[kTileTokens * kPanelRows];
    alignas(64) char room[2][8 * kGroupBytes];
    Vec::F acc[kTileTokens];
#pragma GCC unroll 16
    for (uint32_t t = 0; t < kTileTokens; ++t) acc[t] = Vec::load(sums + t * kStride);
    for (size_t block = k / 32; block < (k + values) / 32; block += 2) {
      const char* groups = step + kScaleBytes;
      _tile_zero(0);
      _tile_loadd(1, tokens, 32);
      _tile_loadd(2, Lines::lines(groups, room[0]), 64);
      _tile_dpbsud(0, 1, 2);
      _tile_stored(0, even, 64);
      _tile_zero(3);
      _tile_loadd(4, tokens + kTileTokens * 32, 32);
      _tile_loadd(5, Lines::lines(groups + Lines::kBlockBytes, room[1]), 64);
      _tile_dpbsud(3, 4, 5);
      _tile_stored(3, odd, 64);
      scale(pass, even, Vec::load_fp16(step), block, acc);
      scale(pass, odd, Vec::load_fp16(step + kPanelRows * 2), block + 1, acc);
      step += kStepBytes;
      tokens += 2 * kTileTokens * 32;
    }
#pragma GCC unroll 16
    for (uint32_t t = 0; t < kTileTokens; ++t) Vec::store(sums + t * kStride, acc[t]);
  }

  static void scale(const Pass& pass, const int32_t* products, Vec::F w_scale, size_t block,
                    Vec::F (&acc)[kTileTokens]) {
#pragma GCC unroll 16
    for (uint32_t t = 0; t < kTileTokens; ++t) {
      const Vec::I offset = Vec::set1i(Lines::kOffset * q8_sums(pass.rows[t], pass.k_padded)[block]);
      const Vec::F exact = Vec::to_float(Vec::subi(Vec::loadi(products + t * kPanelRows), offset));
      const Vec::F a_scale = Vec::set1(q8_scales(pass.rows[t], pass.k_padded)[block]);
      acc[t] = Vec::fma(exact, Vec::mul(w_scale, a_scale), acc[t]);
    }
  }
};

// ---- bf16: tiles 0 to 3 are the sums of as many panels, 4 tokens, 5 to 7 weights -----------------------------------

struct Bf16Tiles {
  static constexpr size_t kStep = 32;  // values of k
  static size_t panel_bytes(size_t k_padded) { return k_padded / 2 * kGroupBytes; }

  static TileConfig config() {
    TileConfig config;
    for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
    return config;
  }

  static void run(const Pass& pass, Sums& sums) {
    if (pass.num_panels == kChunkPanels) return panels<kChunkPanels>(pass, pass.panels, sums[0]);
    for (uint32_t p = 0; p < pass.num_panels; ++p)
      panels<1>(pass, pass.panels + p * pass.panel_bytes, sums[0] + p * kPanelRows);
  }

  template <int Panels>
  static void panels(const Pass& pass, const char* panel, float* sums) {
    alignas(64) char tokens[kChunkValues * kTileTokens * 2];
    _tile_zero(0);
    if (Panels > 1) {
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
    for (size_t k = 0; k < pass.k_padded; k += kChunkValues) {
      const size_t steps = chunk_of(pass.k_padded - k) / kStep;
      gather<64>(pass, k * 2, steps, tokens);
      for (size_t step = 0; step < steps; ++step) {
        multiply<Panels>(tokens + step * kTileTokens * 64, panel, pass.panel_bytes);
        panel += kStep / 2 * kGroupBytes;
      }
    }
    constexpr size_t kStride = kChunkPanels * kPanelRows * sizeof(float);
    _tile_stored(0, sums, kStride);
    if (Panels > 1) {
      _tile_stored(1, sums + kPanelRows, kStride);
      _tile_stored(2, sums + 2 * kPanelRows, kStride);
      _tile_stored(3, sums + 3 * kPanelRows, kStride);
    }
  }

  template <int Panels>
  static void multiply(const char* tokens, const char* lines, size_t panel_bytes) {
    _tile_loadd(4, tokens, 64);
    _tile_loadd(5, lines, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (Panels > 1) {
      _tile_loadd(6, lines + panel_bytes, 64);
      _tile_dpbf16ps(1, 4, 6);
      _tile_loadd(7, lines + 2 * panel_bytes, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(5, lines + 3 * panel_bytes, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
};

}  // namespace

void run_q8_0_q8_amx(const syshax_matmul_args* args) {
  args->num_tokens < kFewTokens ? run_q8_0_q8_avx512vnni(args) : run_amx<BlockTiles<Q8Lines>>(args);
}

void run_q4_0_q8_amx(const syshax_matmul_args* args) {
  args->num_tokens < kFewTokens ? run_q4_0_q8_avx512vnni(args) : run_amx<BlockTiles<Q4Lines>>(args);
}

void run_bf16_bf16_amx(const syshax_matmul_args* args) { run_amx<Bf16Tiles>(args); }

}  // namespace syshax
