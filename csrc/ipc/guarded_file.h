// A file of somebody else's, mapped whole for reading: the checkpoints that are loaded. Owns the mapping and its guard
// against SIGBUS, so that a file that is cut short (or a disk that fails) while it is read gives zeros and a mark
// instead of the end of this process. Knows nothing of what the file holds.
#pragma once
#include <cstddef>
#include <memory>

#include "ipc/sigbus_guard.h"

namespace syshax {

class GuardedFile {
 public:
  // Maps the file behind fd, which stays the caller's. Throws CoreError("checkpoint") for what cannot be mapped.
  explicit GuardedFile(int fd);
  ~GuardedFile();
  GuardedFile(const GuardedFile&) = delete;
  GuardedFile& operator=(const GuardedFile&) = delete;

  const void* data() const { return base_; }
  size_t bytes() const { return bytes_; }
  // True once a read found no file behind the mapping: what was read since is zeros.
  bool cut_short() const { return guard_->poisoned(); }
  // The pages of [offset, offset + bytes) are wanted soon, or no more. Advice: never fails.
  void prefetch(size_t offset, size_t bytes) const;
  void release(size_t offset, size_t bytes) const;

 private:
  void advise(size_t offset, size_t bytes, int advice) const;

  void* base_ = nullptr;
  size_t bytes_ = 0, mapped_ = 0;  // the file's size, and that in whole pages
  std::unique_ptr<SigbusGuard> guard_;
};

}  // namespace syshax
