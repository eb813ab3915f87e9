// Lets this process survive a client that truncates its shared memory. Owns the process-wide SIGBUS handler and the
// table of guarded mappings; knows no ring.
//
// A fault inside a guarded mapping maps zero pages over that whole mapping, marks it poisoned and returns, on
// whichever thread it came: whoever was reading goes on with zeros, and the session's owner finds the mark. Any other
// SIGBUS goes to the handler that was there before.
#pragma once
#include <cstddef>

namespace syshax {

class SigbusGuard {
 public:
  // Guards [base, base + bytes), whole pages, until destroyed; the mapping must outlive the guard.
  // Throws CoreError("limit") when the table is full.
  SigbusGuard(void* base, size_t bytes);
  ~SigbusGuard();
  SigbusGuard(const SigbusGuard&) = delete;
  SigbusGuard& operator=(const SigbusGuard&) = delete;

  bool poisoned() const noexcept;

 private:
  size_t entry_;
};

}  // namespace syshax
