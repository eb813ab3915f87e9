// Shapes that a client may ask for: refused, or laid out without overlap, overflow or a wrong sum. The reference
// computes in 128 bits.
#include "base/error.h"
#include "fuzz.h"
#include "ipc/ring_server.h"

namespace fuzz {
namespace {

__extension__ typedef unsigned __int128 Wide;

bool allowed(const syshax::RingShape& s) {
  return s.num_slots >= 1 && s.num_slots <= 64 && s.max_tokens >= 1 && s.max_tokens <= 1u << 20 && s.hidden_size >= 1 &&
         s.hidden_size <= 1u << 20 && s.top_k >= 1 && s.top_k <= 1u << 16 &&
         (s.element_bytes == 2 || s.element_bytes == 4);
}

void require(bool truth, const char* what, const syshax::RingShape& s) {
  if (truth) return;
  fail("layout: %s for slots %u, tokens %u, hidden %u, top_k %u, element %u", what, s.num_slots, s.max_tokens,
       s.hidden_size, s.top_k, s.element_bytes);
}

void check(const syshax::RingShape& s, const syshax_ring_header& h) {
  const Wide rows = Wide{s.max_tokens} * s.hidden_size * s.element_bytes, wide = Wide{s.max_tokens} * s.top_k * 4;
  // Areas in order, each with where it must begin at the earliest.
  const Wide places[] = {h.requests_offset, h.completions_offset, h.slots_offset};
  const Wide sizes[] = {Wide{s.num_slots} * 64, Wide{s.num_slots} * 64, Wide{s.num_slots} * h.slot_bytes};
  Wide begin = sizeof(syshax_ring_header);
  for (int i = 0; i < 3; ++i) {
    require(places[i] >= begin && places[i] % SYSHAX_RING_PAGE == 0, "an area overlaps or is not on a page", s);
    begin = places[i] + sizes[i];
  }
  require(begin == h.total_bytes && begin < Wide{1} << 62, "the sum is wrong", s);
  const Wide in_slot[] = {0, h.ids_offset, h.weights_offset, h.output_offset, h.slot_bytes};
  const Wide needed[] = {rows, wide, wide, rows};
  for (int i = 0; i < 4; ++i) {
    require(in_slot[i] % SYSHAX_RING_PAGE == 0, "an area of a slot is not on a page", s);
    require(in_slot[i + 1] >= in_slot[i] + needed[i], "areas of a slot overlap", s);
  }
}

}  // namespace

void run_layout(const uint8_t* data, size_t size) {
  Script script(data, size);
  syshax::RingShape shape = {};
  uint32_t* fields[] = {&shape.num_slots, &shape.max_tokens, &shape.hidden_size, &shape.top_k, &shape.element_bytes};
  const uint32_t small[] = {64, 4096, 8192, 128, 5};
  for (int i = 0; i < 5; ++i) {  // mostly shapes that may be had, or nearly
    uint32_t kind = script.below(4);
    *fields[i] = kind == 0 ? script.number() : script.word() % small[i] + (kind == 1);
  }
  shape.num_layers = script.number();
  try {
    syshax_ring_header layout = syshax::ring_layout(shape);
    require(allowed(shape), "accepted", shape);
    check(shape, layout);
  } catch (const syshax::CoreError&) {
    require(!allowed(shape), "refused", shape);
  }
}

}  // namespace fuzz
