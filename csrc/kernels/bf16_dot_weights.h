// bf16 weights against bf16 activations, two products a step, for ISAs that have such a dot product. Include after a
// vec_*.h and a function bf16_dot(w, a, acc) of the ISA's.
#pragma once
#include "kernels/float_tiles.h"

namespace syshax {
namespace {

struct WeightsBf16Dot {
  static constexpr int kValues = 2;
  static constexpr int kSteps = 1;
  static constexpr int kLaneBytes = 4;
  template <int>
  static Vec::I get(const void* p) {
    return Vec::loadi(p);
  }
  template <int>
  static Vec::I activation(const void* row, size_t k) {
    int32_t pair;
    __builtin_memcpy(&pair, static_cast<const char*>(row) + 2 * k, 4);
    return Vec::set1i(pair);
  }
  static Vec::F multiply_add(Vec::I w, Vec::I a, Vec::F acc) { return bf16_dot(w, a, acc); }
};

}  // namespace
}  // namespace syshax
