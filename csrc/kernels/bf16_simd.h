// float32 to bf16 in vectors, the numbers of base/float16.h. Include after a vec_*.h.
#pragma once

namespace syshax {
namespace {

// In the low 16 bits of each lane.
[[maybe_unused]] Vec::I bf16_bits(Vec::F x) {
  const Vec::I bits = Vec::bits(x);
  const Vec::I odd = Vec::andi(Vec::shift_right<16>(bits), Vec::set1i(1));
  const Vec::I rounded = Vec::addi(bits, Vec::addi(odd, Vec::set1i(0x7fff)));
  const Vec::I quiet = Vec::ori(bits, Vec::set1i(0x00400000));
  const Vec::I magnitude = Vec::andi(bits, Vec::set1i(0x7fffffff));
  return Vec::shift_right<16>(Vec::if_greater(magnitude, Vec::set1i(0x7f800000), quiet, rounded));
}

}  // namespace
}  // namespace syshax
