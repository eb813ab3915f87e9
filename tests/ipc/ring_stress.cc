// Client library and dispatcher in one process, under whatever sanitizers the test compiles in: sessions come and go
// while requests of changing size are out, clients close while they wait, the model goes, the daemon drains. Prints
// how many requests were answered rightly; any wrong one ends it with status 1.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "dispatcher.h"
#include "ipc/client.h"
#include "ipc/ring_server.h"

namespace {

constexpr uint32_t kHidden = 24, kExperts = 4, kTokens = 9, kTopK = 2;
std::atomic<uint64_t> right{0}, refused{0};

void require(bool truth, const char* what) {
  if (truth) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

// output = hidden_states * sum of (id + 1) * weight; a token a slice.
class Pass final : public syshax::ForwardPass {
 public:
  void begin(const syshax::MoeRequest& request) noexcept override {
    request_ = request;
    part_ = token_ = row_ = 0;
  }
  bool advance(uint64_t) noexcept override {
    const syshax::MoeRows& part = request_.parts[part_];
    const float* in = static_cast<const float*>(part.hidden_states) + row_ * kHidden;
    float* out = static_cast<float*>(part.output) + row_ * kHidden;
    float sum = 0;
    for (uint32_t i = token_ * request_.top_k; i < (token_ + 1) * request_.top_k; ++i)
      sum += (request_.topk_ids[i] + 1) * request_.topk_weights[i];
    for (uint32_t i = 0; i < kHidden; ++i) out[i] = in[i] * sum;
    if (++row_ == part.num_tokens) {
      row_ = 0;
      ++part_;
    }
    return ++token_ == request_.num_tokens;
  }

 private:
  syshax::MoeRequest request_;
  uint32_t part_ = 0, token_ = 0, row_ = 0;
};

class Model final : public syshax::ExpertModel {
 public:
  const std::string& name() const override { return name_; }
  syshax::MoeGeometry geometry() const override { return {2, kExperts, kHidden, 1, kTopK}; }
  std::unique_ptr<syshax::ForwardPass> make_pass(uint32_t) override { return std::make_unique<Pass>(); }

 private:
  const std::string name_ = "stress";
};

struct Attached {
  Attached(syshax::Dispatcher& dispatcher, std::shared_ptr<syshax::ExpertModel> model, uint64_t id, uint32_t slots)
      : dispatcher(dispatcher), id(id) {
    syshax_ring_header layout = syshax::ring_layout({slots, kTokens, kHidden, kTopK, 4, 2});
    memory = memfd_create("stress", MFD_CLOEXEC);
    require(ftruncate(memory, static_cast<off_t>(layout.total_bytes)) == 0, "ftruncate");
    doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    syshax::SessionSpec spec;
    spec.session_id = id;
    spec.model = std::move(model);
    spec.shm_fd = memory;
    spec.doorbell_fd = doorbell;
    spec.max_tokens = kTokens;
    spec.top_k = kTopK;
    spec.element_bytes = 4;
    spec.num_slots = slots;
    spec.spin_us = id % 2 ? 20 : 0;
    dispatcher.add_session(spec);
    require(syshax_client_open(memory, doorbell, -1, &client) == 0, "open");
  }
  ~Attached() {
    syshax_client_close(client);
    dispatcher.remove_session(id);
    close(memory);
    close(doorbell);
  }
  syshax::Dispatcher& dispatcher;
  uint64_t id;
  int memory, doorbell;
  syshax_client* client = nullptr;
};

// One request of random size, checked; false when the client was shut down.
bool ask(syshax_client* client, std::mt19937& random) {
  uint32_t tokens = random() % kTokens + 1, top_k = random() % kTopK + 1;
  std::vector<float> in(tokens * kHidden), out(in.size()), weights(tokens * top_k);
  std::vector<int32_t> ids(tokens * top_k);
  for (float& x : in) x = static_cast<float>(random() % 100);
  for (float& w : weights) w = static_cast<float>(random() % 8);
  for (int32_t& id : ids) id = static_cast<int32_t>(random() % (kExperts + 1)) - 1;
  bool bad = random() % 50 == 0;
  if (bad) ids[random() % ids.size()] = kExperts;
  syshax_client_result result;
  uint64_t timeout_ns = random() % 20 == 0 ? 1000 : 10000000000u;  // now and then one that gives up at once
  int error = syshax_client_moe(client, 1, tokens, top_k, 0, in.data(), ids.data(), weights.data(), out.data(),
                                timeout_ns, &result);
  if (error == SYSHAX_CLIENT_DAEMON_LOST) return false;
  if (error == SYSHAX_CLIENT_TIMEOUT && timeout_ns == 1000) return true;
  require(error == 0, "client error");
  if (bad || result.status != SYSHAX_RING_OK) {
    require(result.status >= SYSHAX_RING_MODEL_GONE || (bad && result.status == SYSHAX_RING_BAD_EXPERT_ID), "status");
    refused.fetch_add(1);
    return true;
  }
  for (uint32_t t = 0; t < tokens; ++t) {
    float sum = 0;
    for (uint32_t k = 0; k < top_k; ++k) sum += (ids[t * top_k + k] + 1) * weights[t * top_k + k];
    for (uint32_t i = 0; i < kHidden; ++i) require(out[t * kHidden + i] == in[t * kHidden + i] * sum, "output");
  }
  right.fetch_add(1);
  return true;
}

void work(syshax_client* client, uint32_t seed, const std::atomic<bool>& over) {
  std::mt19937 random(seed);
  while (!over && ask(client, random)) {
  }
}

}  // namespace

int main() {
  syshax::Dispatcher dispatcher(20, {});
  dispatcher.start();
  auto model = std::make_shared<Model>();
  std::atomic<bool> over{false};
  {
    Attached one(dispatcher, model, 1, 1), two(dispatcher, model, 2, 3);
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < 4; ++i) threads.emplace_back(work, i % 2 ? one.client : two.client, i, std::cref(over));
    auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
    for (uint64_t id = 3; std::chrono::steady_clock::now() < end;
         ++id) {  // sessions that end in the middle of requests
      Attached brief(dispatcher, model, id, static_cast<uint32_t>(id % 5) + 1);
      std::thread busy(work, brief.client, static_cast<uint32_t>(id), std::cref(over));
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      for (const auto& stats : dispatcher.session_stats()) require(!stats.poisoned, "poisoned");
      syshax_client_shutdown(brief.client);
      busy.join();
    }
    dispatcher.forget_model(model.get());
    require(model.use_count() == 1, "the model is held");
    require(dispatcher.drain(5), "drain");
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    over = true;
    for (auto& thread : threads) thread.join();
    dispatcher.stop();
  }
  require(dispatcher.stats().requests_completed >= right, "counts");
  std::printf("%llu right, %llu refused\n", static_cast<unsigned long long>(right),
              static_cast<unsigned long long>(refused));
  return 0;
}
