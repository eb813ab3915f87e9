// From checkpoint rows to one node's packed panels, and back. Contract: shard_weights.h.
#include "moe/shard_weights.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/cpu_features.h"
#include "base/dtype.h"
#include "kernels/vector_ops.h"

namespace syshax {
namespace {

// Source bytes that are already what the format stores: copied, so that every bit pattern survives.
bool is_stored_as_is(const syshax_format& format, syshax_dtype dtype) {
  const std::string_view name = format.name;
  return format.block_values == 1 && format.block_bytes == 2 &&
         ((name == "bf16" && dtype == SYSHAX_BFLOAT16) || (name == "fp16" && dtype == SYSHAX_FLOAT16));
}

const VectorOps& vector_ops() {
  static const VectorOps& ops = select_vector_ops(detect_cpu_features());
  return ops;
}

}  // namespace

ShardPacker::ShardPacker(const ExpertLayout& layout, uint32_t node)
    : layout_(layout), node_(node), w13_panels_(layout.shard(node).units * layout.w13_unit_panels()) {
  const size_t k = std::max(layout.hidden_k(), layout.shard(node).columns);
  blocks_.resize(layout.row_bytes(k) * layout.panel_rows());
  row_.resize(k);
}

ShardPacker::Piece ShardPacker::piece_at(uint32_t piece) const {
  const Shard& shard = layout_.shard(node_);
  const uint32_t rows = layout_.panel_rows();
  if (piece < w13_panels_)
    return {false, layout_.hidden_k(), piece * layout_.w13_panel_bytes(), size_t{piece} * rows, rows};
  const uint32_t panel = piece - w13_panels_;
  const size_t first = size_t{panel} * rows;
  return {true, shard.columns, shard.w13_bytes + panel * layout_.w2_panel_bytes(node_), first,
          static_cast<uint32_t>(std::min<size_t>(rows, layout_.geometry().hidden_size - first))};
}

ShardPacker::Row ShardPacker::row_at(const Piece& piece, uint32_t row) const {
  const Shard& shard = layout_.shard(node_);
  const size_t packed = piece.first_row + row;
  if (piece.is_w2) return {2, packed, shard.begin, shard.real};
  const size_t column = packed / (2 * kInterleave) * kInterleave + packed % kInterleave;
  const int which = packed % (2 * kInterleave) < kInterleave ? 0 : 1;
  if (column >= shard.real) return {-1, 0, 0, 0};
  return {which, shard.begin + column, 0, layout_.geometry().hidden_size};
}

template <typename Encode>
void ShardPacker::pack_rows(uint32_t index, char* expert, const Encode& encode) {
  const Piece piece = piece_at(index);
  const size_t row_bytes = layout_.row_bytes(piece.k);
  for (uint32_t i = 0; i < piece.num_rows; ++i) encode(row_at(piece, i), piece.k, blocks_.data() + i * row_bytes);
  layout_.packing().pack(blocks_.data(), row_bytes, piece.num_rows, piece.k, expert + piece.offset);
}

void ShardPacker::pack_piece(uint32_t piece, const ExpertSource& source, syshax_dtype dtype, char* expert) {
  const syshax_format& format = layout_.format();
  const MoeGeometry& geometry = layout_.geometry();
  const size_t size = dtype_bytes(dtype);
  const bool copies = is_stored_as_is(format, dtype);
  const void* const matrices[3] = {source.gate, source.up, source.down};
  pack_rows(piece, expert, [&](const Row& row, size_t k, char* blocks) {
    const char* values = nullptr;
    if (row.which >= 0) {
      const size_t stride = row.which == 2 ? geometry.intermediate_size : geometry.hidden_size;
      values = static_cast<const char*>(matrices[row.which]) + (row.row * stride + row.first) * size;
    }
    if (copies) {
      if (values != nullptr) std::memcpy(blocks, values, row.values * size);
      std::memset(blocks + row.values * size, 0, (k - row.values) * size);
      return;
    }
    if (values != nullptr) vector_ops().widen(values, dtype, row.values, row_.data());
    std::fill(row_.begin() + static_cast<ptrdiff_t>(row.values), row_.begin() + static_cast<ptrdiff_t>(k), 0.0f);
    format.encode(row_.data(), k, blocks);
  });
}

void ShardPacker::pack_piece(uint32_t piece, RowSource source, void* context, char* expert) {
  pack_rows(piece, expert, [&](const Row& row, size_t k, char* blocks) {
    if (row.which >= 0) source(context, row.which, row.row, row.first, row.values, row_.data());
    std::fill(row_.begin() + static_cast<ptrdiff_t>(row.values), row_.begin() + static_cast<ptrdiff_t>(k), 0.0f);
    layout_.format().encode(row_.data(), k, blocks);
  });
}

void ShardPacker::unpack(const char* expert, float* gate, float* up, float* down) {
  float* const matrices[3] = {gate, up, down};
  for (uint32_t index = 0; index < num_pieces(); ++index) {
    const Piece piece = piece_at(index);
    const size_t row_bytes = layout_.row_bytes(piece.k);
    layout_.packing().unpack(expert + piece.offset, piece.k, piece.num_rows, blocks_.data(), row_bytes);
    for (uint32_t i = 0; i < piece.num_rows; ++i) {
      const Row row = row_at(piece, i);
      if (row.which < 0) continue;
      const size_t stride = row.which == 2 ? layout_.geometry().intermediate_size : layout_.geometry().hidden_size;
      layout_.format().decode(blocks_.data() + i * row_bytes, piece.k, row_.data());
      std::copy_n(row_.data(), row.values, matrices[row.which] + row.row * stride + row.first);
    }
  }
}

}  // namespace syshax
