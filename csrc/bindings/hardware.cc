// What the machine is: CPU features and ISA names.
#include <pybind11/stl.h>

#include <fstream>

#include "base/cpu_features.h"
#include "bindings/bindings.h"

namespace py = pybind11;
using namespace syshax;

namespace {

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) return line.substr(line.find(':') + 2);
  }
  return "unknown CPU";
}

void bind_cpu(py::module_& m) {
  m.def("cpu_name", cpu_name);
  m.def(
      "cpu_features",
      [](const std::string& isa_cap) { return cap_cpu_features(detect_cpu_features(), isa_cap).names(); },
      py::arg("isa_cap") = "");
  m.def("isa_names", isa_names);
  m.def(
      "isa_effective",
      [](const std::string& isa_cap) { return strongest_isa(cap_cpu_features(detect_cpu_features(), isa_cap)); },
      py::arg("isa_cap") = "");
}

}  // namespace

void bind_hardware(py::module_& m) { bind_cpu(m); }
