// The computing threads of all nodes, pinned as the plan says. One job at a time runs on all of them; the thread that
// calls run() is thread 0 of the first node, so a plan of n threads has n computing threads and no other. Work inside
// a job is handed out by atomic counters; between jobs threads spin for spin_us at most (base/spin.h) and then sleep.
// Knows nothing of what a job computes.
#pragma once
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "threads/event.h"
#include "threads/node_plan.h"
#include "threads/run_delay.h"

namespace syshax {

// Hands out numbers 0, 1, ... to threads. In a cache line of its own.
struct alignas(64) WorkCounter {
  std::atomic<uint32_t> next{0};
  uint32_t take() { return next.fetch_add(1, std::memory_order_relaxed); }
  uint32_t taken() const { return next.load(std::memory_order_relaxed); }
  void reset() { next.store(0, std::memory_order_relaxed); }
};

class ThreadPool {
 public:
  // Called on every thread with its node's index in the plan and its number in the node.
  using Job = void (*)(void* context, uint32_t node, uint32_t thread);

  // Throws CoreError("hardware") when a thread cannot be pinned.
  ThreadPool(std::vector<NodePlan> plan, uint32_t spin_us);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Runs the job on all threads and returns when all are through. One caller at a time. Allocates nothing.
  void run(Job job, void* context);
  // Inside a job: returns when all threads of the node have come here.
  void barrier(uint32_t node, uint32_t thread);

  uint32_t num_nodes() const { return static_cast<uint32_t>(nodes_.size()); }
  uint32_t num_threads(uint32_t node) const { return nodes_[node]->threads; }
  // Time that the node's threads spent inside jobs, not waiting; summed over its threads.
  uint64_t busy_ns(uint32_t node) const;

 private:
  struct alignas(64) ThreadState {
    std::atomic<uint64_t> busy_ns{0};
    // Its own thread's alone:
    uint64_t resumed_ns = 0;                     // when it last began to work
    syshax_spin for_job = {}, for_threads = {};  // waiting for the next job; for the others within one
    RunDelay delay;
  };
  struct Node {
    uint32_t threads = 0;
    std::vector<int> cpus;
    std::unique_ptr<ThreadState[]> states;
    Event passed;  // bumped by the last to come to a barrier
    alignas(64) std::atomic<uint32_t> arrived{0};
  };

  void work(uint32_t node, uint32_t thread);
  // Not at all while others want the thread's CPU.
  uint32_t spin_us(ThreadState& state) const;
  void stop();

  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::thread> threads_;
  const uint32_t spin_us_;
  std::mutex problem_mutex_;
  std::string problem_;  // why a thread could not be pinned when it started
  Job job_ = nullptr;
  void* context_ = nullptr;
  bool stopping_ = false;
  Event started_;   // bumped for each job, and to stop
  Event finished_;  // bumped by the last thread to finish a job
  alignas(64) std::atomic<uint32_t> running_{0};
};

}  // namespace syshax
