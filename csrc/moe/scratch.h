// Working memory of forward passes: sized once when a model is made, so that a forward allocates nothing. Pages are
// touched when first used, by the node that uses them.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "moe/layout.h"

namespace syshax {

// Anonymous memory on one node, given back on destruction. Throws CoreError("no_memory") when it cannot be mapped.
class Region {
 public:
  Region() = default;
  Region(size_t bytes, int node, bool huge_pages);
  ~Region();
  Region(Region&& other) noexcept;
  Region& operator=(Region&& other) noexcept;
  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

// Limits of what one chunk of a request may need.
struct ChunkLimits {
  uint32_t tokens;        // at most
  size_t assignments;     // tokens x top_k at most; at least num_experts, so that any top_k fits
  uint32_t block_tokens;  // tokens that one kernel call sees at most
};

// What one thread needs besides: a tile of outputs, a row of float activations, pointers to rows.
struct ThreadScratch {
  float* tile;        // [block_tokens, tile_columns]
  float* row;         // [hidden_k], zero behind hidden_size
  float* sum;         // [tile_columns]
  const void** rows;  // [block_tokens]
};

struct NodeScratch {
  Region memory;
  char* x = nullptr;   // [tokens] packed rows of hidden_states
  char* h = nullptr;   // [assignments] packed rows of SiLU(gate) * up
  float* y = nullptr;  // [column blocks][tokens][block columns] partial sums of this node
  std::vector<ThreadScratch> threads;
};

struct ScratchSizes {
  ChunkLimits limits;
  size_t x_row_bytes = 0;
  std::vector<size_t> h_row_bytes;  // of each node
  size_t hidden_k = 0, y_columns = 0, tile_columns = 0;
};

std::vector<NodeScratch> make_scratch(const ScratchSizes& sizes, const std::vector<NodePlan>& plan, bool huge_pages);

}  // namespace syshax
