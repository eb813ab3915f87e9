// A model in this process: layout, arenas, kernels and forward pass put together. Contract: cpu_model.h.
#include "moe/cpu_model.h"

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>
#include <string_view>

#include "base/error.h"
#include "kernels/table.h"
#include "memory/free_memory.h"
#include "threads/crew.h"

namespace syshax {
namespace {

constexpr size_t kPopulateBytes = size_t{64} << 20;  // one task's
constexpr uint32_t kPiecesPerTask = 16;
constexpr size_t kMaxChunkAssignments = size_t{1} << 28;

std::string readable(uint64_t bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f GiB (%llu bytes)", static_cast<double>(bytes) / (1u << 30),
                static_cast<unsigned long long>(bytes));
  return text;
}

DtypeKernels choose_kernels(const ExpertLayout& layout, const CpuFeatures& features) {
  DtypeKernels kernels{};
  for (const syshax_dtype dtype : {SYSHAX_FLOAT32, SYSHAX_FLOAT16, SYSHAX_BFLOAT16}) {
    kernels[dtype] = select_kernel(layout.format().name, dtype, features);
    if (std::string_view(kernels[dtype]->packing->name) != layout.packing().name)
      throw CoreError("hardware", std::string("kernel ") + kernels[dtype]->name + " reads packing " +
                                      kernels[dtype]->packing->name + ", the model is packed as " +
                                      layout.packing().name);
  }
  return kernels;
}

// A row's values follow from where it lies, so that neither threads nor nodes change them.
struct RandomRows {
  uint64_t seed;
  static uint64_t mix(uint64_t x) {  // splitmix64's finaliser
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  static void fill(void* context, int which, size_t row, size_t first, size_t values, float* out) {
    const uint64_t start = mix(static_cast<RandomRows*>(context)->seed + mix(row * 4 + static_cast<size_t>(which)));
    const float scale = 1.0f / (std::sqrt(static_cast<float>(values)) * 2147483648.0f);
    for (size_t i = 0; i < values; ++i)
      out[i] = static_cast<float>(static_cast<int32_t>(mix(start + first + i) >> 32)) * scale;
  }
};

}  // namespace

std::vector<uint64_t> plan_bytes(const MoeGeometry& geometry, const std::string& format,
                                 const std::vector<NodePlan>& plan) {
  const ExpertLayout layout(geometry, format, plan);
  std::vector<uint64_t> bytes;
  for (uint32_t node = 0; node < layout.num_nodes(); ++node) bytes.push_back(layout.shard(node).arena_bytes);
  return bytes;
}

CpuModel::CpuModel(std::string name, const MoeGeometry& geometry, const std::string& format,
                   std::shared_ptr<Compute> compute)
    : name_(std::move(name)),
      compute_(std::move(compute)),
      layout_(geometry, format, compute_->plan),
      kernels_(choose_kernels(layout_, compute_->features)),
      loaded_(geometry.num_layers) {
  check_chunk();
  check_memory();
  map_arenas();
}

CpuModel::CpuModel(std::string name, const MoeGeometry& geometry, const std::string& format,
                   std::shared_ptr<Compute> compute, std::vector<Arena> arenas)
    : name_(std::move(name)),
      compute_(std::move(compute)),
      layout_(geometry, format, compute_->plan),
      kernels_(choose_kernels(layout_, compute_->features)),
      arenas_(std::move(arenas)),
      state_(State::kSealed),
      loaded_(geometry.num_layers, true) {
  check_chunk();
  check_sizes();
  for (uint32_t node = 0; node < layout_.num_nodes(); ++node) huge_bytes_[node] = arenas_[node].huge_bytes();
}

void CpuModel::check_chunk() const {
  const uint32_t top_k = geometry().top_k;
  if (compute_->chunk_tokens == 0 || size_t{compute_->chunk_tokens} * top_k > kMaxChunkAssignments)
    throw CoreError("invalid_argument", "chunk_tokens " + std::to_string(compute_->chunk_tokens) + " with top_k " +
                                            std::to_string(top_k) + " is out of range");
}

void CpuModel::check_sizes() const {
  if (arenas_.size() != layout_.num_nodes())
    throw CoreError("invalid_argument", "model " + name_ + " has " + std::to_string(arenas_.size()) +
                                            " arenas, the plan " + std::to_string(layout_.num_nodes()) + " nodes");
  for (uint32_t node = 0; node < layout_.num_nodes(); ++node) {
    const size_t bytes = layout_.shard(node).arena_bytes;
    const size_t huge = (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    if (arenas_[node].bytes() != bytes && arenas_[node].bytes() != huge)
      throw CoreError("invalid_argument", "arena " + std::to_string(node) + " of model " + name_ + " has " +
                                              std::to_string(arenas_[node].bytes()) + " bytes; wanted " +
                                              std::to_string(bytes));
  }
}

// The forward pass as the runtime's threads compute it: one slice at a time of all models.
class CpuModel::Pass final : public ForwardPass {
 public:
  Pass(CpuModel& model, uint32_t max_tokens, std::vector<const char*> arenas)
      : model_(model),
        forward_(model.layout_, std::move(arenas), model.kernels_, select_vector_ops(model.compute_->features),
                 model.compute_->pool, model.compute_->plan, std::min(max_tokens, model.compute_->chunk_tokens),
                 model.compute_->huge_pages != SYSHAX_HUGE_OFF, model.use_) {}

  void begin(const MoeRequest& request) noexcept override { forward_.begin(request); }

  bool advance(uint64_t until_ns) noexcept override {
    const std::lock_guard<std::mutex> turn(model_.compute_->turn);
    const bool through = forward_.advance(until_ns);
    if (through) model_.forward_calls_.fetch_add(1, std::memory_order_relaxed);
    return through;
  }

 private:
  CpuModel& model_;
  MoeForward forward_;
};

std::unique_ptr<ForwardPass> CpuModel::make_pass(uint32_t max_tokens) {
  std::vector<const char*> bases;
  for (const Arena& arena : arenas_) bases.push_back(arena.data());
  return std::make_unique<Pass>(*this, max_tokens, std::move(bases));
}

void CpuModel::check_memory() const {
  if (compute_->huge_pages == SYSHAX_HUGE_REQUIRE) return;  // comes from the pool of huge pages: mapping tells
  std::map<int, uint64_t> wanted;
  for (uint32_t node = 0; node < layout_.num_nodes(); ++node)
    wanted[compute_->plan[node].node] += layout_.shard(node).arena_bytes;
  const std::string what = "model " + name_ + " in " + layout_.format().name + " needs ";
  const std::string help = "use a smaller format, unload a model, or give it more nodes or memory";
  for (const auto& [node, bytes] : wanted) {
    const uint64_t free = node_free_bytes(node);
    if (bytes > free)
      throw CoreError("no_memory",
                      what + readable(bytes) + (node < 0 ? "" : " on node " + std::to_string(node)) + " and " +
                          readable(free) + " are free",
                      help);
  }
}

void CpuModel::map_arenas() {
  std::vector<uint64_t> tasks;
  for (uint32_t node = 0; node < layout_.num_nodes(); ++node) {
    const size_t bytes = layout_.shard(node).arena_bytes;
    tasks.push_back((bytes + kPopulateBytes - 1) / kPopulateBytes);
    if (bytes == 0)
      arenas_.emplace_back();
    else
      arenas_.emplace_back("syshax:" + name_ + ":" + std::to_string(node), bytes, compute_->plan[node].node,
                           compute_->huge_pages);
  }
  run_crew(compute_->plan, tasks, [&](uint32_t node, uint64_t task) {
    const size_t offset = task * kPopulateBytes;
    arenas_[node].populate(offset, std::min(kPopulateBytes, arenas_[node].bytes() - offset));
  });
}

int CpuModel::duplicate_arena(uint32_t node) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  require(State::kSealed, "hand out an arena of");
  if (arenas_[node].bytes() == 0) return -1;
  const int fd = fcntl(arenas_[node].fd(), F_DUPFD_CLOEXEC, 3);
  if (fd < 0) throw CoreError("limit", std::string("an arena's descriptor cannot be duplicated: ") + strerror(errno));
  return fd;
}

void CpuModel::prefault() {
  std::vector<uint64_t> tasks;
  for (uint32_t node = 0; node < layout_.num_nodes(); ++node)
    tasks.push_back((node_bytes(node) + kPopulateBytes - 1) / kPopulateBytes);
  run_crew(compute_->plan, tasks, [&](uint32_t node, uint64_t task) {
    const char* begin = nullptr;
    size_t bytes = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const size_t offset = task * kPopulateBytes;
      if (state_ != State::kSealed || offset >= arenas_[node].bytes()) return;
      begin = arenas_[node].data() + offset;
      bytes = std::min(kPopulateBytes, arenas_[node].bytes() - offset);
    }
    // Should the model be released meanwhile, the call does nothing, or maps early what another mapping holds.
    if (!prefault_pages(begin, bytes))
      throw CoreError("hardware", "an expert of model " + name_ + " cannot be read: the machine's memory has an error",
                      "load it again; see the kernel's log and `rasdaemon` for the module");
  });
  count_huge_bytes();
}

// Looking takes seconds for a large model of small pages, in which nobody must have to wait for the mutex.
void CpuModel::count_huge_bytes() {
  std::vector<MappedRange> ranges;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Arena& arena : arenas_) ranges.push_back({arena.data(), arena.bytes()});
  }
  const std::vector<size_t> counted = mapped_huge_bytes(ranges);
  const std::lock_guard<std::mutex> lock(mutex_);
  for (uint32_t node = 0; node < layout_.num_nodes(); ++node) {
    const Arena& arena = arenas_[node];
    const bool reserved = arena.bytes() > 0 && arena.huge_bytes() == arena.bytes();
    huge_bytes_[node] = reserved ? arena.bytes() : std::min(counted[node], arena.bytes());
  }
}

size_t CpuModel::node_bytes(uint32_t node) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return arenas_[node].bytes();
}

size_t CpuModel::huge_bytes(uint32_t node) const { return huge_bytes_[node]; }

void CpuModel::require(State state, const char* action) const {
  if (state_ == state) return;
  const char* now = state_ == State::kFilling ? "still being loaded" : state_ == State::kSealed ? "sealed" : "unloaded";
  throw CoreError("model_not_ready", "cannot " + std::string(action) + " model " + name_ + ": it is " + now);
}

void CpuModel::check_layer(uint32_t layer) const {
  if (layer >= geometry().num_layers)
    throw CoreError("invalid_argument", "layer " + std::to_string(layer) + " of model " + name_ +
                                            ", which has layers 0.." + std::to_string(geometry().num_layers - 1));
}

template <typename Fill>
void CpuModel::fill_layer(uint32_t layer, const Fill& fill) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    require(State::kFilling, "load a layer of");
    check_layer(layer);
    ++loading_;
  }
  const auto finish = [&](bool complete) {
    const std::lock_guard<std::mutex> lock(mutex_);
    --loading_;
    if (complete) loaded_[layer] = true;
  };
  try {
    fill();
  } catch (...) {
    finish(false);
    throw;
  }
  finish(true);
}

template <typename Pack>
void CpuModel::pack_layer(uint32_t layer, const Pack& pack) {
  std::vector<uint64_t> tasks, per_expert;
  for (uint32_t node = 0; node < layout_.num_nodes(); ++node) {
    const bool active = layout_.shard(node).units > 0;
    const uint32_t pieces = active ? ShardPacker(layout_, node).num_pieces() : 0;
    per_expert.push_back((pieces + kPiecesPerTask - 1) / kPiecesPerTask);
    tasks.push_back(per_expert.back() * geometry().num_experts);
  }
  fill_layer(layer, [&] {
    run_crew(compute_->plan, tasks, [&](uint32_t node, uint64_t task) {
      const uint32_t expert = static_cast<uint32_t>(task / per_expert[node]);
      const uint32_t first = static_cast<uint32_t>(task % per_expert[node]) * kPiecesPerTask;
      ShardPacker packer(layout_, node);
      const uint32_t last = std::min(first + kPiecesPerTask, packer.num_pieces());
      char* const destination = arenas_[node].data() + layout_.expert_offset(node, layer, expert);
      for (uint32_t piece = first; piece < last; ++piece) pack(packer, piece, expert, destination);
    });
  });
}

void CpuModel::load_packed_layer(uint32_t layer, const std::vector<PackedFile>& files) {
  std::vector<uint64_t> tasks;
  for (uint32_t node = 0; node < layout_.num_nodes(); ++node) {
    tasks.push_back((layer_bytes(node) + kPackedChunkBytes - 1) / kPackedChunkBytes);
    if (node >= files.size() || files[node].checksums.size() != tasks.back())
      throw CoreError("invalid_argument", "layer " + std::to_string(layer) + " of model " + name_ + " on node " +
                                              std::to_string(node) + " wants " + std::to_string(tasks.back()) +
                                              " checksums");
  }
  fill_layer(layer, [&] {
    if (layer + 1 < geometry().num_layers)  // the disk works on the next layer while this one is checked
      for (uint32_t node = 0; node < layout_.num_nodes(); ++node)
        if (tasks[node] > 0) expect_packed(files[node].fd, (layer + 1) * layer_bytes(node), layer_bytes(node));
    run_crew(compute_->plan, tasks, [&](uint32_t node, uint64_t chunk) {
      const size_t within = chunk * kPackedChunkBytes, offset = layer * layer_bytes(node) + within;
      read_packed_chunk(files[node].fd, offset, std::min(kPackedChunkBytes, layer_bytes(node) - within),
                        files[node].checksums[chunk], arenas_[node].data() + offset);
    });
  });
}

void CpuModel::load_layer(uint32_t layer, const std::vector<ExpertSource>& experts, syshax_dtype dtype) {
  pack_layer(layer, [&](ShardPacker& packer, uint32_t piece, uint32_t expert, char* destination) {
    packer.pack_piece(piece, experts[expert], dtype, destination);
  });
}

void CpuModel::fill_random(uint64_t seed) {
  for (uint32_t layer = 0; layer < geometry().num_layers; ++layer)
    pack_layer(layer, [&](ShardPacker& packer, uint32_t piece, uint32_t expert, char* destination) {
      RandomRows rows{RandomRows::mix(seed + RandomRows::mix(uint64_t{layer} << 32 | expert))};
      packer.pack_piece(piece, RandomRows::fill, &rows, destination);
    });
}

void CpuModel::seal() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    require(State::kFilling, "seal");
    const size_t missing = static_cast<size_t>(std::count(loaded_.begin(), loaded_.end(), false));
    if (missing > 0 || loading_ > 0)
      throw CoreError("model_not_ready", "cannot seal model " + name_ + ": " + std::to_string(missing) + " of " +
                                             std::to_string(loaded_.size()) + " layers are not loaded");
    for (Arena& arena : arenas_)
      if (arena.bytes() > 0) arena.seal(false);
    state_ = State::kSealed;
  }
  count_huge_bytes();
}

void CpuModel::forward_checked(const MoeRequest& request, bool interrupted) {
  check_layer(request.layer);
  const MoeGeometry g = geometry();
  if (request.num_tokens == 0 || request.top_k == 0 || request.top_k > g.num_experts)
    throw CoreError("invalid_argument",
                    std::to_string(request.num_tokens) + " tokens with top_k " + std::to_string(request.top_k) +
                        "; wanted at least one token and top_k in [1, " + std::to_string(g.num_experts) + "]");
  for (size_t i = 0; i < size_t{request.num_tokens} * request.top_k; ++i)
    if (request.topk_ids[i] < -1 || request.topk_ids[i] >= static_cast<int64_t>(g.num_experts))
      throw CoreError("invalid_argument", "topk_ids[" + std::to_string(i / request.top_k) + ", " +
                                              std::to_string(i % request.top_k) + "] is " +
                                              std::to_string(request.topk_ids[i]) + ", outside [-1, " +
                                              std::to_string(g.num_experts) + ")");
  const std::lock_guard<std::mutex> alone(checked_mutex_);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    require(State::kSealed, "compute with");
  }
  if (!checked_pass_) checked_pass_ = make_pass(compute_->chunk_tokens);
  checked_pass_->begin(request);
  while (!checked_pass_->advance(interrupted ? 0 : UINT64_MAX)) {
  }
}

void CpuModel::dequantize(uint32_t layer, uint32_t expert, float* gate, float* up, float* down) const {
  check_layer(layer);
  if (expert >= geometry().num_experts)
    throw CoreError("invalid_argument",
                    "expert " + std::to_string(expert) + " of " + std::to_string(geometry().num_experts));
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_ == State::kClosed) require(State::kSealed, "read");
  for (uint32_t node = 0; node < layout_.num_nodes(); ++node)
    if (layout_.shard(node).units > 0)
      ShardPacker(layout_, node)
          .unpack(arenas_[node].data() + layout_.expert_offset(node, layer, expert), gate, up, down);
}

void CpuModel::check_serving() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  require(State::kSealed, "serve");
}

void CpuModel::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (loading_ > 0) throw CoreError("model_in_use", "model " + name_ + " is being loaded", "cancel the load first");
  state_ = State::kClosed;
}

void CpuModel::release() {
  const std::lock_guard<std::mutex> alone(checked_mutex_);
  const std::lock_guard<std::mutex> lock(mutex_);
  checked_pass_.reset();
  for (Arena& arena : arenas_) arena = Arena();
  for (uint32_t node = 0; node < layout_.num_nodes(); ++node) huge_bytes_[node] = 0;
}

}  // namespace syshax
