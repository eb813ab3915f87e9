// The C++ face of an arena: owns one, turns its error codes into CoreError("no_memory"). Move-only.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include "syshax/memory_manager.h"

namespace syshax {

constexpr size_t kPageBytes = 4096;
constexpr size_t kHugePageBytes = size_t{2} << 20;

class Arena {
 public:
  Arena() = default;
  // Maps and binds; touches no page.
  Arena(const std::string& name, size_t bytes, int node, syshax_huge_pages huge_pages);
  ~Arena() { syshax_arena_destroy(&arena_); }
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Different ranges may be populated by different threads at the same time.
  void populate(size_t offset, size_t bytes);
  // counted: huge_bytes is known then. Who seals several counts them all at once (mapped_huge_bytes).
  void seal(bool counted = true);
  // Takes the descriptor over when it can map it; else it stays the caller's.
  static Arena adopt(int fd, int node);
  // Leaves the descriptor to the caller in any case.
  static Arena adopt_duplicate(int fd, int node);

  char* data() const { return static_cast<char*>(arena_.base); }
  size_t bytes() const { return arena_.bytes; }
  int fd() const { return arena_.fd; }
  // Known once sealed and counted, or adopted; 0 before.
  size_t huge_bytes() const { return arena_.huge_bytes; }

 private:
  syshax_arena arena_ = {nullptr, 0, -1, -1, 0, SYSHAX_HUGE_OFF};
};

// syshax_arena_seal without counting huge pages.
int seal_uncounted(syshax_arena* arena, char* error, size_t error_size);

// Maps pages that are there before they are first read; best effort. False: some cannot be read, which would end the
// process: the machine's memory has an error there.
bool prefault_pages(const void* begin, size_t bytes);

// "off", "auto" or "require"; else CoreError("config").
syshax_huge_pages parse_huge_pages(const std::string& value);

}  // namespace syshax
