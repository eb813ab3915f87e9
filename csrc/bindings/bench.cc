// Benchmarks of the core for `syshaxd bench`.
#include <pybind11/pybind11.h>

#include "bench/ring.h"
#include "bindings/bindings.h"

namespace py = pybind11;
using namespace pybind11::literals;

void bind_bench(py::module_& m) {
  m.def(
      "bench_ring",
      [](double seconds, size_t payload_bytes, int client_cpu, int daemon_cpu) {
        syshax::RingBench r;
        {
          py::gil_scoped_release unlocked;
          r = syshax::bench_ring(seconds, payload_bytes, client_cpu, daemon_cpu);
        }
        return py::dict("spin_us_p50"_a = r.spin_us_p50, "spin_us_p99"_a = r.spin_us_p99,
                        "parked_us_p50"_a = r.parked_us_p50, "floor_spin_us"_a = r.floor_spin_us,
                        "floor_parked_us"_a = r.floor_parked_us);
      },
      "seconds"_a, "payload_bytes"_a, "client_cpu"_a, "daemon_cpu"_a);
}
