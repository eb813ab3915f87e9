// Whether sessions that decode the same layers should be computed together, so that each expert's weights are read once
// for all of them, and whether one should wait for another to come to its layer. Knows shapes and times, no session.
//
// Two replicas that keep the data plane busy meet by themselves hardly ever: while one computes the other waits, a
// layer or half a model away. So the one that is ahead lets the other catch up, once; afterwards both get their answers
// at the same moment and stay together. Nobody waits where weights would not be shared (a token or two of many
// experts), where the companion spends its time elsewhere, or again soon after having waited in vain.
#pragma once
#include <cstdint>

#include "moe/expert_model.h"

namespace syshax {

constexpr uint32_t kBatchTokens = 128;  // of one batch at most
constexpr uint32_t kBatchSessions = 16;

// The shape of a request.
struct Step {
  uint32_t layer = 0, num_tokens = 0, top_k = 0, dtype = 0;
};

// May be computed as one: within a factor of two in tokens, so that nobody's answer takes much longer than its fair
// share of the time would have made it take.
bool fit_together(const Step& a, const Step& b) noexcept;

// One session's way through the layers.
class Walk {
 public:
  // A request was seen, and was answered after `service_ns` of computing.
  void arrived(uint64_t now_ns) noexcept;
  void answered(const Step& step, uint64_t service_ns, uint64_t now_ns) noexcept;

  const Step& last() const noexcept { return last_; }
  // Is it likely to ask for the next layer within moments?
  bool expected(uint64_t now_ns) const noexcept { return answered_ns_ != 0 && now_ns < expected_until_ns(); }
  uint64_t expected_until_ns() const noexcept;
  // What waiting for a companion like this one must not exceed, for `layers` layers that it is behind.
  uint64_t patience_ns(uint32_t layers) const noexcept;
  // Does sharing weights save more than the time in which nobody computes because all are away at once?
  bool worth_meeting(const MoeGeometry& geometry, const Step& step) const noexcept;

  // Its own waiting. may_wait is false after patience was lost, for a multiple of the time lost.
  bool may_wait(uint64_t now_ns, uint64_t patience_ns) noexcept;
  void met() noexcept { waiting_since_ns_ = 0; }

 private:
  Step last_;
  uint64_t answered_ns_ = 0, service_ns_ = 0, away_ns_ = 0;
  uint64_t waiting_since_ns_ = 0, give_up_ns_ = 0, alone_until_ns_ = 0;
};

// Layers from `behind` to `ahead`, going upwards and round.
inline uint32_t layers_between(uint32_t behind, uint32_t ahead, uint32_t num_layers) noexcept {
  return (ahead + num_layers - behind) % num_layers;
}

}  // namespace syshax
