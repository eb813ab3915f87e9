// The table of targets.
#include "fuzz.h"

namespace fuzz {
namespace {

std::vector<Bytes> none() { return {Bytes(16, 0)}; }

}  // namespace

const std::vector<Target>& targets() {
  static const std::vector<Target> all = {
      {"layout", "shapes of rings against arithmetic in 128 bits", run_layout, none, 32},
      {"ring", "the daemon's side of one ring, alone", run_ring, ring_seeds, 256},
      {"client", "the client's library on rings that make no sense", run_client, client_seeds, 160},
      {"files", "packed chunks and guarded files", run_files, none, 64},
      {"dispatcher", "hostile sessions beside honest ones", run_dispatcher, dispatcher_seeds, 320},
  };
  return all;
}

const Target* find_target(const std::string& name) {
  for (const Target& target : targets())
    if (name == target.name) return &target;
  return nullptr;
}

}  // namespace fuzz
