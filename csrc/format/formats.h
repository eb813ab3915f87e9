// The built-in weight formats. Each has one header of its own with its block, encode and decode.
#pragma once
#include "syshax/quantization_base.h"

namespace syshax {

extern const syshax_format format_bf16, format_fp16, format_q8_0, format_q4_0;

}  // namespace syshax
