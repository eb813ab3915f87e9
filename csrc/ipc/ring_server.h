// The daemon's side of one session's ring: mapping, layout, queue and completions. Knows bytes only; what a request
// means is the dispatcher's. The client may write anything anywhere at any time: every number used here was fixed at
// attach or copied once and checked.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>

#include "ipc/ring_layout.h"
#include "ipc/sigbus_guard.h"

namespace syshax {

struct RingShape {
  uint32_t num_slots, max_tokens, hidden_size, top_k, element_bytes, num_layers;
};

// The header of such a ring with every offset and total_bytes, before the memory exists; boot_id, session_id and
// spin_us are left 0. Throws CoreError("invalid_argument") naming the field.
syshax_ring_header ring_layout(const RingShape& shape);

// Where both sides begin to count requests: shortly before the published 32 bits wrap, so that every session and every
// test passes over the wrap.
constexpr uint32_t kFirstPosition = 0xFFFFFFC0u;

struct RingSlot {
  const void* hidden_states;
  const int32_t* topk_ids;
  const float* topk_weights;
  void* output;
};

class RingServer {
 public:
  // Maps shm_fd (duplicated by the kernel's mapping, may be closed afterwards), checks that it holds layout.total_bytes
  // and writes the header. doorbell_fd is duplicated. Throws CoreError.
  RingServer(int shm_fd, int doorbell_fd, const syshax_ring_header& layout);
  ~RingServer();
  RingServer(const RingServer&) = delete;
  RingServer& operator=(const RingServer&) = delete;

  // Requests published and not taken; more than num_slots means that the client's queue makes no sense.
  uint32_t pending() const noexcept;
  // Copies the oldest of them and counts it as taken.
  syshax_ring_request take() noexcept;
  RingSlot slot(uint32_t index) const noexcept;  // index < num_slots

  struct Completion {
    uint64_t tag;
    uint32_t status;
    int32_t detail = 0;
    uint32_t detail2 = 0;
    uint64_t queued_ns = 0, compute_ns = 0;
  };
  void complete(uint32_t slot, const Completion& completion) noexcept;

  void set_parked(bool parked) noexcept;        // the caller fences before it looks at pending() again
  void set_closing(uint32_t closing) noexcept;  // a syshax_ring_closing; an end is not taken back by a drain
  void set_heartbeat(uint64_t now_ns) noexcept;
  uint64_t client_heartbeat() const noexcept;
  uint64_t client_wait_ns() const noexcept;
  bool poisoned() const noexcept { return guard_->poisoned(); }
  int doorbell_fd() const noexcept { return doorbell_fd_; }
  const syshax_ring_header& layout() const noexcept { return layout_; }

 private:
  syshax_ring_header* header() const noexcept { return reinterpret_cast<syshax_ring_header*>(base_); }

  syshax_ring_header layout_;  // private: never read back from shared memory
  uint8_t* base_ = nullptr;
  int doorbell_fd_ = -1;
  uint32_t closing_ = SYSHAX_RING_OPEN;
  std::unique_ptr<SigbusGuard> guard_;
  uint64_t position_ = kFirstPosition;  // 64 bits, so that position % num_slots stays right over the wrap
};

}  // namespace syshax
