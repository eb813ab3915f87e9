// hwloc's view of a machine as a plain struct, real or synthetic. Discovers; decides nothing (the planner is Python).
#pragma once
#include <cstdint>
#include <string>
#include <vector>

namespace syshax {

struct TopologyNode {
  int node = 0;  // the operating system's number
  uint64_t memory_bytes = 0;
  std::vector<std::vector<int>> cores;  // sibling CPUs of each core; empty: a node of memory alone
};

struct Topology {
  std::string source;  // "system" or "synthetic"
  std::vector<TopologyNode> nodes;
};

// All CPUs and nodes, whatever this process may use. A core whose CPUs several nodes share (fast and large memory)
// belongs to the one with the most memory. synthetic: an hwloc description ("numa:2 core:4 pu:2").
// Throws CoreError("hardware").
Topology discover_topology(const std::string& synthetic);

}  // namespace syshax
