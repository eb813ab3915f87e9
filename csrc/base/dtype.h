// How many bytes an element of the ring's and checkpoints' types takes.
#pragma once
#include <cstdint>

#include "syshax/quantization_base.h"

namespace syshax {

static inline uint32_t dtype_bytes(syshax_dtype dtype) { return dtype == SYSHAX_FLOAT32 ? 4 : 2; }

}  // namespace syshax
