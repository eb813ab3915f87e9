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
                       bool huge_pages, ExpertUse& use)
    : layout_(layout),
      arenas_(std::move(arenas)),
      kernels_(kernels),
      ops_(ops),
      pool_(pool),
      use_(use),
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
  progress_ = std::make_unique<Progress[]>(plan.size());
  for (const uint32_t node : active_nodes_) {
    progress_[node].places = std::make_unique<Place[]>(plan[node].threads);
    progress_[node].units_done = std::make_unique<std::atomic<uint32_t>[]>(layout.geometry().num_experts);
  }
  blocks_done_ = std::make_unique<std::atomic<uint32_t>[]>(num_blocks_);
}

void MoeForward::begin(const MoeRequest& request) noexcept {
  request_ = request;
  const size_t fitting = std::max<size_t>(limits_.assignments / request.top_k, 1);
  step_ = static_cast<uint32_t>(std::min<size_t>(limits_.tokens, fitting));
  chunk_.kernel = kernels_[request.dtype];
  chunk_.dtype = request.dtype;
  chunk_.layer = request.layer;
  chunk_.x_row_bytes = chunk_.kernel->activation->row_bytes(layout_.hidden_k());
  chunk_.first = chunk_.tokens = 0;
  in_chunk_ = false;
}

bool MoeForward::advance(uint64_t until_ns) noexcept {
  until_ns_ = until_ns;
  while (true) {
    if (!in_chunk_) {
      chunk_.first += chunk_.tokens;
      if (chunk_.first >= request_.num_tokens) return true;
      begin_chunk();
    }
    pool_.run(job, this);
    in_chunk_ = !settle();
    const bool last = chunk_.first + chunk_.tokens >= request_.num_tokens;
    if (in_chunk_ || (!last && time_is_up())) return false;
  }
}

void MoeForward::begin_chunk() {
  chunk_.tokens = std::min(step_, request_.num_tokens - chunk_.first);
  const size_t at = size_t{chunk_.first} * request_.top_k;
  grouping_.assign(request_.topk_ids + at, request_.topk_weights + at, chunk_.tokens, request_.top_k);
  use_.add(chunk_.layer, grouping_.groups());
  const bool packed = chunk_.tokens <= kSerialPack;
  for (uint32_t node : active_nodes_) {
    Progress& progress = progress_[node];
    progress.phase = packed ? Phase::kW13 : Phase::kPack;
    for (Tasks* tasks : {&progress.pack, &progress.w13, &progress.w2}) tasks->reset();
    for (uint32_t thread = 0; thread < pool_.num_threads(node); ++thread) progress.places[thread].open = false;
    if (chunk_.kernel->activation->finish == nullptr) continue;
    for (size_t i = 0; i < grouping_.groups().size(); ++i) progress.units_done[i].store(0, std::memory_order_relaxed);
  }
  for (uint32_t block = 0; block < num_blocks_; ++block) blocks_done_[block].store(0, std::memory_order_relaxed);
  if (!packed) return;
  NodeScratch& first = scratch_[active_nodes_.front()];
  for (uint32_t token = 0; token < chunk_.tokens; ++token) pack_token(first, scratch_[0].threads[0], token);
  for (size_t i = 1; i < active_nodes_.size(); ++i)
    std::memcpy(scratch_[active_nodes_[i]].x, first.x, chunk_.tokens * chunk_.x_row_bytes);
}

// After a slice: where each node is now; true when the chunk is through.
bool MoeForward::settle() {
  bool through = true;
  for (uint32_t node : active_nodes_) {
    Phase& phase = progress_[node].phase;
    for (const Phase next : {Phase::kW13, Phase::kW2, Phase::kDone})
      if (phase < next && finished(node, phase)) phase = next;
    through = through && phase == Phase::kDone;
  }
  return through;
}

uint32_t MoeForward::num_tasks(uint32_t node, Phase phase) const {
  if (phase == Phase::kPack) return (chunk_.tokens + kPackTokens - 1) / kPackTokens;
  if (phase == Phase::kW2) return num_blocks_;
  return static_cast<uint32_t>(grouping_.groups().size()) * layout_.shard(node).units;
}

// Where all of the node's threads have left the phase, all of them get the same answer.
bool MoeForward::finished(uint32_t node, Phase phase) const {
  const Progress& progress = progress_[node];
  const Tasks& tasks = phase == Phase::kPack ? progress.pack : phase == Phase::kW13 ? progress.w13 : progress.w2;
  return tasks.next.taken() >= num_tasks(node, phase) && tasks.left.load(std::memory_order_relaxed) == 0;
}

bool MoeForward::time_is_up() const { return until_ns_ != UINT64_MAX && now_ns() >= until_ns_; }

// Goes on with the task that the thread left, or takes the next one; false: none is left, or the time is up.
bool MoeForward::take(Tasks& tasks, uint32_t num_tasks, Place& place) const {
  if (place.open) {
    tasks.left.fetch_sub(1, std::memory_order_relaxed);
    return true;
  }
  if (!place.fresh && time_is_up()) return false;
  place = {false, false, tasks.next.take(), 0, 0};
  place.open = place.task < num_tasks;
  return place.open;
}

void MoeForward::job(void* self, uint32_t node, uint32_t thread) {
  static_cast<MoeForward*>(self)->run_thread(node, thread);
}

void MoeForward::run_thread(uint32_t node, uint32_t thread) {
  if (layout_.shard(node).units == 0) return;
  ThreadScratch& scratch = scratch_[node].threads[thread];
  Place& place = progress_[node].places[thread];
  place.fresh = true;
  Phase phase = progress_[node].phase;
  if (phase == Phase::kPack) {
    pack_tokens(node, scratch, place);
    pool_.barrier(node, thread);
    if (!finished(node, phase)) return;
    phase = Phase::kW13;
  }
  if (phase == Phase::kW13) {
    run_w13(node, scratch, place);
    pool_.barrier(node, thread);
    if (!finished(node, phase)) return;
    phase = Phase::kW2;
  }
  if (phase == Phase::kW2) run_w2(node, scratch, place);
}

MoeForward::Row MoeForward::row_of(uint32_t token) const {
  size_t index = size_t{chunk_.first} + token;
  const MoeRows* part = request_.parts;
  while (index >= part->num_tokens) index -= (part++)->num_tokens;
  return {part, index};
}

// Reads client memory, which may change meanwhile: each element once, into `row`.
void MoeForward::pack_token(NodeScratch& node, ThreadScratch& scratch, uint32_t token) const {
  const size_t hidden = layout_.geometry().hidden_size;
  const Row row = row_of(token);
  const char* source = static_cast<const char*>(row.part->hidden_states);
  ops_.widen(source + row.index * hidden * dtype_bytes(chunk_.dtype), chunk_.dtype, hidden, scratch.row);
  syshax_pack_row(chunk_.kernel->activation, scratch.row, layout_.hidden_k(), node.x + token * chunk_.x_row_bytes);
}

void MoeForward::pack_tokens(uint32_t node, ThreadScratch& scratch, Place& place) {
  const uint32_t tasks = num_tasks(node, Phase::kPack);
  for (; take(progress_[node].pack, tasks, place); place.open = false) {
    const uint32_t first = place.task * kPackTokens, last = std::min(first + kPackTokens, chunk_.tokens);
    for (uint32_t token = first; token < last; ++token) pack_token(scratch_[node], scratch, token);
  }
}

void MoeForward::run_w13(uint32_t node, ThreadScratch& scratch, Place& place) {
  const uint32_t units = layout_.shard(node).units, tasks = num_tasks(node, Phase::kW13);
  for (; take(progress_[node].w13, tasks, place); place.open = false) {
    if (!run_w13_task(node, scratch, place)) {
      progress_[node].w13.left.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    if (chunk_.kernel->activation->finish != nullptr) finish_group(node, place.task / units);
  }
}

// Whoever computes a group's last unit finishes its rows of h.
void MoeForward::finish_group(uint32_t node, uint32_t index) {
  const Shard& shard = layout_.shard(node);
  if (progress_[node].units_done[index].fetch_add(1, std::memory_order_acq_rel) + 1 < shard.units) return;
  const syshax_activation& activation = *chunk_.kernel->activation;
  const ExpertGroup& group = grouping_.groups()[index];
  const size_t h_row_bytes = activation.row_bytes(shard.columns);
  for (uint32_t i = group.begin; i < group.begin + group.count; ++i)
    activation.finish(shard.columns, scratch_[node].h + i * h_row_bytes);
}

// One expert's unit of columns; false when the time is up before all of its tokens are done.
bool MoeForward::run_w13_task(uint32_t node, ThreadScratch& scratch, Place& place) const {
  const Shard& shard = layout_.shard(node);
  const ExpertGroup& group = grouping_.groups()[place.task / shard.units];
  const uint32_t unit = place.task % shard.units;
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
  while (true) {
    args.num_tokens = std::min(most, group.count - place.done);
    const uint32_t begin = group.begin + place.done;
    const uint32_t* tokens = grouping_.tokens() + begin;
    for (uint32_t i = 0; i < args.num_tokens; ++i) scratch.rows[i] = scratch_[node].x + tokens[i] * chunk_.x_row_bytes;
    chunk_.kernel->run(&args);
    char* h = scratch_[node].h + begin * h_row_bytes;
    for (uint32_t i = 0; i < args.num_tokens; ++i) {
      ops_.silu_mul(scratch.tile + i * stride, columns / kInterleave, scratch.sum);
      std::fill(scratch.sum + real, scratch.sum + columns, 0.0f);  // padding stays 0, whatever the token holds
      activation.pack(scratch.sum, columns, first, shard.columns, h + i * h_row_bytes);
    }
    place.done += args.num_tokens;
    if (place.done == group.count) return true;
    if (time_is_up()) return false;
  }
}

uint32_t MoeForward::panels_of_block(uint32_t block) const {
  return std::min(block_panels_, layout_.w2_panels() - block_first_panel(block));
}

float* MoeForward::y_block(uint32_t node, uint32_t block) const {
  return scratch_[node].y + block * (chunk_.tokens * y_stride());
}

void MoeForward::run_w2(uint32_t node, ThreadScratch& scratch, Place& place) {
  Tasks& tasks = progress_[node].w2;
  for (; take(tasks, num_blocks_, place); place.open = false) {
    if (!run_w2_task(node, scratch, place)) {
      tasks.left.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    // The last node to come sees what the others wrote.
    const uint32_t before = blocks_done_[place.task].fetch_add(1, std::memory_order_acq_rel);
    if (before + 1 == active_nodes_.size()) write_output(scratch, place.task);
  }
}

// One block of hidden columns over all experts; false when the time is up before it is through.
bool MoeForward::run_w2_task(uint32_t node, ThreadScratch& scratch, Place& place) {
  const Shard& shard = layout_.shard(node);
  const size_t h_row_bytes = chunk_.kernel->activation->row_bytes(shard.columns);
  const size_t offset = shard.w13_bytes + block_first_panel(place.task) * layout_.w2_panel_bytes(node);
  float* const y = y_block(node, place.task);
  syshax_matmul_args args;
  args.num_panels = panels_of_block(place.task);
  args.k_padded = shard.columns;
  args.activations = scratch.rows;
  args.out = scratch.tile;
  args.out_stride = y_stride();
  const size_t columns = size_t{args.num_panels} * layout_.panel_rows();
  const uint32_t most = block_tokens(h_row_bytes);
  if (place.group == 0 && place.done == 0) std::memset(y, 0, chunk_.tokens * y_stride() * sizeof(float));
  for (bool fresh = true; place.group < grouping_.groups().size(); fresh = false) {
    if (!fresh && time_is_up()) return false;
    const ExpertGroup& group = grouping_.groups()[place.group];
    args.panels = arenas_[node] + layout_.expert_offset(node, chunk_.layer, group.expert) + offset;
    args.num_tokens = std::min(most, group.count - place.done);
    const uint32_t first = group.begin + place.done;
    for (uint32_t i = 0; i < args.num_tokens; ++i) scratch.rows[i] = scratch_[node].h + (first + i) * h_row_bytes;
    chunk_.kernel->run(&args);
    for (uint32_t i = 0; i < args.num_tokens; ++i)
      ops_.accumulate(grouping_.weights()[first + i], scratch.tile + i * y_stride(), columns,
                      y + grouping_.tokens()[first + i] * y_stride());
    place.done += args.num_tokens;
    if (place.done < group.count) continue;
    ++place.group;
    place.done = 0;
  }
  return true;
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
    const Row row = row_of(token);
    ops_.narrow(sum, columns, chunk_.dtype, static_cast<char*>(row.part->output) + (row.index * hidden + first) * size);
  }
}

}  // namespace syshax
