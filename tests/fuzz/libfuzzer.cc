// The same targets for libFuzzer (clang++ -fsanitize=fuzzer) and for AFL++ (afl-clang-fast++ takes such programs too).
// SYSHAX_FUZZ_TARGET names the target.
#include <cstdlib>

#include "fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const fuzz::Target* target = [] {
    const char* name = std::getenv("SYSHAX_FUZZ_TARGET");
    const fuzz::Target* found = fuzz::find_target(name ? name : "dispatcher");
    if (!found) fuzz::fail("SYSHAX_FUZZ_TARGET=%s: there is no such target", name);
    return found;
  }();
  target->run(data, size);
  return 0;
}
