// What memory is free, as the kernel's files under /proc and /sys say: asked before memory is taken, so that a
// refusal can name numbers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace syshax {

// Free plus reclaimable bytes of a NUMA node, never more than the machine's MemAvailable; -1 or a node that does not
// exist: MemAvailable.
uint64_t node_free_bytes(int node);

// The kernel's list of NUMA nodes that have memory, such as "0-1,4"; "0" where it does not say.
std::string nodes_with_memory();

// Free 2 MiB pages in the pool of huge pages; of one node, or with -1 of the machine.
int64_t free_huge_pages(int node);

// How many bytes of each range, which are whole mappings, are mapped as huge pages of shared memory. The kernel looks
// at every page of the process for it, tens of milliseconds a GiB of small ones: once for all, and under no lock.
struct MappedRange {
  const void* base;
  size_t bytes;
};
std::vector<size_t> mapped_huge_bytes(const std::vector<MappedRange>& ranges);

}  // namespace syshax
