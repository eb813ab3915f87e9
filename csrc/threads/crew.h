// Threads for loading: they come and go with one piece of work, may run on any of their node's CPUs and let the
// computing threads go first, so that a load does not hold up models that serve.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "threads/node_plan.h"

namespace syshax {

// Calls task(node, index) for every index below tasks[node], on each node's own threads. Returns when all are done;
// rethrows the first exception after the others have stopped. Any thread may call it, several at a time.
void run_crew(const std::vector<NodePlan>& plan, const std::vector<uint64_t>& tasks,
              const std::function<void(uint32_t node, uint64_t index)>& task);

}  // namespace syshax
