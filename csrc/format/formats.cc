// The rows of the built-in formats.
#include "format/formats.h"

#include "format/bf16.h"
#include "format/fp16.h"
#include "format/q4_0.h"
#include "format/q8_0.h"

namespace syshax {

constexpr uint32_t kSize = sizeof(syshax_format);
const syshax_format format_bf16 = {SYSHAX_OPERATOR_ABI, kSize, "bf16", 1, 2, bf16::encode, bf16::decode, nullptr};
const syshax_format format_fp16 = {SYSHAX_OPERATOR_ABI, kSize, "fp16", 1, 2, fp16::encode, fp16::decode, nullptr};
const syshax_format format_q8_0 = {SYSHAX_OPERATOR_ABI, kSize, "q8_0", 32, 34, q8_0::encode, q8_0::decode, nullptr};
const syshax_format format_q4_0 = {SYSHAX_OPERATOR_ABI, kSize, "q4_0", 32, 18, q4_0::encode, q4_0::decode, nullptr};

}  // namespace syshax
