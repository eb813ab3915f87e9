// One layer's forward pass over all nodes: group, pack, w13, SiLU-and-multiply, w2, weighted sum.
//
// A request is cut into chunks, so that working memory is fixed. For each chunk every node works on its own shard:
//   1. hidden_states are read once into private memory and packed for the kernel;
//   2. tasks (expert, unit of intermediate columns): w13, SiLU-and-multiply, packed into the assignment's row of h; an
//      expert's last unit finishes those rows;
//   3. tasks (block of hidden columns): over all experts, ascending, w2 and the weighted sum. A block belongs to one
//      thread, so nothing conflicts and no memory of size assignments x hidden_size is needed. The node that finishes a
//      block last adds up the nodes' sums in node order and writes the output.
// Results do not depend on the number of threads: every sum has one order.
//
// When its time is up, every thread stops after the kernel call that it is in and leaves where it was: which task,
// which expert in it, how many of the expert's tokens are done. The next slice goes on from there.
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "kernels/vector_ops.h"
#include "moe/expert_model.h"
#include "moe/expert_use.h"
#include "moe/grouping.h"
#include "moe/layout.h"
#include "moe/scratch.h"
#include "threads/pool.h"

namespace syshax {

constexpr size_t kNumDtypes = 3;
using DtypeKernels = std::array<const syshax_kernel*, kNumDtypes>;

class MoeForward final : public ForwardPass {
 public:
  // arenas: of each node, nullptr for a node without units. References must outlive this object.
  MoeForward(const ExpertLayout& layout, std::vector<const char*> arenas, const DtypeKernels& kernels,
             const VectorOps& ops, ThreadPool& pool, const std::vector<NodePlan>& plan, uint32_t chunk_tokens,
             bool huge_pages, ExpertUse& use);

  void begin(const MoeRequest& request) noexcept override;
  bool advance(uint64_t until_ns) noexcept override;

 private:
  enum class Phase { kPack, kW13, kW2, kDone };

  // What the threads need to know of the current chunk.
  struct Chunk {
    const syshax_kernel* kernel;
    syshax_dtype dtype;
    uint32_t layer;
    uint32_t first, tokens;  // of the request
    size_t x_row_bytes;
  };
  // A phase's tasks on one node. Cache lines of their own, since all of the node's threads write them.
  struct Tasks {
    WorkCounter next;
    alignas(64) std::atomic<uint32_t> left{0};  // begun and left when the time was up
    void reset() {
      next.reset();
      left.store(0, std::memory_order_relaxed);
    }
  };
  // Where a thread is in its task; it goes on there in the next slice.
  struct alignas(64) Place {
    bool fresh =
        true;  // has not taken a task in this slice: the first is taken whatever the time, so that work goes on
    bool open = false;
    uint32_t task = 0, group = 0, done = 0;  // done: of the group's assignments
  };
  struct Progress {
    Phase phase = Phase::kDone;  // changed between slices alone
    Tasks pack, w13, w2;
    std::unique_ptr<Place[]> places;                      // of each thread
    std::unique_ptr<std::atomic<uint32_t>[]> units_done;  // of each group, where rows of h must be finished
  };
  struct Row {
    const MoeRows* part;
    size_t index;
  };

  static void job(void* self, uint32_t node, uint32_t thread);
  void begin_chunk();
  bool settle();
  uint32_t num_tasks(uint32_t node, Phase phase) const;
  bool finished(uint32_t node, Phase phase) const;
  bool time_is_up() const;
  bool take(Tasks& tasks, uint32_t num_tasks, Place& place) const;
  Row row_of(uint32_t token) const;
  void run_thread(uint32_t node, uint32_t thread);
  void pack_token(NodeScratch& node, ThreadScratch& scratch, uint32_t token) const;
  void pack_tokens(uint32_t node, ThreadScratch& scratch, Place& place);
  void run_w13(uint32_t node, ThreadScratch& scratch, Place& place);
  bool run_w13_task(uint32_t node, ThreadScratch& scratch, Place& place) const;
  void finish_group(uint32_t node, uint32_t index);
  void run_w2(uint32_t node, ThreadScratch& scratch, Place& place);
  bool run_w2_task(uint32_t node, ThreadScratch& scratch, Place& place);
  void write_output(ThreadScratch& scratch, uint32_t block) const;

  uint32_t block_first_panel(uint32_t block) const { return block * block_panels_; }
  uint32_t panels_of_block(uint32_t block) const;
  // Floats from one token's row to the next in a block of y.
  size_t y_stride() const { return y_stride_; }
  float* y_block(uint32_t node, uint32_t block) const;

  const ExpertLayout& layout_;
  const std::vector<const char*> arenas_;
  const DtypeKernels kernels_;
  const VectorOps& ops_;
  ThreadPool& pool_;
  ExpertUse& use_;
  ChunkLimits limits_;
  uint32_t block_panels_ = 1, num_blocks_ = 1;  // of hidden columns
  size_t y_stride_ = 16;
  std::vector<uint32_t> active_nodes_;
  std::vector<NodeScratch> scratch_;
  std::unique_ptr<Progress[]> progress_;
  std::unique_ptr<std::atomic<uint32_t>[]> blocks_done_;
  Grouping grouping_;
  MoeRequest request_{};
  uint32_t step_ = 1;  // tokens of a chunk
  bool in_chunk_ = false;
  Chunk chunk_{};
  uint64_t until_ns_ = 0;
};

}  // namespace syshax
