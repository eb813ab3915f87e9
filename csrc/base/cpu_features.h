// What this CPU can do. Detected once and passed on as a value, so that tests may pass any set.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "syshax/matmul_base.h"

namespace syshax {

struct CpuFeatures {
  uint64_t bits = 0;  // SYSHAX_CPU_*
  bool has(uint64_t required) const { return (bits & required) == required; }
  std::vector<std::string> names() const;
};

// The set of these feature names. Throws CoreError("invalid_argument") for an unknown one.
CpuFeatures features_named(const std::vector<std::string>& names);

// The CPU's features as the operating system enables them, capped by the environment variable SYSHAX_ISA. Read once.
// Throws CoreError("hardware") when SYSHAX_ISA is no known name.
CpuFeatures detect_cpu_features();

// Caps to an ISA name ("scalar", "avx2", "avx512", "avx512vnni", "avx512bf16", ...; "" or "auto": no cap):
// features of later steps are cleared. Throws CoreError("hardware") naming the known ones.
CpuFeatures cap_cpu_features(CpuFeatures features, const std::string& isa);

// The names cap_cpu_features knows for this architecture, weakest first.
std::vector<std::string> isa_names();

// The strongest of isa_names() that the features reach.
std::string strongest_isa(const CpuFeatures& features);

}  // namespace syshax
