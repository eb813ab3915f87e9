// The element-wise operations that this CPU can run, without Python: conversions and sums have the scalar table's bits,
// SiLU lies within a few units of the last place.
#include <cmath>
#include <vector>

#include "kernels/vector_ops.h"
#include "native_test.h"

using namespace syshax;
using namespace native_test;

namespace {

float any_float(Random& random) {
  const uint32_t bits = static_cast<uint32_t>(random.bits());
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

void check_silu(const VectorOps& ops) {
  Random random(1);
  for (int round = 0; round < 4000; ++round) {
    auto tile = make_memory<float>(32), out = make_memory<float>(16);
    for (int i = 0; i < 16; ++i) {
      tile[i] = round % 2 ? any_float(random) : random.unit() * 110;
      tile[16 + i] = 1.0f;
    }
    ops.silu_mul(tile.get(), 1, out.get());
    for (int i = 0; i < 16; ++i) {
      const float x = tile[i];
      if (x != x ? out[i] != out[i] : std::isinf(x) ? out[i] == (x > 0 ? x : 0.0f) : false) continue;
      const double wide = x < -700 ? -700.0 : double(x), exact = wide / (1 + std::exp(-wide));
      const double bound = std::fabs(exact) * 4 * 0x1p-23 + (1 + std::fabs(wide)) * 0x1p-149;
      if (!(std::fabs(out[i] - exact) <= bound))
        fail("%s: silu(%.9g) is %.9g, float64 says %.9g", ops.isa, double(x), double(out[i]), exact);
    }
  }
}

void check_accumulate(const VectorOps& ops, const VectorOps& reference) {
  Random random(2);
  for (size_t values = 1; values < 70; ++values) {
    std::vector<float> src(values), a(values), b;
    for (size_t i = 0; i < values; ++i) src[i] = random.unit() * 100, a[i] = random.unit();
    b = a;
    const float weight = random.unit();
    ops.accumulate(weight, src.data(), values, a.data());
    reference.accumulate(weight, src.data(), values, b.data());
    for (size_t i = 0; i < values; ++i)
      if (!same(a[i], b[i])) fail("%s: accumulate of %zu values differs at %zu", ops.isa, values, i);
  }
}

void check_conversions(const VectorOps& ops, const VectorOps& reference, syshax_dtype dtype) {
  const size_t size = dtype == SYSHAX_FLOAT32 ? 4 : 2;
  Random random(3);
  for (size_t round = 0; round < 3000; ++round) {
    const size_t values = round % 70 + 1;
    std::vector<float> x(values), wide(values), wanted_wide(values);
    for (float& v : x) v = round % 2 ? any_float(random) : random.unit() * 0x1p-14f * float(round);
    std::vector<char> narrow(values * size), wanted(values * size);
    ops.narrow(x.data(), values, dtype, narrow.data());
    reference.narrow(x.data(), values, dtype, wanted.data());
    if (narrow != wanted) fail("%s: narrow to dtype %d differs for %zu values", ops.isa, dtype, values);
    ops.widen(narrow.data(), dtype, values, wide.data());
    reference.widen(narrow.data(), dtype, values, wanted_wide.data());
    if (std::memcmp(wide.data(), wanted_wide.data(), values * 4) != 0)
      fail("%s: widen from dtype %d differs for %zu values", ops.isa, dtype, values);
  }
}

}  // namespace

int main() {
  const std::vector<const VectorOps*> tables = usable_vector_ops(detect_cpu_features());
  for (const VectorOps* ops : tables) {
    check_silu(*ops);
    check_accumulate(*ops, *tables.front());
    for (const syshax_dtype dtype : {SYSHAX_FLOAT32, SYSHAX_FLOAT16, SYSHAX_BFLOAT16})
      check_conversions(*ops, *tables.front(), dtype);
    std::printf("vector operations of %s\n", ops->isa);
  }
  return 0;
}
