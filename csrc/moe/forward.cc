// One chunk of tokens through one layer: pack, w13 with SiLU, w2 by columns, sum over nodes. Contract: forward.h;
// why the work is cut this way: docs/decisions/0003. Threads meet at barriers and share nothing else but counters.
#include "moe/forward.h"

#include <algorithm>
#include <cstring>

#include "base/dtype.h"

namespace syshax {
namespace {

constexpr uint32_t kTokenStep = 12;        // a multiple of what kernels take at once
constexpr uint32_t kBlockTokens = 96;      // in one kernel call
constexpr size_t kBlockBytes = 400 << 10;  // of activations in one kernel call, so that they stay in the cache
constexpr uint32_t kMaxBlockColumns = 64;  // of hidden_size in one task
constexpr uint32_t kTasksPerThread = 4;    // at least, so that threads finish together
constexpr uint32_t kSerialPack = 4;        // up to so many tokens waking others to pack costs more than packing
constexpr uint32_t kPackTokens = 4;        // tokens that a thread takes at once
constexpr uint32_t kLane = 16;             // floats; strides of tiles are multiples

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

size_t max_row_bytes(const DtypeKernels& kernels, size_t k) {
  size_t most = 0;
  for (const syshax_kernel* kernel : kernels) most = std::max(most, kernel->activation->row_bytes(k));
  return most;
}

// Tokens that one kernel call takes at most.
uint32_t block_tokens(size_t row_bytes) {
  const size_t fitting = kBlockBytes / row_bytes / kTokenStep * kTokenStep;
  return static_cast<uint32_t>(std::clamp<size_t>(fitting, kTokenStep, kBlockTokens));
}

}  // namespace

MoeForward::MoeForward(const ExpertLayout& layout, std::vector<const char*> arenas, const DtypeKernels& kernels,
                       const VectorOps& ops, ThreadPool& pool, const std::vector<NodePlan>& plan, uint32_t chunk_tokens,
                       bool huge_pages)
    : layout_(layout),
      arenas_(std::move(arenas)),
      kernels_(kernels),
      ops_(ops),
      pool_(pool),
      limits_{chunk_tokens,
              std::max(size_t{chunk_tokens} * layout.geometry().top_k, size_t{layout.geometry().num_experts}),
              kBlockTokens},
      grouping_(layout.geometry().num_experts, limits_.assignments) {
  uint32_t most_threads = 1;
  for (const NodePlan& node : plan) most_threads = std::max(most_threads, node.threads);
  const uint32_t rows = layout.panel_rows();
  const uint32_t wanted = layout.w2_panels() / (kTasksPerThread * most_threads);
  block_panels_ = std::max(1u, std::min(wanted, std::max(1u, kMaxBlockColumns / rows)));
  num_blocks_ = (layout.w2_panels() + block_panels_ - 1) / block_panels_;
  y_stride_ = round_up(size_t{block_panels_} * rows, kLane);
  ScratchSizes sizes;
  sizes.limits = limits_;
  sizes.x_row_bytes = max_row_bytes(kernels, layout.hidden_k());
  sizes.hidden_k = layout.hidden_k();
  sizes.y_columns = num_blocks_ * y_stride_;
  sizes.tile_columns = std::max<size_t>(2 * layout.unit(), y_stride_);
  for (uint32_t node = 0; node < layout.num_nodes(); ++node) {
    const Shard& shard = layout.shard(node);
    sizes.h_row_bytes.push_back(shard.units == 0 ? 0 : max_row_bytes(kernels, shard.columns));
    if (shard.units > 0) active_nodes_.push_back(node);
  }
  scratch_ = make_scratch(sizes, plan, huge_pages);
  counters_ = std::make_unique<Counters[]>(plan.size());
  for (const uint32_t node : active_nodes_)
    counters_[node].units_done = std::make_unique<std::atomic<uint32_t>[]>(layout.geometry().num_experts);
  blocks_done_ = std::make_unique<std::atomic<uint32_t>[]>(num_blocks_);
}

void MoeForward::run(const MoeRequest& request) noexcept {
  const size_t row_bytes = layout_.geometry().hidden_size * dtype_bytes(request.dtype);
  const size_t fitting = std::max<size_t>(limits_.assignments / request.top_k, 1);
  const uint32_t step = static_cast<uint32_t>(std::min<size_t>(limits_.tokens, fitting));
  chunk_.kernel = kernels_[request.dtype];
  chunk_.dtype = request.dtype;
  chunk_.layer = request.layer;
  chunk_.x_row_bytes = chunk_.kernel->activation->row_bytes(layout_.hidden_k());
  for (uint32_t first = 0; first < request.num_tokens; first += chunk_.tokens) {
    chunk_.tokens = std::min(step, request.num_tokens - first);
    chunk_.hidden = static_cast<const char*>(request.hidden_states) + first * row_bytes;
    chunk_.output = static_cast<char*>(request.output) + first * row_bytes;
    const size_t at = size_t{first} * request.top_k;
    grouping_.assign(request.topk_ids + at, request.topk_weights + at, chunk_.tokens, request.top_k);
    run_chunk();
  }
}

void MoeForward::run_chunk() {
  for (uint32_t node : active_nodes_) {
    counters_[node].pack.reset();
    counters_[node].w13.reset();
    counters_[node].w2.reset();
    if (chunk_.kernel->activation->finish == nullptr) continue;
    for (size_t i = 0; i < grouping_.groups().size(); ++i)
      counters_[node].units_done[i].store(0, std::memory_order_relaxed);
  }
  for (uint32_t block = 0; block < num_blocks_; ++block) blocks_done_[block].store(0, std::memory_order_relaxed);
  chunk_.packed = chunk_.tokens <= kSerialPack;
  if (chunk_.packed) {
    NodeScratch& first = scratch_[active_nodes_.front()];
    for (uint32_t token = 0; token < chunk_.tokens; ++token) pack_token(first, scratch_[0].threads[0], token);
    for (size_t i = 1; i < active_nodes_.size(); ++i)
      std::memcpy(scratch_[active_nodes_[i]].x, first.x, chunk_.tokens * chunk_.x_row_bytes);
  }
  pool_.run(job, this);
}

void MoeForward::job(void* self, uint32_t node, uint32_t thread) {
  static_cast<MoeForward*>(self)->run_thread(node, thread);
}

void MoeForward::run_thread(uint32_t node, uint32_t thread) {
  if (layout_.shard(node).units == 0) return;
  ThreadScratch& scratch = scratch_[node].threads[thread];
  if (!chunk_.packed) {
    pack_tokens(node, scratch);
    pool_.barrier(node, thread);
  }
  run_w13(node, scratch);
  pool_.barrier(node, thread);
  run_w2(node, scratch);
}

// Reads client memory, which may change meanwhile: each element once, into `row`.
void MoeForward::pack_token(NodeScratch& node, ThreadScratch& scratch, uint32_t token) const {
  const size_t hidden = layout_.geometry().hidden_size;
  ops_.widen(chunk_.hidden + token * hidden * dtype_bytes(chunk_.dtype), chunk_.dtype, hidden, scratch.row);
  syshax_pack_row(chunk_.kernel->activation, scratch.row, layout_.hidden_k(), node.x + token * chunk_.x_row_bytes);
}

void MoeForward::pack_tokens(uint32_t node, ThreadScratch& scratch) {
  for (uint64_t first; (first = uint64_t{counters_[node].pack.take()} * kPackTokens) < chunk_.tokens;) {
    const uint32_t last = static_cast<uint32_t>(std::min<uint64_t>(first + kPackTokens, chunk_.tokens));
    for (uint32_t token = static_cast<uint32_t>(first); token < last; ++token)
      pack_token(scratch_[node], scratch, token);
  }
}

void MoeForward::run_w13(uint32_t node, ThreadScratch& scratch) {
  const uint32_t units = layout_.shard(node).units;
  const uint32_t tasks = static_cast<uint32_t>(grouping_.groups().size()) * units;
  for (uint32_t task; (task = counters_[node].w13.take()) < tasks;) {
    run_w13_task(node, scratch, grouping_.groups()[task / units], task % units);
    if (chunk_.kernel->activation->finish != nullptr) finish_group(node, task / units);
  }
}

// Whoever computes a group's last unit finishes its rows of h.
void MoeForward::finish_group(uint32_t node, uint32_t index) {
  const Shard& shard = layout_.shard(node);
  if (counters_[node].units_done[index].fetch_add(1, std::memory_order_acq_rel) + 1 < shard.units) return;
  const syshax_activation& activation = *chunk_.kernel->activation;
  const ExpertGroup& group = grouping_.groups()[index];
  const size_t h_row_bytes = activation.row_bytes(shard.columns);
  for (uint32_t i = group.begin; i < group.begin + group.count; ++i)
    activation.finish(shard.columns, scratch_[node].h + i * h_row_bytes);
}

void MoeForward::run_w13_task(uint32_t node, ThreadScratch& scratch, const ExpertGroup& group, uint32_t unit) const {
  const Shard& shard = layout_.shard(node);
  const syshax_activation& activation = *chunk_.kernel->activation;
  const size_t columns = layout_.unit(), stride = 2 * columns, first = unit * columns;
  const size_t real = std::min(columns, shard.real - std::min(shard.real, first));
  const size_t h_row_bytes = activation.row_bytes(shard.columns);
  const size_t panels = size_t{unit} * layout_.w13_unit_panels();
  syshax_matmul_args args;
  args.panels =
      arenas_[node] + layout_.expert_offset(node, chunk_.layer, group.expert) + panels * layout_.w13_panel_bytes();
  args.num_panels = layout_.w13_unit_panels();
  args.k_padded = layout_.hidden_k();
  args.activations = scratch.rows;
  args.out = scratch.tile;
  args.out_stride = stride;
  const uint32_t most = block_tokens(chunk_.x_row_bytes);
  for (uint32_t done = 0; done < group.count; done += args.num_tokens) {
    args.num_tokens = std::min(most, group.count - done);
    const uint32_t* tokens = grouping_.tokens() + group.begin + done;
    for (uint32_t i = 0; i < args.num_tokens; ++i) scratch.rows[i] = scratch_[node].x + tokens[i] * chunk_.x_row_bytes;
    chunk_.kernel->run(&args);
    char* h = scratch_[node].h + (group.begin + done) * h_row_bytes;
    for (uint32_t i = 0; i < args.num_tokens; ++i) {
      ops_.silu_mul(scratch.tile + i * stride, columns / kInterleave, scratch.sum);
      std::fill(scratch.sum + real, scratch.sum + columns, 0.0f);  // padding stays 0, whatever the token holds
      activation.pack(scratch.sum, columns, first, shard.columns, h + i * h_row_bytes);
    }
  }
}

uint32_t MoeForward::panels_of_block(uint32_t block) const {
  return std::min(block_panels_, layout_.w2_panels() - block_first_panel(block));
}

float* MoeForward::y_block(uint32_t node, uint32_t block) const {
  return scratch_[node].y + block * (chunk_.tokens * y_stride());
}

void MoeForward::run_w2(uint32_t node, ThreadScratch& scratch) {
  for (uint32_t block; (block = counters_[node].w2.take()) < num_blocks_;) {
    run_w2_task(node, scratch, block);
    // The last node to come sees what the others wrote.
    const uint32_t before = blocks_done_[block].fetch_add(1, std::memory_order_acq_rel);
    if (before + 1 == active_nodes_.size()) write_output(scratch, block);
  }
}

void MoeForward::run_w2_task(uint32_t node, ThreadScratch& scratch, uint32_t block) {
  const Shard& shard = layout_.shard(node);
  const size_t h_row_bytes = chunk_.kernel->activation->row_bytes(shard.columns);
  const size_t offset = shard.w13_bytes + block_first_panel(block) * layout_.w2_panel_bytes(node);
  float* const y = y_block(node, block);
  syshax_matmul_args args;
  args.num_panels = panels_of_block(block);
  args.k_padded = shard.columns;
  args.activations = scratch.rows;
  args.out = scratch.tile;
  args.out_stride = y_stride();
  const size_t columns = size_t{args.num_panels} * layout_.panel_rows();
  const uint32_t most = block_tokens(h_row_bytes);
  std::memset(y, 0, chunk_.tokens * y_stride() * sizeof(float));
  for (const ExpertGroup& group : grouping_.groups()) {
    args.panels = arenas_[node] + layout_.expert_offset(node, chunk_.layer, group.expert) + offset;
    for (uint32_t done = 0; done < group.count; done += args.num_tokens) {
      args.num_tokens = std::min(most, group.count - done);
      const uint32_t first = group.begin + done;
      for (uint32_t i = 0; i < args.num_tokens; ++i) scratch.rows[i] = scratch_[node].h + (first + i) * h_row_bytes;
      chunk_.kernel->run(&args);
      for (uint32_t i = 0; i < args.num_tokens; ++i)
        ops_.accumulate(grouping_.weights()[first + i], scratch.tile + i * y_stride(), columns,
                        y + grouping_.tokens()[first + i] * y_stride());
    }
  }
}

void MoeForward::write_output(ThreadScratch& scratch, uint32_t block) const {
  const size_t hidden = layout_.geometry().hidden_size, size = dtype_bytes(chunk_.dtype);
  const size_t first = size_t{block_first_panel(block)} * layout_.panel_rows();
  const size_t columns = std::min(size_t{panels_of_block(block)} * layout_.panel_rows(), hidden - first);
  for (uint32_t token = 0; token < chunk_.tokens; ++token) {
    const float* sum = y_block(active_nodes_.front(), block) + token * y_stride();
    if (active_nodes_.size() > 1) {
      std::copy_n(sum, columns, scratch.sum);
      for (size_t i = 1; i < active_nodes_.size(); ++i)
        ops_.accumulate(1.0f, y_block(active_nodes_[i], block) + token * y_stride(), columns, scratch.sum);
      sum = scratch.sum;
    }
    ops_.narrow(sum, columns, chunk_.dtype, chunk_.output + (token * hidden + first) * size);
  }
}

}  // namespace syshax
