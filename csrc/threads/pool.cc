// Contract: pool.h. Workers wait on one event for the next job's number and meet at one barrier for each node.
#include "threads/pool.h"

#include <algorithm>
#include <mutex>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "threads/pinning.h"

namespace syshax {
namespace {

// The time between two jobs is the client's, whose threads may want these CPUs: a long limit is for waits within a job.
uint32_t between_jobs_us(uint32_t spin_us) {
  return spin_us & SYSHAX_SPIN_FIXED ? spin_us : std::min(spin_us, uint32_t{50});
}

}  // namespace

ThreadPool::ThreadPool(std::vector<NodePlan> plan, uint32_t spin_us) : spin_us_(spin_us) {
  check_plan(plan);
  for (NodePlan& entry : plan) {
    auto node = std::make_unique<Node>();
    node->threads = entry.threads;
    node->cpus = std::move(entry.cpus);
    node->states = std::make_unique<ThreadState[]>(entry.threads);
    nodes_.push_back(std::move(node));
  }
  // The first CPU is the calling thread's to be; the other threads try theirs when they start.
  if (!nodes_[0]->cpus.empty()) check_pinning({nodes_[0]->cpus[0]});
  try {
    for (uint32_t node = 0; node < num_nodes(); ++node)
      for (uint32_t thread = node == 0 ? 1 : 0; thread < nodes_[node]->threads; ++thread)
        threads_.emplace_back([this, node, thread] { work(node, thread); });
  } catch (const std::system_error& e) {
    const size_t started = threads_.size();
    stop();
    throw CoreError("hardware", "cannot start thread " + std::to_string(started + 1) + ": " + e.what(),
                    "raise the limit of tasks or plan fewer threads");
  }
  run([](void*, uint32_t, uint32_t) {}, nullptr);  // returns when all have started
  if (!problem_.empty()) {
    stop();
    throw CoreError("hardware", problem_, kPinningHint);
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stopping_ = true;
  started_.bump();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void ThreadPool::run(Job job, void* context) {
  job_ = job;
  context_ = context;
  const uint32_t others = static_cast<uint32_t>(threads_.size());
  const uint32_t finished = finished_.value();
  running_.store(others, std::memory_order_relaxed);
  if (others > 0) started_.bump();
  ThreadState& state = nodes_[0]->states[0];
  state.resumed_ns = now_ns();
  job(context, 0, 0);
  state.busy_ns.fetch_add(now_ns() - state.resumed_ns, std::memory_order_relaxed);
  if (others > 0) finished_.await(finished, state.for_threads, spin_us(state));
}

void ThreadPool::work(uint32_t node, uint32_t thread) {
  name_this_thread("moe-" + std::to_string(node) + "-" + std::to_string(thread));
  Node& home = *nodes_[node];
  if (!home.cpus.empty()) {
    const std::string problem = pin_this_thread({home.cpus[thread]});
    const std::lock_guard<std::mutex> lock(problem_mutex_);
    if (!problem.empty()) problem_ = problem;
  }
  ThreadState& state = home.states[thread];
  uint32_t seen = 0;
  while (true) {
    seen = started_.await(seen, state.for_job, between_jobs_us(spin_us(state)));
    if (stopping_) return;
    state.resumed_ns = now_ns();
    job_(context_, node, thread);
    state.busy_ns.fetch_add(now_ns() - state.resumed_ns, std::memory_order_relaxed);
    if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) finished_.bump();
  }
}

uint32_t ThreadPool::spin_us(ThreadState& state) const {
  if (spin_us_ == 0 || spin_us_ & SYSHAX_SPIN_FIXED) return spin_us_;
  return state.delay.contended(now_ns()) ? 0 : spin_us_;
}

void ThreadPool::barrier(uint32_t node, uint32_t thread) {
  Node& home = *nodes_[node];
  if (home.threads == 1) return;
  const uint32_t seen = home.passed.value();
  if (home.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == home.threads) {
    home.arrived.store(0, std::memory_order_relaxed);
    home.passed.bump();
    return;
  }
  ThreadState& state = home.states[thread];
  state.busy_ns.fetch_add(now_ns() - state.resumed_ns, std::memory_order_relaxed);
  home.passed.await(seen, state.for_threads, spin_us(state));
  state.resumed_ns = now_ns();
}

uint64_t ThreadPool::busy_ns(uint32_t node) const {
  uint64_t sum = 0;
  for (uint32_t i = 0; i < nodes_[node]->threads; ++i)
    sum += nodes_[node]->states[i].busy_ns.load(std::memory_order_relaxed);
  return sum;
}

}  // namespace syshax
