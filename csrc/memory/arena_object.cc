// The C++ owner of an arena: the C calls of memory_manager.h with their errors turned into CoreError. Contract:
// arena.h.
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "base/error.h"
#include "memory/arena.h"
#include "memory/free_memory.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace syshax {
namespace {

constexpr size_t kMessageBytes = 512;

void check(int result, const char* message) {
  if (result == 0) return;
  if (result == -EINVAL || result == -EPERM) throw CoreError("hardware", message, "syshaxctl topology lists the nodes");
  throw CoreError("no_memory", message, "use a smaller format, unload a model, or free memory");
}

}  // namespace

Arena::Arena(const std::string& name, size_t bytes, int node, syshax_huge_pages huge_pages) {
  char message[kMessageBytes] = "";
  check(syshax_arena_create(&arena_, name.c_str(), bytes, node, huge_pages, message, sizeof message), message);
}

Arena::Arena(Arena&& other) noexcept : arena_(std::exchange(other.arena_, Arena().arena_)) {}

Arena& Arena::operator=(Arena&& other) noexcept {
  std::swap(arena_, other.arena_);
  return *this;
}

void Arena::populate(size_t offset, size_t bytes) {
  char message[kMessageBytes] = "";
  check(syshax_arena_populate(&arena_, offset, bytes, message, sizeof message), message);
}

void Arena::seal(bool counted) {
  char message[kMessageBytes] = "";
  check((counted ? syshax_arena_seal : seal_uncounted)(&arena_, message, sizeof message), message);
}

Arena Arena::adopt(int fd, int node) {
  Arena arena;
  char message[kMessageBytes] = "";
  check(syshax_arena_adopt(&arena.arena_, fd, node, message, sizeof message), message);
  return arena;
}

Arena Arena::adopt_duplicate(int fd, int node) {
  const int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (own < 0)
    throw CoreError("hardware", "descriptor " + std::to_string(fd) + " cannot be duplicated: " + strerror(errno));
  try {
    return adopt(own, node);
  } catch (...) {
    ::close(own);
    throw;
  }
}

bool prefault_pages(const void* begin, size_t bytes) {
  int status = 0;
  while ((status = madvise(const_cast<void*>(begin), bytes, MADV_POPULATE_READ)) != 0 && errno == EINTR) {
  }
  return status == 0 || (errno != EHWPOISON && errno != EFAULT);
}

syshax_huge_pages parse_huge_pages(const std::string& value) {
  if (value == "off") return SYSHAX_HUGE_OFF;
  if (value == "auto") return SYSHAX_HUGE_AUTO;
  if (value == "require") return SYSHAX_HUGE_REQUIRE;
  throw CoreError("config", "huge pages \"" + value + "\" is none of off, auto, require");
}

}  // namespace syshax
