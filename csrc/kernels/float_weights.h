// How stored float weights become float32 lanes: the same on every ISA. Include after a vec_*.h.
#pragma once
#include <cstddef>
#include <cstdint>

namespace syshax {
namespace {

// The two bf16 of each 32-bit lane, one after the other.
struct WeightsBf16 {
  static constexpr int kValues = 2;  // k per lane
  static constexpr int kSteps = 2;   // multiply-adds they take
  static constexpr int kLaneBytes = 4;
  template <int Step>
  static Vec::F get(const void* p) {
    const Vec::I pair = Vec::loadi(p);
    return Vec::from_bits(Step == 0 ? Vec::shift_left<16>(pair) : Vec::andi(pair, Vec::set1i(int32_t(0xffff0000))));
  }
  template <int Step>
  static Vec::F activation(const void* row, size_t k) {
    return Vec::set1(static_cast<const float*>(row)[k + Step]);
  }
  static Vec::F multiply_add(Vec::F w, Vec::F a, Vec::F acc) { return Vec::add_product(w, a, acc); }
};

struct WeightsFp16 {
  static constexpr int kValues = 1;
  static constexpr int kSteps = 1;
  static constexpr int kLaneBytes = 2;
  template <int>
  static Vec::F get(const void* p) {
    return Vec::load_fp16(p);
  }
  template <int>
  static Vec::F activation(const void* row, size_t k) {
    return Vec::set1(static_cast<const float*>(row)[k]);
  }
  static Vec::F multiply_add(Vec::F w, Vec::F a, Vec::F acc) { return Vec::add_product(w, a, acc); }
};

}  // namespace
}  // namespace syshax
