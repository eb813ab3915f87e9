// What all models of a runtime share: the plan, the CPU's features, the thread pool and who may use it now.
#pragma once
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/cpu_features.h"
#include "syshax/memory_manager.h"
#include "threads/pool.h"

namespace syshax {

struct Compute {
  Compute(std::vector<NodePlan> nodes, const CpuFeatures& cpu, uint32_t spin_us, syshax_huge_pages pages,
          uint32_t tokens)
      : plan(std::move(nodes)), features(cpu), huge_pages(pages), chunk_tokens(tokens), pool(plan, spin_us) {}

  const std::vector<NodePlan> plan;
  const CpuFeatures features;
  const syshax_huge_pages huge_pages;
  const uint32_t chunk_tokens;
  ThreadPool pool;
  // Held for one slice. In service the dispatcher alone takes it, so that it never waits; Model.forward, which tests
  // and benches call, takes it too.
  std::mutex turn;
};

}  // namespace syshax
