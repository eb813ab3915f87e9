// Topology, free memory and arenas.
#include <pybind11/stl.h>

#include "base/error.h"
#include "bindings/bindings.h"
#include "memory/arena.h"
#include "memory/free_memory.h"
#include "memory/topology.h"

namespace py = pybind11;

namespace {

using namespace syshax;

py::dict topology(const std::string& synthetic) {
  const Topology found = discover_topology(synthetic);
  py::list nodes;
  for (const TopologyNode& node : found.nodes)
    nodes.append(py::dict(py::arg("node") = node.node, py::arg("memory_bytes") = node.memory_bytes,
                          py::arg("cores") = node.cores));
  return py::dict(py::arg("source") = found.source, py::arg("nodes") = nodes);
}

// [offset, offset + bytes) of the arena, checked.
char* range(const Arena& arena, size_t offset, size_t bytes) {
  if (offset > arena.bytes() || bytes > arena.bytes() - offset)
    throw CoreError("invalid_argument", "[" + std::to_string(offset) + ", +" + std::to_string(bytes) +
                                            ") lies outside an arena of " + std::to_string(arena.bytes()) + " bytes");
  return arena.data() + offset;
}

void bind_arena(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<Arena, std::unique_ptr<Arena>>(m, "Arena")
      .def(py::init([](const std::string& name, size_t bytes, int node, const std::string& huge_pages) {
             return std::make_unique<Arena>(name, bytes, node, parse_huge_pages(huge_pages));
           }),
           py::arg("name"), py::arg("bytes"), py::arg("node") = -1, py::arg("huge_pages") = "auto")
      .def_static(
          "adopt", [](int fd, int node) { return std::make_unique<Arena>(Arena::adopt(fd, node)); }, py::arg("fd"),
          py::arg("node") = -1)
      .def("populate", &Arena::populate, py::arg("offset"), py::arg("bytes"), no_gil)
      .def(
          "seal", [](Arena& arena) { arena.seal(); }, no_gil)
      .def("fileno", &Arena::fd)
      .def_property_readonly("size", &Arena::bytes)
      .def_property_readonly("huge_bytes", &Arena::huge_bytes)
      .def(
          "read",
          [](const Arena& arena, size_t offset, size_t bytes) { return py::bytes(range(arena, offset, bytes), bytes); },
          py::arg("offset"), py::arg("bytes"));
}

}  // namespace

void bind_memory(py::module_& m) {
  m.def("topology", topology, py::arg("synthetic") = "");
  m.def("node_free_bytes", node_free_bytes, py::arg("node"));
  bind_arena(m);
}
