// Tags and token buckets. Contract and source of the algorithm: fair_share.h.
#include "schedule/fair_share.h"

#include <algorithm>

namespace syshax {
namespace {

constexpr double kBurstNs = 20e6;  // of a limited session: what it may save up

}  // namespace

void Account::refill(uint64_t now_ns) {
  const double rate = share_ / 100.0;
  const double gained = refilled_ns_ == 0 ? kBurstNs : static_cast<double>(now_ns - refilled_ns_);
  allowance_ns_ = std::min(allowance_ns_ + gained * rate, kBurstNs * rate);
  refilled_ns_ = now_ns;
}

uint64_t Account::blocked_ns(uint64_t now_ns) {
  if (share_ == 0 || share_ >= 100) return 0;
  refill(now_ns);
  return allowance_ns_ > 0 ? 0 : static_cast<uint64_t>(-allowance_ns_ * 100 / share_) + 1;
}

void FairShare::configure(Account& account, Priority priority, uint32_t share) {
  if (account.priority_ != priority) {
    account.priority_ = priority;
    account.start_ = classes_[static_cast<size_t>(priority)].session;
  }
  if (account.share_ == share) return;
  account.share_ = share;
  account.allowance_ns_ = 0;
  account.refilled_ns_ = 0;
}

bool FairShare::before(const Account& a, const Account& b) const {
  const size_t class_a = static_cast<size_t>(a.priority_), class_b = static_cast<size_t>(b.priority_);
  if (class_a == class_b) return a.start_ < b.start_;
  const double start_a = classes_[class_a].start, start_b = classes_[class_b].start;
  return start_a != start_b ? start_a < start_b : class_a < class_b;
}

bool FairShare::offer(Account& account) {
  const size_t index = static_cast<size_t>(account.priority_);
  Class& own = classes_[index];
  if (!offered_[index] && own.round + 1 < round_) own.start = std::max(own.start, virtual_time_);
  offered_[index] = true;
  own.round = round_;
  if (account.round_ + 1 < round_) account.start_ = std::max(account.start_, own.session);
  account.round_ = round_;
  const bool best = best_ == nullptr || before(account, *best_);
  if (best) best_ = &account;
  return best;
}

void FairShare::charge(Account& account, uint64_t ns, uint64_t now_ns) {
  const size_t index = static_cast<size_t>(account.priority_);
  Class& own = classes_[index];
  own.session = std::max(own.session, account.start_);
  virtual_time_ = std::max(virtual_time_, own.start);
  account.start_ += ns;
  own.start += static_cast<double>(ns) / weights_[index];
  if (account.share_ == 0 || account.share_ >= 100) return;
  account.refill(now_ns);
  account.allowance_ns_ -= static_cast<double>(ns);
}

}  // namespace syshax
