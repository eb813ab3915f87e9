// Where each expert's panels lie on each node, computed from geometry, format and plan alone. Contract: layout.h.
#include "moe/layout.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"
#include "kernels/table.h"
#include "memory/arena.h"

namespace syshax {
namespace {

constexpr uint32_t kMaxDimension = 1u << 20;
constexpr uint32_t kMaxExperts = 1u << 16;
constexpr uint32_t kActivationGroup = 64;  // what syshax_activation::pack never splits

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void check_dimension(const char* name, uint32_t value, uint32_t most) {
  if (value == 0 || value > most)
    throw CoreError("invalid_argument",
                    std::string(name) + " is " + std::to_string(value) + ", outside [1, " + std::to_string(most) + "]");
}

void check_geometry(const MoeGeometry& geometry) {
  check_dimension("num_layers", geometry.num_layers, kMaxDimension);
  check_dimension("num_experts", geometry.num_experts, kMaxExperts);
  check_dimension("hidden_size", geometry.hidden_size, kMaxDimension);
  check_dimension("intermediate_size", geometry.intermediate_size, kMaxDimension);
  check_dimension("top_k", geometry.top_k, geometry.num_experts);
}

// A format has one packing whatever the CPU, so that this needs none.
const syshax_packing* packing_of(const std::string& format) {
  const syshax_packing* packing = format_packing(format);
  if (packing->k_multiple % kActivationGroup != 0 || (2 * packing->k_multiple) % packing->panel_rows != 0)
    throw CoreError("no_kernel", "packing " + std::string(packing->name) + " has k_multiple " +
                                     std::to_string(packing->k_multiple) + " and panel_rows " +
                                     std::to_string(packing->panel_rows) + ", which experts cannot be cut into");
  return packing;
}

}  // namespace

ExpertLayout::ExpertLayout(const MoeGeometry& geometry, const std::string& format, const std::vector<NodePlan>& plan)
    : geometry_(geometry), format_(nullptr), packing_(packing_of(format)) {
  check_geometry(geometry);
  check_plan(plan);
  format_ = find_format(format);
  unit_ = packing_->k_multiple;
  hidden_k_ = round_up(geometry.hidden_size, packing_->k_multiple);
  w2_panels_ = static_cast<uint32_t>(round_up(geometry.hidden_size, packing_->panel_rows) / packing_->panel_rows);
  split(plan);
}

uint32_t ExpertLayout::num_active_nodes() const {
  return static_cast<uint32_t>(
      std::count_if(shards_.begin(), shards_.end(), [](const Shard& shard) { return shard.units > 0; }));
}

// Largest remainders: every node within one unit of its share.
void ExpertLayout::split(const std::vector<NodePlan>& plan) {
  const uint32_t units = static_cast<uint32_t>(round_up(geometry_.intermediate_size, unit_) / unit_);
  double sum = 0;
  for (const NodePlan& node : plan) sum += node.share;
  std::vector<double> rest;
  uint32_t given = 0;
  for (const NodePlan& node : plan) {
    const double exact = units * (node.share / sum);
    Shard shard;
    shard.units = std::min(static_cast<uint32_t>(exact), units - given);
    given += shard.units;
    rest.push_back(node.share > 0 ? exact - shard.units : -1);
    shards_.push_back(shard);
  }
  std::vector<size_t> order(plan.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return rest[a] > rest[b]; });
  for (size_t i = 0; given < units; i = (i + 1) % order.size())
    if (rest[order[i]] >= 0) ++shards_[order[i]].units, ++given;
  size_t begin = 0;
  for (Shard& shard : shards_) {
    shard.begin = begin;
    size_shard(shard);
    begin += shard.columns;
  }
}

void ExpertLayout::size_shard(Shard& shard) const {
  shard.columns = static_cast<size_t>(shard.units) * unit_;
  if (shard.units == 0) return;
  shard.real = std::min<size_t>(shard.columns, geometry_.intermediate_size - shard.begin);
  shard.w13_bytes = static_cast<size_t>(shard.units) * w13_unit_panels() * w13_panel_bytes();
  shard.w2_bytes = static_cast<size_t>(w2_panels_) * packing_->panel_bytes(shard.columns);
  shard.expert_bytes = round_up(shard.w13_bytes + shard.w2_bytes, kPageBytes);
  const size_t experts = static_cast<size_t>(geometry_.num_layers) * geometry_.num_experts;
  if (__builtin_mul_overflow(experts, shard.expert_bytes, &shard.arena_bytes) || shard.arena_bytes > SIZE_MAX / 4)
    throw CoreError("invalid_argument", std::to_string(experts) + " experts of " + std::to_string(shard.expert_bytes) +
                                            " bytes exceed the address space");
}

}  // namespace syshax
