// Hostile sessions beside honest ones on a real dispatcher. The honest one asks through the client's library and must
// get right answers in time, the silent one's memory must stay as it is, and nobody's memory may ever hold another's
// secret. A second thread can rewrite a hostile session's memory while it is read.
//
// The model is an exclusive or with a word that depends on layer, ids and weights: it leaves secrets recognisable.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>

#include "base/error.h"
#include "dispatcher.h"
#include "fuzz.h"
#include "hostile.h"
#include "ipc/client.h"

namespace fuzz {
namespace {

constexpr uint32_t kLayers = 3, kExperts = 4, kHidden = 256, kTopK = 2, kHonestTokens = 4;
constexpr uint32_t kHonestSecret = 0x9017e57u, kSilentSecret = 0x5117e27u;

uint32_t mix(uint32_t layer, const int32_t* ids, const float* weights, uint32_t top_k) {
  uint32_t sum = layer + 1;
  for (uint32_t k = 0; k < top_k; ++k) {
    uint32_t bits;
    std::memcpy(&bits, weights + k, 4);
    sum += (static_cast<uint32_t>(ids[k]) + 1) * bits;
  }
  return sum;
}

void check_request(const syshax::MoeRequest& r) {
  uint32_t tokens = 0;
  for (uint32_t p = 0; p < r.num_parts; ++p) tokens += std::min(r.parts[p].num_tokens, 65u);
  if (r.layer >= kLayers || tokens != r.num_tokens || tokens < 1 || r.top_k < 1 || r.top_k > kTopK || r.dtype > 2)
    fail("dispatcher: an unchecked request reached the model");
  for (uint32_t i = 0; i < r.num_tokens * r.top_k; ++i)
    if (r.topk_ids[i] < -1 || r.topk_ids[i] >= static_cast<int32_t>(kExperts))
      fail("dispatcher: expert %d reached the model", r.topk_ids[i]);
}

// While closed, whoever computes stands still, so that others' requests come together behind it.
std::atomic<bool> closed{false}, standing{false};

// A few tokens a slice, so that requests are interrupted and sessions end in the middle of them.
class Pass final : public syshax::ForwardPass {
 public:
  void begin(const syshax::MoeRequest& request) noexcept override {
    check_request(request);
    request_ = request;
    part_ = token_ = row_ = 0;
  }
  bool advance(uint64_t) noexcept override {
    standing.store(true, std::memory_order_release);
    while (closed.load(std::memory_order_acquire)) sched_yield();
    standing.store(false, std::memory_order_relaxed);
    for (uint32_t i = 0; i < kTokensPerSlice && token_ < request_.num_tokens; ++i) next_token();
    return token_ == request_.num_tokens;
  }

 private:
  static constexpr uint32_t kTokensPerSlice = 3;

  void next_token() {
    const syshax::MoeRows& part = request_.parts[part_];
    const size_t at = size_t{token_++} * request_.top_k;
    const uint32_t sum = mix(request_.layer, request_.topk_ids + at, request_.topk_weights + at, request_.top_k);
    if (request_.dtype == SYSHAX_FLOAT32)
      row<uint32_t>(part, row_, sum);
    else
      row<uint16_t>(part, row_, sum);
    if (++row_ < part.num_tokens) return;
    row_ = 0;
    ++part_;
  }
  template <typename Word>
  static void row(const syshax::MoeRows& part, uint32_t index, uint32_t sum) {
    const Word* in = static_cast<const Word*>(part.hidden_states) + index * kHidden;
    Word* out = static_cast<Word*>(part.output) + index * kHidden;
    for (uint32_t i = 0; i < kHidden; ++i) out[i] = in[i] ^ static_cast<Word>(sum);
  }

  syshax::MoeRequest request_{};
  uint32_t part_ = 0, token_ = 0, row_ = 0;
};

class Model final : public syshax::ExpertModel {
 public:
  const std::string& name() const override { return name_; }
  syshax::MoeGeometry geometry() const override { return {kLayers, kExperts, kHidden, 1, kTopK}; }
  std::unique_ptr<syshax::ForwardPass> make_pass(uint32_t) override { return std::make_unique<Pass>(); }

 private:
  const std::string name_ = "fuzz";
};

// Overwrites a range of a session's memory as fast as it can, from when it is told until it is told to stop or has done
// so often enough to have met several requests.
class Scribbler {
 public:
  Scribbler() : thread_([this] { loop(); }) {}
  ~Scribbler() {
    stop();
    over_ = true;
    thread_.join();
  }
  void start(uint8_t* begin, size_t bytes, uint8_t one, uint8_t other) {
    stop();
    begin_ = begin, bytes_ = bytes, one_ = one, other_ = other;
    running_.store(true, std::memory_order_release);
    wanted_.store(true, std::memory_order_release);
  }
  void stop() {
    wanted_.store(false, std::memory_order_release);
    while (running_.load(std::memory_order_acquire)) sched_yield();
  }

 private:
  // The race with the script's own writes is meant; the thread sanitizer shall look at the daemon's side.
  __attribute__((no_sanitize("thread"), noinline)) static void overwrite(uint8_t* begin, size_t bytes, uint8_t value) {
    for (size_t i = 0; i < bytes; ++i) static_cast<volatile uint8_t*>(begin)[i] = value;
  }

  void loop() {
    for (uint32_t round = 0; !over_.load(std::memory_order_relaxed); ++round) {
      if (!running_.load(std::memory_order_acquire)) {
        std::this_thread::sleep_for(std::chrono::microseconds(20));
        round = 0;
        continue;
      }
      overwrite(begin_, bytes_, round % 2 ? one_ : other_);
      if (round == kRounds || !wanted_.load(std::memory_order_acquire))
        running_.store(false, std::memory_order_release);
    }
  }
  static constexpr uint32_t kRounds = 300;
  std::atomic<bool> wanted_{false}, running_{false}, over_{false};
  uint8_t* begin_ = nullptr;
  size_t bytes_ = 0;
  uint8_t one_ = 0, other_ = 0;
  std::thread thread_;
};

syshax::SessionSpec spec_of(const HostileMemory& memory, uint64_t id, std::shared_ptr<Model> model) {
  const syshax_ring_header& h = memory.layout();
  syshax::SessionSpec spec;
  spec.session_id = id;
  spec.model = std::move(model);
  spec.shm_fd = memory.fd();
  spec.doorbell_fd = memory.doorbell();
  spec.max_tokens = h.max_tokens;
  spec.top_k = h.top_k;
  spec.element_bytes = h.element_bytes;
  spec.num_slots = h.num_slots;
  return spec;
}

syshax_ring_header layout_of(uint32_t slots, uint32_t tokens, uint32_t top_k, uint32_t element_bytes) {
  return syshax::ring_layout({slots, tokens, kHidden, top_k, element_bytes, kLayers});
}

// What lives as long as the process: the dispatcher, the honest session and the silent one.
class World {
 public:
  World() {
    dispatcher.start();
    dispatcher.add_session(spec_of(silent_, 2, honest_model_));
    dispatcher.add_session(spec_of(honest_, 1, honest_model_));
    if (syshax_client_open(honest_.fd(), honest_.doorbell(), -1, &client_) != 0) fail("dispatcher: open");
    silent_before_.assign(silent_.base() + SYSHAX_RING_PAGE, silent_.base() + silent_.layout().total_bytes);
  }
  // Everything else ends with the process, which is about to.
  ~World() {
    syshax_client_close(client_);
    dispatcher.stop();
  }

  // between: called when the request is out, before its answer is waited for.
  template <typename Between>
  void honest_asks(uint32_t variant, const Between& between) {
    const uint32_t tokens = variant % kHonestTokens + 1, layer = variant % kLayers, words = tokens * kHidden;
    uint32_t slot, in[kHonestTokens * kHidden];
    expect(syshax_client_acquire(client_, kHonestNs, &slot), "acquire");
    int32_t* ids = syshax_client_topk_ids(client_, slot);
    float* weights = syshax_client_topk_weights(client_, slot);
    write_secret(reinterpret_cast<uint8_t*>(in), words * 4, kHonestSecret, ++asked_);
    std::memcpy(syshax_client_hidden_states(client_, slot), in, words * 4);
    for (uint32_t i = 0; i < tokens * kTopK; ++i) {
      ids[i] = static_cast<int32_t>((asked_ + i) % (kExperts + 1)) - 1;
      weights[i] = static_cast<float>(i) + 0.5f;
    }
    uint64_t tag;
    syshax_client_result result = {};
    expect(syshax_client_submit(client_, slot, layer, tokens, kTopK, 0, &tag), "submit");
    between();
    expect(syshax_client_wait(client_, slot, tag, kHonestNs, &result), "wait");
    if (result.status != 0) fail("dispatcher: the honest session got status %u", result.status);
    const auto* out = static_cast<const uint32_t*>(syshax_client_output(client_, slot));
    for (uint32_t i = 0; i < words; ++i) {
      const size_t at = i / kHidden * kTopK;
      if (out[i] != (in[i] ^ mix(layer, ids + at, weights + at, kTopK)))
        fail("dispatcher: the honest session got a wrong answer");
    }
    syshax_client_release(client_, slot);
  }
  void honest_asks(uint32_t variant) {
    honest_asks(variant, [] {});
  }

  void check_silent() const {
    if (std::memcmp(silent_before_.data(), silent_.base() + SYSHAX_RING_PAGE, silent_before_.size()) != 0)
      fail("dispatcher: the silent session's memory changed");
  }

  syshax::SessionStats stats_of(uint64_t id) const {
    for (const auto& stats : dispatcher.session_stats())
      if (stats.session_id == id) return stats;
    fail("dispatcher: session %llu is not there", static_cast<unsigned long long>(id));
  }

  // Every accepted request ends, whatever its client does meanwhile.
  void settle(uint64_t id) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (syshax::SessionStats stats = stats_of(id); stats.in_flight != 0 && !stats.poisoned; stats = stats_of(id)) {
      if (std::chrono::steady_clock::now() > end) fail("dispatcher: a request has not ended for 20 s");
      sched_yield();
    }
  }

  // The honest session's model: hostile ones may share it, so that their requests are computed together.
  std::shared_ptr<Model> model() const { return honest_model_; }

  syshax::Dispatcher dispatcher{50, {}};
  Scribbler scribbler;
  uint64_t next_id = 100;

 private:
  static constexpr uint64_t kHonestNs = 20000000000u;
  static void expect(int error, const char* what) {
    if (error != 0) fail("dispatcher: the honest session's %s: %s", what, syshax_client_error_name(error));
  }

  std::shared_ptr<Model> honest_model_ = std::make_shared<Model>();
  HostileMemory silent_{layout_of(2, 4, kTopK, 4), kSilentSecret};
  HostileMemory honest_{layout_of(3, kHonestTokens, kTopK, 4), kHonestSecret};
  syshax_client* client_ = nullptr;
  Bytes silent_before_;
  uint64_t asked_ = 0;
};

// A hostile session of one input.
class Hostile {
 public:
  Hostile(World& world, Script& script, std::shared_ptr<Model> model)
      : world_(world),
        id_(world.next_id++),
        memory_(layout_of(script.below(3) + 1, script.below(6) + 1, script.below(kTopK) + 1, script.below(2) ? 4 : 2),
                0x40000001u * static_cast<uint32_t>(id_)) {
    world.dispatcher.add_session(spec_of(memory_, id_, std::move(model)));
  }
  ~Hostile() {
    world_.dispatcher.remove_session(id_);
    for (uint32_t key : {kHonestSecret, kSilentSecret})
      if (holds_secret(memory_.base(), memory_.layout().total_bytes, key)) fail("dispatcher: a secret came over");
  }
  void must_not_hold(uint32_t key) const {
    if (holds_secret(memory_.base(), memory_.layout().total_bytes, key))
      fail("dispatcher: a neighbour's secret came over");
  }
  uint64_t id() const { return id_; }
  HostileMemory& memory() { return memory_; }

 private:
  World& world_;
  const uint64_t id_;
  HostileMemory memory_;
};

// One input: up to three hostile sessions that take turns as the script says.
class Play {
 public:
  Play(World& world, Script& script) : world_(world), script_(script) {
    for (uint32_t left = script.below(3) + 1; left != 0; --left) add();
  }
  ~Play() { world_.scribbler.stop(); }

  void run() {
    while (!script_.done()) step();
    for (auto& one : sessions_) world_.settle(one->id());
    world_.scribbler.stop();
    for (auto& one : sessions_)
      for (auto& other : sessions_)
        if (one != other) one->must_not_hold(other->memory().secret());
  }

 private:
  std::unique_ptr<Hostile> make() {
    return std::make_unique<Hostile>(world_, script_, script_.below(4) ? world_.model() : model_);
  }
  void add() { sessions_.push_back(make()); }
  Hostile& current() { return *sessions_[current_ % sessions_.size()]; }

  void step() {
    uint8_t what = script_.byte();
    if (what < 198) return current().memory().act(script_);
    switch (what % 13) {
      case 0:
        return world_.honest_asks(script_.byte());
      case 1:
        return world_.settle(current().id());
      case 2:
      case 3:
        return scribble();
      case 4:
        return replace();
      case 5:
        return unload();
      case 6:
        sched_yield();
        return;
      case 7:
        return world_.dispatcher.end_session(current().id(), SYSHAX_RING_BROKEN_QUEUE + script_.below(4));
      case 8:
      case 9:
        return schedule();
      case 10:
      case 11:
        return together();
      default:
        ++current_;
    }
  }

  // While one request stands still, hostile ones and an honest one for the same layer queue up: they are computed
  // together. What the script does to the hostile ones' memory meanwhile must not touch the honest one's answer.
  void together() {
    const uint32_t variant = script_.byte();
    closed.store(true, std::memory_order_release);
    current().memory().post_legal(script_);
    for (int i = 0; i < 200 && !standing.load(std::memory_order_acquire); ++i) sched_yield();
    for (auto& one : sessions_) one->memory().post_companion(variant % kLayers, script_);
    world_.honest_asks(variant, [&] {
      for (uint32_t left = script_.below(3); left != 0; --left) current().memory().act(script_);
      closed.store(false, std::memory_order_release);
      if (script_.below(2)) current().memory().act(script_);
    });
  }

  void scribble() {
    const syshax_ring_header& h = current().memory().layout();
    size_t at = script_.number() % h.total_bytes,
           bytes = std::min<size_t>(script_.word() % 4096 + 1, h.total_bytes - at);
    uint8_t one = script_.byte(), other = script_.byte();
    world_.scribbler.start(current().memory().base() + at, bytes, one, other);
  }

  void replace() {  // with requests in flight
    world_.scribbler.stop();
    sessions_[current_ % sessions_.size()].reset();
    sessions_[current_ % sessions_.size()] = make();
  }

  // What an administrator may change meanwhile; the honest session's class stays, its weight is at least 1.
  void schedule() {
    try {
      if (script_.below(4) == 0) world_.dispatcher.set_class_weights({script_.byte(), script_.byte(), script_.byte()});
      world_.dispatcher.configure_session(current().id(), syshax::Priority{script_.below(4)}, script_.below(104));
    } catch (const syshax::CoreError&) {
    }
  }

  void unload() {
    world_.dispatcher.forget_model(model_.get());
    if (model_.use_count() != 1) fail("dispatcher: a model that was forgotten is held");
    model_ = std::make_shared<Model>();
  }

  World& world_;
  Script& script_;
  std::shared_ptr<Model> model_ = std::make_shared<Model>();
  std::vector<std::unique_ptr<Hostile>> sessions_;
  size_t current_ = 0;
};

}  // namespace

void run_dispatcher(const uint8_t* data, size_t size) {
  static World world;
  Script script(data, size);
  Play(world, script).run();
  world.honest_asks(script.byte());
  world.check_silent();
}

std::vector<Bytes> dispatcher_seeds() {
  std::vector<Bytes> seeds;
  const Bytes sessions = {1, 1, 1, 3, 1, 1, 1, 2, 5, 1, 1};  // two of them
  for (uint8_t action = 0; action < HostileMemory::kActions; ++action) {
    Bytes seed = sessions;
    for (uint8_t round = 0; round < 5; ++round) {
      seed.insert(seed.end(), {0, action, round, 2, 1, 0, 1, 1, 0});      // the action, its words
      seed.insert(seed.end(), {0, 0, round, 1, 2, 1, 0, 1});              // a request that is legal
      seed.push_back(static_cast<uint8_t>(208 + (action + round) % 13));  // one of the world's steps
    }
    seeds.push_back(seed);
  }
  for (uint8_t area : {0, 40, 80, 120}) {  // requests while another thread rewrites header, queue, completions, slots
    Bytes seed = sessions;
    seed.insert(seed.end(), {211, 211, area, area, 0, 0, 16, 0, 0xff});
    for (uint8_t round = 0; round < 8; ++round) seed.insert(seed.end(), {0, 0, round, 1, 2, 1, 0, 1, 209});
    seeds.push_back(seed);
  }
  return seeds;
}

}  // namespace fuzz
