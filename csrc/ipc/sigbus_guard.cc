// The handler runs on any thread at any time: it reads the table with atomics alone and calls nothing but mmap,
// sigaction and raise. Registration is guarded by a mutex that the handler never takes.
#include "ipc/sigbus_guard.h"

#include <sys/mman.h>
#include <csignal>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <mutex>

#include "base/error.h"

namespace syshax {
namespace {

constexpr size_t kEntries = 4096;

struct Entry {
  std::atomic<uintptr_t> begin{0};  // 0: free. Stored last when registering, cleared first when leaving.
  std::atomic<size_t> bytes{0};
  std::atomic<bool> poisoned{false};
};

Entry entries[kEntries];
std::atomic<size_t> entries_used{0};  // high-water mark
std::mutex registration;
struct sigaction previous;
std::atomic<int> passed_on{0};

bool replace_with_zeros(uintptr_t address) {
  size_t used = entries_used.load(std::memory_order_acquire);
  for (size_t i = 0; i < used; ++i) {
    uintptr_t begin = entries[i].begin.load(std::memory_order_acquire);
    size_t bytes = entries[i].bytes.load(std::memory_order_relaxed);
    if (begin == 0 || address < begin || address - begin >= bytes) continue;
    entries[i].poisoned.store(true, std::memory_order_release);
    return mmap(reinterpret_cast<void*>(begin), bytes, PROT_READ | PROT_WRITE,
                MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != MAP_FAILED;
  }
  return false;
}

// Restores the disposition before ours; a fault recurs and meets it, a sent signal is sent again. Coming here twice
// means that the previous handler handed the signal back: then the default ends the process.
void pass_on(const siginfo_t* info) {
  struct sigaction fallback = {};
  fallback.sa_handler = SIG_DFL;
  bool again = passed_on.fetch_add(1) > 0;
  bool ignored = (previous.sa_flags & SA_SIGINFO) == 0 && previous.sa_handler == SIG_IGN;
  sigaction(SIGBUS, again || ignored ? &fallback : &previous, nullptr);
  if (info->si_code <= 0) raise(SIGBUS);
}

void on_sigbus(int, siginfo_t* info, void*) {
  int saved = errno;
  bool memory_error = info->si_code == BUS_MCEERR_AR || info->si_code == BUS_MCEERR_AO || info->si_code <= 0;
  if (memory_error || !replace_with_zeros(reinterpret_cast<uintptr_t>(info->si_addr))) pass_on(info);
  errno = saved;
}

// Installs the handler; also again when somebody (faulthandler, say) took its place since.
void install() {
  struct sigaction current = {};
  sigaction(SIGBUS, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) && current.sa_sigaction == on_sigbus) return;
  previous = current;
  struct sigaction ours = {};
  ours.sa_sigaction = on_sigbus;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  sigemptyset(&ours.sa_mask);
  sigaction(SIGBUS, &ours, nullptr);
}

}  // namespace

SigbusGuard::SigbusGuard(void* base, size_t bytes) {
  std::lock_guard<std::mutex> lock(registration);
  install();
  for (entry_ = 0; entry_ < kEntries && entries[entry_].begin.load() != 0;) ++entry_;
  if (entry_ == kEntries)
    throw CoreError("limit", "no more than " + std::to_string(kEntries) + " sessions fit into one daemon",
                    "detach idle clients");
  Entry& entry = entries[entry_];
  entry.poisoned.store(false);
  entry.bytes.store(bytes);
  entry.begin.store(reinterpret_cast<uintptr_t>(base), std::memory_order_release);
  if (entry_ >= entries_used.load()) entries_used.store(entry_ + 1, std::memory_order_release);
}

SigbusGuard::~SigbusGuard() { entries[entry_].begin.store(0, std::memory_order_release); }

bool SigbusGuard::poisoned() const noexcept { return entries[entry_].poisoned.load(std::memory_order_acquire); }

}  // namespace syshax
