// Contract: session.h. The order of checks is the order of the statuses in docs/RING.md.
#include "session.h"

#include <cstring>
#include <ctime>
#include <string>

#include "base/dtype.h"
#include "base/error.h"

namespace syshax {
namespace {

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
      topk_ids_(size_t{spec.max_tokens} * spec.top_k),
      topk_weights_(size_t{spec.max_tokens} * spec.top_k),
      priority_(spec.priority),
      share_(spec.share),
      last_active_ns_(monotonic_ns()) {}

void Session::configure(Priority priority, uint32_t share) noexcept {
  priority_.store(priority, std::memory_order_relaxed);
  share_.store(share, std::memory_order_relaxed);
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
  ring_.set_closing(closing);
  ended_.store(reason, std::memory_order_relaxed);
}

void Session::end_if_poisoned() noexcept {
  if (ring_.poisoned()) end(kTruncated, SYSHAX_RING_TRUNCATED);
}

uint32_t Session::look(uint64_t now_ns) noexcept {
  if (ended()) return 0;
  uint32_t refused = 0, pending = ring_.pending();
  if (pending > ring_.layout().num_slots) {
    end("submit_tail is further ahead than there are slots", SYSHAX_RING_BROKEN_QUEUE);
    return 1;
  }
  for (; pending != 0 && !ended(); --pending) refused += !admit(ring_.take(), now_ns);
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
  in_flight_.store(queued_, std::memory_order_relaxed);
  return true;
}

Session::Queued Session::pop() noexcept {
  Queued oldest = queue_[first_];
  first_ = (first_ + 1) % SYSHAX_RING_MAX_SLOTS;
  --queued_;
  return oldest;
}

uint32_t Session::answer_queued() noexcept {
  uint32_t answered = queued_;
  while (queued_ != 0) {
    Queued queued = pop();
    answer(queued, {refusal_}, monotonic_ns() - queued.seen_ns, 0);
  }
  return answered;
}

void Session::answer(const Queued& queued, const Verdict& verdict, uint64_t queued_ns, uint64_t compute_ns) noexcept {
  busy_slots_ &= ~(uint64_t{1} << queued.request.slot);
  add(verdict.status == SYSHAX_RING_OK ? requests_ : errors_, 1);
  add(queued_ns_, queued_ns);
  add(compute_ns_, compute_ns);
  in_flight_.store(queued_, std::memory_order_relaxed);
  last_active_ns_.store(monotonic_ns(), std::memory_order_relaxed);
  ring_.complete(queued.request.slot, {queued.request.tag, static_cast<uint32_t>(verdict.status), verdict.detail,
                                       verdict.detail2, queued_ns, compute_ns});
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
Session::Verdict Session::copy_routing(const syshax_ring_request& r, const RingSlot& slot) noexcept {
  size_t count = size_t{r.num_tokens} * r.top_k;
  std::memcpy(topk_ids_.data(), slot.topk_ids, count * sizeof(int32_t));
  std::memcpy(topk_weights_.data(), slot.topk_weights, count * sizeof(float));
  for (size_t i = 0; i < count; ++i)  // -1 becomes 0, legal ids 1..num_experts, all others something larger
    if (static_cast<uint32_t>(topk_ids_[i]) + 1u > geometry_.num_experts)
      return {SYSHAX_RING_BAD_EXPERT_ID, topk_ids_[i], static_cast<uint32_t>(i)};
  return {};
}

Session::Outcome Session::run_one() noexcept {
  Queued queued = pop();
  const syshax_ring_request& r = queued.request;
  uint64_t start = monotonic_ns(), compute_ns = 0;
  Verdict verdict = check(r);
  if (verdict.status == SYSHAX_RING_OK) {
    RingSlot slot = ring_.slot(r.slot);
    verdict = copy_routing(r, slot);
    if (verdict.status == SYSHAX_RING_OK) {
      model_->forward({r.layer, r.num_tokens, r.top_k, static_cast<syshax_dtype>(r.dtype), slot.hidden_states,
                       topk_ids_.data(), topk_weights_.data(), slot.output});
      compute_ns = monotonic_ns() - start;
    }
  }
  end_if_poisoned();
  if (ended()) return {false, 0, compute_ns};
  bool ok = verdict.status == SYSHAX_RING_OK;
  if (ok) add(tokens_, r.num_tokens);
  answer(queued, verdict, start - queued.seen_ns, compute_ns);
  return {ok, ok ? r.num_tokens : 0, compute_ns};
}

SessionStats Session::stats() const {
  auto read = [](const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  SessionStats stats;
  stats.session_id = id_;
  stats.requests = read(requests_);
  stats.tokens = read(tokens_);
  stats.errors = read(errors_);
  stats.in_flight = read(in_flight_);
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
