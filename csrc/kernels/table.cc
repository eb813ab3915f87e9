// Builds the table from kernels.inc and answers questions about it. A published table never changes: loading a library
// publishes a longer copy and keeps the old one, so readers need no lock and references stay valid.
#include "kernels/table.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>

#include "base/error.h"
#include "format/formats.h"
#include "kernels/kernels.h"
#include "kernels/operator_library.h"

namespace syshax {
namespace {

constexpr uint32_t kFloat32 = 1u << SYSHAX_FLOAT32, kBfloat16 = 1u << SYSHAX_BFLOAT16;
constexpr uint32_t kHalves = 1u << SYSHAX_FLOAT16 | kBfloat16, kAnyDtype = kFloat32 | kHalves;
// What the AMX kernels are made of beside tiles.
constexpr uint64_t kAmxInt8 = SYSHAX_CPU_AMX_INT8 | SYSHAX_CPU_AVX512VNNI | SYSHAX_CPU_AVX512;
constexpr uint64_t kAmxBf16 = SYSHAX_CPU_AMX_BF16 | SYSHAX_CPU_AVX512BF16 | SYSHAX_CPU_AVX512;

#define SYSHAX_KERNEL(weight, activation, isa, packer, features, dtypes, rank) \
  const syshax_kernel kernel_##weight##_##activation##_##isa = {               \
      SYSHAX_OPERATOR_ABI,                                                     \
      sizeof(syshax_kernel),                                                   \
      #weight "_" #activation "_" #isa,                                        \
      #isa,                                                                    \
      &packing_##weight,                                                       \
      &activation_##activation##_##packer,                                     \
      features,                                                                \
      dtypes,                                                                  \
      rank,                                                                    \
      run_##weight##_##activation##_##isa,                                     \
  };
#include "kernels/kernels.inc"
#undef SYSHAX_KERNEL

struct Table {
  std::vector<const syshax_format*> formats;
  std::vector<const syshax_kernel*> kernels;
  std::map<const syshax_kernel*, std::string> vendors;
};

const Table* builtin_table() {
  auto* table = new Table;
  table->formats = {&format_bf16, &format_fp16, &format_q8_0, &format_q4_0};
#define SYSHAX_KERNEL(weight, activation, isa, packer, features, dtypes, rank) \
  table->kernels.push_back(&kernel_##weight##_##activation##_##isa);
#include "kernels/kernels.inc"
#undef SYSHAX_KERNEL
  for (const syshax_kernel* kernel : table->kernels) table->vendors[kernel] = "syshax";
  return table;
}

std::atomic<const Table*>& published() {
  static std::atomic<const Table*> table{builtin_table()};
  return table;
}

const Table& current() { return *published().load(std::memory_order_acquire); }

const char* dtype_name(syshax_dtype dtype) {
  return dtype == SYSHAX_FLOAT32 ? "float32" : dtype == SYSHAX_FLOAT16 ? "float16" : "bfloat16";
}

std::string joined_format_names() {
  std::string text;
  for (const syshax_format* format : all_formats()) text += (text.empty() ? "" : ", ") + std::string(format->name);
  return text;
}

void require_format(std::string_view name) {
  if (find_format(name)) return;
  throw CoreError("invalid_argument", "unknown weight format \"" + std::string(name) + "\"",
                  "use one of: " + joined_format_names());
}

}  // namespace

const std::vector<const syshax_format*>& all_formats() { return current().formats; }
const std::vector<const syshax_kernel*>& all_kernels() { return current().kernels; }

const syshax_format* find_format(std::string_view name) {
  for (const syshax_format* format : all_formats()) {
    if (name == format->name) return format;
  }
  return nullptr;
}

const syshax_kernel* find_kernel(std::string_view name) {
  for (const syshax_kernel* kernel : all_kernels()) {
    if (name == kernel->name) return kernel;
  }
  return nullptr;
}

std::string kernel_vendor(const syshax_kernel* kernel) {
  const Table& table = current();
  const auto found = table.vendors.find(kernel);
  return found == table.vendors.end() ? std::string() : found->second;
}

const syshax_packing* format_packing(std::string_view name) {
  require_format(name);
  for (const syshax_kernel* kernel : all_kernels()) {
    if (name == kernel->packing->format) return kernel->packing;
  }
  throw CoreError("hardware", "there is no kernel for format " + std::string(name), "see `syshaxctl kernels`");
}

const syshax_kernel* select_kernel(std::string_view format, syshax_dtype dtype, const CpuFeatures& features) {
  const std::string name(format);
  require_format(format);
  const syshax_kernel* best = nullptr;
  for (const syshax_kernel* kernel : all_kernels()) {
    const bool usable =
        format == kernel->packing->format && features.has(kernel->required_features) && (kernel->dtypes >> dtype & 1u);
    if (usable && (!best || kernel->rank > best->rank)) best = kernel;
  }
  if (!best) {
    throw CoreError("hardware",
                    "no kernel on this CPU for format " + name + " with " + dtype_name(dtype) + " activations",
                    "see `syshaxctl kernels`; is SYSHAX_ISA or the isa setting too low?");
  }
  return best;
}

void load_operator_library(const std::string& path) {
  static std::mutex loading;
  const std::lock_guard<std::mutex> lock(loading);
  const syshax_operator_library* library = open_operator_library(path, current().formats, current().kernels);
  if (!library) return;
  auto* longer = new Table(current());
  longer->formats.insert(longer->formats.end(), library->formats, library->formats + library->num_formats);
  for (uint32_t i = 0; i < library->num_kernels; ++i) {
    longer->kernels.push_back(library->kernels[i]);
    longer->vendors[library->kernels[i]] = library->vendor;
  }
  published().store(longer, std::memory_order_release);
}

}  // namespace syshax
