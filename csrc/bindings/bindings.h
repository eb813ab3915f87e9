// One function for each file in this folder; module.cc calls them.
#pragma once
#include <pybind11/pybind11.h>

#include <vector>

void bind_hardware(pybind11::module_& m);  // hardware.cc: CPU features
void bind_memory(pybind11::module_& m);    // memory.cc: topology, free memory, arenas
void bind_kernels(pybind11::module_& m);   // kernels.cc: formats, kernels, vector ops
void bind_runtime(pybind11::module_& m);   // runtime.cc: Runtime, Model
void bind_bench(pybind11::module_& m);     // bench.cc
void bind_files(pybind11::module_& m);     // files.cc: checkpoint files, mapped for reading
void bind_harness(pybind11::module_& m);   // harness.cc: the ring's ABI, a dispatcher over a fake model (tests)

namespace syshax {
struct NodePlan;
struct SessionStats;
}  // namespace syshax
struct syshax_ring_header;

// harness.cc; for every binding that shows rings
pybind11::dict ring_header_dict(const syshax_ring_header& header);
pybind11::dict session_stats_dict(const syshax::SessionStats& stats);

// runtime.cc; for every binding that takes a plan
std::vector<syshax::NodePlan> to_plan(const std::vector<pybind11::dict>& nodes);
