// The walk over a product in register tiles, for the ISA files alone (internal linkage). An ISA gives
//   kUnitRows             rows of one unit: what it loads of a group at once
//   kTokens               tokens of a tile at most
//   units_for(tokens)     units of a tile: few tokens take more rows, so that enough sums are in flight
//   tile<Units, Tokens>   one tile over one segment of k
#pragma once
#include "int8row.h"

namespace int8row {
namespace {

constexpr size_t kAhead = 4096;       // bytes of a panel that are asked for early
constexpr uint32_t kChunkPanels = 4;  // stay in the cache while all tokens pass over them

// One tile's place: its first unit's group of the panel, its tokens, its outputs, and a segment of k.
struct Place {
  const char* panels;  // the panel of unit 0
  size_t panel_bytes, k_padded, begin, end;
  uint32_t unit;  // first unit, counted from that panel
  const void* const* tokens;
  float* out;  // of that panel's row 0
  size_t out_stride;
};

template <class Isa, int T, int U>
void run_units(Place place, uint32_t units) {
  for (; units >= U; units -= U, place.unit += U) {
    for (place.begin = 0; place.begin < place.k_padded; place.begin = place.end) {
      place.end = place.k_padded - place.begin < kSegment ? place.k_padded : place.begin + kSegment;
      Isa::template tile<U, T>(place);
    }
  }
  if constexpr (U > 1) {
    if (units) run_units<Isa, T, U / 2>(place, units);
  }
}

template <class Isa, int T = Isa::kTokens>
void run_tokens(const Place& place, uint32_t units, uint32_t tokens) {
  if constexpr (T > 1) {
    if (tokens < T) return run_tokens<Isa, T - 1>(place, units, tokens);
  }
  run_units<Isa, T, Isa::units_for(T)>(place, units);
}

template <class Isa>
void run_tiles(const syshax_matmul_args* args) {
  const size_t bytes = panel_bytes(args->k_padded);
  const uint32_t tiles = (args->num_tokens + Isa::kTokens - 1) / Isa::kTokens;
  for (uint32_t p = 0; p < args->num_panels; p += kChunkPanels) {
    const uint32_t panels = args->num_panels - p < kChunkPanels ? args->num_panels - p : kChunkPanels;
    uint32_t t = 0;
    for (uint32_t i = 0; i < tiles; ++i) {  // equal tiles: 7 tokens become 4 + 3
      const uint32_t tokens = (args->num_tokens - t + tiles - i - 1) / (tiles - i);
      const Place place = {static_cast<const char*>(args->panels) + p * bytes,
                           bytes,
                           args->k_padded,
                           0,
                           0,
                           0,
                           args->activations + t,
                           args->out + t * args->out_stride + p * kPanelRows,
                           args->out_stride};
      run_tokens<Isa>(place, panels * (kPanelRows / Isa::kUnitRows), tokens);
      t += tokens;
    }
  }
}

}  // namespace
}  // namespace int8row
