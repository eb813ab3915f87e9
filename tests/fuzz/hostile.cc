// Contract: hostile.h. Operations are numbered so that a random byte chooses among them about evenly.
#include "hostile.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

namespace fuzz {

void write_secret(uint8_t* memory, size_t bytes, uint32_t key, uint64_t seed) {
  uint32_t word = static_cast<uint32_t>(seed) | 1;
  for (size_t at = 0; at + 8 <= bytes; at += 8) {
    word = word * 1664525 + 1013904223;
    uint32_t pair[2] = {word, word ^ key};
    std::memcpy(memory + at, pair, 8);
  }
}

bool holds_secret(const uint8_t* memory, size_t bytes, uint32_t key) {
  uint32_t in_a_row = 0;
  for (size_t at = 0; at + 8 <= bytes; at += 8) {
    uint64_t pair;
    std::memcpy(&pair, memory + at, 8);
    in_a_row = (static_cast<uint32_t>(pair) ^ static_cast<uint32_t>(pair >> 32)) == key ? in_a_row + 1 : 0;
    if (in_a_row == 3) return true;
  }
  return false;
}

MemoryFile::MemoryFile(size_t size) : bytes(size) {
  fd = memfd_create("fuzz-hostile", MFD_CLOEXEC);
  doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0 || doorbell < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) fail("no memory file");
  void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (mapped == MAP_FAILED) fail("no mapping");
  base = static_cast<uint8_t*>(mapped);
  guard_ = std::make_unique<syshax::SigbusGuard>(base, bytes);
}

MemoryFile::~MemoryFile() {
  guard_.reset();
  munmap(base, bytes);
  close(fd);
  close(doorbell);
}

namespace {

std::vector<std::unique_ptr<MemoryFile>> kept;

std::unique_ptr<MemoryFile> file_of(size_t bytes) {
  for (auto& file : kept) {
    if (file->bytes != bytes) continue;
    std::unique_ptr<MemoryFile> found = std::move(file);
    file = std::move(kept.back());
    kept.pop_back();
    std::memset(found->base, 0, bytes);
    return found;
  }
  return std::make_unique<MemoryFile>(bytes);
}

}  // namespace

HostileMemory::HostileMemory(const syshax_ring_header& layout, uint32_t secret)
    : layout_(layout), secret_(secret), file_(file_of(layout.total_bytes)), base_(file_->base) {
  const size_t rows = size_t{layout.max_tokens} * layout.hidden_size * layout.element_bytes;
  for (uint32_t slot = 0; slot < layout.num_slots; ++slot)
    write_secret(base_ + layout.slots_offset + slot * layout.slot_bytes, rows, secret, slot + secret);
}

HostileMemory::~HostileMemory() {
  uint64_t drained;
  bool rung = read(file_->doorbell, &drained, sizeof(drained)) > 0;
  if (!resized_ && kept.size() < 32u + rung) kept.push_back(std::move(file_));
}

void HostileMemory::publish(uint32_t tail, bool ring) {
  __atomic_store_n(&header()->submit_tail, tail, __ATOMIC_SEQ_CST);
  uint64_t one = 1;
  if (ring && write(file_->doorbell, &one, sizeof(one)) < 0) return;  // full: it has been rung
}

void HostileMemory::post(const syshax_ring_request& request, bool ring) {
  auto* queue = reinterpret_cast<syshax_ring_request*>(base_ + layout_.requests_offset);
  std::memcpy(queue + position_ % layout_.num_slots, &request, sizeof(request));
  publish(static_cast<uint32_t>(++position_), ring);
}

void HostileMemory::post_legal(Script& script) {
  syshax_ring_request r = {};
  if (static_cast<uint32_t>(++tag_) == 0) ++tag_;
  r.tag = tag_;
  r.slot = script.below(layout_.num_slots);
  r.layer = script.below(layout_.num_layers);
  r.num_tokens = script.below(layout_.max_tokens) + 1;
  r.top_k = script.below(layout_.top_k) + 1;
  r.dtype = layout_.element_bytes == 4 ? script.below(3) : 1 + script.below(2);
  post(r, script.below(4) != 0);
}

void HostileMemory::post_companion(uint32_t layer, Script& script) {
  syshax_ring_request r = {};
  if (static_cast<uint32_t>(++tag_) == 0) ++tag_;
  r.tag = tag_;
  r.slot = script.below(layout_.num_slots);
  r.layer = layer;
  r.num_tokens = script.below(layout_.max_tokens) + 1;
  r.top_k = layout_.top_k;
  r.dtype = layout_.element_bytes == 4 ? 0 : 1;
  post(r, true);
}

void HostileMemory::post_plausible(Script& script) {
  syshax_ring_request r = {};
  r.tag = script.below(8) ? ++tag_ : script.number();
  // Often at the edge: just one too far is what a wrong comparison lets pass.
  r.slot = script.below(8) ? script.below(layout_.num_slots + (script.below(8) == 0)) : script.number();
  uint32_t* fields[] = {&r.layer, &r.num_tokens, &r.top_k, &r.dtype, &r.flags};
  const uint32_t legal[] = {script.below(3), 1 + script.below(4), 1, 0, 0};
  for (int i = 0; i < 5; ++i) *fields[i] = script.below(4) ? legal[i] : script.number();
  touched_ = true;
  post(r, script.below(4) != 0);
}

void HostileMemory::post_any(Script& script) {
  syshax_ring_request r;
  script.fill(&r, sizeof(r));
  touched_ = true;
  post(r, true);
}

void HostileMemory::write_routing(Script& script) {
  uint8_t* slot = base_ + layout_.slots_offset + script.below(layout_.num_slots) * layout_.slot_bytes;
  uint8_t* area = slot + (script.below(2) ? layout_.ids_offset : layout_.weights_offset);
  uint32_t value = script.number(), count = script.below(16) + 1;
  const size_t area_bytes = layout_.output_offset - layout_.weights_offset;
  const size_t at = script.below(4) ? 4 * script.below(16) : script.word() % (area_bytes - 64) & ~size_t{3};
  for (uint32_t i = 0; i < count; ++i) std::memcpy(area + at + 4 * i, &value, 4);
}

void HostileMemory::write_somewhere(Script& script) {
  size_t at = script.number() % (layout_.total_bytes - 64);
  size_t count = script.below(64) + 1;
  uint8_t value = script.byte();
  std::memset(base_ + at, value, count);
  touched_ = true;
}

// Not under the thread sanitizer, which takes the zero pages that the fault's handler maps for a write to the memory.
void HostileMemory::change_size(Script& script) {
  uint64_t size = script.below(3) ? script.below(16) * uint64_t{4096} : script.number() % (2 * layout_.total_bytes);
#ifdef __SANITIZE_THREAD__
  size = layout_.total_bytes;
#endif
  touched_ = resized_ = true;
  if (ftruncate(file_->fd, static_cast<off_t>(size)) != 0)
    fail("ftruncate to %llu", static_cast<unsigned long long>(size));
}

void HostileMemory::punch(Script& script) {
  off_t at = static_cast<off_t>(script.below(16)) * 4096, bytes = static_cast<off_t>(script.below(16) + 1) * 4096;
  touched_ = true;
  if (fallocate(file_->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, bytes) != 0) fail("no hole can be punched");
}

void HostileMemory::ring_doorbell(Script& script) {
  uint64_t value = script.below(2) ? 1 : ~uint64_t{1} - script.byte();
  if (script.below(4) == 0) {
    uint64_t drained;
    if (read(file_->doorbell, &drained, sizeof(drained)) < 0) return;
  } else if (write(file_->doorbell, &value, sizeof(value)) < 0) {
    return;
  }
}

void HostileMemory::act(Script& script) {
  switch (script.byte() % kActions) {
    case 0:
    case 1:
    case 2:
      return post_legal(script);
    case 3:
    case 4:
      return post_plausible(script);
    case 5:
      return post_any(script);
    case 6:
    case 7:
      return write_routing(script);
    case 8:
      return write_somewhere(script);
    case 9:
      touched_ = true;
      return publish(script.number(), true);
    case 10:
      touched_ = true;
      return publish(static_cast<uint32_t>(position_ += script.below(70)), script.below(2));
    case 11:  // any word of the header
      touched_ = true;
      return script.fill(base_ + script.word() % (sizeof(syshax_ring_header) - 8), script.below(8) + 1);
    case 12:  // one in four: the file of such an input cannot be used again
      return script.below(4) ? punch(script) : change_size(script);
    case 13:
      return punch(script);
    case 14: {  // completions are the daemon's to write, and the client's to spoil
      uint8_t* completion = base_ + layout_.completions_offset + script.below(layout_.num_slots) * size_t{64};
      return script.fill(completion + script.below(8) * 8, 8);
    }
    default:
      return ring_doorbell(script);
  }
}

}  // namespace fuzz
