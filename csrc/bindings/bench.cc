// Benchmarks of the core for `syshaxd bench`.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "base/error.h"
#include "bench/limits.h"
#include "bench/ring.h"
#include "bindings/bindings.h"

namespace py = pybind11;
using namespace pybind11::literals;
using namespace syshax;

namespace {

constexpr size_t kMaxLimitBytes = size_t{1} << 40;

Limit limit_named(const std::string& name) {
  std::string known;
  for (uint32_t i = 0; i < kNumLimits; ++i) {
    if (name == kLimitNames[i]) return static_cast<Limit>(i);
    known += (known.empty() ? "" : ", ") + std::string(kLimitNames[i]);
  }
  throw CoreError("invalid_argument", "\"" + name + "\" is no limit", "one of: " + known);
}

py::list measure(LimitBench& bench, const std::string& limit, double seconds) {
  const Limit which = limit_named(limit);
  if (!(seconds >= 0) || seconds > 3600) throw CoreError("invalid_argument", "seconds must be in [0, 3600]");
  std::vector<LimitVariant> variants;
  {
    py::gil_scoped_release unlocked;
    variants = bench.measure(which, seconds);
  }
  py::list result;
  for (const LimitVariant& variant : variants)
    result.append(py::make_tuple(variant.name, variant.per_second, variant.sustained));
  return result;
}

void bind_limits(py::module_& m) {
  py::class_<LimitBench>(m, "LimitBench")
      .def(py::init([](const std::vector<py::dict>& nodes, const std::string& isa_cap, uint32_t spin_us, size_t bytes) {
             if (bytes == 0 || bytes > kMaxLimitBytes)
               throw CoreError("invalid_argument", "bytes to read must be in [1, 1 TiB]");
             return std::make_unique<LimitBench>(to_plan(nodes), cap_cpu_features(detect_cpu_features(), isa_cap),
                                                 spin_us, bytes);
           }),
           "nodes"_a, "isa_cap"_a, "spin_us"_a, "bytes"_a)
      .def("measure", measure, "limit"_a, "seconds"_a);
}

void bind_ring(py::module_& m) {
  m.def(
      "bench_ring",
      [](double seconds, size_t payload_bytes, int client_cpu, int daemon_cpu) {
        RingBench r;
        {
          py::gil_scoped_release unlocked;
          r = bench_ring(seconds, payload_bytes, client_cpu, daemon_cpu);
        }
        return py::dict("spin_us_p50"_a = r.spin_us_p50, "spin_us_p99"_a = r.spin_us_p99,
                        "parked_us_p50"_a = r.parked_us_p50, "floor_spin_us"_a = r.floor_spin_us,
                        "floor_parked_us"_a = r.floor_parked_us);
      },
      "seconds"_a, "payload_bytes"_a, "client_cpu"_a, "daemon_cpu"_a);
}

}  // namespace

void bind_bench(py::module_& m) {
  bind_limits(m);
  bind_ring(m);
}
