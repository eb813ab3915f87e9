// The daemon's side of one ring, served by a few lines in place of the dispatcher, on one thread: fast, and the same
// every time. Beside it, in the same kind of memory, lies a neighbour in which no byte may change.
#include <cstdint>

#include "base/error.h"
#include "fuzz.h"
#include "hostile.h"

namespace fuzz {
namespace {

constexpr uint32_t kHidden = 256, kSecret = 0x5ec7e700;

// A ring in memory of its own that nobody writes; its bytes as they were.
struct Neighbour {
  syshax_ring_header layout = syshax::ring_layout({2, 4, kHidden, 2, 4, 3});
  HostileMemory memory{layout, 0x0e1bb0u};
  syshax::RingServer server{memory.fd(), memory.doorbell(), layout};
  Bytes before{memory.base(), memory.base() + layout.total_bytes};

  void check() const {
    if (std::memcmp(memory.base(), before.data(), before.size()) != 0) fail("ring: the neighbour's memory changed");
  }
};

// As the dispatcher does: at most num_slots requests, each copied once, answered by slot.
void serve(syshax::RingServer& ring, Script& script) {
  uint32_t pending = ring.pending();
  const syshax_ring_header& h = ring.layout();
  for (; pending != 0 && pending <= h.num_slots && !ring.poisoned(); --pending) {
    syshax_ring_request request = ring.take();
    if (request.slot >= h.num_slots) continue;
    syshax::RingSlot slot = ring.slot(request.slot);
    const auto* begin = static_cast<const uint8_t*>(slot.hidden_states);
    if (reinterpret_cast<const uint8_t*>(slot.topk_ids) != begin + h.ids_offset ||
        reinterpret_cast<const uint8_t*>(slot.topk_weights) != begin + h.weights_offset ||
        static_cast<uint8_t*>(slot.output) != begin + h.output_offset)
      fail("ring: an area is not where the layout has it");
    std::memmove(slot.output, slot.hidden_states, size_t{h.max_tokens} * h.hidden_size * h.element_bytes);
    ring.complete(request.slot, {request.tag, script.byte(), static_cast<int32_t>(request.layer), request.num_tokens});
  }
  ring.set_heartbeat(script.byte());
  ring.set_parked(script.below(2));
  if (ring.client_heartbeat() + ring.client_wait_ns() == 1) ring.set_closing(script.number());
}

}  // namespace

void run_ring(const uint8_t* data, size_t size) {
  static Neighbour neighbour;
  Script script(data, size);
  syshax_ring_header layout = syshax::ring_layout(
      {script.below(3) + 1, script.below(6) + 1, kHidden, script.below(2) + 1, script.below(2) ? 4u : 2u, 3});
  HostileMemory memory(layout, kSecret);
  if (script.below(16) == 0) memory.act(script);  // before the daemon has mapped it
  try {
    syshax::RingServer ring(memory.fd(), memory.doorbell(), layout);
    while (!script.done()) {
      memory.act(script);
      if (script.below(3)) serve(ring, script);
    }
    serve(ring, script);
    if (ring.layout().total_bytes != layout.total_bytes) fail("ring: the layout changed");
    if (holds_secret(memory.base(), layout.total_bytes, 0x0e1bb0u)) fail("ring: the neighbour's data came over");
  } catch (const syshax::CoreError& error) {
    if (!memory.touched()) fail("ring: untouched memory is refused: %s", error.what());
  }
  neighbour.check();
}

std::vector<Bytes> ring_seeds() {
  std::vector<Bytes> seeds;
  for (uint8_t action = 0; action < HostileMemory::kActions; ++action) {
    Bytes seed = {1, 3, 1, 1, 1};
    for (uint8_t round = 0; round < 6; ++round) seed.insert(seed.end(), {action, round, 1, 2, 0, 1, 1, 0, 1, 2});
    seeds.push_back(seed);
  }
  return seeds;
}

}  // namespace fuzz
