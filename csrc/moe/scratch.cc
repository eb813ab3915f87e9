// The forward pass's working memory, allocated once and bound to each node. Contract: scratch.h.
#include "moe/scratch.h"

#include <errno.h>
#include <linux/mempolicy.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "base/error.h"
#include "memory/arena.h"

namespace syshax {
namespace {

constexpr size_t kLine = 64;

// Cuts one region into pieces that begin on cache lines; first called without memory to learn the size.
class Cutter {
 public:
  explicit Cutter(char* base) : base_(base) {}
  template <typename T>
  T* take(size_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + kLine - 1) / kLine * kLine;
    return piece;
  }
  void next_page() { used_ = (used_ + kPageBytes - 1) / kPageBytes * kPageBytes; }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

size_t cut(NodeScratch& node, char* base, const ScratchSizes& sizes, size_t h_row_bytes, uint32_t threads) {
  Cutter cutter(base);
  node.x = cutter.take<char>(sizes.limits.tokens * sizes.x_row_bytes);
  node.h = cutter.take<char>(sizes.limits.assignments * h_row_bytes);
  node.y = cutter.take<float>(sizes.limits.tokens * sizes.y_columns);
  node.threads.clear();
  for (uint32_t i = 0; i < threads; ++i) {
    cutter.next_page();
    ThreadScratch thread;
    thread.tile = cutter.take<float>(sizes.limits.block_tokens * sizes.tile_columns);
    thread.row = cutter.take<float>(sizes.hidden_k);
    thread.sum = cutter.take<float>(sizes.tile_columns);
    thread.rows = cutter.take<const void*>(sizes.limits.block_tokens);
    node.threads.push_back(thread);
  }
  cutter.next_page();
  return cutter.used();
}

}  // namespace

Region::Region(size_t bytes, int node, bool huge_pages) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    throw CoreError("no_memory", "cannot map " + std::to_string(bytes) + " bytes of working memory: " + strerror(errno),
                    "lower chunk_tokens");
  data_ = static_cast<char*>(memory);
  bytes_ = bytes;
  if (huge_pages) madvise(memory, bytes, MADV_HUGEPAGE);
  if (node < 0) return;
  // Preferred, not bound: working memory is small, and a full node must not end the process.
  unsigned long mask[1024 / (8 * sizeof(unsigned long))] = {};
  const size_t bits = 8 * sizeof(unsigned long);
  mask[static_cast<size_t>(node) / bits] = 1ul << (static_cast<size_t>(node) % bits);
  syscall(SYS_mbind, memory, bytes, MPOL_PREFERRED, mask, 1025, 0);
}

Region::~Region() {
  if (data_ != nullptr) munmap(data_, bytes_);
}

Region::Region(Region&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

std::vector<NodeScratch> make_scratch(const ScratchSizes& sizes, const std::vector<NodePlan>& plan, bool huge_pages) {
  std::vector<NodeScratch> nodes(plan.size());
  for (size_t i = 0; i < plan.size(); ++i) {
    NodeScratch& node = nodes[i];
    const size_t bytes = cut(node, nullptr, sizes, sizes.h_row_bytes[i], plan[i].threads);
    node.memory = Region(bytes, plan[i].node, huge_pages);
    cut(node, node.memory.data(), sizes, sizes.h_row_bytes[i], plan[i].threads);
  }
  return nodes;
}

}  // namespace syshax
