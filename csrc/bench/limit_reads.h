// Reading memory, written once for every ISA: some streams side by side, with or without prefetching. Internal linkage,
// for limit_loops_*.cc alone. An ISA gives `Line`: type Register, zero(), mix(Register, const char* line),
// keep(Register).
#pragma once
#include <cstddef>
#include <cstdint>

#include "bench/limit_chains.h"
#include "bench/limit_loops.h"

namespace syshax {
namespace {

constexpr size_t kLineBytes = 64;

// kStreams divides 8; `kAhead` bytes are prefetched in front of each stream, 0: none.
template <class Line, int kStreams, int kAhead>
void read_streams(const char* data, size_t bytes) {
  constexpr int kLines = 8 / kStreams;
  const size_t part = bytes / kStreams;
  typename Line::Register sums[8];
  size_t at = 0;
  auto clear = [&](auto i) { sums[i.value] = Line::zero(); };
  auto step = [&](auto i) {
    const char* line = data + (i.value / kLines) * part + at + (i.value % kLines) * kLineBytes;
    if constexpr (kAhead > 0) __builtin_prefetch(line + kAhead);
    sums[i.value] = Line::mix(sums[i.value], line);
  };
  auto keep = [&](auto i) { Line::keep(sums[i.value]); };
  each<0, 8>(clear);
  for (; at < part; at += kLines * kLineBytes) each<0, 8>(step);
  each<0, 8>(keep);
}

#define SYSHAX_READ_LOOPS(Line, isa, needs)                                          \
  {isa ", 1 stream", needs, read_streams<Line, 1, 0>},                               \
      {isa ", 1 stream, prefetch 1 KiB ahead", needs, read_streams<Line, 1, 1024>},  \
      {isa ", 1 stream, prefetch 4 KiB ahead", needs, read_streams<Line, 1, 4096>},  \
      {isa ", 2 streams", needs, read_streams<Line, 2, 0>},                          \
      {isa ", 2 streams, prefetch 1 KiB ahead", needs, read_streams<Line, 2, 1024>}, \
      {isa ", 4 streams", needs, read_streams<Line, 4, 0>},                          \
      {isa ", 4 streams, prefetch 2 KiB ahead", needs, read_streams<Line, 4, 2048>}, \
      {isa ", 8 streams", needs, read_streams<Line, 8, 0>}, {                        \
    isa ", 8 streams, prefetch 512 B ahead", needs, read_streams<Line, 8, 512>       \
  }

}  // namespace
}  // namespace syshax
