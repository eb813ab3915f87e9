// Contract: session.h. The order of checks is the order of the statuses in docs/RING.md.
#include "session.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <string>

#include "base/dtype.h"
#include "base/error.h"

namespace syshax {
namespace {

// Ids of one request: they are copied and checked in one go, which is to take no longer than a slice.
constexpr uint64_t kMaxRouting = uint64_t{1} << 20;
constexpr const char* kTruncated = "the client truncated its shared memory";

// Single writer: no locked instruction needed.
void add(std::atomic<uint64_t>& counter, uint64_t amount) noexcept {
  counter.store(counter.load(std::memory_order_relaxed) + amount, std::memory_order_relaxed);
}

syshax_ring_header header_for(const SessionSpec& spec) {
  if (!spec.model) throw CoreError("internal", "session " + std::to_string(spec.session_id) + " has no model");
  MoeGeometry geometry = spec.model->geometry();
  if (spec.top_k > geometry.num_experts)
    throw CoreError("invalid_argument", "session top_k is " + std::to_string(spec.top_k) + ", the model has " +
                                            std::to_string(geometry.num_experts) + " experts");
  if (uint64_t{spec.max_tokens} * spec.top_k > kMaxRouting)
    throw CoreError("invalid_argument", "session max_tokens " + std::to_string(spec.max_tokens) + " with top_k " +
                                            std::to_string(spec.top_k) + " is more than " +
                                            std::to_string(kMaxRouting) + " experts' ids a request");
  syshax_ring_header h = ring_layout(
      {spec.num_slots, spec.max_tokens, geometry.hidden_size, spec.top_k, spec.element_bytes, geometry.num_layers});
  std::memcpy(h.boot_id, spec.boot_id, sizeof(h.boot_id));
  h.session_id = spec.session_id;
  h.spin_us = spec.spin_us;
  return h;
}

}  // namespace

uint64_t monotonic_ns() noexcept {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

Session::Session(const SessionSpec& spec)
    : id_(spec.session_id),
      model_(spec.model),
      geometry_(spec.model ? spec.model->geometry() : MoeGeometry{}),
      ring_(spec.shm_fd, spec.doorbell_fd, header_for(spec)),
      topk_ids_(size_t{std::max(spec.max_tokens, kBatchTokens)} * spec.top_k),
      topk_weights_(topk_ids_.size()),
      pass_(spec.model->make_pass(std::max(spec.max_tokens, kBatchTokens))),
      account_(spec.priority, spec.share),
      priority_(spec.priority),
      share_(spec.share),
      last_active_ns_(monotonic_ns()) {}

void Session::set_class(Priority priority, uint32_t share) noexcept {
  priority_.store(priority, std::memory_order_relaxed);
  share_.store(share, std::memory_order_relaxed);
}

void Session::note_throttled(bool throttled, uint64_t now_ns) noexcept {
  if (!throttled && throttled_since_ns_ != 0) add(throttled_ns_, now_ns - throttled_since_ns_);
  if (!throttled || throttled_since_ns_ == 0) throttled_since_ns_ = throttled ? now_ns : 0;
}

Step Session::heading() const noexcept {
  if (next_step() != nullptr) return next_step_;
  Step step = walk_.last();
  if (leader_ != nullptr) {
    const syshax_ring_request& r = current_.request;
    step = {r.layer, r.num_tokens, r.top_k, r.dtype};
  }
  ++step.layer;
  return step;
}

void Session::end(const char* reason, uint32_t closing) noexcept {
  if (ended()) return;
  if (ring_.poisoned()) {  // zero pages look like nonsense first
    reason = kTruncated;
    closing = SYSHAX_RING_TRUNCATED;
  }
  add(errors_, 1);
  queued_ = 0;
  in_flight_.store(0, std::memory_order_relaxed);
  tokens_in_flight_.store(0, std::memory_order_relaxed);
  ring_.set_closing(closing);
  ended_.store(reason, std::memory_order_relaxed);
}

void Session::end_if_poisoned() noexcept {
  if (ring_.poisoned()) end(kTruncated, SYSHAX_RING_TRUNCATED);
}

// ---- the queue

uint32_t Session::look(uint64_t now_ns, uint32_t most_refused) noexcept {
  if (ended()) return 0;
  uint32_t refused = 0, pending = ring_.pending();
  if (pending > ring_.layout().num_slots) {
    end("submit_tail is further ahead than there are slots", SYSHAX_RING_BROKEN_QUEUE);
    return 1;
  }
  if (pending != 0 && in_flight_.load(std::memory_order_relaxed) == 0) walk_.arrived(now_ns);
  for (; pending != 0 && !ended() && refused < most_refused; --pending) refused += !admit(ring_.take(), now_ns);
  end_if_poisoned();
  return refused;
}

bool Session::admit(const syshax_ring_request& request, uint64_t now_ns) noexcept {
  if (request.slot >= ring_.layout().num_slots) {
    end("a request names a slot that does not exist", SYSHAX_RING_BROKEN_QUEUE);
    return false;
  }
  if (static_cast<uint32_t>(request.tag) == 0) {
    end("a request's tag is 0", SYSHAX_RING_BROKEN_QUEUE);
    return false;
  }
  uint64_t bit = uint64_t{1} << request.slot;
  bool busy = busy_slots_ & bit;
  if (busy || refusal_ != SYSHAX_RING_OK) {
    add(errors_, 1);
    ring_.complete(request.slot, {request.tag, static_cast<uint32_t>(busy ? SYSHAX_RING_BAD_REQUEST : refusal_)});
    return false;
  }
  busy_slots_ |= bit;
  queue_[(first_ + queued_) % SYSHAX_RING_MAX_SLOTS] = {request, now_ns};
  ++queued_;
  note_next();
  add(in_flight_, 1);
  add(tokens_in_flight_, tokens_of(request));
  return true;
}

// What the client asks for at most; the request itself is checked when it is its turn.
uint32_t Session::tokens_of(const syshax_ring_request& request) const noexcept {
  return std::min(request.num_tokens, ring_.layout().max_tokens);
}

Session::Queued Session::pop() noexcept {
  Queued oldest = queue_[first_];
  first_ = (first_ + 1) % SYSHAX_RING_MAX_SLOTS;
  --queued_;
  note_next();
  return oldest;
}

void Session::note_next() noexcept {
  const syshax_ring_request& next = queue_[first_].request;
  next_step_ = {next.layer, next.num_tokens, next.top_k, next.dtype};
}

uint32_t Session::answer_queued() noexcept {
  uint32_t answered = queued_;
  while (queued_ != 0) answer(pop(), {refusal_}, 0);
  return answered;
}

void Session::answer(const Queued& queued, const Verdict& verdict, uint64_t compute_ns) noexcept {
  const uint64_t now_ns = monotonic_ns(), waited_ns = now_ns - queued.seen_ns - compute_ns;
  busy_slots_ &= ~(uint64_t{1} << queued.request.slot);
  add(verdict.status == SYSHAX_RING_OK ? requests_ : errors_, 1);
  add(queued_ns_, waited_ns);
  add(compute_ns_, compute_ns);
  in_flight_.store(in_flight_.load(std::memory_order_relaxed) - 1, std::memory_order_relaxed);
  tokens_in_flight_.store(tokens_in_flight_.load(std::memory_order_relaxed) - tokens_of(queued.request),
                          std::memory_order_relaxed);
  last_active_ns_.store(now_ns, std::memory_order_relaxed);
  ring_.complete(queued.request.slot, {queued.request.tag, static_cast<uint32_t>(verdict.status), verdict.detail,
                                       verdict.detail2, waited_ns, compute_ns});
}

// ---- jobs

bool Session::open_job(FairShare& shares, uint64_t now_ns) noexcept {
  const Step step = next_step_;
  job_.num_members = 0;
  job_.compute_ns = 0;
  job_.begun = false;
  job_.request = {step.layer,        0, step.top_k,       static_cast<syshax_dtype>(step.dtype),
                  job_.parts.data(), 0, topk_ids_.data(), topk_weights_.data()};
  return prepare(*this, shares, now_ns);
}

bool Session::join(Session& other, FairShare& shares, uint64_t now_ns) noexcept {
  return other.prepare(*this, shares, now_ns);
}

void Session::charge(FairShare& shares, uint64_t ns, uint64_t now_ns) noexcept {
  shares.charge(account_, ns, now_ns);
  add(charged_ns_, ns);
}

// Takes the next request, checks it, and makes it the last part of the leader's job.
bool Session::prepare(Session& leader, FairShare& shares, uint64_t now_ns) noexcept {
  current_ = pop();
  start_ns_ = now_ns;
  const syshax_ring_request& r = current_.request;
  Job& job = leader.job_;
  Verdict verdict = check(r);
  const RingSlot slot = ring_.slot(r.slot);
  if (verdict.status == SYSHAX_RING_OK) {
    const size_t at = size_t{job.request.num_tokens} * r.top_k;
    verdict = copy_routing(r, slot, leader.topk_ids_.data() + at, leader.topk_weights_.data() + at);
  }
  end_if_poisoned();
  if (ended()) return false;
  if (verdict.status != SYSHAX_RING_OK) {
    answer(current_, verdict, 0);
    const uint64_t end_ns = monotonic_ns();
    charge(shares, end_ns - now_ns, end_ns);  // else refusals were free, and took any share of the time
    return false;
  }
  leader_ = &leader;
  job.members[job.num_members] = this;
  job.parts[job.num_members] = {r.num_tokens, slot.hidden_states, slot.output};
  job.request.num_parts = ++job.num_members;
  job.request.num_tokens += r.num_tokens;
  return true;
}

Session::Outcome Session::advance(FairShare& shares, uint64_t now_ns, uint64_t until_ns) noexcept {
  Outcome outcome;
  if (!job_.begun) pass_->begin(job_.request);
  job_.begun = true;
  outcome.through = pass_->advance(until_ns);
  const uint64_t end_ns = monotonic_ns(), took_ns = end_ns - now_ns;
  job_.compute_ns += took_ns;
  bool wanted = false;
  for (uint32_t i = 0; i < job_.num_members; ++i) {
    Session& member = *job_.members[i];
    const uint64_t part_ns = took_ns * job_.parts[i].num_tokens / job_.request.num_tokens;
    member.charge(shares, part_ns, end_ns);
    member.end_if_poisoned();
    wanted = wanted || !member.ended();
  }
  outcome.compute_ns = took_ns;
  outcome.through = outcome.through || !wanted;
  if (outcome.through) finish_job(outcome);
  return outcome;
}

void Session::finish_job(Outcome& outcome) noexcept {
  for (uint32_t i = 0; i < job_.num_members; ++i) {
    Session& member = *job_.members[i];
    member.leader_ = nullptr;
    ++(member.ended() ? outcome.failed : outcome.completed);
    if (member.ended()) continue;
    const syshax_ring_request& r = member.current_.request;
    outcome.tokens += r.num_tokens;
    add(member.tokens_, r.num_tokens);
    if (job_.num_members > 1) add(member.batched_, 1);
    const uint64_t now_ns = monotonic_ns();
    member.wait_.add(member.start_ns_ - member.current_.seen_ns);
    member.service_.add(now_ns - member.start_ns_);
    member.walk_.answered({r.layer, r.num_tokens, r.top_k, r.dtype}, job_.compute_ns, now_ns);
    member.answer(member.current_, {}, job_.compute_ns);
  }
  job_.num_members = 0;
}

uint32_t Session::abandon(syshax_ring_status status) noexcept {
  const uint32_t members = job_.num_members;
  for (uint32_t i = 0; i < members; ++i) {
    Session& member = *job_.members[i];
    member.leader_ = nullptr;
    if (!member.ended()) member.answer(member.current_, {status}, job_.compute_ns);
  }
  job_.num_members = 0;
  return members;
}

Session::Verdict Session::check(const syshax_ring_request& r) const noexcept {
  const syshax_ring_header& h = ring_.layout();
  if (r.flags != 0 || r.dtype > SYSHAX_BFLOAT16 || dtype_bytes(syshax_dtype(r.dtype)) > h.element_bytes)
    return {SYSHAX_RING_BAD_REQUEST};
  if (r.layer >= h.num_layers) return {SYSHAX_RING_BAD_LAYER, static_cast<int32_t>(r.layer)};
  if (r.num_tokens < 1 || r.num_tokens > h.max_tokens)
    return {SYSHAX_RING_BAD_SHAPE, static_cast<int32_t>(r.num_tokens)};
  if (r.top_k < 1 || r.top_k > h.top_k) return {SYSHAX_RING_BAD_SHAPE, static_cast<int32_t>(r.top_k)};
  return {};
}

// Copies first, then checks the copy: the client may change its memory at any time.
Session::Verdict Session::copy_routing(const syshax_ring_request& r, const RingSlot& slot, int32_t* ids,
                                       float* weights) const noexcept {
  size_t count = size_t{r.num_tokens} * r.top_k;
  std::memcpy(ids, slot.topk_ids, count * sizeof(int32_t));
  std::memcpy(weights, slot.topk_weights, count * sizeof(float));
  for (size_t i = 0; i < count; ++i)  // -1 becomes 0, legal ids 1..num_experts, all others something larger
    if (static_cast<uint32_t>(ids[i]) + 1u > geometry_.num_experts)
      return {SYSHAX_RING_BAD_EXPERT_ID, ids[i], static_cast<uint32_t>(i)};
  return {};
}

SessionStats Session::stats() const {
  auto read = [](const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  SessionStats stats;
  stats.session_id = id_;
  stats.requests = read(requests_);
  stats.tokens = read(tokens_);
  stats.errors = read(errors_);
  stats.in_flight = read(in_flight_);
  stats.tokens_in_flight = read(tokens_in_flight_);
  stats.charged_ns = read(charged_ns_);
  stats.batched = read(batched_);
  stats.throttled_ns = read(throttled_ns_);
  stats.wait_us_p50 = wait_.percentile(0.5) / 1e3;
  stats.wait_us_p99 = wait_.percentile(0.99) / 1e3;
  stats.service_us_p50 = service_.percentile(0.5) / 1e3;
  stats.service_us_p99 = service_.percentile(0.99) / 1e3;
  stats.queued_ns = read(queued_ns_);
  stats.compute_ns = read(compute_ns_);
  uint64_t now = monotonic_ns(), active = read(last_active_ns_);
  stats.last_active_ns_ago = now > active ? now - active : 0;
  stats.heartbeat = ring_.client_heartbeat();
  stats.client_wait_ns = ring_.client_wait_ns();
  stats.priority = priority_.load(std::memory_order_relaxed);
  stats.share = share_.load(std::memory_order_relaxed);
  const char* ended = ended_.load(std::memory_order_relaxed);
  stats.poisoned = ended != nullptr;
  stats.ended = ended ? ended : "";
  return stats;
}

}  // namespace syshax
