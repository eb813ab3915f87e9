// A node of the daemon's plan: what the planner decided and the core obeys.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace syshax {

struct NodePlan {
  int node = -1;          // NUMA node to bind memory to; -1: not bound
  std::vector<int> cpus;  // one computing thread is pinned to each of the first `threads`; empty: unpinned
  uint32_t threads = 1;   // computing threads of this node; on the first node the calling thread is one of them
  double share = 1.0;     // relative part of intermediate_size
};

// Throws CoreError("hardware") for a plan that cannot be obeyed.
void check_plan(const std::vector<NodePlan>& plan);

}  // namespace syshax
