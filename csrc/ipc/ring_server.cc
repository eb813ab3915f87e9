// Contract: ring_server.h. Every number that leads into shared memory comes from layout_, which is private.
#include "ipc/ring_server.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace syshax {
namespace {

// A slot has one waiter; more than a few wait on one only to keep the daemon busy. Who is left looks again by itself
// (docs/RING.md).
constexpr int kMostWoken = 4;

uint64_t to_page(uint64_t bytes) { return (bytes + SYSHAX_RING_PAGE - 1) / SYSHAX_RING_PAGE * SYSHAX_RING_PAGE; }

void check_range(const char* field, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return;
  throw CoreError("invalid_argument", std::string("session ") + field + " is " + std::to_string(value) +
                                          ", allowed is " + std::to_string(low) + " to " + std::to_string(high));
}

std::string system_text(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

size_t system_page() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

size_t with_guards(size_t bytes) {
  const size_t page = system_page();
  return (bytes + page - 1) / page * page + 2 * page;
}

// Between two pages that nobody may touch: an offset too far by mistake ends this process and meets no other session.
uint8_t* map_between_guards(int fd, size_t bytes) {
  void* hole = mmap(nullptr, with_guards(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (hole == MAP_FAILED) throw CoreError("no_memory", system_text("room for session memory"));
  uint8_t* base = static_cast<uint8_t*>(hole) + system_page();
  if (mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const CoreError error("no_memory", system_text("mapping session memory"));
    munmap(hole, with_guards(bytes));
    throw error;
  }
  return base;
}

void unmap_with_guards(uint8_t* base, size_t bytes) { munmap(base - system_page(), with_guards(bytes)); }

}  // namespace

syshax_ring_header ring_layout(const RingShape& shape) {
  check_range("num_slots", shape.num_slots, 1, SYSHAX_RING_MAX_SLOTS);
  check_range("max_tokens", shape.max_tokens, 1, 1u << 20);
  check_range("hidden_size", shape.hidden_size, 1, 1u << 20);
  check_range("top_k", shape.top_k, 1, 1u << 16);
  if (shape.element_bytes != 2) check_range("element_bytes", shape.element_bytes, 4, 4);
  syshax_ring_header h = {};
  h.magic = SYSHAX_RING_MAGIC;
  h.version_major = SYSHAX_RING_VERSION_MAJOR;
  h.version_minor = SYSHAX_RING_VERSION_MINOR;
  h.num_slots = shape.num_slots;
  h.max_tokens = shape.max_tokens;
  h.hidden_size = shape.hidden_size;
  h.top_k = shape.top_k;
  h.element_bytes = shape.element_bytes;
  h.num_layers = shape.num_layers;
  uint64_t rows = to_page(uint64_t{shape.max_tokens} * shape.hidden_size * shape.element_bytes);
  uint64_t wide = to_page(uint64_t{shape.max_tokens} * shape.top_k * 4);
  h.ids_offset = rows;
  h.weights_offset = rows + wide;
  h.output_offset = rows + 2 * wide;
  h.slot_bytes = 2 * (rows + wide);
  h.requests_offset = SYSHAX_RING_PAGE;
  h.completions_offset = h.requests_offset + to_page(shape.num_slots * sizeof(syshax_ring_request));
  h.slots_offset = h.completions_offset + to_page(shape.num_slots * sizeof(syshax_ring_completion));
  h.total_bytes = h.slots_offset + shape.num_slots * h.slot_bytes;
  return h;
}

RingServer::RingServer(int shm_fd, int doorbell_fd, const syshax_ring_header& layout) : layout_(layout) {
  struct stat status = {};
  if (fstat(shm_fd, &status) != 0) throw CoreError("internal", system_text("session memory"));
  if (status.st_size < 0 || static_cast<uint64_t>(status.st_size) < layout.total_bytes)
    throw CoreError("internal", "session memory has " + std::to_string(status.st_size) + " bytes, its layout needs " +
                                    std::to_string(layout.total_bytes));
  base_ = map_between_guards(shm_fd, layout.total_bytes);
  try {
    guard_ = std::make_unique<SigbusGuard>(base_, layout.total_bytes);
    doorbell_fd_ = fcntl(doorbell_fd, F_DUPFD_CLOEXEC, 0);
    if (doorbell_fd_ < 0)
      throw CoreError("limit", system_text("no descriptor for the session's doorbell"),
                      "end sessions, or raise the daemon's limit on open files (LimitNOFILE=)");
  } catch (...) {
    guard_.reset();
    unmap_with_guards(base_, layout.total_bytes);
    throw;
  }
  layout_.submit_tail = layout_.submit_head = kFirstPosition;
  std::memset(base_ + layout_.completions_offset, 0, layout_.slots_offset - layout_.completions_offset);
  std::memcpy(base_, &layout_, sizeof(layout_));
}

RingServer::~RingServer() {
  guard_.reset();
  unmap_with_guards(base_, layout_.total_bytes);
  close(doorbell_fd_);
}

uint32_t RingServer::pending() const noexcept {
  return __atomic_load_n(&header()->submit_tail, __ATOMIC_ACQUIRE) - static_cast<uint32_t>(position_);
}

syshax_ring_request RingServer::take() noexcept {
  syshax_ring_request copy;
  std::memcpy(&copy, base_ + layout_.requests_offset + position_ % layout_.num_slots * sizeof(copy), sizeof(copy));
  __asm__ volatile("" : "+m"(copy) : : "memory");  // the copy is checked and used, never the source again
  ++position_;
  __atomic_store_n(&header()->submit_head, static_cast<uint32_t>(position_), __ATOMIC_RELEASE);
  return copy;
}

RingSlot RingServer::slot(uint32_t index) const noexcept {
  uint8_t* begin = base_ + layout_.slots_offset + index * layout_.slot_bytes;
  return {begin, reinterpret_cast<const int32_t*>(begin + layout_.ids_offset),
          reinterpret_cast<const float*>(begin + layout_.weights_offset), begin + layout_.output_offset};
}

void RingServer::complete(uint32_t slot, const Completion& completion) noexcept {
  auto* c = reinterpret_cast<syshax_ring_completion*>(base_ + layout_.completions_offset) + slot;
  c->tag = completion.tag;
  c->status = completion.status;
  c->detail = completion.detail;
  c->detail2 = completion.detail2;
  c->queued_ns = completion.queued_ns;
  c->compute_ns = completion.compute_ns;
  __atomic_store_n(&c->state, static_cast<uint32_t>(completion.tag), __ATOMIC_RELEASE);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);  // state before waiters: the client increments waiters, then compares state
  if (__atomic_load_n(&c->waiters, __ATOMIC_RELAXED))
    syscall(SYS_futex, &c->state, FUTEX_WAKE, kMostWoken, nullptr, nullptr, 0);
}

void RingServer::set_parked(bool parked) noexcept {
  __atomic_store_n(&header()->parked, parked ? 1u : 0u, __ATOMIC_RELAXED);
}

void RingServer::set_closing(uint32_t closing) noexcept {
  if (closing_ > SYSHAX_RING_DRAINING) return;
  closing_ = closing;
  __atomic_store_n(&header()->closing, closing, __ATOMIC_RELEASE);
}

void RingServer::set_heartbeat(uint64_t now_ns) noexcept {
  __atomic_store_n(&header()->daemon_heartbeat, now_ns, __ATOMIC_RELAXED);
}

uint64_t RingServer::client_heartbeat() const noexcept {
  return __atomic_load_n(&header()->client_heartbeat, __ATOMIC_RELAXED);
}

uint64_t RingServer::client_wait_ns() const noexcept {
  return __atomic_load_n(&header()->client_wait_ns, __ATOMIC_RELAXED);
}

}  // namespace syshax
