// Which tokens go to which expert: a chunk's assignments sorted by expert. Memory is taken once, for the largest chunk.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace syshax {

struct ExpertGroup {
  uint32_t expert;
  uint32_t begin, count;  // its assignments
};

class Grouping {
 public:
  Grouping(uint32_t num_experts, size_t max_assignments);

  // ids and weights: [tokens, top_k]; an id of -1 is no assignment. Groups come in ascending order of experts, a
  // group's assignments in ascending order of tokens: the order in which results are summed.
  void assign(const int32_t* ids, const float* weights, uint32_t tokens, uint32_t top_k);

  const std::vector<ExpertGroup>& groups() const { return groups_; }
  const uint32_t* tokens() const { return tokens_.data(); }
  const float* weights() const { return weights_.data(); }

 private:
  std::vector<ExpertGroup> groups_;
  std::vector<uint32_t> cursor_;  // for each expert: where its next assignment goes
  std::vector<uint32_t> tokens_;
  std::vector<float> weights_;
};

}  // namespace syshax
