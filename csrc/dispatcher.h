// The data plane's one thread: takes requests from the sessions' rings, checks them, has the model compute them and
// writes completions. Knows rings and ExpertModel; knows no format, kernel, NUMA or Python. After submit there is no
// allocation, no lock, no log here. The daemon's Python calls everything below from other threads.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "moe/expert_model.h"
#include "schedule/fair_share.h"

namespace syshax {

struct SessionSpec {
  uint64_t session_id = 0;
  std::shared_ptr<ExpertModel> model;
  int shm_fd = -1;       // sized and reserved by the caller; duplicated here
  int doorbell_fd = -1;  // eventfd; duplicated here
  uint8_t boot_id[16] = {};
  uint32_t max_tokens = 0, top_k = 0, element_bytes = 0, num_slots = 0;
  uint32_t spin_us = 0;  // written into the header for the client
  Priority priority = Priority::kNormal;
  uint32_t share = 0;  // percent of the data plane's time that it may use at most; 0: all
};

// requests and tokens count what succeeded, errors what was answered with a status other than OK.
struct SessionStats {
  uint64_t session_id = 0, requests = 0, tokens = 0, errors = 0, in_flight = 0;
  uint64_t queued_ns = 0, compute_ns = 0, last_active_ns_ago = 0, heartbeat = 0;
  uint64_t client_wait_ns = 0;  // as the client says
  Priority priority = Priority::kNormal;
  uint32_t share = 0;
  uint64_t charged_ns = 0;    // its part of the data plane's time: a batch's is divided among its sessions
  uint64_t batched = 0;       // requests computed together with another session's
  uint64_t throttled_ns = 0;  // had work, but its share was used up
  uint64_t tokens_in_flight = 0;
  // Of the requests answered: from seeing one to starting it, and from there to its end. Within an eighth.
  double wait_us_p50 = 0, wait_us_p99 = 0, service_us_p50 = 0, service_us_p99 = 0;
  bool poisoned = false;   // the dispatcher serves it no more: the client truncated its memory or broke its queue
  const char* ended = "";  // why, when poisoned
};

struct DispatcherStats {
  uint64_t requests_completed = 0, requests_failed = 0, tokens = 0, compute_ns = 0;
  uint64_t heartbeat_age_ns = 0;  // 0 while asleep with nothing to do
};

class Dispatcher {
 public:
  // spin_us: how long to look for work before sleeping. cpus: where the thread may run, empty: anywhere.
  Dispatcher(uint32_t spin_us, std::vector<int> cpus);
  ~Dispatcher();  // stops
  void start();
  // Answers new requests with SHUTTING_DOWN and waits for accepted ones; false: time ran out.
  bool drain(double timeout_s);
  void stop();

  void add_session(const SessionSpec& spec);  // throws CoreError
  // Returns when nothing touches the session's memory any more. Unknown ids are ignored.
  void remove_session(uint64_t session_id);
  // Serves it no more and tells its client why: `closing` is a syshax_ring_closing. Unknown ids are ignored.
  void end_session(uint64_t session_id, uint32_t closing);
  // Throw CoreError("invalid_argument"). Unknown ids are ignored.
  void configure_session(uint64_t session_id, Priority priority, uint32_t share);
  void set_class_weights(const ClassWeights& weights);
  // From now on its sessions get MODEL_GONE; returns when no forward of it runs and no session holds it.
  void forget_model(const ExpertModel* model);

  std::vector<SessionStats> session_stats() const;
  DispatcherStats stats() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace syshax
