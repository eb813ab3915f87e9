// Where an expert's packed weights lie: how intermediate_size is split over nodes and what one node holds.
//
// A node's arena holds num_layers x num_experts experts of equal size, each starting on a page:
//   w13  the shard's gate and up rows, [2 * columns, hidden_padded]. Rows alternate: 16 of gate_proj, the same 16 of
//        up_proj, the next 16 of gate_proj, ... so that SiLU-and-multiply stays inside one tile.
//   w2   down_proj's columns of the shard, [hidden_size, columns].
// Both are the packing's panels, one after the other, zero-padded: hidden_size to the packing's k_multiple,
// intermediate_size to whole units of columns, rows to panel_rows. Shards are whole units, consecutive in plan order;
// a node may have none. The inverse is the packing's unpack and this file's row order.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "moe/expert_model.h"
#include "syshax/matmul_base.h"
#include "threads/node_plan.h"

namespace syshax {

// Of all that this file's heading says: whoever changes it counts this up, so that arenas kept by an older version are
// not read with a newer one's eyes. A packing has a version of its own in its name.
constexpr uint32_t kArenaLayoutVersion = 1;

// Gate rows (and up rows) that lie together in w13.
constexpr uint32_t kInterleave = 16;

struct Shard {
  uint32_t units = 0;
  size_t begin = 0;    // first intermediate column
  size_t columns = 0;  // with padding: units * unit
  size_t real = 0;     // without
  size_t w13_bytes = 0, w2_bytes = 0;
  size_t expert_bytes = 0;  // whole pages
  size_t arena_bytes = 0;
};

class ExpertLayout {
 public:
  // Throws CoreError("invalid_argument") for a geometry that makes no sense, with the value.
  ExpertLayout(const MoeGeometry& geometry, const std::string& format, const std::vector<NodePlan>& plan);

  const MoeGeometry& geometry() const { return geometry_; }
  const syshax_format& format() const { return *format_; }
  const syshax_packing& packing() const { return *packing_; }
  uint32_t unit() const { return unit_; }  // intermediate columns that are never split
  size_t hidden_k() const { return hidden_k_; }
  // Bytes of one row of blocks of k values.
  size_t row_bytes(size_t k) const { return syshax_row_bytes(format_, k); }

  const Shard& shard(uint32_t node) const { return shards_[node]; }
  uint32_t num_nodes() const { return static_cast<uint32_t>(shards_.size()); }
  uint32_t num_active_nodes() const;

  size_t w13_panel_bytes() const { return packing_->panel_bytes(hidden_k_); }
  size_t w2_panel_bytes(uint32_t node) const { return packing_->panel_bytes(shards_[node].columns); }
  // Panels of one unit of w13, and of all of w2.
  uint32_t w13_unit_panels() const { return 2 * unit_ / packing_->panel_rows; }
  uint32_t w2_panels() const { return w2_panels_; }
  uint32_t panel_rows() const { return packing_->panel_rows; }

  // Offset of an expert's w13 in the node's arena; its w2 follows w13_bytes later.
  size_t expert_offset(uint32_t node, uint32_t layer, uint32_t expert) const {
    return (static_cast<size_t>(layer) * geometry_.num_experts + expert) * shards_[node].expert_bytes;
  }

 private:
  void split(const std::vector<NodePlan>& plan);
  void size_shard(Shard& shard) const;

  MoeGeometry geometry_;
  const syshax_format* format_;
  const syshax_packing* packing_;
  uint32_t unit_ = 0, w2_panels_ = 0;
  size_t hidden_k_ = 0;
  std::vector<Shard> shards_;
};

}  // namespace syshax
