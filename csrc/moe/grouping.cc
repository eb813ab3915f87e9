// Counting sort of a chunk's assignments by expert; ids of -1 are left out. Contract: grouping.h.
#include "moe/grouping.h"

#include <algorithm>

namespace syshax {

Grouping::Grouping(uint32_t num_experts, size_t max_assignments)
    : cursor_(num_experts), tokens_(max_assignments), weights_(max_assignments) {
  groups_.reserve(num_experts);
}

void Grouping::assign(const int32_t* ids, const float* weights, uint32_t tokens, uint32_t top_k) {
  const size_t total = size_t{tokens} * top_k;
  std::fill(cursor_.begin(), cursor_.end(), 0);
  for (size_t i = 0; i < total; ++i)
    if (ids[i] >= 0) ++cursor_[static_cast<size_t>(ids[i])];
  groups_.clear();
  uint32_t begin = 0;
  for (uint32_t expert = 0; expert < cursor_.size(); ++expert) {
    const uint32_t count = cursor_[expert];
    cursor_[expert] = begin;
    if (count > 0) groups_.push_back({expert, begin, count});
    begin += count;
  }
  for (uint32_t token = 0, i = 0; token < tokens; ++token)
    for (uint32_t k = 0; k < top_k; ++k, ++i) {
      if (ids[i] < 0) continue;
      const uint32_t at = cursor_[static_cast<size_t>(ids[i])]++;
      tokens_[at] = token;
      weights_[at] = weights[i];
    }
}

}  // namespace syshax
