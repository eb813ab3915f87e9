// Opens and checks vendor libraries. Knows the ABI, not the table.
#pragma once
#include <string>
#include <vector>

#include "syshax/matmul_base.h"

namespace syshax {

// Loads the library at `path` and checks every row against the ABI and against the names that exist already. Throws
// CoreError("config") that names the library, the row and the field. nullptr: the same library is loaded already.
const syshax_operator_library* open_operator_library(const std::string& path,
                                                     const std::vector<const syshax_format*>& formats,
                                                     const std::vector<const syshax_kernel*>& kernels);

}  // namespace syshax
