// The client's library on a ring whose header makes no sense, and beside a daemon's side that answers anything or
// nothing: it opens exactly the headers whose areas lie in the memory (the reference computes in 128 bits), and every
// call ends.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "fuzz.h"
#include "ipc/client.h"
#include "ipc/ring_server.h"

namespace fuzz {
namespace {

__extension__ typedef unsigned __int128 Wide;

constexpr uint64_t kPage = SYSHAX_RING_PAGE;

bool fits(const syshax_ring_header& h, uint64_t bytes) {
  if (h.magic != SYSHAX_RING_MAGIC || h.version_major != SYSHAX_RING_VERSION_MAJOR) return false;
  if (h.num_slots < 1 || h.num_slots > SYSHAX_RING_MAX_SLOTS || (h.element_bytes != 2 && h.element_bytes != 4))
    return false;
  if (h.max_tokens == 0 || h.hidden_size == 0 || h.top_k == 0) return false;
  for (uint64_t offset : {h.requests_offset, h.completions_offset, h.slots_offset, h.slot_bytes, h.ids_offset,
                          h.weights_offset, h.output_offset})
    if (offset % kPage != 0) return false;
  const Wide rows = Wide{h.max_tokens} * h.hidden_size * h.element_bytes, wide = Wide{h.max_tokens} * h.top_k * 4;
  const Wide queue = Wide{h.num_slots} * 64;
  return Wide{h.requests_offset} >= sizeof(h) && h.requests_offset + queue <= h.completions_offset &&
         h.completions_offset + queue <= h.slots_offset &&
         h.slots_offset + Wide{h.num_slots} * h.slot_bytes <= h.total_bytes && h.total_bytes <= bytes &&
         rows <= h.ids_offset && h.ids_offset + wide <= h.weights_offset &&
         h.weights_offset + wide <= h.output_offset && h.output_offset + rows <= h.slot_bytes;
}

struct Memory {
  int fd = memfd_create("fuzz-client", MFD_CLOEXEC);
  int doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  ~Memory() {
    close(fd);
    close(doorbell);
  }
};

// Fields that matter, each with its width.
void change_header(syshax_ring_header& h, Script& script) {
  uint64_t* wide[] = {&h.requests_offset, &h.completions_offset, &h.slots_offset,  &h.slot_bytes,
                      &h.ids_offset,      &h.weights_offset,     &h.output_offset, &h.total_bytes};
  uint32_t* narrow[] = {&h.magic,      &h.num_slots,   &h.max_tokens,  &h.hidden_size, &h.top_k,   &h.element_bytes,
                        &h.num_layers, &h.submit_tail, &h.submit_head, &h.spin_us,     &h.closing, &h.parked};
  switch (script.below(5)) {
    case 0:
      *narrow[script.below(12)] = script.number();
      break;
    case 1: {
      uint64_t value = script.number();
      *wide[script.below(8)] = script.below(2) ? value << 32 | script.number() : value;
      break;
    }
    case 2:  // as far below 2^64 as it takes to wrap around
      *wide[script.below(8)] = uint64_t{0} - (script.below(4) + 1) * (script.below(4) ? kPage : uint64_t{64});
      break;
    case 3: {
      uint64_t& field = *wide[script.below(8)];
      field += script.below(2) ? kPage : ~kPage + 1;
      break;
    }
    default: {
      uint8_t bytes[sizeof(h)];
      std::memcpy(bytes, &h, sizeof(h));
      script.fill(bytes + script.word() % (sizeof(h) - 8), script.below(8) + 1);
      std::memcpy(&h, bytes, sizeof(h));
    }
  }
}

void require_inside(syshax_client* client, const void* area, uint64_t bytes, const char* what) {
  uint64_t total;
  const uint8_t* base = static_cast<const uint8_t*>(syshax_client_base(client, &total));
  const uint8_t* begin = static_cast<const uint8_t*>(area);
  if (begin < base || static_cast<uint64_t>(begin - base) > total ||
      total - static_cast<uint64_t>(begin - base) < bytes)
    fail("client: %s lies outside of the memory", what);
}

// What an answer of a daemon may look like, before or instead of a right one.
void write_completions(syshax_client* client, const syshax_ring_header& h, Script& script) {
  uint64_t total;
  uint8_t* base = static_cast<uint8_t*>(syshax_client_base(client, &total));
  auto* completions = reinterpret_cast<syshax_ring_completion*>(base + h.completions_offset);
  syshax_ring_completion& c = completions[script.below(h.num_slots)];
  script.fill(&c, script.below(2) ? sizeof(c) : 0);
  if (script.below(2)) c.state = h.submit_tail + 1 + script.below(3);
}

// Returns the slots that are still held.
uint64_t use(syshax_client* client, const syshax_ring_header& h, Script& script) {
  uint64_t held = 0;
  const uint64_t rows = uint64_t{h.max_tokens} * h.hidden_size * h.element_bytes,
                 wide = uint64_t{h.max_tokens} * h.top_k * 4;
  for (uint32_t round = 0; round < 3; ++round) {
    write_completions(client, h, script);
    uint32_t slot;
    if (syshax_client_acquire(client, script.below(2) * 1000, &slot) != 0) continue;
    if (slot >= h.num_slots) fail("client: a slot that does not exist");
    void* hidden_states = syshax_client_hidden_states(client, slot);
    void* output = syshax_client_output(client, slot);
    require_inside(client, hidden_states, rows, "hidden_states");
    require_inside(client, syshax_client_topk_ids(client, slot), wide, "topk_ids");
    require_inside(client, syshax_client_topk_weights(client, slot), wide, "topk_weights");
    require_inside(client, output, rows, "output");
    std::memset(hidden_states, 1, rows);
    std::memset(output, 2, rows);
    uint64_t tag;
    syshax_client_result result;
    uint32_t words[] = {script.number(), script.number(), script.number(), script.number()};
    int error = syshax_client_submit(client, slot, words[0], words[1], words[2], words[3], &tag);
    if (error == SYSHAX_CLIENT_BAD_ARGUMENT) fail("client: a slot that is held cannot be submitted");
    if (error != 0) {  // the header says that the session has ended
      syshax_client_release(client, slot);
      continue;
    }
    syshax_client_wait(client, slot, script.below(4) ? tag : script.number(), script.below(4) * 3000, &result);
    if (script.below(4))
      syshax_client_release(client, slot);
    else
      held |= uint64_t{1} << slot;
  }
  return held;
}

}  // namespace

void run_client(const uint8_t* data, size_t size) {
  Script script(data, size);
  Memory memory;
  syshax_ring_header h = syshax::ring_layout({script.below(5) + 1, script.below(20) + 1, 16u << script.below(5),
                                              script.below(3) + 1, script.below(2) ? 4u : 2u, 3});
  uint64_t bytes = h.total_bytes;
  h.submit_tail = h.submit_head = syshax::kFirstPosition;
  for (uint32_t left = script.below(4); left != 0; --left) change_header(h, script);
  if (script.below(8) == 0) bytes = script.number() % (2 * bytes);
  if (ftruncate(memory.fd, static_cast<off_t>(bytes)) != 0) fail("client: ftruncate");
  if (bytes >= sizeof(h) && pwrite(memory.fd, &h, sizeof(h), 0) != sizeof(h)) fail("client: pwrite");
  syshax_client* client = nullptr;
  int error = syshax_client_open(memory.fd, memory.doorbell, -1, &client);
  if ((error == 0) != (bytes >= kPage && fits(h, bytes)))
    fail(
        "client: a ring that %s was %s (%s; slots %u, tokens %u, hidden %u, top_k %u, at %llx %llx %llx, slot %llx: "
        "%llx "
        "%llx %llx, %llx of %llx)",
        error == 0 ? "does not fit" : "fits", error == 0 ? "opened" : "refused", syshax_client_error_name(error),
        h.num_slots, h.max_tokens, h.hidden_size, h.top_k, (unsigned long long)h.requests_offset,
        (unsigned long long)h.completions_offset, (unsigned long long)h.slots_offset, (unsigned long long)h.slot_bytes,
        (unsigned long long)h.ids_offset, (unsigned long long)h.weights_offset, (unsigned long long)h.output_offset,
        (unsigned long long)h.total_bytes, (unsigned long long)bytes);
  if (error != 0) return;
  uint64_t held = use(client, h, script);
  for (uint32_t left = script.below(3); left != 0; --left) {
    uint32_t slot = script.number();
    syshax_client_release(client, slot);
    if (slot < 64) held &= ~(uint64_t{1} << slot);
  }
  syshax_client_close(client);
  for (uint32_t slot = 0; slot < 64; ++slot)  // the last one unmaps
    if (held >> slot & 1) syshax_client_release(client, slot);
}

std::vector<Bytes> client_seeds() {
  std::vector<Bytes> seeds;
  for (uint8_t changes = 0; changes < 4; ++changes) {
    Bytes seed(66, static_cast<uint8_t>(changes * 5 + 1));
    const Bytes shape = {2, 8, 2, 1, 1, changes};
    std::copy(shape.begin(), shape.end(), seed.begin());
    seeds.push_back(seed);
  }
  seeds.push_back({0, 0, 0, 0, 0, 1, 2, 0, 1, 0, 0});  // requests_offset = 2^64 - 64
  seeds.push_back({0, 0, 0, 0, 0, 1, 2, 5, 1, 0, 0});  // weights_offset
  return seeds;
}

}  // namespace fuzz
