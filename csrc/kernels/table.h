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

const std::vector<const syshax_format*>& all_formats();
const std::vector<const syshax_kernel*>& all_kernels();

// nullptr when unknown.
const syshax_format* find_format(std::string_view name);
const syshax_kernel* find_kernel(std::string_view name);

// The best kernel for weights of `format` and ring activations of `dtype` that `features` allow; its packing is
// the same whichever features are given. Throws CoreError("unknown_format") or ("no_kernel").
const syshax_kernel* select_kernel(std::string_view format, syshax_dtype dtype, const CpuFeatures& features);

// Loads a vendor's operator library and adds its rows. Throws CoreError("bad_operator_library").
void load_operator_library(const std::string& path);

}  // namespace syshax
