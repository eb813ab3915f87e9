// Whose turn it is, tried on sessions that exist as accounts only: shares by class and within a class, nobody starved,
// nothing saved up by being away, limits kept; and who meets whom on the way through the layers. Random, same in every
// run; what is expected follows from weights and times alone. Also whose waiting a thread is told of.
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "native_test.h"
#include "schedule/companions.h"
#include "schedule/fair_share.h"
#include "threads/run_delay.h"

namespace {

using namespace syshax;
using native_test::fail;
using native_test::Random;

constexpr uint64_t kMs = 1000000;

struct Client {
  explicit Client(Priority priority, uint32_t share = 0) : account(priority, share) {}
  Account account;
  uint64_t used_ns = 0, since_ns = 0, longest_wait_ns = 0;
  bool busy = true;
};

struct Machine {
  FairShare shares;
  std::vector<std::unique_ptr<Client>> clients;
  uint64_t now_ns = 1000 * kMs;

  Client& add(Priority priority, uint32_t share = 0) {
    clients.push_back(std::make_unique<Client>(priority, share));
    clients.back()->since_ns = now_ns;
    return *clients.back();
  }

  // One slice; false when nobody may compute, then time passes.
  bool turn(uint64_t slice_ns) {
    Client* best = nullptr;
    shares.begin_round();
    for (auto& client : clients)
      if (client->busy && client->account.blocked_ns(now_ns) == 0 && shares.offer(client->account)) best = client.get();
    if (best == nullptr) {
      now_ns += kMs / 10;
      return false;
    }
    best->longest_wait_ns = std::max(best->longest_wait_ns, now_ns - best->since_ns);
    now_ns += slice_ns;
    best->used_ns += slice_ns;
    best->since_ns = now_ns;
    shares.charge(best->account, slice_ns, now_ns);
    return true;
  }
};

// All busy: class by weight, equal within.
void check_shares(uint64_t seed) {
  Random random(seed);
  Machine machine;
  const ClassWeights weights = {1 + random.below(50), 1 + random.below(50), 1 + random.below(50)};
  machine.shares.set_weights(weights);
  std::array<uint32_t, kNumPriorities> members{};
  for (uint32_t i = 0, n = 1 + random.below(9); i < n; ++i) {
    const uint32_t priority = random.below(kNumPriorities);
    ++members[priority];
    machine.add(static_cast<Priority>(priority));
  }
  const uint64_t begin_ns = machine.now_ns;
  for (int i = 0; i < 40000; ++i) machine.turn(kMs / 2 + random.below(2 * kMs));
  const double total = static_cast<double>(machine.now_ns - begin_ns);
  double sum = 0;
  for (size_t i = 0; i < kNumPriorities; ++i) sum += members[i] != 0 ? weights[i] : 0;
  for (auto& client : machine.clients) {
    const size_t index = static_cast<size_t>(client->account.priority());
    const double wanted = weights[index] / sum / members[index], got = static_cast<double>(client->used_ns) / total;
    if (std::fabs(got - wanted) > 0.02 * wanted + 0.0005)
      fail("seed %llu: class %zu got %.4f of the time, wanted %.4f", (unsigned long long)seed, index, got, wanted);
  }
}

// A service that has computed for a year shares as on its first day.
void check_age() {
  Machine machine;
  machine.shares.set_weights({3, 1, 1});
  Client &one = machine.add(Priority::kInteractive), &two = machine.add(Priority::kNormal);
  const uint64_t year_ns = 365ull * 24 * 3600 * 1000 * kMs;
  for (Client* client : {&one, &two}) {
    client->busy = false;
    machine.turn(1);
    client->busy = true;
  }
  machine.shares.charge(one.account, 3 * (year_ns / 4), machine.now_ns);
  machine.shares.charge(two.account, year_ns / 4, machine.now_ns);
  one.used_ns = two.used_ns = 0;
  for (int i = 0; i < 4000; ++i) machine.turn(2 * kMs);
  const double part = double(one.used_ns) / double(one.used_ns + two.used_ns);
  if (std::fabs(part - 0.75) > 0.01) fail("after a year the class with weight 3 of 4 gets %.3f", part);
}

// One that asks now and then, beside others of its class that always have work, waits for one slice of each and is done
// within as many times its own work.
void check_latency(uint64_t seed) {
  Random random(seed);
  Machine machine;
  const uint32_t others = 1 + random.below(4);
  for (uint32_t i = 0; i < others; ++i) machine.add(Priority::kNormal);
  Client& brief = machine.add(Priority::kNormal);
  for (int i = 0; i < 300; ++i) {
    brief.busy = false;
    for (uint32_t j = random.below(20); j > 0; --j) machine.turn(2 * kMs);
    const uint64_t begin_ns = machine.now_ns, work_ns = kMs / 2 + random.below(6 * kMs), before_ns = brief.used_ns;
    brief.busy = true;
    brief.since_ns = begin_ns;
    while (brief.used_ns - before_ns < work_ns) machine.turn(2 * kMs);
    const uint64_t took_ns = machine.now_ns - begin_ns, slices = (work_ns + 2 * kMs - 1) / (2 * kMs);
    if (took_ns > (others + 1) * slices * 2 * kMs + others * 2 * kMs)
      fail("seed %llu: %.1f ms of work beside %u others took %.1f ms", (unsigned long long)seed, double(work_ns) / kMs,
           others, double(took_ns) / kMs);
  }
}

// Sessions that come, go and change class at random: nobody with work waits for ever.
void check_starvation(uint64_t seed) {
  Random random(seed);
  Machine machine;
  for (uint32_t i = 0; i < 6; ++i) machine.add(static_cast<Priority>(i % kNumPriorities));
  for (int i = 0; i < 60000; ++i) {
    machine.turn(1 + random.below(2 * kMs));
    Client& client = *machine.clients[random.below(6)];
    if (random.below(50) == 0) {
      client.busy = !client.busy;
      client.since_ns = machine.now_ns;
    }
    if (random.below(500) == 0)
      machine.shares.configure(client.account, static_cast<Priority>(random.below(kNumPriorities)), 0);
  }
  // batch has 1 of 21 parts, two clients, slices of 2 ms: some 84 ms; the classes' changes of mind on top
  for (auto& client : machine.clients)
    if (client->longest_wait_ns > 400 * kMs)
      fail("seed %llu: somebody waited %.0f ms", (unsigned long long)seed, double(client->longest_wait_ns) / kMs);
}

// A limit holds alone and beside others, and does not keep the others from the rest.
void check_limit(uint64_t seed) {
  Random random(seed);
  Machine machine;
  const uint32_t percent = 5 + random.below(90);
  Client& limited = machine.add(Priority::kInteractive, percent);
  const bool alone = random.below(2) == 0;
  if (!alone) machine.add(Priority::kBatch);
  const uint64_t begin_ns = machine.now_ns;
  uint64_t idle_ns = 0;
  for (int i = 0; i < 20000; ++i) {
    const uint64_t before_ns = machine.now_ns;
    if (!machine.turn(2 * kMs)) idle_ns += machine.now_ns - before_ns;
  }
  const double total = static_cast<double>(machine.now_ns - begin_ns), got = 100 * double(limited.used_ns) / total;
  if (got > percent + 0.5 || (got < percent - 1 && (alone || got < 90)))
    fail("seed %llu: a share of %u percent got %.1f (%s)", (unsigned long long)seed, percent, got,
         alone ? "alone" : "");
  if (!alone && idle_ns != 0) fail("seed %llu: time was lost beside a limited session", (unsigned long long)seed);
}

void check_fit() {
  const Step step = {3, 8, 2, 0};
  if (!fit_together(step, {3, 8, 2, 0}) || !fit_together(step, {3, 4, 2, 0}) || !fit_together(step, {3, 16, 2, 0}))
    fail("requests within a factor of two do not fit");
  for (const Step& other : {Step{4, 8, 2, 0}, Step{3, 3, 2, 0}, Step{3, 17, 2, 0}, Step{3, 8, 1, 0}, Step{3, 8, 2, 1},
                            Step{3, 0, 2, 0}, Step{3, 0xFFFFFFFFu, 2, 0}})
    if (fit_together(step, other) || fit_together(other, step)) fail("requests that differ fit");
  if (fit_together({0, 100, 2, 0}, {0, 100, 2, 0})) fail("a batch has too many tokens");
}

// Nobody waits for a companion that brings nothing, that is away, or again soon after it waited in vain.
void check_walk() {
  const MoeGeometry many = {48, 128, 2048, 768, 8}, few = {48, 8, 64, 64, 2};
  const auto walk_with = [](uint64_t away_ns, uint64_t service_ns, uint32_t tokens) {
    Walk walk;
    uint64_t now_ns = 5 * kMs;
    for (uint32_t layer = 0; layer < 20; ++layer) {
      walk.answered({layer, tokens, 8, 0}, service_ns, now_ns);
      walk.arrived(now_ns += away_ns);
      now_ns += service_ns;
    }
    walk.answered({20, tokens, 8, 0}, service_ns, now_ns);
    return walk;
  };
  if (!walk_with(kMs / 20, 20 * kMs, 32).worth_meeting(many, {0, 32, 8, 0}))
    fail("32 tokens of 128 experts do not meet");
  if (walk_with(kMs / 20, 20 * kMs, 1).worth_meeting(many, {0, 1, 8, 0})) fail("single tokens of 128 experts meet");
  if (!walk_with(kMs / 20, 20 * kMs, 4).worth_meeting(few, {0, 4, 2, 0})) fail("4 tokens of 8 experts do not meet");
  if (walk_with(50 * kMs, 20 * kMs, 32).worth_meeting(many, {0, 32, 8, 0})) fail("one waits for who is elsewhere");
  Walk never;
  if (never.expected(10 * kMs)) fail("somebody is expected who has never been there");
  Walk waiting;
  uint64_t now_ns = 100 * kMs;
  if (!waiting.may_wait(now_ns, 10 * kMs) || !waiting.may_wait(now_ns + 9 * kMs, 10 * kMs)) fail("no patience");
  if (waiting.may_wait(now_ns + 10 * kMs, 10 * kMs)) fail("patience without end");
  if (waiting.may_wait(now_ns + 100 * kMs, 10 * kMs)) fail("one waits again at once");
  if (!waiting.may_wait(now_ns + 1000 * kMs, 10 * kMs)) fail("one waits never again");
}

// Whoever asks is told of itself: the file that it reads is that of the asking thread.
void check_run_delay() {
  const auto reads_own = [] {
    char own[64], link[64];
    std::snprintf(own, sizeof own, "/proc/%d/task/%ld/schedstat", getpid(), syscall(SYS_gettid));
    for (int fd = 0; fd < 64; ++fd) {
      std::snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
      char target[128];
      const ssize_t length = readlink(link, target, sizeof target - 1);
      if (length > 0 && std::string(target, static_cast<size_t>(length)) == own) return true;
    }
    return false;
  };
  if (access("/proc/thread-self/schedstat", R_OK) != 0) return;  // a kernel that does not count
  RunDelay delay;
  bool first = false, second = false;
  std::thread([&] { delay.contended(1000 * kMs), first = reads_own(); }).join();
  if (delay.contended(2000 * kMs)) fail("a thread that has just begun to ask is told that it waits");
  second = reads_own();
  if (!first || !second) fail("the run delay is another thread's: first %d, then %d", first, second);
}

}  // namespace

int main() {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    check_shares(seed);
    check_latency(seed);
    check_starvation(seed);
    check_limit(seed);
  }
  check_run_delay();
  check_age();
  check_fit();
  check_walk();
  std::printf("fair shares and companions\n");
  return 0;
}
