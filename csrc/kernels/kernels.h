// Declares what the rows of kernels.inc name: the run functions and the table entries.
#pragma once
#include "kernels/activations.h"
#include "kernels/packings.h"
#include "syshax/matmul_base.h"

namespace syshax {

#define SYSHAX_KERNEL(weight, activation, isa, packer, features, dtypes, rank) \
  void run_##weight##_##activation##_##isa(const syshax_matmul_args* args);
#include "kernels/kernels.inc"
#undef SYSHAX_KERNEL

}  // namespace syshax
