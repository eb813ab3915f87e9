// How often each expert of a model was used since the model was made: what a console draws and a placement could use.
//
// Written by the pass that computes, and one pass computes at a time (Compute::turn), so plain additions do; read by
// anybody at any time. A number may be a chunk behind the others.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "moe/grouping.h"

namespace syshax {

class ExpertUse {
 public:
  ExpertUse(uint32_t num_layers, uint32_t num_experts)
      : num_layers_(num_layers),
        num_experts_(num_experts),
        tokens_(std::make_unique<std::atomic<uint64_t>[]>(size_t{num_layers} * num_experts)) {}

  void add(uint32_t layer, const std::vector<ExpertGroup>& groups) noexcept {
    std::atomic<uint64_t>* row = tokens_.get() + size_t{layer} * num_experts_;
    for (const ExpertGroup& group : groups) increase(row[group.expert], group.count);
    increase(reads_, groups.size());
  }

  // tokens: [num_layers, num_experts], how many were sent to each.
  void read(uint64_t* tokens) const {
    for (size_t i = 0; i < size_t{num_layers_} * num_experts_; ++i)
      tokens[i] = tokens_[i].load(std::memory_order_relaxed);
  }
  // How many times some expert's weights were read: once for each chunk of tokens that has any for it.
  uint64_t reads() const { return reads_.load(std::memory_order_relaxed); }

 private:
  static void increase(std::atomic<uint64_t>& value, uint64_t by) {
    value.store(value.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
  }

  const uint32_t num_layers_, num_experts_;
  const std::unique_ptr<std::atomic<uint64_t>[]> tokens_;
  std::atomic<uint64_t> reads_{0};
};

}  // namespace syshax
