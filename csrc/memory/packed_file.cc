// Reading and writing of packed files. Contract: packed_file.h.
#include "memory/packed_file.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <thread>

#include "base/error.h"
#include "base/xxh64.h"

namespace syshax {

void read_packed_chunk(int fd, uint64_t offset, size_t bytes, uint64_t checksum, char* into) {
  size_t done = 0;
  while (done < bytes) {
    const ssize_t got = pread(fd, into + done, bytes - done, static_cast<off_t>(offset + done));
    if (got > 0) {
      done += static_cast<size_t>(got);
    } else if (got == 0) {
      throw CoreError("checkpoint", "the packed file ends at byte " + std::to_string(offset + done) + ", wanted " +
                                        std::to_string(offset + bytes));
    } else if (errno != EINTR) {
      throw CoreError("checkpoint", "the packed file cannot be read at byte " + std::to_string(offset + done) + ": " +
                                        strerror(errno));
    }
  }
  if (xxh64(into, bytes) != checksum)
    throw CoreError("checkpoint", "the packed file's bytes [" + std::to_string(offset) + ", " +
                                      std::to_string(offset + bytes) + ") are not those that were written");
  posix_fadvise(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
}

namespace {

// Moves all of the bytes; 0 or an error number. A file that ends before is EIO.
template <typename Move>
int move_all(size_t bytes, const Move& move) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t moved = move(done, bytes - done);
    if (moved > 0)
      done += static_cast<size_t>(moved);
    else if (moved == 0)
      return EIO;
    else if (errno != EINTR)
      return errno;
  }
  return 0;
}

int copy_chunk(int from, int to, uint64_t offset, std::vector<char>& buffer) {
  const int failed = move_all(buffer.size(), [&](size_t done, size_t left) {
    return pread(from, buffer.data() + done, left, static_cast<off_t>(offset + done));
  });
  if (failed != 0) return failed;
  return move_all(buffer.size(), [&](size_t done, size_t left) {
    return pwrite(to, buffer.data() + done, left, static_cast<off_t>(offset + done));
  });
}

// The calling thread lets all others go first, on the CPUs and at the disk. Best effort.
void step_back() {
  constexpr int kOneThread = 1, kIdle = 3 << 13;  // IOPRIO_WHO_PROCESS, IOPRIO_CLASS_IDLE
  const auto thread = static_cast<id_t>(syscall(SYS_gettid));
  setpriority(PRIO_PROCESS, thread, 19);
  syscall(SYS_ioprio_set, kOneThread, thread, kIdle);
}

}  // namespace

std::vector<uint64_t> copy_packed(int from, int to, uint64_t offset, uint64_t bytes, int* error_number) {
  std::vector<uint64_t> checksums;
  checksums.reserve(bytes / kPackedChunkBytes + 1);  // the thread allocates nothing: nobody would hear of a failure
  std::vector<char> buffer(kPackedChunkBytes);
  *error_number = 0;
  std::thread([&] {
    step_back();
    for (uint64_t done = 0; done < bytes && *error_number == 0; done += buffer.size()) {
      buffer.resize(std::min<uint64_t>(kPackedChunkBytes, bytes - done));
      *error_number = copy_chunk(from, to, offset + done, buffer);
      checksums.push_back(xxh64(buffer.data(), buffer.size()));
    }
    if (*error_number == 0 && fdatasync(to) != 0) *error_number = errno;
    posix_fadvise(to, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
  }).join();
  return checksums;
}

void expect_packed(int fd, uint64_t offset, size_t bytes) {
  posix_fadvise(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
}

}  // namespace syshax
