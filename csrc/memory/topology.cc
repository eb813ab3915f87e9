// hwloc's view of the machine as plain structs; the only file that includes hwloc. Contract: topology.h.
#include "memory/topology.h"

#include <hwloc.h>

#include <memory>

#include "base/error.h"

namespace syshax {
namespace {

struct DestroyTopology {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
using TopologyPtr = std::unique_ptr<hwloc_topology, DestroyTopology>;

TopologyPtr load(const std::string& synthetic) {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) throw CoreError("hardware", "hwloc cannot start");
  TopologyPtr topology(raw);
  hwloc_topology_set_flags(raw, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED);
  hwloc_topology_set_io_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_NONE);
  if (!synthetic.empty() && hwloc_topology_set_synthetic(raw, synthetic.c_str()) != 0)
    throw CoreError("hardware", "hwloc does not understand the synthetic topology \"" + synthetic + "\"",
                    "for example: numa:2 core:4 pu:2");
  if (hwloc_topology_load(raw) != 0) throw CoreError("hardware", "hwloc cannot read this machine's topology");
  return topology;
}

std::vector<int> cpus_of(hwloc_const_cpuset_t set) {
  std::vector<int> cpus;
  for (int cpu = hwloc_bitmap_first(set); cpu >= 0; cpu = hwloc_bitmap_next(set, cpu)) cpus.push_back(cpu);
  return cpus;
}

// The index of the node with the most memory among those near `cpu`; -1: none.
int home_of(hwloc_topology_t topology, int cpu, int num_nodes) {
  int best = -1;
  uint64_t most = 0;
  for (int i = 0; i < num_nodes; ++i) {
    const hwloc_obj_t node = hwloc_get_obj_by_type(topology, HWLOC_OBJ_NUMANODE, static_cast<unsigned>(i));
    if (!hwloc_bitmap_isset(node->cpuset, static_cast<unsigned>(cpu))) continue;
    const uint64_t bytes = node->attr->numanode.local_memory;
    if (best < 0 || bytes > most) best = i, most = bytes;
  }
  return best;
}

}  // namespace

Topology discover_topology(const std::string& synthetic) {
  const TopologyPtr loaded = load(synthetic);
  hwloc_topology_t topology = loaded.get();
  Topology result;
  result.source = synthetic.empty() ? "system" : "synthetic";
  const int num_nodes = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE);
  for (int i = 0; i < num_nodes; ++i) {
    const hwloc_obj_t node = hwloc_get_obj_by_type(topology, HWLOC_OBJ_NUMANODE, static_cast<unsigned>(i));
    result.nodes.push_back({static_cast<int>(node->os_index), node->attr->numanode.local_memory, {}});
  }
  // Some virtual machines and containers show processing units without cores.
  const bool has_cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE) > 0;
  const hwloc_obj_type_t type = has_cores ? HWLOC_OBJ_CORE : HWLOC_OBJ_PU;
  const int num_cores = hwloc_get_nbobjs_by_type(topology, type);
  for (int i = 0; i < num_cores; ++i) {
    const hwloc_obj_t core = hwloc_get_obj_by_type(topology, type, static_cast<unsigned>(i));
    std::vector<int> cpus = cpus_of(core->cpuset);
    if (cpus.empty()) continue;
    const int home = home_of(topology, cpus.front(), num_nodes);
    if (home >= 0) result.nodes[static_cast<size_t>(home)].cores.push_back(std::move(cpus));
  }
  return result;
}

}  // namespace syshax
