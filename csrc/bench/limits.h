// What this machine can do at most: bytes read from memory and operations per second, with the threads of a plan. The
// figures against which every benchmark is held (docs/BENCHMARKS.md).
#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "base/cpu_features.h"
#include "bench/limit_loops.h"
#include "threads/node_plan.h"

namespace syshax {

struct LimitVariant {
  std::string name;
  double per_second;  // bytes read or operations, over all threads; the best of its repetitions
  double sustained;   // their median: what the machine gave while its neighbours had their share of it
};

class LimitBench {
 public:
  // bytes: of memory to read, over all nodes; many times the caches, or the caches are measured. Throws CoreError.
  LimitBench(std::vector<NodePlan> plan, CpuFeatures features, uint32_t spin_us, size_t bytes);
  ~LimitBench();

  // What the loops reached, the best first. The first call runs all that this CPU can, at least `seconds` long; later
  // calls run mostly those that were best and take about `seconds`. The calling thread computes as the plan's first:
  // it is the caller that pins it.
  std::vector<LimitVariant> measure(Limit limit, double seconds);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace syshax
