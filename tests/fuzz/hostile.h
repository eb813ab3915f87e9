// A hostile client's hands: its own view of a session's shared memory and all that it can do to it by a script.
// Knows the layout, and nothing of who serves the ring.
#pragma once
#include <memory>
#include <vector>

#include "fuzz.h"
#include "ipc/ring_layout.h"
#include "ipc/ring_server.h"
#include "ipc/sigbus_guard.h"

namespace fuzz {

// Pairs of words that differ by `key` in every pair: a mark that survives a model which adds the same word to all
// (by exclusive or). `seed` chooses the words, `key` whose they are.
void write_secret(uint8_t* memory, size_t bytes, uint32_t key, uint64_t seed);
// Three such pairs in a row anywhere in the memory.
bool holds_secret(const uint8_t* memory, size_t bytes, uint32_t key);

// A memory file with its doorbell, mapped whole and populated. The mapping is guarded: a script that truncates it must
// not end this process by its own next write. Page faults are most of what an input costs, so files whose size was
// not touched are kept and used again, zeroed.
class MemoryFile {
 public:
  explicit MemoryFile(size_t bytes);
  ~MemoryFile();
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  int fd = -1, doorbell = -1;
  uint8_t* base = nullptr;
  const size_t bytes;

 private:
  std::unique_ptr<syshax::SigbusGuard> guard_;
};

class HostileMemory {
 public:
  // Zeroed memory of that layout, its slots' hidden_states filled with the secret.
  HostileMemory(const syshax_ring_header& layout, uint32_t secret);
  ~HostileMemory();
  HostileMemory(const HostileMemory&) = delete;
  HostileMemory& operator=(const HostileMemory&) = delete;

  int fd() const { return file_->fd; }
  int doorbell() const { return file_->doorbell; }
  uint32_t secret() const { return secret_; }
  uint8_t* base() const { return file_->base; }
  const syshax_ring_header& layout() const { return layout_; }
  bool touched() const { return touched_; }  // its queue may make no sense any more

  // One operation of the script on the memory or the doorbell.
  void act(Script& script);
  void post(const syshax_ring_request& request, bool ring);
  // What a client that keeps to the rules would post; ids and weights are legal.
  void post_legal(Script& script);
  // A legal one for that layer, of the kind that an honest client's may be computed together with.
  void post_companion(uint32_t layer, Script& script);
  static constexpr uint32_t kActions = 16;

 private:
  void post_plausible(Script& script);
  void post_any(Script& script);
  void write_routing(Script& script);
  void write_somewhere(Script& script);
  void change_size(Script& script);
  void punch(Script& script);
  void ring_doorbell(Script& script);
  syshax_ring_header* header() { return reinterpret_cast<syshax_ring_header*>(base_); }
  void publish(uint32_t tail, bool ring);

  const syshax_ring_header layout_;
  const uint32_t secret_;
  std::unique_ptr<MemoryFile> file_;
  uint8_t* const base_;
  uint64_t position_ = syshax::kFirstPosition, tag_ = syshax::kFirstPosition;
  bool touched_ = false, resized_ = false;
};

}  // namespace fuzz
