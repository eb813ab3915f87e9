// Checks a plan's CPUs and pins threads to them; a CPU that cannot be had is an error. Contract: pinning.h.
#include "threads/pinning.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <memory>
#include <thread>

#include "base/error.h"
#include "threads/node_plan.h"

namespace syshax {
namespace {

constexpr int kMaxCpus = 8192;
constexpr size_t kSetBytes = CPU_ALLOC_SIZE(kMaxCpus);
using CpuSet = std::unique_ptr<cpu_set_t, decltype(&free)>;
constexpr int kLoaderNice = 10;

std::string list(const std::vector<int>& cpus) {
  std::string text;
  for (int cpu : cpus) text += (text.empty() ? "" : ",") + std::to_string(cpu);
  return text;
}

// Throws unless the plan's entry makes sense by itself.
void check_node(const NodePlan& plan, size_t index) {
  const std::string where = "node entry " + std::to_string(index) + " of the plan";
  if (!(plan.share >= 0) || !std::isfinite(plan.share))
    throw CoreError("hardware", where + " has share " + std::to_string(plan.share), "shares are numbers >= 0");
  if (plan.threads == 0 && plan.share > 0)
    throw CoreError("hardware", where + " has a share but no thread", "give it threads or the share 0");
  if (!plan.cpus.empty() && plan.threads > plan.cpus.size())
    throw CoreError("hardware",
                    where + " wants " + std::to_string(plan.threads) + " threads on " +
                        std::to_string(plan.cpus.size()) + " CPUs (" + list(plan.cpus) + ")",
                    "list one CPU for each thread, or none to run unpinned");
}

}  // namespace

void check_plan(const std::vector<NodePlan>& plan) {
  if (plan.empty()) throw CoreError("hardware", "the plan has no nodes");
  double sum = 0;
  for (size_t i = 0; i < plan.size(); ++i) {
    check_node(plan[i], i);
    sum += plan[i].share;
  }
  if (sum <= 0) throw CoreError("hardware", "no node of the plan has a share of the work");
  if (plan.front().threads == 0) throw CoreError("hardware", "the first node of the plan needs at least one thread");
}

std::string pin_this_thread_among(const std::vector<int>& cpus) {
  if (cpus.empty()) return "";
  const CpuSet set(CPU_ALLOC(kMaxCpus), &free);
  CPU_ZERO_S(kSetBytes, set.get());
  for (int cpu : cpus) {
    if (cpu < 0 || cpu >= kMaxCpus) return "CPU " + std::to_string(cpu) + " does not exist";
    CPU_SET_S(static_cast<size_t>(cpu), kSetBytes, set.get());
  }
  if (sched_setaffinity(0, kSetBytes, set.get()) == 0) return "";
  const int cause = errno;
  return "cannot run a thread on CPU " + list(cpus) + ": " + strerror(cause) + " (errno " + std::to_string(cause) + ")";
}

std::string pin_this_thread(const std::vector<int>& cpus) {
  std::string problem = pin_this_thread_among(cpus);
  if (!problem.empty() || cpus.empty()) return problem;
  // The kernel drops CPUs outside the cpuset silently as long as one is left.
  const CpuSet got(CPU_ALLOC(kMaxCpus), &free);
  CPU_ZERO_S(kSetBytes, got.get());
  if (sched_getaffinity(0, kSetBytes, got.get()) != 0) return std::string("sched_getaffinity: ") + strerror(errno);
  for (int cpu : cpus)
    if (!CPU_ISSET_S(static_cast<size_t>(cpu), kSetBytes, got.get()))
      return "CPU " + std::to_string(cpu) + " is outside the cpuset of this process";
  return "";
}

void check_pinning(const std::vector<int>& cpus) {
  if (cpus.empty()) return;
  std::string problem;
  std::thread([&] { problem = pin_this_thread(cpus); }).join();
  if (!problem.empty()) throw CoreError("hardware", problem, kPinningHint);
}

void name_this_thread(const std::string& name) { pthread_setname_np(pthread_self(), name.substr(0, 15).c_str()); }

void lower_this_threads_priority() { setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), kLoaderNice); }

}  // namespace syshax
