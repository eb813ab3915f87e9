// Every measurement is a pair: a forked child that is the client and keeps the time, and a thread here that is the
// daemon (for the floors) or the dispatcher itself. The child makes system calls and calls the ring's client library,
// nothing else: it was forked out of a process that may have threads.
#include "bench/ring.h"

#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "dispatcher.h"
#include "ipc/client.h"
#include "ipc/ring_server.h"
#include "session.h"

namespace syshax {
namespace {

constexpr uint32_t kMaxSamples = 1u << 20;
constexpr uint32_t kSpinUs = 100;  // far above a round trip; bounded, because unpinned sides may meet on one CPU

struct Shared {  // between the two processes; behind it the payload there, and the payload back
  alignas(64) std::atomic<uint32_t> ping;
  alignas(64) std::atomic<uint32_t> pong;
  alignas(64) uint32_t num_samples;
  uint32_t samples_ns[kMaxSamples];
};

class NullModel final : public ExpertModel {
 public:
  explicit NullModel(uint32_t hidden_size) : geometry_{1, 8, hidden_size, 1, 8} {}
  const std::string& name() const override { return name_; }
  MoeGeometry geometry() const override { return geometry_; }
  std::unique_ptr<ForwardPass> make_pass(uint32_t) override { return std::make_unique<Pass>(geometry_.hidden_size); }

 private:
  // Moves the bytes and computes nothing, as the bare ping-pong does.
  struct Pass final : ForwardPass {
    explicit Pass(uint32_t hidden_size) : bytes(size_t{hidden_size} * sizeof(float)) {}
    void begin(const MoeRequest& r) noexcept override { std::memcpy(r.parts->output, r.parts->hidden_states, bytes); }
    bool advance(uint64_t) noexcept override { return true; }
    const size_t bytes;
  };
  const std::string name_ = "null";
  const MoeGeometry geometry_;
};

void pin(int cpu) {
  if (cpu < 0) return;
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof(set), &set);
}

bool shares_cpu(int client_cpu, int daemon_cpu) {
  cpu_set_t set;
  bool single = sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) == 1;
  return single || (client_cpu >= 0 && client_cpu == daemon_cpu);
}

[[noreturn]] void fail(const std::string& what) { throw CoreError("internal", "ring benchmark: " + what); }

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {
    if (fd < 0) fail(std::strerror(errno));
  }
  ~Descriptor() { close(fd_); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

class Bench {
 public:
  Bench(double seconds, size_t payload_bytes, int client_cpu, int daemon_cpu)
      : phase_ns_(static_cast<uint64_t>(seconds / 4 * 1e9)),
        hidden_size_(static_cast<uint32_t>(std::max<size_t>(1, payload_bytes / 4))),
        client_cpu_(client_cpu),
        daemon_cpu_(daemon_cpu),
        shared_cpu_(shares_cpu(client_cpu, daemon_cpu)) {
    void* memory = mmap(nullptr, shared_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail(std::strerror(errno));
    shared_ = new (memory) Shared{};
  }
  ~Bench() { munmap(shared_, shared_bytes()); }

  RingBench run() {
    RingBench result = {};
    std::tie(result.spin_us_p50, result.spin_us_p99) = ring(shared_cpu_ ? 0 : kSpinUs);
    result.parked_us_p50 = ring(0).first;
    result.floor_spin_us = floor_spin();
    result.floor_parked_us = floor_parked();
    return result;
  }

 private:
  using Percentiles = std::pair<double, double>;

  // Runs `client` over and over in a child for the phase's time; each call is one sample, false is an error. `daemon`
  // runs on a thread here; once the child has ended, `ended_` is set and `stop` makes it return.
  Percentiles measure(const std::function<bool()>& client, const std::function<void()>& daemon,
                      const std::function<void()>& stop) {
    shared_->ping = shared_->pong = shared_->num_samples = 0;
    pid_t parent = getpid();
    child_ = fork();
    if (child_ < 0) fail(std::strerror(errno));
    if (child_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(2);
      _exit(sample(client) ? 0 : 1);
    }
    std::thread daemon_thread([&] {
      pin(daemon_cpu_);
      daemon();
    });
    int status = 0;
    while (waitpid(child_, &status, 0) < 0 && errno == EINTR) {
    }
    ended_ = true;
    stop();
    daemon_thread.join();
    ended_ = false;
    if (status != 0) fail("the client process ended with status " + std::to_string(status));
    return percentiles();
  }

  bool sample(const std::function<bool()>& client) {
    pin(client_cpu_);
    uint64_t start = monotonic_ns(), now = start;
    while (now - start < phase_ns_ && shared_->num_samples < kMaxSamples) {
      if (!client()) return false;
      uint64_t end = monotonic_ns();
      shared_->samples_ns[shared_->num_samples++] = static_cast<uint32_t>(std::min<uint64_t>(end - now, UINT32_MAX));
      now = end;
    }
    return true;
  }

  Percentiles percentiles() const {
    uint32_t warm_up = shared_->num_samples / 10;
    std::vector<uint32_t> sorted(shared_->samples_ns + warm_up, shared_->samples_ns + shared_->num_samples);
    if (sorted.empty()) fail("no round trip was completed; give it more time");
    std::sort(sorted.begin(), sorted.end());
    return {sorted[sorted.size() / 2] / 1e3, sorted[sorted.size() * 99 / 100] / 1e3};
  }

  Percentiles ring(uint32_t spin_us) {
    syshax_ring_header layout = ring_layout({2, 1, hidden_size_, 8, 4, 1});
    Descriptor memory(memfd_create("syshax-bench", MFD_CLOEXEC)), doorbell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (ftruncate(memory.get(), static_cast<off_t>(layout.total_bytes)) != 0) fail(std::strerror(errno));
    Dispatcher dispatcher(spin_us, daemon_cpu_ < 0 ? std::vector<int>{} : std::vector<int>{daemon_cpu_});
    SessionSpec spec;
    spec.session_id = 1;
    spec.model = std::make_shared<NullModel>(hidden_size_);
    spec.shm_fd = memory.get();
    spec.doorbell_fd = doorbell.get();
    spec.max_tokens = 1;
    spec.top_k = 8;
    spec.element_bytes = 4;
    spec.num_slots = 2;
    spec.spin_us = spin_us;
    dispatcher.add_session(spec);
    std::vector<float> hidden(hidden_size_), output(hidden_size_);
    const int32_t ids[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    const float weights[8] = {};
    syshax_client* client = nullptr;
    auto round_trip = [&] {
      syshax_client_result result;
      if (client == nullptr && syshax_client_open(memory.get(), doorbell.get(), -1, &client) != 0) return false;
      return syshax_client_moe(client, 0, 1, 8, 0, hidden.data(), ids, weights, output.data(), 10000000000u, &result) ==
                 0 &&
             result.status == 0;
    };
    return measure(
        round_trip, [&] { dispatcher.start(); }, [] {});
  }

  size_t row_bytes() const { return size_t{hidden_size_} * sizeof(float); }
  size_t shared_bytes() const { return sizeof(Shared) + 2 * row_bytes(); }

  void relax() const {
    if (shared_cpu_) sched_yield();
  }

  double floor_spin() {
    char *there = reinterpret_cast<char*>(shared_ + 1), *back = there + row_bytes();
    std::vector<char> own(row_bytes());
    auto client = [&] {
      std::memcpy(there, own.data(), own.size());
      uint32_t next = shared_->ping.load(std::memory_order_relaxed) + 1;
      shared_->ping.store(next, std::memory_order_release);
      while (shared_->pong.load(std::memory_order_acquire) != next) relax();
      std::memcpy(own.data(), back, own.size());
      return true;
    };
    auto daemon = [&] {
      uint32_t seen = 0;
      while (!ended_.load(std::memory_order_relaxed)) {
        uint32_t next = shared_->ping.load(std::memory_order_acquire);
        if (next == seen) {
          relax();
          continue;
        }
        std::memcpy(back, there, row_bytes());
        shared_->pong.store(seen = next, std::memory_order_release);
      }
    };
    return measure(client, daemon, [] {}).first;
  }

  double floor_parked() {
    Descriptor there(eventfd(0, EFD_CLOEXEC)), back(eventfd(0, EFD_CLOEXEC));
    auto client = [&] {
      uint64_t value = 1;
      return write(there.get(), &value, 8) == 8 && read(back.get(), &value, 8) == 8;
    };
    auto daemon = [&] {
      uint64_t value = 0;
      while (read(there.get(), &value, 8) == 8 && !ended_)
        if (write(back.get(), &value, 8) != 8) return;
    };
    auto stop = [&] {
      const uint64_t value = 1;
      if (write(there.get(), &value, 8) != 8) fail(std::strerror(errno));
    };
    return measure(client, daemon, stop).first;
  }

  const uint64_t phase_ns_;
  const uint32_t hidden_size_;
  const int client_cpu_, daemon_cpu_;
  const bool shared_cpu_;
  Shared* shared_ = nullptr;
  pid_t child_ = -1;
  std::atomic<bool> ended_{false};
};

}  // namespace

RingBench bench_ring(double seconds, size_t payload_bytes, int client_cpu, int daemon_cpu) {
  if (!(seconds > 0) || seconds > 3600)
    throw CoreError("invalid_argument", "the benchmark's seconds must be in (0, 3600]");
  return Bench(seconds, payload_bytes, client_cpu, daemon_cpu).run();
}

}  // namespace syshax
