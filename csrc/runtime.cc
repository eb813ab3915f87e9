// Models, thread pool and dispatcher of one process, made and ended in the right order. Contract: runtime.h.
#include "runtime.h"

#include <utility>

#include "base/error.h"
#include "memory/free_memory.h"

namespace syshax {
namespace {

// A node that does not exist, or that the cpuset forbids, is found when the daemon starts, not when a model is loaded.
std::vector<NodePlan> checked_nodes(std::vector<NodePlan> plan) {
  for (const NodePlan& node : plan) {
    if (node.node < 0) continue;
    try {
      Arena("syshax:check", kPageBytes, node.node, SYSHAX_HUGE_OFF);
    } catch (const CoreError& e) {
      throw CoreError("hardware",
                      "NUMA node " + std::to_string(node.node) +
                          " cannot be used; nodes with memory: " + nodes_with_memory() + " (" + e.what() + ")",
                      "syshaxctl topology lists nodes and CPUs");
    }
  }
  return plan;
}

// The dispatcher's thread computes as the first node's first thread.
std::vector<int> dispatcher_cpus(const Compute& compute) {
  const std::vector<int>& cpus = compute.plan.front().cpus;
  return cpus.empty() ? std::vector<int>{} : std::vector<int>{cpus.front()};
}

}  // namespace

Runtime::Runtime(std::vector<NodePlan> plan, const std::string& isa_cap, uint32_t spin_us,
                 const std::string& huge_pages, uint32_t chunk_tokens)
    : compute_(std::make_shared<Compute>(checked_nodes(std::move(plan)),
                                         cap_cpu_features(detect_cpu_features(), isa_cap), spin_us,
                                         parse_huge_pages(huge_pages), chunk_tokens)),
      spin_us_(spin_us) {}

Runtime::~Runtime() { stop(); }

std::shared_ptr<CpuModel> Runtime::create_model(const std::string& name, const MoeGeometry& geometry,
                                                const std::string& format) {
  const std::lock_guard<std::mutex> lock(creating_);
  return std::make_shared<CpuModel>(name, geometry, format, compute_);
}

std::shared_ptr<CpuModel> Runtime::adopt_model(const std::string& name, const MoeGeometry& geometry,
                                               const std::string& format, const std::map<uint32_t, int>& arenas) {
  std::vector<Arena> mapped(compute_->plan.size());
  for (const auto& [node, fd] : arenas) {
    if (node >= mapped.size())
      throw CoreError("invalid_argument", "model " + name + " has an arena " + std::to_string(node) +
                                              ", the plan has " + std::to_string(mapped.size()) + " nodes");
    mapped[node] = Arena::adopt_duplicate(fd, compute_->plan[node].node);
  }
  return std::make_shared<CpuModel>(name, geometry, format, compute_, std::move(mapped));
}

void Runtime::drop_model(const std::shared_ptr<CpuModel>& model) {
  {
    const std::lock_guard<std::mutex> lock(attaching_);
    model->close();
  }
  if (const auto dispatcher = running()) dispatcher->forget_model(model.get());
  model->release();
}

void Runtime::start() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (dispatcher_) return;
  auto dispatcher = std::make_shared<Dispatcher>(spin_us_, dispatcher_cpus(*compute_));
  dispatcher->set_class_weights(class_weights_);
  dispatcher->start();
  dispatcher_ = std::move(dispatcher);
}

bool Runtime::drain(double timeout_s) {
  const auto dispatcher = running();
  return !dispatcher || dispatcher->drain(timeout_s);
}

void Runtime::stop() {
  std::shared_ptr<Dispatcher> dispatcher;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    dispatcher = std::move(dispatcher_);
    dispatcher_.reset();
  }
  if (dispatcher) dispatcher->stop();
}

std::shared_ptr<Dispatcher> Runtime::running() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return dispatcher_;
}

void Runtime::add_session(const std::shared_ptr<CpuModel>& model, SessionSpec spec) {
  const auto dispatcher = running();
  if (!dispatcher) throw CoreError("shutting_down", "the data plane does not run");
  const std::lock_guard<std::mutex> lock(attaching_);
  model->check_serving();
  spec.model = model;
  dispatcher->add_session(spec);
}

void Runtime::remove_session(uint64_t session_id) {
  if (const auto dispatcher = running()) dispatcher->remove_session(session_id);
}

void Runtime::end_session(uint64_t session_id, uint32_t closing) {
  if (const auto dispatcher = running()) dispatcher->end_session(session_id, closing);
}

void Runtime::configure_session(uint64_t session_id, Priority priority, uint32_t share) {
  if (const auto dispatcher = running()) dispatcher->configure_session(session_id, priority, share);
}

void Runtime::set_class_weights(const ClassWeights& weights) {
  if (const auto dispatcher = running()) dispatcher->set_class_weights(weights);
  const std::lock_guard<std::mutex> lock(mutex_);
  class_weights_ = weights;
}

std::vector<SessionStats> Runtime::session_stats() const {
  const auto dispatcher = running();
  return dispatcher ? dispatcher->session_stats() : std::vector<SessionStats>{};
}

DispatcherStats Runtime::dispatcher_stats() const {
  const auto dispatcher = running();
  return dispatcher ? dispatcher->stats() : DispatcherStats{};
}

std::vector<uint64_t> Runtime::busy_ns() const {
  std::vector<uint64_t> result;
  for (uint32_t node = 0; node < compute_->pool.num_nodes(); ++node) result.push_back(compute_->pool.busy_ns(node));
  return result;
}

}  // namespace syshax
