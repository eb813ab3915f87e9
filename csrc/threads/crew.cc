// Contract: crew.h. Threads are made for the piece of work and joined before run_crew returns.
#include "threads/crew.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "threads/pinning.h"

namespace syshax {
namespace {

struct Crew {
  const std::vector<NodePlan>& plan;
  const std::vector<uint64_t>& tasks;
  const std::function<void(uint32_t, uint64_t)>& task;
  std::unique_ptr<std::atomic<uint64_t>[]> next;
  std::atomic<bool> failed{false};
  std::mutex mutex;
  std::exception_ptr error;  // under mutex

  void fail(std::exception_ptr e) {
    failed = true;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!error) error = std::move(e);
  }

  void work(uint32_t node) {
    try {
      name_this_thread("load-" + std::to_string(node));
      lower_this_threads_priority();
      const std::string problem = pin_this_thread_among(plan[node].cpus);
      if (!problem.empty()) throw CoreError("hardware", problem, kPinningHint);
      for (uint64_t index; !failed && (index = next[node].fetch_add(1)) < tasks[node];) task(node, index);
    } catch (...) {
      fail(std::current_exception());
    }
  }
};

}  // namespace

void run_crew(const std::vector<NodePlan>& plan, const std::vector<uint64_t>& tasks,
              const std::function<void(uint32_t, uint64_t)>& task) {
  Crew crew{plan, tasks, task, std::make_unique<std::atomic<uint64_t>[]>(plan.size()), {}, {}, {}};
  for (size_t node = 0; node < plan.size(); ++node) crew.next[node] = 0;
  std::vector<std::thread> threads;
  try {
    for (uint32_t node = 0; node < plan.size(); ++node) {
      const uint64_t wanted = std::min<uint64_t>(std::max(plan[node].threads, 1u), tasks[node]);
      for (uint64_t i = 0; i < wanted; ++i) threads.emplace_back([&crew, node] { crew.work(node); });
    }
  } catch (const std::system_error& e) {
    crew.fail(std::make_exception_ptr(
        CoreError("hardware", std::string("cannot start a loading thread: ") + e.what(), "raise the limit of tasks")));
  }
  for (std::thread& thread : threads) thread.join();
  if (crew.error) std::rethrow_exception(crew.error);
}

}  // namespace syshax
