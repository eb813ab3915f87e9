// One attached client as the data plane sees it: its ring, its model, the requests it has published, the checks that a
// request passes before the model sees it, and the pass that computes it. Used by the dispatcher's thread alone, but
// for stats(). Knows no thread and no sleeping; of other sessions only those whose request it computes with its own.
#pragma once
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/histogram.h"
#include "dispatcher.h"
#include "ipc/ring_server.h"
#include "schedule/companions.h"
#include "schedule/fair_share.h"

namespace syshax {

uint64_t monotonic_ns() noexcept;

class Session {
 public:
  // Maps the memory, writes the header, allocates private copies and working memory. Throws CoreError.
  explicit Session(const SessionSpec& spec);

  uint64_t id() const noexcept { return id_; }
  const ExpertModel* model() const noexcept { return model_.get(); }
  const MoeGeometry& geometry() const noexcept { return geometry_; }
  RingServer& ring() noexcept { return ring_; }
  Account& account() noexcept { return account_; }
  const Account& account() const noexcept { return account_; }
  Walk& walk() noexcept { return walk_; }

  // Takes what the client has published. A request that cannot be queued is answered at once; a queue that makes no
  // sense ends the session. Bounded: at most num_slots requests a call, and it ends with the last of `most_refused`.
  // Returns how many were refused.
  uint32_t look(uint64_t now_ns, uint32_t most_refused) noexcept;
  // Serves it no more; the client reads `closing`, a syshax_ring_closing.
  void end(const char* reason, uint32_t closing) noexcept;
  void set_class(Priority priority, uint32_t share) noexcept;
  bool ended() const noexcept { return ended_.load(std::memory_order_relaxed) != nullptr; }
  // Whether its share of the time keeps it from computing now.
  void note_throttled(bool throttled, uint64_t now_ns) noexcept;

  // ---- a job: the pass of one request, or of several sessions' requests for the same layer
  // Its next request, when none of its requests is being computed; nullptr when there is none. As the client wrote it.
  const Step* next_step() const noexcept { return queued_ != 0 && leader_ == nullptr ? &next_step_ : nullptr; }
  // The request that it asks for next, as far as that can be told: the queued one, or its last one a layer further on.
  Step heading() const noexcept;
  // The session whose job computes its request, itself perhaps; nullptr when none is being computed.
  Session* leader() const noexcept { return leader_; }
  bool leads() const noexcept { return leader_ == this; }
  // Begins a job with its next request. A request that fails a check is answered, charged, and leaves no job: false.
  bool open_job(FairShare& shares, uint64_t now_ns) noexcept;
  // Adds the other's next request to this job, before it first advances; false as in open_job.
  bool join(Session& other, FairShare& shares, uint64_t now_ns) noexcept;
  uint32_t members() const noexcept { return job_.num_members; }
  uint32_t job_tokens() const noexcept { return job_.request.num_tokens; }
  struct Outcome {
    bool through = false;
    uint32_t completed = 0, failed = 0, tokens = 0;
    uint64_t compute_ns = 0;
  };
  // Computes a slice of the job that it leads and charges each member for its part of the time; completes the requests
  // of all members when through.
  Outcome advance(FairShare& shares, uint64_t now_ns, uint64_t until_ns) noexcept;
  // Answers the requests of the job that it leads with the status, what was computed forgotten; returns how many.
  uint32_t abandon(syshax_ring_status status) noexcept;

  // New requests are answered with this status from now on.
  void refuse(syshax_ring_status status) noexcept { refusal_ = status; }
  syshax_ring_status refusal() const noexcept { return refusal_; }
  // Answers all that is queued with the refusal; returns how many.
  uint32_t answer_queued() noexcept;
  // Gives up the model and the pass that needs it; the caller drops them on its own thread, pass first.
  struct Released {
    std::shared_ptr<ExpertModel> model;
    std::unique_ptr<ForwardPass> pass;
  };
  Released release_model() noexcept { return {std::move(model_), std::move(pass_)}; }

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
  struct Job {
    std::array<Session*, kBatchSessions> members;
    std::array<MoeRows, kBatchSessions> parts;
    uint32_t num_members = 0;
    MoeRequest request;
    uint64_t compute_ns = 0;
    bool begun = false;
  };

  bool admit(const syshax_ring_request& request, uint64_t now_ns) noexcept;
  bool prepare(Session& leader, FairShare& shares, uint64_t now_ns) noexcept;
  void charge(FairShare& shares, uint64_t ns, uint64_t now_ns) noexcept;
  Verdict check(const syshax_ring_request& request) const noexcept;
  Verdict copy_routing(const syshax_ring_request& request, const RingSlot& slot, int32_t* ids,
                       float* weights) const noexcept;
  void answer(const Queued& queued, const Verdict& verdict, uint64_t compute_ns) noexcept;
  void finish_job(Outcome& outcome) noexcept;
  uint32_t tokens_of(const syshax_ring_request& request) const noexcept;
  Queued pop() noexcept;
  void note_next() noexcept;
  void end_if_poisoned() noexcept;

  const uint64_t id_;
  std::shared_ptr<ExpertModel> model_;
  const MoeGeometry geometry_;
  RingServer ring_;
  std::vector<int32_t> topk_ids_;    // [max(max_tokens, kBatchTokens), top_k], private copies, of all the job's members
  std::vector<float> topk_weights_;  // the same
  std::unique_ptr<ForwardPass> pass_;
  Account account_;
  Walk walk_;
  Queued queue_[SYSHAX_RING_MAX_SLOTS];
  uint32_t first_ = 0, queued_ = 0;
  Step next_step_;         // of the oldest queued
  Queued current_{};       // the request being computed
  uint64_t start_ns_ = 0;  // when that began
  uint64_t throttled_since_ns_ = 0;
  Session* leader_ = nullptr;
  Job job_;                  // that it leads
  uint64_t busy_slots_ = 0;  // bit set: queued or computing
  syshax_ring_status refusal_ = SYSHAX_RING_OK;

  // Written by the dispatcher's thread, read by stats().
  std::atomic<const char*> ended_{nullptr};
  std::atomic<Priority> priority_;
  std::atomic<uint32_t> share_;
  std::atomic<uint64_t> requests_{0}, tokens_{0}, errors_{0}, queued_ns_{0}, compute_ns_{0}, charged_ns_{0},
      batched_{0}, throttled_ns_{0}, in_flight_{0}, tokens_in_flight_{0}, last_active_ns_;
  Histogram wait_, service_;
};

}  // namespace syshax
