// Round-trip times of the ring with a model that hands back what it is given, and the floors that this machine sets:
// what the same two processes need to pass the payload on with a bare word of shared memory, and to wake each other
// with eventfds.
#pragma once
#include <cstddef>

namespace syshax {

struct RingBench {
  double spin_us_p50, spin_us_p99;  // both sides spinning; where they share a CPU they sleep at once instead
  double parked_us_p50;             // both sides sleeping between requests
  double floor_spin_us, floor_parked_us;
};

// Takes about `seconds`. payload_bytes: of hidden_states and of the output, one token. CPUs to pin to, -1: none.
// Forks its client; throws CoreError.
RingBench bench_ring(double seconds, size_t payload_bytes, int client_cpu, int daemon_cpu);

}  // namespace syshax
