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
#pragma once
#include <array>
#include <atomic>
#include <memory>
#include <vector>

#include "kernels/vector_ops.h"
#include "moe/grouping.h"
#include "moe/layout.h"
#include "moe/scratch.h"
#include "threads/pool.h"

namespace syshax {

constexpr size_t kNumDtypes = 3;
using DtypeKernels = std::array<const syshax_kernel*, kNumDtypes>;

class MoeForward {
 public:
  // arenas: of each node, nullptr for a node without units. References must outlive this object.
  MoeForward(const ExpertLayout& layout, std::vector<const char*> arenas, const DtypeKernels& kernels,
             const VectorOps& ops, ThreadPool& pool, const std::vector<NodePlan>& plan, uint32_t chunk_tokens,
             bool huge_pages);

  // One caller at a time. Allocates nothing, takes no lock.
  void run(const MoeRequest& request) noexcept;

 private:
  // What the threads need to know of the current chunk.
  struct Chunk {
    const syshax_kernel* kernel;
    syshax_dtype dtype;
    uint32_t layer, tokens;
    const char* hidden;  // [tokens, hidden_size] of dtype
    char* output;        // the same
    size_t x_row_bytes;
    bool packed;  // the caller has packed x already
  };
  // Cache lines of their own, since all of a node's threads write them.
  struct Counters {
    WorkCounter pack, w13, w2;
    std::unique_ptr<std::atomic<uint32_t>[]> units_done;  // of each group, where rows of h must be finished
  };

  static void job(void* self, uint32_t node, uint32_t thread);
  void run_chunk();
  void run_thread(uint32_t node, uint32_t thread);
  void pack_token(NodeScratch& node, ThreadScratch& scratch, uint32_t token) const;
  void pack_tokens(uint32_t node, ThreadScratch& scratch);
  void run_w13(uint32_t node, ThreadScratch& scratch);
  void run_w13_task(uint32_t node, ThreadScratch& scratch, const ExpertGroup& group, uint32_t unit) const;
  void finish_group(uint32_t node, uint32_t index);
  void run_w2(uint32_t node, ThreadScratch& scratch);
  void run_w2_task(uint32_t node, ThreadScratch& scratch, uint32_t block);
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
  ChunkLimits limits_;
  uint32_t block_panels_ = 1, num_blocks_ = 1;  // of hidden columns
  size_t y_stride_ = 16;
  std::vector<uint32_t> active_nodes_;
  std::vector<NodeScratch> scratch_;
  std::unique_ptr<Counters[]> counters_;
  std::unique_ptr<std::atomic<uint32_t>[]> blocks_done_;
  Grouping grouping_;
  Chunk chunk_{};
};

}  // namespace syshax
