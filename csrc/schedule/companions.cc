// Contract and reasons: companions.h.
#include "schedule/companions.h"

#include <algorithm>
#include <cmath>

namespace syshax {
namespace {

constexpr double kLeastGain = 1.15;         // of reading weights once, else nobody waits
constexpr uint64_t kJitterNs = 20000;       // of a client's way back to us
constexpr uint64_t kAwayCapNs = 100000000;  // a longer absence is a pause, not a layer's attention
constexpr uint64_t kWorthWaiting = 16;      // so small a part of a pass is less than what sharing it saves
constexpr uint64_t kSulk = 32;              // times what was waited in vain

// Experts that `tokens` tokens touch, were the router without preferences.
double touched(const MoeGeometry& geometry, double tokens, uint32_t top_k) {
  const double experts = geometry.num_experts;
  return experts * (1 - std::pow(1 - std::min(1.0, top_k / experts), tokens));
}

}  // namespace

bool fit_together(const Step& a, const Step& b) noexcept {
  const uint64_t few = std::min(a.num_tokens, b.num_tokens), many = std::max(a.num_tokens, b.num_tokens);
  return a.layer == b.layer && a.top_k == b.top_k && a.dtype == b.dtype && many <= 2 * few &&
         few + many <= kBatchTokens;
}

void Walk::arrived(uint64_t now_ns) noexcept {
  if (answered_ns_ == 0) return;
  const uint64_t away = std::min(now_ns - std::min(now_ns, answered_ns_), kAwayCapNs);
  away_ns_ = away_ns_ == 0 ? away : (7 * away_ns_ + away) / 8;
}

void Walk::answered(const Step& step, uint64_t service_ns, uint64_t now_ns) noexcept {
  last_ = step;
  service_ns_ = service_ns;
  answered_ns_ = now_ns;
}

uint64_t Walk::expected_until_ns() const noexcept {
  return answered_ns_ + away_ns_ + away_ns_ / 2 + kJitterNs + service_ns_ / kWorthWaiting;
}

uint64_t Walk::patience_ns(uint32_t layers) const noexcept {
  return (uint64_t{layers} + 2) * (service_ns_ + away_ns_ + kJitterNs) * 3 / 2;
}

bool Walk::worth_meeting(const MoeGeometry& geometry, const Step& step) const noexcept {
  const double gain =
      2 * touched(geometry, step.num_tokens, step.top_k) / touched(geometry, 2.0 * step.num_tokens, step.top_k);
  const double saved = 1.5 * (1 - 1 / gain) * static_cast<double>(service_ns_);
  return gain >= kLeastGain && static_cast<double>(away_ns_) < saved;
}

bool Walk::may_wait(uint64_t now_ns, uint64_t patience_ns) noexcept {
  if (now_ns < alone_until_ns_) return false;
  if (waiting_since_ns_ == 0) {
    waiting_since_ns_ = now_ns;
    give_up_ns_ = now_ns + patience_ns;
  }
  if (now_ns < give_up_ns_) return true;
  alone_until_ns_ = now_ns + kSulk * (now_ns - waiting_since_ns_);
  waiting_since_ns_ = 0;
  return false;
}

}  // namespace syshax
