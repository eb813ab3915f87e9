// What memory is free, as the kernel's files under /proc and /sys say: asked before memory is taken, so that a
// refusal can name numbers.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace syshax {

// Free plus reclaimable bytes of a NUMA node, never more than the machine's MemAvailable; -1 or a node that does not
// exist: MemAvailable.
uint64_t node_free_bytes(int node);

// The kernel's list of NUMA nodes that have memory, such as "0-1,4"; "0" where it does not say.
std::string nodes_with_memory();

// Free 2 MiB pages in the pool of huge pages; of one node, or with -1 of the machine.
int64_t free_huge_pages(int node);

// How many bytes of the mapping that starts at base are mapped as huge pages of shared memory.
size_t mapped_huge_bytes(const void* base, size_t bytes);

}  // namespace syshax
