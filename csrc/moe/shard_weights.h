// Between checkpoint matrices and an expert's packed panels: converts source values to the format's blocks and packs
// them straight into the arena, and reads them back. Scratch is one panel's blocks and one row per thread.
#pragma once
#include <cstdint>
#include <vector>

#include "moe/layout.h"

namespace syshax {

// One expert's matrices as the checkpoint has them, C order: gate and up [intermediate_size, hidden_size], down
// [hidden_size, intermediate_size].
struct ExpertSource {
  const void* gate;
  const void* up;
  const void* down;
};

// Values for a row of a matrix, instead of a checkpoint: which 0 gate, 1 up, 2 down. For benches.
using RowSource = void (*)(void* context, int which, size_t row, size_t first, size_t values, float* out);

class ShardPacker {
 public:
  ShardPacker(const ExpertLayout& layout, uint32_t node);

  // Work is cut into pieces of one panel: first those of w13, then those of w2.
  uint32_t num_pieces() const { return w13_panels_ + layout_.w2_panels(); }
  void pack_piece(uint32_t piece, const ExpertSource& source, syshax_dtype dtype, char* expert);
  void pack_piece(uint32_t piece, RowSource source, void* context, char* expert);
  // Writes the shard's part of gate, up [intermediate_size, hidden_size] and down [hidden_size, intermediate_size].
  void unpack(const char* expert, float* gate, float* up, float* down);

 private:
  // One row of w13 or w2 in the order of the packed matrix.
  struct Row {
    int which;      // 0 gate, 1 up, 2 down, -1: padding
    size_t row;     // of the source matrix
    size_t first;   // first value of it
    size_t values;  // the rest, up to k, is zeros
  };
  struct Piece {
    bool is_w2;
    size_t k;
    size_t offset;     // in the expert
    size_t first_row;  // in the packed matrix
    uint32_t num_rows;
  };
  Piece piece_at(uint32_t piece) const;
  Row row_at(const Piece& piece, uint32_t row) const;
  template <typename Encode>
  void pack_rows(uint32_t piece, char* expert, const Encode& encode);

  const ExpertLayout& layout_;
  const uint32_t node_;
  const uint32_t w13_panels_;
  std::vector<char> blocks_;
  std::vector<float> row_;
};

}  // namespace syshax
