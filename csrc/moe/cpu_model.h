// A model whose experts the CPUs compute: its arenas (one on each node), its kernels, loading and forward.
//
// Life: made (memory reserved and populated), filled layer by layer, sealed, served, released; or made of sealed arenas
// that an earlier process filled, and served. Every step checks that it is its turn. Loading may run on several
// threads.
#pragma once
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory/arena.h"
#include "memory/packed_file.h"
#include "moe/compute.h"
#include "moe/forward.h"
#include "moe/shard_weights.h"

namespace syshax {

class CpuModel final : public ExpertModel {
 public:
  // Checks free memory, reserves and populates. Throws CoreError("no_memory") with the numbers.
  CpuModel(std::string name, const MoeGeometry& geometry, const std::string& format, std::shared_ptr<Compute> compute);
  // Sealed from the beginning. arenas: one for each node of the plan, empty for a node without a share; their bytes are
  // believed, their sizes checked: CoreError("invalid_argument").
  CpuModel(std::string name, const MoeGeometry& geometry, const std::string& format, std::shared_ptr<Compute> compute,
           std::vector<Arena> arenas);

  const std::string& name() const override { return name_; }
  MoeGeometry geometry() const override { return layout_.geometry(); }
  const ExpertLayout& layout() const { return layout_; }
  const syshax_kernel* kernel(syshax_dtype dtype) const { return kernels_[dtype]; }
  uint64_t forward_calls() const { return forward_calls_.load(std::memory_order_relaxed); }
  const ExpertUse& expert_use() const { return use_; }

  // A sealed model's arena on one node of the plan: a duplicate of its descriptor, closed on exec and the caller's to
  // close; -1 for a node without a share.
  int duplicate_arena(uint32_t node) const;
  // Maps all pages before requests meet them, with the nodes' own CPUs. May run while the model serves.
  void prefault();

  // Bytes held on one node of the plan, and how many of them in huge pages; 0 once released.
  size_t node_bytes(uint32_t node) const;
  size_t huge_bytes(uint32_t node) const;

  // experts: num_experts of them. Converts and packs with threads of its own, at most one layer's sources are read.
  void load_layer(uint32_t layer, const std::vector<ExpertSource>& experts, syshax_dtype dtype);
  // What load_layer gave when the model was last loaded, from files; one for each node of the plan, with checksums for
  // all of the layer's chunks (layer_bytes of kPackedChunkBytes each). Throws CoreError("checkpoint") for bytes that
  // are not those; then the model is to be thrown away.
  void load_packed_layer(uint32_t layer, const std::vector<PackedFile>& files);
  // A layer's bytes in a node's arena, where it begins at layer * layer_bytes.
  size_t layer_bytes(uint32_t node) const { return layout_.expert_offset(node, 1, 0); }
  // Weights that need no checkpoint, all different: uniform in +-1 / sqrt(row length). For benches.
  void fill_random(uint64_t seed);
  void seal();  // and counts huge pages

  std::unique_ptr<ForwardPass> make_pass(uint32_t max_tokens) override;
  // A whole pass for callers that are not the dispatcher, one at a time: throws CoreError("model_not_ready") unless
  // sealed, and CoreError("invalid_argument") for a layer, top_k or id out of range. interrupted: as often as it can
  // be, for tests.
  void forward_checked(const MoeRequest& request, bool interrupted = false);
  // gate, up [intermediate_size, hidden_size] and down [hidden_size, intermediate_size] as the kernels see them.
  void dequantize(uint32_t layer, uint32_t expert, float* gate, float* up, float* down) const;

  // Throws CoreError("model_not_ready") unless sealed and not yet closed.
  void check_serving() const;
  // From now on nobody may begin to use it; throws CoreError("model_in_use") while it is being loaded.
  void close();
  // Gives a closed model's memory back; returns when forward_checked does not use it. No pass may be used any more.
  void release();

 private:
  class Pass;
  enum class State { kFilling, kSealed, kClosed };

  void check_memory() const;
  void check_chunk() const;
  void check_sizes() const;
  void count_huge_bytes();
  void map_arenas();
  void require(State state, const char* action) const;
  void check_layer(uint32_t layer) const;
  // Runs `fill` while the layer counts as being loaded, and counts it as loaded when fill returns.
  template <typename Fill>
  void fill_layer(uint32_t layer, const Fill& fill);
  // Packs all experts of the layer; pack(packer, piece, expert, destination).
  template <typename Pack>
  void pack_layer(uint32_t layer, const Pack& pack);

  const std::string name_;
  const std::shared_ptr<Compute> compute_;
  const ExpertLayout layout_;
  DtypeKernels kernels_{};
  std::vector<Arena> arenas_;
  // Of each node: read while others hold the mutex.
  const std::unique_ptr<std::atomic<size_t>[]> huge_bytes_ { new std::atomic<size_t>[ layout_.num_nodes() ]() };
  std::mutex checked_mutex_;  // of forward_checked
  std::unique_ptr<ForwardPass> checked_pass_;
  mutable std::mutex mutex_;  // guards the three below
  State state_ = State::kFilling;
  uint32_t loading_ = 0;
  std::vector<bool> loaded_;
  std::atomic<uint64_t> forward_calls_{0};
  ExpertUse use_{layout_.geometry().num_layers, layout_.geometry().num_experts};
};

// Arena bytes of each node of the plan.
std::vector<uint64_t> plan_bytes(const MoeGeometry& geometry, const std::string& format,
                                 const std::vector<NodePlan>& plan);

}  // namespace syshax
