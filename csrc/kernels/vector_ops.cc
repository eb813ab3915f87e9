// Lists the element-wise tables, weakest first, and chooses the last one that the CPU can run.
#include "kernels/vector_ops.h"

#include "kernels/vector_tables.h"

namespace syshax {
namespace {

struct Row {
  const VectorOps* ops;
  uint64_t features;
};

constexpr Row kRows[] = {
    {&vector_ops_scalar, 0},
#if defined(__x86_64__)
    {&vector_ops_avx2, SYSHAX_CPU_AVX2},
    {&vector_ops_avx512, SYSHAX_CPU_AVX512},
#elif defined(__aarch64__)
    {&vector_ops_neon, SYSHAX_CPU_NEON},
#endif
};

}  // namespace

std::vector<const VectorOps*> usable_vector_ops(const CpuFeatures& features) {
  std::vector<const VectorOps*> usable;
  for (const Row& row : kRows) {
    if (features.has(row.features)) usable.push_back(row.ops);
  }
  return usable;
}

const VectorOps& select_vector_ops(const CpuFeatures& features) { return *usable_vector_ops(features).back(); }

}  // namespace syshax
