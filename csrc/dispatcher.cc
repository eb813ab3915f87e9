// The dispatcher's thread: looks at every session, computes a slice of the session whose turn it is, sleeps when there
// is nothing. Contract: dispatcher.h; whose turn it is: schedule/; sleep protocol: docs/RING.md.
//
// Other threads reach the thread by commands: closures that it runs between two turns, while they wait. Sessions are
// changed by commands alone and under `mutex`, so the thread itself reads them without a lock, and readers of
// statistics take the mutex. What a command takes out (sessions, models) is destroyed by the caller: unmapping
// gigabytes must not stop the data path.
#include "dispatcher.h"

#include <poll.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "base/spin.h"
#include "session.h"
#include "threads/pinning.h"
#include "threads/run_delay.h"

namespace syshax {
namespace {

constexpr uint64_t kSliceNs = 1500000;        // and the kernel calls in progress then end: 2 ms
constexpr uint64_t kAloneSliceNs = 10000000;  // with one session only commands wait
constexpr uint32_t kRefusedATurn = 8;  // of a session's requests that cannot be queued: nobody is charged for these
constexpr uint64_t kBeatNs = 1000000;  // heartbeats are written at most this often: the line is shared with the client

void check_class(Priority priority, uint32_t share) {
  if (static_cast<uint32_t>(priority) >= kNumPriorities)
    throw CoreError("invalid_argument", "there is no priority " + std::to_string(static_cast<uint32_t>(priority)));
  if (share > 100)
    throw CoreError("invalid_argument", "a share of " + std::to_string(share) + " percent; allowed is 0 to 100");
}

// Signals belong to the process's main thread; faults to whoever makes them.
void block_signals(sigset_t* before) {
  sigset_t all;
  sigfillset(&all);
  for (int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, before);
}

}  // namespace

struct Dispatcher::Impl {
  struct Command {
    std::function<void()> run;
    bool done = false;
  };

  Impl(uint32_t spin_us, std::vector<int> cpu_list) : spin_us(spin_us), cpus(std::move(cpu_list)) {
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (epoll_fd < 0 || wake_fd < 0 || !watch(wake_fd)) {
      int error = errno;
      close(epoll_fd);
      close(wake_fd);
      throw CoreError("internal", std::string("dispatcher: ") + std::strerror(error), "raise the limit on open files");
    }
  }
  ~Impl() {
    close(epoll_fd);
    close(wake_fd);
  }

  // Edge-triggered: every write to the eventfd is an event, so that nobody needs to read it back to zero.
  bool watch(int fd) {
    epoll_event event = {};
    event.events = EPOLLIN | EPOLLET;
    return epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event) == 0;
  }

  // Runs `run` on the dispatcher's thread between two turns, or here when there is no such thread; returns when done.
  void command(std::function<void()> run) {
    std::unique_lock<std::mutex> lock(mutex);
    if (!running) return run();
    Command entry{std::move(run)};
    commands.push_back(&entry);
    commands_waiting.store(true, std::memory_order_seq_cst);
    wake();
    changed.wait(lock, [&] { return entry.done; });
  }

  void wake() {
    uint64_t one = 1;
    while (write(wake_fd, &one, sizeof(one)) < 0 && errno == EINTR) {
    }
  }

  void run_commands() {
    std::lock_guard<std::mutex> lock(mutex);
    commands_waiting.store(false, std::memory_order_relaxed);
    for (Command* entry : commands) {
      entry->run();
      entry->done = true;
    }
    commands.clear();
    changed.notify_all();
  }

  void loop() {
    for (;;) {
      if (commands_waiting.load(std::memory_order_acquire)) run_commands();
      if (stopping) return leave();
      uint64_t now = begin_turn(), wake_ns = UINT64_MAX;
      if (Session* session = choose(now, &wake_ns)) {
        syshax_spin_found(&spin, now);
        compute(*session, now);
      } else if (draining && !drained) {
        tell_drained();
      } else if (syshax_spin_again(&spin, spin_limit_us(now), now)) {
        syshax_cpu_pause();
      } else {
        sleep(wake_ns);
      }
    }
  }

  // Nothing spins where a client's threads may need the CPU: the daemon's Python says so by the session's spin_us.
  // Nor where others make this thread wait for its own.
  uint32_t spin_limit_us(uint64_t now) noexcept {
    if (spin_us == 0 || spin_us & SYSHAX_SPIN_FIXED) return spin_us;
    for (auto& session : sessions)
      if (!session->ended() && session->ring().layout().spin_us == 0) return 0;
    return delay.contended(now) ? 0 : spin_us;
  }

  uint64_t begin_turn() noexcept {
    uint64_t now = monotonic_ns();
    last_turn_ns.store(now, std::memory_order_relaxed);
    bool beat = now - last_beat_ns >= kBeatNs;
    if (beat) last_beat_ns = now;
    for (auto& session : sessions) {
      if (session->ended()) continue;
      if (uint32_t refused = session->look(now, kRefusedATurn)) failed.fetch_add(refused, std::memory_order_relaxed);
      if (beat) session->ring().set_heartbeat(now);
    }
    return now;
  }

  // Whose turn it is; nullptr when nobody may compute now, and wake_ns when somebody will.
  Session* choose(uint64_t now, uint64_t* wake_ns) noexcept {
    Session *best = nullptr, *best_waiting = nullptr;
    shares.begin_round();
    for (auto& entry : sessions) {
      Session& session = *entry;
      if (!session.leads() && session.next_step() == nullptr) continue;
      if (!draining && throttled(session, now, wake_ns)) continue;
      const Wait wait = draining || session.leads() ? Wait::kNo : wait_for_companion(session, now, wake_ns);
      if (wait == Wait::kNo && shares.offer(session.account())) best = &session;
      if (wait == Wait::kForQueued && best_waiting == nullptr) best_waiting = &session;
    }
    return best != nullptr ? best : best_waiting;  // the latter: all wait for one another
  }

  bool throttled(Session& session, uint64_t now, uint64_t* wake_ns) noexcept {
    const uint64_t blocked_ns = session.members() > 1 ? 0 : session.account().blocked_ns(now);
    session.note_throttled(blocked_ns != 0, now);
    if (blocked_ns != 0) *wake_ns = std::min(*wake_ns, now + blocked_ns);
    return blocked_ns != 0;
  }

  static bool companions(const Session& a, const Session& b) noexcept {
    return &a != &b && a.model() == b.model() && a.account().priority() == b.account().priority();
  }

  // Whether a session lets others go first, so that one of them comes to its layer (schedule/companions.h).
  enum class Wait { kNo, kForQueued, kForIdle };
  Wait wait_for_companion(Session& session, uint64_t now, uint64_t* wake_ns) noexcept {
    const Step& step = *session.next_step();
    const uint32_t layers = session.geometry().num_layers;
    Wait wait = Wait::kNo;
    uint64_t patience_ns = 0, idle_until_ns = UINT64_MAX;
    if (sessions.size() < 2 || step.num_tokens > kBatchTokens / 2 || step.layer >= layers) return wait;
    for (auto& entry : sessions) {
      Session& other = *entry;
      if (!companions(session, other) || other.ended()) continue;
      const bool idle = other.next_step() == nullptr && other.leader() == nullptr;
      Step heading = other.heading();
      if (other.next_step() != nullptr && fit_together(step, heading)) return Wait::kNo;  // they meet now
      if (idle && !other.walk().expected(now)) continue;
      const uint32_t behind = layers_between(heading.layer % layers, step.layer, layers);
      heading.layer = step.layer;
      if (2 * behind > layers || (2 * behind == layers && session.id() > other.id())) continue;
      if (!fit_together(step, heading) || !other.walk().worth_meeting(session.geometry(), step)) continue;
      patience_ns = std::max(patience_ns, other.walk().patience_ns(behind));
      if (idle) idle_until_ns = std::min(idle_until_ns, other.walk().expected_until_ns());
      if (wait != Wait::kForIdle) wait = idle ? Wait::kForIdle : Wait::kForQueued;
    }
    if (wait == Wait::kNo || !session.walk().may_wait(now, patience_ns)) return Wait::kNo;
    *wake_ns = std::min(*wake_ns, idle_until_ns);
    return wait;
  }

  // A slice of the session's job; when it has none in progress, of one that begins with its next request.
  void compute(Session& session, uint64_t now) noexcept {
    if (!session.leads() && !open_job(session, now)) return;
    count(session.advance(shares, now, now + (sessions.size() > 1 ? kSliceNs : kAloneSliceNs)));
  }

  bool open_job(Session& leader, uint64_t now) noexcept {
    const Step step = *leader.next_step();
    if (!leader.open_job(shares, now)) {
      failed.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
    leader.walk().met();
    for (auto& entry : sessions) {
      Session& other = *entry;
      const Step* next = companions(leader, other) ? other.next_step() : nullptr;
      if (next == nullptr || !fit_together(step, *next) || leader.job_tokens() + next->num_tokens > kBatchTokens)
        continue;
      if (leader.members() == kBatchSessions) break;
      if (other.account().blocked_ns(now) != 0) continue;
      other.walk().met();
      if (!leader.join(other, shares, monotonic_ns())) failed.fetch_add(1, std::memory_order_relaxed);
    }
    return true;
  }

  void count(const Session::Outcome& outcome) noexcept {
    completed.fetch_add(outcome.completed, std::memory_order_relaxed);
    failed.fetch_add(outcome.failed, std::memory_order_relaxed);
    tokens.fetch_add(outcome.tokens, std::memory_order_relaxed);
    compute_ns.fetch_add(outcome.compute_ns, std::memory_order_relaxed);
  }

  // Before a session goes: its request is forgotten; where others compute theirs with it, the job is ended first.
  void end_job_of(Session& session) noexcept {
    Session* leader = session.leader();
    if (leader == nullptr) return;
    if (leader == &session && session.members() == 1)
      failed.fetch_add(session.abandon(SYSHAX_RING_SHUTTING_DOWN), std::memory_order_relaxed);
    while (session.leader() != nullptr) count(leader->advance(shares, monotonic_ns(), UINT64_MAX));
  }

  void abandon_job(Session& session, syshax_ring_status status) noexcept {
    if (session.leads()) failed.fetch_add(session.abandon(status), std::memory_order_relaxed);
  }

  // parked = 1, full fence, look again, sleep. A client publishes, full fence, reads parked: one of the two sees the
  // other, so that a request is never published to a sleeper without a ring of the doorbell. Until wake_ns at most.
  void sleep(uint64_t wake_ns) {
    set_parked(true);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    bool work = commands_waiting.load(std::memory_order_relaxed);
    for (auto& session : sessions) work = work || (!session->ended() && session->ring().pending() != 0);
    if (!work) {
      asleep.store(true, std::memory_order_relaxed);
      epoll_event events[16];
      const bool event = wake_ns == UINT64_MAX || wait_until(wake_ns);
      epoll_wait(epoll_fd, events, 16, event ? -1 : 0);
      last_turn_ns.store(monotonic_ns(), std::memory_order_relaxed);
      asleep.store(false, std::memory_order_relaxed);
    }
    set_parked(false);
  }

  // epoll_wait alone knows milliseconds only. True when there is an event.
  bool wait_until(uint64_t wake_ns) const noexcept {
    const uint64_t now = monotonic_ns(), ns = wake_ns > now ? wake_ns - now : 0;
    const timespec time = {static_cast<time_t>(ns / 1000000000u), static_cast<long>(ns % 1000000000u)};
    pollfd epoll = {epoll_fd, POLLIN, 0};
    return ppoll(&epoll, 1, &time, nullptr) > 0;
  }

  void set_parked(bool parked) noexcept {
    for (auto& session : sessions) session->ring().set_parked(parked);
  }

  void tell_drained() {
    std::lock_guard<std::mutex> lock(mutex);
    drained = true;
    changed.notify_all();
  }

  // The thread's end: nobody may wait for an answer that will not come.
  void leave() {
    refuse_all(SYSHAX_RING_SHUTTING_DOWN);
    for (auto& session : sessions) abandon_job(*session, SYSHAX_RING_SHUTTING_DOWN);
    for (auto& session : sessions) {
      failed.fetch_add(session->answer_queued() + session->look(monotonic_ns(), UINT32_MAX), std::memory_order_relaxed);
    }
    std::lock_guard<std::mutex> lock(mutex);
    running = false;
    drained = true;
    asleep.store(true, std::memory_order_relaxed);
    for (Command* entry : commands) {
      entry->run();
      entry->done = true;
    }
    commands.clear();
    changed.notify_all();
  }

  Session* find(uint64_t session_id) noexcept {
    for (auto& session : sessions)
      if (session->id() == session_id) return session.get();
    return nullptr;
  }

  void refuse_all(syshax_ring_status status) {
    for (auto& session : sessions) {
      if (session->model()) session->refuse(status);
      session->ring().set_closing(SYSHAX_RING_DRAINING);
    }
  }

  const uint32_t spin_us;
  syshax_spin spin = {};  // the thread's own, as the next
  RunDelay delay;
  const std::vector<int> cpus;
  int epoll_fd = -1, wake_fd = -1;
  std::thread thread;

  mutable std::mutex mutex;
  std::condition_variable changed;
  std::vector<Command*> commands;
  bool running = false;
  std::atomic<bool> commands_waiting{false};
  std::vector<std::unique_ptr<Session>> sessions;
  FairShare shares;
  uint64_t last_beat_ns = 0;
  // Changed on the thread (by commands) or before it starts; drained is read by drain() under the mutex.
  bool stopping = false, draining = false, drained = false;

  std::atomic<uint64_t> completed{0}, failed{0}, tokens{0}, compute_ns{0}, last_turn_ns{0};
  std::atomic<bool> asleep{true};
};

Dispatcher::Dispatcher(uint32_t spin_us, std::vector<int> cpus)
    : impl_(std::make_unique<Impl>(spin_us, std::move(cpus))) {}

Dispatcher::~Dispatcher() { stop(); }

void Dispatcher::start() {
  std::unique_lock<std::mutex> lock(impl_->mutex);
  if (impl_->running) return;
  impl_->stopping = false;
  impl_->asleep.store(false);
  impl_->last_turn_ns.store(monotonic_ns());
  sigset_t before;
  block_signals(&before);
  try {
    impl_->thread = std::thread([this] { impl_->loop(); });
    impl_->running = true;
  } catch (const std::system_error& e) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw CoreError("no_memory", std::string("starting the dispatcher's thread: ") + e.what(), "raise TasksMax=");
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  lock.unlock();
  pthread_setname_np(impl_->thread.native_handle(), "syshax-dispatch");
  if (impl_->cpus.empty()) return;
  std::string problem;
  impl_->command([&] { problem = pin_this_thread(impl_->cpus); });
  if (problem.empty()) return;
  stop();
  throw CoreError("hardware", "pinning the dispatcher's thread: " + problem, kPinningHint);
}

void Dispatcher::stop() {
  impl_->command([this] { impl_->stopping = true; });
  if (impl_->thread.joinable()) impl_->thread.join();
}

bool Dispatcher::drain(double timeout_s) {
  impl_->command([this] {
    if (impl_->draining) return;
    impl_->draining = true;
    impl_->refuse_all(SYSHAX_RING_SHUTTING_DOWN);
  });
  std::unique_lock<std::mutex> lock(impl_->mutex);
  return impl_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s),
                                 [&] { return impl_->drained || !impl_->running; });
}

void Dispatcher::add_session(const SessionSpec& spec) {
  check_class(spec.priority, spec.share);
  auto session = std::make_unique<Session>(spec);
  std::string error;
  impl_->command([&] {
    for (auto& other : impl_->sessions)
      if (other->id() == spec.session_id) error = "session " + std::to_string(spec.session_id) + " exists already";
    if (error.empty() && !impl_->watch(session->ring().doorbell_fd()))
      error = std::string("watching a doorbell: ") + std::strerror(errno);
    if (!error.empty()) return;
    if (impl_->draining) session->refuse(SYSHAX_RING_SHUTTING_DOWN);
    session->ring().set_parked(false);  // a command runs only while nobody sleeps
    impl_->sessions.push_back(std::move(session));
  });
  if (!error.empty()) throw CoreError("internal", error);
}

void Dispatcher::remove_session(uint64_t session_id) {
  std::unique_ptr<Session> removed;
  impl_->command([&] {
    auto& sessions = impl_->sessions;
    for (size_t i = 0; i < sessions.size(); ++i) {
      if (sessions[i]->id() != session_id) continue;
      epoll_ctl(impl_->epoll_fd, EPOLL_CTL_DEL, sessions[i]->ring().doorbell_fd(), nullptr);
      impl_->end_job_of(*sessions[i]);
      removed = std::move(sessions[i]);
      sessions.erase(sessions.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
  });
}

void Dispatcher::end_session(uint64_t session_id, uint32_t closing) {
  impl_->command([&] {
    if (Session* session = impl_->find(session_id)) session->end("ended by the daemon", closing);
  });
}

void Dispatcher::configure_session(uint64_t session_id, Priority priority, uint32_t share) {
  check_class(priority, share);
  impl_->command([&] {
    Session* session = impl_->find(session_id);
    if (session == nullptr) return;
    impl_->shares.configure(session->account(), priority, share);
    session->set_class(priority, share);
  });
}

void Dispatcher::set_class_weights(const ClassWeights& weights) {
  for (const uint32_t weight : weights)
    if (weight < 1 || weight > kMaxClassWeight)
      throw CoreError("invalid_argument", "a class's weight is " + std::to_string(weight) + ", allowed is 1 to " +
                                              std::to_string(kMaxClassWeight));
  impl_->command([&] { impl_->shares.set_weights(weights); });
}

void Dispatcher::forget_model(const ExpertModel* model) {
  std::vector<Session::Released> released;
  impl_->command([&] {
    for (auto& session : impl_->sessions) {
      if (session->model() != model) continue;
      impl_->abandon_job(*session, SYSHAX_RING_MODEL_GONE);
      session->refuse(SYSHAX_RING_MODEL_GONE);
      impl_->failed.fetch_add(session->answer_queued(), std::memory_order_relaxed);
      released.push_back(session->release_model());
    }
  });
}

std::vector<SessionStats> Dispatcher::session_stats() const {
  std::lock_guard<std::mutex> lock(impl_->mutex);
  std::vector<SessionStats> all;
  for (auto& session : impl_->sessions) all.push_back(session->stats());
  return all;
}

DispatcherStats Dispatcher::stats() const {
  DispatcherStats stats;
  stats.requests_completed = impl_->completed.load(std::memory_order_relaxed);
  stats.requests_failed = impl_->failed.load(std::memory_order_relaxed);
  stats.tokens = impl_->tokens.load(std::memory_order_relaxed);
  stats.compute_ns = impl_->compute_ns.load(std::memory_order_relaxed);
  uint64_t now = monotonic_ns(), last = impl_->last_turn_ns.load(std::memory_order_relaxed);
  bool asleep = impl_->asleep.load(std::memory_order_relaxed);
  stats.heartbeat_age_ns = asleep || now < last ? 0 : now - last;
  return stats;
}

}  // namespace syshax
