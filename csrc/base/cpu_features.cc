// Reads CPUID (x86) or the kernel's hardware capabilities (Arm); the environment variable SYSHAX_ISA caps the result,
// here and nowhere else.
#include "base/cpu_features.h"

#include <cstdlib>

#include "base/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

// Features that a test build provides in software.
#ifndef SYSHAX_EMULATED_FEATURES
#define SYSHAX_EMULATED_FEATURES 0
#endif

namespace syshax {
namespace {

struct NamedFeature {
  uint64_t bit;
  const char* name;
};

constexpr NamedFeature kFeatures[] = {
    {SYSHAX_CPU_AVX2, "avx2"},
    {SYSHAX_CPU_AVX512, "avx512"},
    {SYSHAX_CPU_AVX512VNNI, "avx512vnni"},
    {SYSHAX_CPU_AVX512BF16, "avx512bf16"},
    {SYSHAX_CPU_AVXVNNI, "avxvnni"},
    {SYSHAX_CPU_AVX512FP16, "avx512fp16"},
    {SYSHAX_CPU_AMX_INT8, "amx_int8"},
    {SYSHAX_CPU_AMX_BF16, "amx_bf16"},
    {SYSHAX_CPU_NEON, "neon"},
    {SYSHAX_CPU_DOTPROD, "dotprod"},
    {SYSHAX_CPU_I8MM, "i8mm"},
    {SYSHAX_CPU_ARM_BF16, "armbf16"},
};

// One step of an architecture's ladder: the feature that makes it, and what else a cap to it allows on top of the
// steps before it.
struct IsaStep {
  const char* name;
  uint64_t needs;
  uint64_t allows;
};

#if defined(__aarch64__)
constexpr IsaStep kSteps[] = {
    {"scalar", 0, 0},
    {"neon", SYSHAX_CPU_NEON, 0},
    {"dotprod", SYSHAX_CPU_DOTPROD, 0},
    {"i8mm", SYSHAX_CPU_I8MM, 0},
    {"armbf16", SYSHAX_CPU_ARM_BF16, 0},
};

uint64_t read_hardware() {
  const unsigned long caps = getauxval(AT_HWCAP), caps2 = getauxval(AT_HWCAP2);
  constexpr unsigned long kAsimd = 1ul << 1, kAsimdDp = 1ul << 20;  // AT_HWCAP
  constexpr unsigned long kI8mm = 1ul << 13, kBf16 = 1ul << 14;     // AT_HWCAP2
  uint64_t bits = 0;
  if (caps & kAsimd) bits |= SYSHAX_CPU_NEON;
  if (caps & kAsimdDp) bits |= SYSHAX_CPU_DOTPROD;
  if (caps2 & kI8mm) bits |= SYSHAX_CPU_I8MM;
  if (caps2 & kBf16) bits |= SYSHAX_CPU_ARM_BF16;
  return bits;
}
#elif defined(__x86_64__)
constexpr IsaStep kSteps[] = {
    {"scalar", 0, 0},
    {"avx2", SYSHAX_CPU_AVX2, 0},
    {"avx512", SYSHAX_CPU_AVX512, 0},
    {"avx512vnni", SYSHAX_CPU_AVX512VNNI, SYSHAX_CPU_AVXVNNI},
    {"avx512bf16", SYSHAX_CPU_AVX512BF16, SYSHAX_CPU_AVX512FP16},
    {"amx", SYSHAX_CPU_AMX_INT8 | SYSHAX_CPU_AMX_BF16, 0},
};

uint64_t enabled_states() {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t(high) << 32) | low;
}

// Linux gives a process tile registers on request alone, and may refuse.
bool tiles_granted(uint64_t states) {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of arch_prctl
  constexpr uint64_t kTileStates = 3ull << 17;
  return (states & kTileStates) == kTileStates && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

uint64_t read_hardware() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  constexpr unsigned kOsxsave = 1u << 27, kFma = 1u << 12, kF16c = 1u << 29;
  if ((c & (kOsxsave | kFma | kF16c)) != (kOsxsave | kFma | kF16c)) return 0;
  const uint64_t states = enabled_states();
  unsigned b7, c7, d7, a71 = 0, d71 = 0;
  if ((states & 0x6) != 0x6 || !__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return 0;
  if (a >= 1) __get_cpuid_count(7, 1, &a71, &b, &c, &d71);
  constexpr unsigned kAvx2 = 1u << 5, kBmi2 = 1u << 8;
  if ((b7 & (kAvx2 | kBmi2)) != (kAvx2 | kBmi2)) return 0;
  uint64_t bits = SYSHAX_CPU_AVX2;
  if (a71 & (1u << 4)) bits |= SYSHAX_CPU_AVXVNNI;
  constexpr unsigned kF = 1u << 16, kDq = 1u << 17, kCd = 1u << 28, kBw = 1u << 30, kVl = 1u << 31;
  constexpr unsigned kAll = kF | kDq | kCd | kBw | kVl;
  if ((states & 0xe0) != 0xe0 || (b7 & kAll) != kAll) return bits;
  bits |= SYSHAX_CPU_AVX512;
  if (c7 & (1u << 11)) bits |= SYSHAX_CPU_AVX512VNNI;
  if (a71 & (1u << 5)) bits |= SYSHAX_CPU_AVX512BF16;
  if (d7 & (1u << 23)) bits |= SYSHAX_CPU_AVX512FP16;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
  if ((d7 & kAmxTile) && tiles_granted(states)) {
    if (d7 & kAmxInt8) bits |= SYSHAX_CPU_AMX_INT8;
    if (d7 & kAmxBf16) bits |= SYSHAX_CPU_AMX_BF16;
  }
  return bits;
}
#else
constexpr IsaStep kSteps[] = {{"scalar", 0, 0}};

uint64_t read_hardware() { return 0; }
#endif

std::string joined_isa_names() {
  std::string text;
  for (const IsaStep& step : kSteps) text += (text.empty() ? "" : ", ") + std::string(step.name);
  return text;
}

CpuFeatures cap(CpuFeatures features, const std::string& isa, const char* where) {
  if (isa.empty() || isa == "auto") return features;
  uint64_t allowed = 0;
  for (const IsaStep& step : kSteps) {
    allowed |= step.needs | step.allows;
    if (isa == step.name) return CpuFeatures{features.bits & allowed};
  }
  throw CoreError("hardware", std::string(where) + ": \"" + isa + "\" is no ISA name of this architecture",
                  "use one of: auto, " + joined_isa_names());
}

}  // namespace

std::vector<std::string> CpuFeatures::names() const {
  std::vector<std::string> found;
  for (const NamedFeature& feature : kFeatures) {
    if (has(feature.bit)) found.emplace_back(feature.name);
  }
  return found;
}

CpuFeatures features_named(const std::vector<std::string>& names) {
  CpuFeatures features;
  for (const std::string& name : names) {
    uint64_t bit = 0;
    for (const NamedFeature& feature : kFeatures) bit |= name == feature.name ? feature.bit : 0;
    if (!bit) throw CoreError("invalid_argument", "unknown CPU feature \"" + name + "\"");
    features.bits |= bit;
  }
  return features;
}

CpuFeatures detect_cpu_features() {
  static const CpuFeatures features = [] {
    const char* wanted = std::getenv("SYSHAX_ISA");
    return cap(CpuFeatures{read_hardware() | SYSHAX_EMULATED_FEATURES}, wanted ? wanted : "", "SYSHAX_ISA");
  }();
  return features;
}

CpuFeatures cap_cpu_features(CpuFeatures features, const std::string& isa) { return cap(features, isa, "isa cap"); }

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const IsaStep& step : kSteps) names.emplace_back(step.name);
  return names;
}

std::string strongest_isa(const CpuFeatures& features) {
  std::string strongest = kSteps[0].name;
  for (const IsaStep& step : kSteps) {
    if (features.has(step.needs)) strongest = step.name;
  }
  return strongest;
}

}  // namespace syshax
