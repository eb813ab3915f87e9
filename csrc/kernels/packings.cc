// Pack and unpack: pure permutations of block bytes (q8_0's values change their sign bit), so unpack is exact. The
// layouts are described in packings.h and docs/KERNELS.md. Not speed-critical beyond loading.
#include "kernels/packings.h"

#include <cstring>

#include "format/formats.h"
#include "format/q4_0.h"
#include "format/q8_0.h"

namespace syshax {
namespace {

using Byte = unsigned char;

const Byte* row_of(const void* blocks, size_t row_bytes, uint32_t row) {
  return static_cast<const Byte*>(blocks) + row * row_bytes;
}

Byte* row_of(void* blocks, size_t row_bytes, uint32_t row) { return static_cast<Byte*>(blocks) + row * row_bytes; }

// ---- bf16 and fp16: units of `Unit` bytes of one row, 16 rows side by side -------------------------------------

size_t panel_bytes_16bit(size_t k_padded) { return k_padded * kPanelRows * 2; }

template <size_t Unit>
void pack_units(const void* blocks, size_t row_bytes, uint32_t rows, size_t k_padded, void* panel) {
  Byte* const out = static_cast<Byte*>(panel);
  if (rows < kPanelRows) std::memset(out, 0, panel_bytes_16bit(k_padded));
  for (uint32_t row = 0; row < rows; ++row) {
    const Byte* in = row_of(blocks, row_bytes, row);
    for (size_t i = 0; i < k_padded * 2 / Unit; ++i)
      std::memcpy(out + (i * kPanelRows + row) * Unit, in + i * Unit, Unit);
  }
}

template <size_t Unit>
void unpack_units(const void* panel, size_t k_padded, uint32_t rows, void* blocks, size_t row_bytes) {
  const Byte* const in = static_cast<const Byte*>(panel);
  for (uint32_t row = 0; row < rows; ++row) {
    Byte* out = row_of(blocks, row_bytes, row);
    for (size_t i = 0; i < k_padded * 2 / Unit; ++i)
      std::memcpy(out + i * Unit, in + (i * kPanelRows + row) * Unit, Unit);
  }
}

// ---- q8_0 and q4_0: steps of two blocks ---------------------------------------------------------------------------

template <class Block>
struct Step {
  static constexpr size_t kGroups = sizeof(Block::q) / 4;
  static constexpr size_t kBytes = kScaleBytes + 2 * kGroups * kGroupBytes;
  static constexpr uint32_t kSignBits = kGroups == 8 ? 0x80808080u : 0u;  // q8_0: signed <-> value + 128

  static size_t scale_at(size_t block, uint32_t row) { return block / 2 * kBytes + (block % 2 * kPanelRows + row) * 2; }
  static size_t group_at(size_t block, size_t group, uint32_t row) {
    return block / 2 * kBytes + kScaleBytes + (block % 2 * kGroups + group) * kGroupBytes + row * 4;
  }
};

template <class Block>
size_t panel_bytes(size_t k_padded) {
  return k_padded / kStepValues * Step<Block>::kBytes;
}

template <class Block>
void pack_block(const Block& block, size_t index, uint32_t row, Byte* panel) {
  using S = Step<Block>;
  std::memcpy(panel + S::scale_at(index, row), &block.scale, 2);
  for (size_t group = 0; group < S::kGroups; ++group) {
    uint32_t four;
    std::memcpy(&four, block.q + 4 * group, 4);
    four ^= S::kSignBits;
    std::memcpy(panel + S::group_at(index, group, row), &four, 4);
  }
}

template <class Block>
Block unpack_block(const Byte* panel, size_t index, uint32_t row) {
  using S = Step<Block>;
  Block block;
  std::memcpy(&block.scale, panel + S::scale_at(index, row), 2);
  for (size_t group = 0; group < S::kGroups; ++group) {
    uint32_t four;
    std::memcpy(&four, panel + S::group_at(index, group, row), 4);
    four ^= S::kSignBits;
    std::memcpy(block.q + 4 * group, &four, 4);
  }
  return block;
}

template <class Block>
Block zero_block() {
  Block block{};
  std::memset(block.q, Step<Block>::kGroups == 8 ? 0 : 0x88, sizeof block.q);
  return block;
}

template <class Block>
void pack_blocks(const void* blocks, size_t row_bytes, uint32_t rows, size_t k_padded, void* panel) {
  Byte* const out = static_cast<Byte*>(panel);
  for (size_t i = 0; i < k_padded / 32; ++i) {
    for (uint32_t row = 0; row < kPanelRows; ++row) {
      Block block = zero_block<Block>();
      if (row < rows) std::memcpy(&block, row_of(blocks, row_bytes, row) + i * sizeof block, sizeof block);
      pack_block(block, i, row, out);
    }
  }
}

template <class Block>
void unpack_blocks(const void* panel, size_t k_padded, uint32_t rows, void* blocks, size_t row_bytes) {
  const Byte* const in = static_cast<const Byte*>(panel);
  for (uint32_t row = 0; row < rows; ++row) {
    Byte* out = row_of(blocks, row_bytes, row);
    for (size_t i = 0; i < k_padded / 32; ++i) {
      const Block block = unpack_block<Block>(in, i, row);
      std::memcpy(out + i * sizeof block, &block, sizeof block);
    }
  }
}

static_assert(Step<q8_0::Block>::kBytes == kQ8StepBytes && Step<q4_0::Block>::kBytes == kQ4StepBytes);
constexpr uint32_t kSize = sizeof(syshax_packing);

}  // namespace

const syshax_packing packing_bf16 = {SYSHAX_OPERATOR_ABI, kSize,       "bf16/p16k2/1",    "bf16",
                                     kPanelRows,          kStepValues, panel_bytes_16bit, pack_units<4>,
                                     unpack_units<4>};
const syshax_packing packing_fp16 = {SYSHAX_OPERATOR_ABI, kSize,       "fp16/p16k1/1",    "fp16",
                                     kPanelRows,          kStepValues, panel_bytes_16bit, pack_units<2>,
                                     unpack_units<2>};
const syshax_packing packing_q8_0 = {SYSHAX_OPERATOR_ABI,
                                     kSize,
                                     "q8_0/p16k4/1",
                                     "q8_0",
                                     kPanelRows,
                                     kStepValues,
                                     panel_bytes<q8_0::Block>,
                                     pack_blocks<q8_0::Block>,
                                     unpack_blocks<q8_0::Block>};
const syshax_packing packing_q4_0 = {SYSHAX_OPERATOR_ABI,
                                     kSize,
                                     "q4_0/p16k4/1",
                                     "q4_0",
                                     kPanelRows,
                                     kStepValues,
                                     panel_bytes<q4_0::Block>,
                                     pack_blocks<q4_0::Block>,
                                     unpack_blocks<q4_0::Block>};

}  // namespace syshax
