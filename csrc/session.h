// One attached client as the data plane sees it: its ring, its model, the requests it has published, and the checks
// that a request passes before the model sees it. Used by the dispatcher's thread alone, but for stats(). Knows no
// thread, no sleeping and no other session.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "dispatcher.h"
#include "ipc/ring_server.h"

namespace syshax {

uint64_t monotonic_ns() noexcept;

class Session {
 public:
  // Maps the memory, writes the header, allocates the private copies. Throws CoreError.
  explicit Session(const SessionSpec& spec);

  uint64_t id() const noexcept { return id_; }
  const ExpertModel* model() const noexcept { return model_.get(); }
  RingServer& ring() noexcept { return ring_; }

  // Takes what the client has published. A request that cannot be queued is answered at once; a queue that makes no
  // sense ends the session. Bounded: at most num_slots requests a call. Returns how many were refused.
  uint32_t look(uint64_t now_ns) noexcept;
  bool has_work() const noexcept { return queued_ != 0; }
  // Serves it no more; the client reads `closing`, a syshax_ring_closing.
  void end(const char* reason, uint32_t closing) noexcept;
  void configure(Priority priority, uint32_t share) noexcept;
  bool ended() const noexcept { return ended_.load(std::memory_order_relaxed) != nullptr; }

  struct Outcome {
    bool ok;
    uint32_t tokens;
    uint64_t compute_ns;
  };
  // Checks and computes the oldest queued request and completes it. has_work() must hold.
  Outcome run_one() noexcept;

  // New requests are answered with this status from now on.
  void refuse(syshax_ring_status status) noexcept { refusal_ = status; }
  // Answers all that is queued with the refusal; returns how many.
  uint32_t answer_queued() noexcept;
  // Gives up the model; the caller drops it on its own thread.
  std::shared_ptr<ExpertModel> release_model() noexcept { return std::move(model_); }

  SessionStats stats() const;  // any thread, while the session exists

 private:
  struct Queued {
    syshax_ring_request request;
    uint64_t seen_ns;
  };
  struct Verdict {
    syshax_ring_status status = SYSHAX_RING_OK;
    int32_t detail = 0;
    uint32_t detail2 = 0;
  };

  bool admit(const syshax_ring_request& request, uint64_t now_ns) noexcept;
  Verdict check(const syshax_ring_request& request) const noexcept;
  Verdict copy_routing(const syshax_ring_request& request, const RingSlot& slot) noexcept;
  void answer(const Queued& queued, const Verdict& verdict, uint64_t queued_ns, uint64_t compute_ns) noexcept;
  Queued pop() noexcept;
  void end_if_poisoned() noexcept;

  const uint64_t id_;
  std::shared_ptr<ExpertModel> model_;
  const MoeGeometry geometry_;
  RingServer ring_;
  std::vector<int32_t> topk_ids_;    // [max_tokens, top_k], private copies
  std::vector<float> topk_weights_;  // [max_tokens, top_k]
  Queued queue_[SYSHAX_RING_MAX_SLOTS];
  uint32_t first_ = 0, queued_ = 0;
  uint64_t busy_slots_ = 0;  // bit set: queued or computing
  syshax_ring_status refusal_ = SYSHAX_RING_OK;

  // Written by the dispatcher's thread, read by stats().
  std::atomic<const char*> ended_{nullptr};
  std::atomic<Priority> priority_;
  std::atomic<uint32_t> share_;
  std::atomic<uint64_t> requests_{0}, tokens_{0}, errors_{0}, queued_ns_{0}, compute_ns_{0}, in_flight_{0},
      last_active_ns_;
};

}  // namespace syshax
