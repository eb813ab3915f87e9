// dlopen and validation of vendor libraries. Whatever a library gets wrong is found here, before a weight is packed.
#include "kernels/operator_library.h"

#include <dlfcn.h>

#include <cstring>
#include <set>
#include <string_view>

#include "base/error.h"

namespace syshax {
namespace {

constexpr uint32_t kDtypeMask = 7;
constexpr uint32_t kPanelRows = 16;  // VectorOps::silu_mul and the callers' tiles are built on it

// Collects where we are, so that every message names library, row and field.
class Checker {
 public:
  explicit Checker(std::string path) : path_(std::move(path)) {}

  [[noreturn]] void fail(const std::string& what) const {
    throw CoreError("config", "operator library " + path_ + ": " + what,
                    "ask its vendor for a version built against syshax operator ABI " +
                        std::to_string(SYSHAX_OPERATOR_ABI) + ", or remove the file");
  }

  void require(bool ok, const std::string& what) const {
    if (!ok) fail(what);
  }

  // The two fields that open every struct of the ABI.
  template <class Struct>
  void header(const Struct* row, const std::string& where) const {
    require(row != nullptr, where + " is NULL");
    require(row->abi == SYSHAX_OPERATOR_ABI, where + ": abi is " + std::to_string(row->abi) + ", this daemon speaks " +
                                                 std::to_string(SYSHAX_OPERATOR_ABI));
    require(row->struct_size >= sizeof(Struct), where + ": struct_size is " + std::to_string(row->struct_size) +
                                                    ", at least " + std::to_string(sizeof(Struct)) + " are needed");
  }

  void name(const char* text, const std::string& where) const {
    require(text != nullptr, where + " is NULL");
    const size_t length = strnlen(text, 65);
    require(length >= 1 && length <= 64, where + " must have 1 to 64 characters");
    for (const char* c = text; *c; ++c) {
      require(*c > ' ' && *c <= '~', where + " must be printable ASCII without spaces");
    }
  }

  void format(const syshax_format* row, const std::string& where) const {
    header(row, where);
    name(row->name, where + ".name");
    require(row->encode && row->decode, where + ".encode or .decode is NULL");
    if (row->block_values == 0) {
      require(row->row_bytes != nullptr,
              where + ".block_values is 0 (a block is a row), so .row_bytes must not be NULL");
      require(row->block_bytes == 0, where + ".block_values is 0 (a block is a row), so .block_bytes must be 0");
      require(row->row_bytes(64) >= 1, where + ".row_bytes(64) is 0");
      return;
    }
    require(64 % row->block_values == 0,
            where + ".block_values is " + std::to_string(row->block_values) + ", it must divide 64");
    require(row->block_bytes >= 1, where + ".block_bytes is 0");
    require(row->row_bytes == nullptr, where + ".row_bytes must be NULL where .block_values is not 0");
  }

  void packing(const syshax_packing* row, const std::string& where) const {
    header(row, where);
    name(row->name, where + ".name");
    name(row->format, where + ".format");
    require(row->panel_rows == kPanelRows,
            where + ".panel_rows is " + std::to_string(row->panel_rows) + ", this daemon takes 16");
    require(row->k_multiple >= 64 && row->k_multiple % 64 == 0,
            where + ".k_multiple is " + std::to_string(row->k_multiple) + ", it must be a multiple of 64");
    require(row->panel_bytes && row->pack && row->unpack, where + ".panel_bytes, .pack or .unpack is NULL");
    const size_t bytes = row->panel_bytes(row->k_multiple);
    require(bytes > 0 && bytes % 64 == 0, where + ".panel_bytes(" + std::to_string(row->k_multiple) + ") is " +
                                              std::to_string(bytes) + ", it must be a multiple of 64");
  }

  void activation(const syshax_activation* row, const std::string& where) const {
    header(row, where);
    name(row->name, where + ".name");
    require(row->row_bytes && row->pack, where + ".row_bytes or .pack is NULL");
    const size_t bytes = row->row_bytes(64);
    require(bytes > 0 && bytes % 64 == 0,
            where + ".row_bytes(64) is " + std::to_string(bytes) + ", it must be a multiple of 64");
  }

  void kernel(const syshax_kernel* row, const std::string& where) const {
    header(row, where);
    name(row->name, where + ".name");
    name(row->isa, where + ".isa");
    packing(row->packing, where + ".packing");
    activation(row->activation, where + ".activation");
    require(row->dtypes != 0 && (row->dtypes & ~kDtypeMask) == 0,
            where + ".dtypes is " + std::to_string(row->dtypes) + ", it must be a set of bits 0 to 2");
    require(row->run != nullptr, where + ".run is NULL");
  }

 private:
  std::string path_;
};

const syshax_operator_library* entry_of(void* handle, const Checker& check) {
  const auto entry = reinterpret_cast<syshax_operators_v1_fn>(dlsym(handle, "syshax_operators_v1"));
  check.require(entry != nullptr, "it exports no function syshax_operators_v1");
  const syshax_operator_library* library = entry();
  check.header(library, "its table");
  check.name(library->vendor, "vendor");
  check.name(library->version, "version");
  check.require(library->num_formats <= 256 && library->num_kernels <= 4096, "num_formats or num_kernels is absurd");
  check.require(library->formats || !library->num_formats, "formats is NULL");
  check.require(library->kernels || !library->num_kernels, "kernels is NULL");
  return library;
}

std::string row_name(const char* kind, uint32_t index) { return std::string(kind) + "[" + std::to_string(index) + "]"; }

void check_formats(const syshax_operator_library& library, const Checker& check, std::set<std::string_view>& known) {
  for (uint32_t i = 0; i < library.num_formats; ++i) {
    check.format(library.formats[i], row_name("formats", i));
    check.require(known.insert(library.formats[i]->name).second,
                  "format \"" + std::string(library.formats[i]->name) + "\" exists already");
  }
}

// One format has one packing, so that stored experts never depend on which CPU or library packed them.
void check_packing(const syshax_kernel& kernel, const std::vector<const syshax_kernel*>& others, const Checker& check) {
  const std::string_view format = kernel.packing->format, packing = kernel.packing->name;
  for (const syshax_kernel* other : others) {
    check.require(format != other->packing->format || packing == other->packing->name,
                  "kernel \"" + std::string(kernel.name) + "\" packs format " + std::string(format) + " as " +
                      std::string(packing) + ", but that format's packing is " + other->packing->name);
  }
}

}  // namespace

const syshax_operator_library* open_operator_library(const std::string& path,
                                                     const std::vector<const syshax_format*>& formats,
                                                     const std::vector<const syshax_kernel*>& kernels) {
  const Checker check(path);
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) check.fail(std::string("cannot be loaded: ") + dlerror());
  try {
    const syshax_operator_library* library = entry_of(handle, check);
    std::set<std::string_view> format_names, kernel_names;
    for (const syshax_format* format : formats) format_names.insert(format->name);
    for (const syshax_kernel* kernel : kernels) kernel_names.insert(kernel->name);
    for (uint32_t i = 0; i < library->num_kernels && library->kernels[i]; ++i) {
      for (const syshax_kernel* kernel : kernels) {
        if (kernel == library->kernels[i]) return nullptr;
      }
    }
    check_formats(*library, check, format_names);
    std::vector<const syshax_kernel*> all = kernels;
    for (uint32_t i = 0; i < library->num_kernels; ++i) {
      const syshax_kernel* kernel = library->kernels[i];
      check.kernel(kernel, row_name("kernels", i));
      check.require(kernel_names.insert(kernel->name).second,
                    "kernel \"" + std::string(kernel->name) + "\" exists already");
      check.require(
          format_names.count(kernel->packing->format) == 1,
          "kernel \"" + std::string(kernel->name) + "\" is for unknown format \"" + kernel->packing->format + "\"");
      check_packing(*kernel, all, check);
      all.push_back(kernel);
    }
    return library;
  } catch (const CoreError&) {
    dlclose(handle);
    throw;
  }
}

}  // namespace syshax
