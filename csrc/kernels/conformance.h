// Checks any row of the kernel table against what the operator headers promise, with no knowledge of the row: what
// `syshaxd operators check` runs over a vendor's library, and the tests over every built-in row. Slow and obvious.
#pragma once
#include <string>
#include <vector>

#include "syshax/matmul_base.h"

namespace syshax {

struct CheckResult {
  bool ok;
  std::string text;  // what is wrong and where; for a passed check a figure, where one is worth telling
};

// Names of the checks, in the order in which they are best run.
std::vector<std::string> format_checks();
std::vector<std::string> kernel_checks();

// One check of one row. A row that touches memory that is not its own may end the process: every buffer has forbidden
// pages on both sides. Throws CoreError("invalid_argument") for an unknown check. The CPU must have the kernel's
// features.
CheckResult check_format(const syshax_format& format, const std::string& check);
CheckResult check_kernel(const syshax_kernel& kernel, const std::string& check);

}  // namespace syshax
