// Walks a matrix product in register tiles of P panels x T tokens; what one tile computes is the Tile's business.
// Internal linkage, for the ISA files alone.
//
// Panels are taken in chunks that stay in the cache while all tokens pass over them. Tokens are cut into equal tiles
// (7 becomes 4 + 3, not 6 + 1), so that no token count falls off a cliff. With few tokens a tile spans more panels:
// that keeps enough independent sums in flight, and several streams of memory when one token decodes.
#pragma once
#include <cstddef>
#include <cstdint>

#include "kernels/packings.h"
#include "syshax/matmul_base.h"

namespace syshax {
namespace {

constexpr uint32_t kChunkPanels = 4;
constexpr size_t kAhead = 2048;  // bytes of weights that are asked for before they are needed

// Where one tile reads and writes.
struct TilePlace {
  const char* panel;
  size_t panel_bytes;
  size_t k_padded;
  const void* const* activations;
  float* out;
  size_t out_stride;
  size_t ahead;  // bytes; 0 once the panels are in the cache
};

// Asks for the line that one of `Streams` streams of weights reaches soon. One or two streams are too few for the
// hardware to keep as much of memory in flight as it can; four are enough. Behind a panel lies the next one, and an
// address that is not there is ignored.
template <int Streams>
inline void prefetch(const char* line, size_t ahead) {
  if constexpr (Streams < 4) __builtin_prefetch(line + ahead);
}

template <class Tile, int T, int P>
void run_panels(TilePlace place, uint32_t panels) {
  for (; panels >= P; panels -= P) {
    Tile::template run<P, T>(place);
    place.panel += P * place.panel_bytes;
    place.out += P * kPanelRows;
  }
  if constexpr (P > 1) {
    if (panels) run_panels<Tile, T, P / 2>(place, panels);
  }
}

template <class Tile, int T = Tile::kMaxTokens>
void run_tokens(const TilePlace& place, uint32_t panels, uint32_t tokens) {
  if constexpr (T > 1) {
    if (tokens < T) return run_tokens<Tile, T - 1>(place, panels, tokens);
  }
  run_panels<Tile, T, Tile::panels_for(T)>(place, panels);
}

template <class Tile>
void run_tiles(const syshax_matmul_args* args) {
  const size_t panel_bytes = Tile::panel_bytes(args->k_padded);
  const uint32_t num_tiles = (args->num_tokens + Tile::kMaxTokens - 1) / Tile::kMaxTokens;
  for (uint32_t p = 0; p < args->num_panels; p += kChunkPanels) {
    const uint32_t panels = args->num_panels - p < kChunkPanels ? args->num_panels - p : kChunkPanels;
    uint32_t t = 0;
    for (uint32_t i = 0; i < num_tiles; ++i) {
      const uint32_t tokens = (args->num_tokens - t + num_tiles - i - 1) / (num_tiles - i);
      const TilePlace place = {static_cast<const char*>(args->panels) + p * panel_bytes,
                               panel_bytes,
                               args->k_padded,
                               args->activations + t,
                               args->out + t * args->out_stride + p * kPanelRows,
                               args->out_stride,
                               t == 0 ? kAhead : 0};
      run_tokens<Tile>(place, panels, tokens);
      t += tokens;
    }
  }
}

}  // namespace
}  // namespace syshax
