// Mapping, advice and guard of one file. The guard needs whole pages, the mapping's length is rounded up to them.
#include "ipc/guarded_file.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace syshax {
namespace {

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

}  // namespace

GuardedFile::GuardedFile(int fd) {
  struct stat status = {};
  if (fstat(fd, &status) != 0) throw CoreError("checkpoint", std::string("fstat: ") + std::strerror(errno));
  bytes_ = static_cast<size_t>(status.st_size);
  if (bytes_ == 0) throw CoreError("checkpoint", "the file is empty");
  mapped_ = (bytes_ + page_bytes() - 1) / page_bytes() * page_bytes();
  void* base = mmap(nullptr, mapped_, PROT_READ, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED)
    throw CoreError("checkpoint", std::string("the file cannot be mapped: ") + std::strerror(errno));
  base_ = base;
  try {
    guard_ = std::make_unique<SigbusGuard>(base_, mapped_);
  } catch (...) {
    munmap(base_, mapped_);
    throw;
  }
}

GuardedFile::~GuardedFile() {
  guard_.reset();
  munmap(base_, mapped_);
}

void GuardedFile::prefetch(size_t offset, size_t bytes) const { advise(offset, bytes, MADV_WILLNEED); }

void GuardedFile::release(size_t offset, size_t bytes) const { advise(offset, bytes, MADV_DONTNEED); }

void GuardedFile::advise(size_t offset, size_t bytes, int advice) const {
  if (offset >= bytes_ || cut_short()) return;
  size_t begin = offset / page_bytes() * page_bytes();
  size_t end = std::min(offset + std::min(bytes, bytes_ - offset), bytes_);
  madvise(static_cast<char*>(base_) + begin, end - begin, advice);
}

}  // namespace syshax
