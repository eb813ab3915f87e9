// Every loop that this CPU can run gives a figure for each limit: proof that the loops of an ISA that only an emulator
// has here are at least right.
#include "bench/limits.h"

#include "native_test.h"

using namespace syshax;
using native_test::fail;

int main() {
  NodePlan plan;
  plan.threads = 2;
  LimitBench bench({plan}, detect_cpu_features(), 0, size_t{4} << 20);
  for (uint32_t limit = 0; limit < kNumLimits; ++limit) {
    const std::vector<LimitVariant> variants = bench.measure(static_cast<Limit>(limit), 0);
    if (variants.empty()) fail("%s: no loop", kLimitNames[limit]);
    for (const LimitVariant& variant : variants) {
      if (!(variant.per_second > 1e3))
        fail("%s: %s gives %f", kLimitNames[limit], variant.name.c_str(), variant.per_second);
      if (limit != 0) std::printf("%s: %s\n", kLimitNames[limit], variant.name.c_str());
    }
    std::printf("%s: %zu loops\n", kLimitNames[limit], variants.size());
  }
  return 0;
}
