// Whether others want this thread's CPU, by the kernel's own account: how long the thread, ready to run, waited for it
// (second number of /proc/thread-self/schedstat). Asked every few milliseconds, which costs about a microsecond.
#pragma once
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace syshax {

// One thread's at a time: asked by another than before it begins anew with that one's file. Where the kernel does not
// count, nobody waits.
class RunDelay {
 public:
  RunDelay() = default;
  ~RunDelay() {
    if (fd_ >= 0) close(fd_);
  }
  RunDelay(const RunDelay&) = delete;
  RunDelay& operator=(const RunDelay&) = delete;

  // Of the time since it was last looked at, a few milliseconds at least, more than a twentieth was waiting.
  bool contended(uint64_t now_ns) {
    if (now_ns - looked_ns_ < kEveryNs) return contended_;
    const uint64_t waited = waited_ns();
    contended_ = looked_ns_ != 0 && (waited - waited_ns_) * kPart > now_ns - looked_ns_;
    looked_ns_ = now_ns;
    waited_ns_ = waited;
    return contended_;
  }

 private:
  static constexpr uint64_t kEveryNs = 4000000, kPart = 20;

  uint64_t waited_ns() {
    const long thread = syscall(SYS_gettid);
    if (thread != thread_) {
      if (fd_ >= 0) close(fd_);
      fd_ = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
      thread_ = thread;
      looked_ns_ = 0;
    }
    char text[64];
    const ssize_t got = fd_ < 0 ? 0 : pread(fd_, text, sizeof(text) - 1, 0);
    if (got <= 0) return waited_ns_;
    text[got] = '\0';
    char* second = nullptr;
    strtoull(text, &second, 10);
    return strtoull(second, nullptr, 10);
  }

  int fd_ = -1;
  long thread_ = -1;
  bool contended_ = false;
  uint64_t looked_ns_ = 0, waited_ns_ = 0;
};

}  // namespace syshax
