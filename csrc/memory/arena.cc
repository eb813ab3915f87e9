// Arenas: memfd + mmap + mbind + populate + seal, the C ABI of syshax/memory_manager.h. Knows nothing of experts.
//
// Mappings start on a huge-page boundary, so that the kernel can back them with huge pages. Pages are allocated with
// MADV_POPULATE_WRITE, or fallocate where the kernel does not know it: both fail with an error code when memory runs
// out, where touching a page would end the process with SIGBUS.
#include "syshax/memory_manager.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/mempolicy.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <string>

#include "memory/arena.h"
#include "memory/free_memory.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MFD_HUGE_2MB
#define MFD_HUGE_2MB (21u << 26)
#endif

namespace {

using syshax::kHugePageBytes;
using syshax::kPageBytes;

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | F_SEAL_FUTURE_WRITE;

__attribute__((format(printf, 4, 5))) int fail(int error_number, char* error, size_t error_size, const char* format,
                                               ...) {
  if (error != nullptr && error_size > 0) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(error, error_size, format, arguments);
    va_end(arguments);
  }
  return -error_number;
}

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

bool is_hugetlb(int fd) {
  struct statfs status;
  return fstatfs(fd, &status) == 0 && static_cast<unsigned long>(status.f_type) == HUGETLBFS_MAGIC;
}

size_t huge_bytes_of(const void* base, size_t bytes) { return syshax::mapped_huge_bytes({{base, bytes}}).front(); }

constexpr syshax_arena kNothing = {nullptr, 0, -1, -1, 0, SYSHAX_HUGE_OFF};

// Maps all of fd at a huge-page boundary. Returns nullptr with errno set.
void* map_aligned(int fd, size_t bytes, int protection) {
  const size_t reserved = bytes + kHugePageBytes;
  void* hole = mmap(nullptr, reserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (hole == MAP_FAILED) return nullptr;
  char* const begin = static_cast<char*>(hole);
  char* const aligned = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(hole), kHugePageBytes));
  void* base = mmap(aligned, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0);
  if (base == MAP_FAILED) {
    const int saved = errno;
    munmap(hole, reserved);
    errno = saved;
    return nullptr;
  }
  char* const end = aligned + round_up(bytes, kPageBytes);
  if (aligned > begin) munmap(begin, static_cast<size_t>(aligned - begin));
  if (begin + reserved > end) munmap(end, static_cast<size_t>(begin + reserved - end));
  return base;
}

int bind_to_node(void* base, size_t bytes, int32_t node) {
  constexpr size_t kMaxNodes = 1024;
  constexpr size_t kBits = 8 * sizeof(unsigned long);
  if (node < 0 || static_cast<size_t>(node) >= kMaxNodes) return EINVAL;
  unsigned long mask[kMaxNodes / kBits] = {};
  mask[static_cast<size_t>(node) / kBits] = 1ul << (static_cast<size_t>(node) % kBits);
  if (syscall(SYS_mbind, base, bytes, MPOL_BIND, mask, kMaxNodes + 1, 0) == 0) return 0;
  // Containers often forbid mbind; with a single node there is nothing to bind.
  const int cause = errno;
  const bool forbidden = cause == EPERM || cause == ENOSYS;
  return forbidden && syshax::nodes_with_memory() == std::to_string(node) ? 0 : cause;
}

int fail_no_memory(const syshax_arena* arena, size_t bytes, int cause, char* error, size_t error_size) {
  char where[32] = "the machine";
  if (arena->node >= 0) snprintf(where, sizeof where, "node %d", arena->node);
  if (is_hugetlb(arena->fd))
    return fail(ENOMEM, error, error_size,
                "cannot fill %zu bytes of huge pages (%zu pages of 2 MiB) on %s: %lld are free; more come with "
                "vm.nr_hugepages, or set huge pages to auto",
                bytes, bytes / kHugePageBytes, where, static_cast<long long>(syshax::free_huge_pages(arena->node)));
  return fail(ENOMEM, error, error_size, "cannot fill %zu bytes of memory on %s: %llu bytes are available (%s)", bytes,
              where, static_cast<unsigned long long>(syshax::node_free_bytes(arena->node)), strerror(cause));
}

// In a row: then memory is too fragmented, or the kernel cannot do it.
constexpr int kCollapseFailures = 4;

// One page in every aligned 2 MiB, then collapse: the kernel clears each huge page once instead of copying 512 small
// ones. Best effort; what stays small is populated by the caller.
void collapse(char* begin, char* end) {
  char* from = reinterpret_cast<char*>(round_up(reinterpret_cast<uintptr_t>(begin), kHugePageBytes));
  int failures = 0;
  for (; from + kHugePageBytes <= end && failures < kCollapseFailures; from += kHugePageBytes) {
    if (madvise(from, kPageBytes, MADV_POPULATE_WRITE) != 0) return;
    failures = madvise(from, kHugePageBytes, MADV_COLLAPSE) == 0 ? 0 : failures + 1;
  }
}

int populate_pages(syshax_arena* arena, char* begin, size_t bytes) {
  while (madvise(begin, bytes, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno != EINVAL) return errno;
    const off_t offset = begin - static_cast<char*>(arena->base);
    while (fallocate(arena->fd, 0, offset, static_cast<off_t>(bytes)) != 0)
      if (errno != EINTR) return errno;
    break;
  }
  return 0;
}

}  // namespace

extern "C" int syshax_arena_create(syshax_arena* arena, const char* name, size_t bytes, int32_t node,
                                   syshax_huge_pages huge_pages, char* error, size_t error_size) {
  *arena = kNothing;
  arena->node = node;
  arena->huge_pages = huge_pages;
  const bool reserved = huge_pages == SYSHAX_HUGE_REQUIRE;
  if (bytes == 0) return fail(EINVAL, error, error_size, "an arena of 0 bytes was asked for");
  if (bytes > SIZE_MAX / 4) return fail(ENOMEM, error, error_size, "an arena of %zu bytes was asked for", bytes);
  bytes = round_up(bytes, reserved ? kHugePageBytes : kPageBytes);
  const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING | (reserved ? MFD_HUGETLB | MFD_HUGE_2MB : 0u);
  arena->fd = static_cast<int>(syscall(SYS_memfd_create, name, flags));
  if (arena->fd < 0) return fail(errno, error, error_size, "memfd_create(%s): %s", name, strerror(errno));
  if (ftruncate(arena->fd, static_cast<off_t>(bytes)) != 0) {
    const int cause = errno;
    syshax_arena_destroy(arena);
    return fail(cause == EFBIG || cause == EINVAL ? ENOMEM : cause, error, error_size,
                "cannot size arena %s to %zu bytes: %s (is the file-size limit RLIMIT_FSIZE too low?)", name, bytes,
                strerror(cause));
  }
  arena->base = map_aligned(arena->fd, bytes, PROT_READ | PROT_WRITE);
  if (arena->base == nullptr) {
    const int cause = errno;
    const long long pages = static_cast<long long>(syshax::free_huge_pages(node));
    syshax_arena_destroy(arena);
    if (reserved)
      return fail(cause, error, error_size,
                  "arena %s wants %zu huge pages of 2 MiB and %lld are free; more come with vm.nr_hugepages, or set "
                  "huge pages to auto",
                  name, bytes / kHugePageBytes, pages);
    return fail(cause, error, error_size, "cannot map %zu bytes for arena %s: %s (address space limit RLIMIT_AS?)",
                bytes, name, strerror(cause));
  }
  arena->bytes = bytes;
  if (node >= 0) {
    const int cause = bind_to_node(arena->base, bytes, node);
    if (cause != 0) {
      syshax_arena_destroy(arena);
      return fail(cause, error, error_size,
                  "cannot bind arena %s to NUMA node %d: %s (does the node exist, and do the "
                  "cpuset's memory nodes include it?)",
                  name, node, strerror(cause));
    }
  }
  if (huge_pages == SYSHAX_HUGE_AUTO) madvise(arena->base, bytes, MADV_HUGEPAGE);
  if (huge_pages == SYSHAX_HUGE_OFF) madvise(arena->base, bytes, MADV_NOHUGEPAGE);
  return 0;
}

extern "C" int syshax_arena_populate(syshax_arena* arena, size_t offset, size_t bytes, char* error, size_t error_size) {
  if (arena->base == nullptr || offset > arena->bytes || bytes > arena->bytes - offset)
    return fail(EINVAL, error, error_size, "populate of [%zu, +%zu) outside an arena of %zu bytes", offset, bytes,
                arena->bytes);
  char* const base = static_cast<char*>(arena->base);
  const size_t page = is_hugetlb(arena->fd) ? kHugePageBytes : kPageBytes;
  const size_t begin = offset / page * page;
  const size_t end = std::min(round_up(offset + bytes, page), arena->bytes);
  if (begin == end) return 0;
  if (arena->huge_pages == SYSHAX_HUGE_AUTO) collapse(base + begin, base + end);
  const int cause = populate_pages(arena, base + begin, end - begin);
  return cause == 0 ? 0 : fail_no_memory(arena, end - begin, cause, error, error_size);
}

int syshax::seal_uncounted(syshax_arena* arena, char* error, size_t error_size) {
  if (arena->base == nullptr) return fail(EINVAL, error, error_size, "seal of an arena that is not mapped");
  if (fcntl(arena->fd, F_ADD_SEALS, kSeals) != 0)
    return fail(errno, error, error_size, "cannot seal an arena of %zu bytes: %s", arena->bytes, strerror(errno));
  if (mprotect(arena->base, arena->bytes, PROT_READ) != 0)
    return fail(errno, error, error_size, "cannot make an arena of %zu bytes read-only: %s", arena->bytes,
                strerror(errno));
  if (is_hugetlb(arena->fd)) arena->huge_bytes = arena->bytes;
  return 0;
}

extern "C" int syshax_arena_seal(syshax_arena* arena, char* error, size_t error_size) {
  const int status = syshax::seal_uncounted(arena, error, error_size);
  if (status == 0 && !is_hugetlb(arena->fd)) arena->huge_bytes = huge_bytes_of(arena->base, arena->bytes);
  return status;
}

extern "C" int syshax_arena_adopt(syshax_arena* arena, int fd, int32_t node, char* error, size_t error_size) {
  *arena = kNothing;
  struct stat status;
  if (fstat(fd, &status) != 0) return fail(errno, error, error_size, "descriptor %d: %s", fd, strerror(errno));
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals)
    return fail(EPERM, error, error_size, "descriptor %d is no sealed arena (seals %d, wanted %d)", fd, seals, kSeals);
  if (status.st_size <= 0) return fail(EINVAL, error, error_size, "descriptor %d holds no bytes", fd);
  const size_t bytes = static_cast<size_t>(status.st_size);
  void* base = map_aligned(fd, bytes, PROT_READ);
  if (base == nullptr)
    return fail(errno, error, error_size, "cannot map %zu bytes of descriptor %d: %s", bytes, fd, strerror(errno));
  *arena = {base, bytes, fd, node, 0, SYSHAX_HUGE_OFF};
  arena->huge_bytes = is_hugetlb(fd) ? bytes : huge_bytes_of(base, bytes);
  return 0;
}

extern "C" void syshax_arena_destroy(syshax_arena* arena) {
  if (arena->base != nullptr) munmap(arena->base, arena->bytes);
  if (arena->fd >= 0) close(arena->fd);
  *arena = kNothing;
}
