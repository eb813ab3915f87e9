// What every CPU of the architecture has: 128-bit vectors as the compiler offers them. The limit where no ISA's own
// loops apply.

#include "bench/limit_chains.h"
#include "bench/limit_loops.h"
#include "bench/limit_reads.h"

namespace syshax {
namespace {

using Floats = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(16)));

struct Line {
  using Register = Ints;
  static Register zero() { return Ints{}; }
  static Register mix(Register sum, const char* line) {
    const Ints* p = reinterpret_cast<const Ints*>(line);
    return sum ^ p[0] ^ p[1] ^ p[2] ^ p[3];
  }
  static void keep(Register sum) { asm volatile("" ::"m"(sum)); }
};

template <class T>
struct MultiplyAdd {
  using Sum = T;
  static Sum zero() { return Sum{}; }
  // Both kinds of vector live in the floating-point registers.
  static void hide(Sum& sum) {
#if defined(__aarch64__)
    asm volatile("" : "+w"(sum));
#elif defined(__x86_64__)
    asm volatile("" : "+x"(sum));
#else
    asm volatile("" : "+m"(sum));
#endif
  }
  void step(Sum& sum) {
    hide(a);  // or the product would be computed once
    sum += a * b;
    hide(sum);
  }
  Sum a = {3, 5, 7, 9}, b = {2, 4, 6, 8};
};

constexpr ComputeLoop kCompute[] = {
    {"portable, 12 chains of float32", kFloatLimits, 0, 12 * 4 * 2, run_chains<MultiplyAdd<Floats>, 12>},
    {"portable, 12 chains of int32", kByteLimits, 0, 12 * 4 * 2, run_chains<MultiplyAdd<Ints>, 12>},
};

constexpr ReadLoop kRead[] = {SYSHAX_READ_LOOPS(Line, "portable", 0)};

}  // namespace

IsaLoops limit_loops_portable() {
  return {{kCompute, sizeof(kCompute) / sizeof(*kCompute)}, {kRead, sizeof(kRead) / sizeof(*kRead)}};
}

}  // namespace syshax
