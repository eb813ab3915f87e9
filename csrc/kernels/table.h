// The kernel table: every kernel that this build or a loaded vendor library offers, and how one is chosen.
// Rows come from kernels.inc; a kernel exists when it has a row there. Knows nothing of experts or threads.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "base/cpu_features.h"
#include "syshax/matmul_base.h"
#include "syshax/quantization_base.h"

namespace syshax {

// In the order of the table; a reference stays valid and unchanged when a library is loaded later.
const std::vector<const syshax_format*>& all_formats();
const std::vector<const syshax_kernel*>& all_kernels();

// nullptr when unknown.
const syshax_format* find_format(std::string_view name);
const syshax_kernel* find_kernel(std::string_view name);
// The one packing of a format. Throws CoreError("invalid_argument") for an unknown one, ("hardware") when no kernel
// takes it.
const syshax_packing* format_packing(std::string_view name);
// "syshax" for built-in rows, else what the vendor's library calls itself.
std::string kernel_vendor(const syshax_kernel* kernel);

// The best kernel for weights of `format` and ring activations of `dtype` that `features` allow; its packing is
// the same whichever features are given. Throws CoreError("invalid_argument") for an
// unknown format, ("hardware") when nothing fits.
const syshax_kernel* select_kernel(std::string_view format, syshax_dtype dtype, const CpuFeatures& features);

// Loads a vendor's operator library and adds its rows. Throws CoreError("config").
void load_operator_library(const std::string& path);

}  // namespace syshax
