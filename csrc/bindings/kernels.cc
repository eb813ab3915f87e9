// Formats, kernels and element-wise operations for tests, bench and status: packs, runs and unpacks whole matrices.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "bindings/bindings.h"
#include "kernels/conformance.h"
#include "kernels/table.h"
#include "kernels/vector_ops.h"

namespace py = pybind11;
using namespace syshax;

namespace {

using Bytes = py::array_t<uint8_t, py::array::c_style | py::array::forcecast>;
using Floats = py::array_t<float, py::array::c_style | py::array::forcecast>;
using Halves = py::array_t<uint16_t, py::array::c_style>;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Aligned = std::unique_ptr<char, Free>;

Aligned aligned(size_t bytes) {
  void* memory = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
  if (!memory) throw std::bad_alloc();
  return Aligned(static_cast<char*>(memory));
}

// What a row's number of values must be a multiple of.
size_t block_values(const syshax_format& format) { return format.block_values ? format.block_values : 64; }

[[noreturn]] void invalid(const std::string& message) { throw CoreError("invalid_argument", message); }

const syshax_format& format_named(const std::string& name) {
  const syshax_format* format = find_format(name);
  if (!format) invalid("unknown weight format \"" + name + "\"");
  return *format;
}

const syshax_kernel& kernel_named(const std::string& name) {
  const syshax_kernel* kernel = find_kernel(name);
  if (!kernel) invalid("unknown kernel \"" + name + "\"");
  return *kernel;
}

const syshax_kernel& usable_kernel(const std::string& name) {
  const syshax_kernel& kernel = kernel_named(name);
  if (!detect_cpu_features().has(kernel.required_features)) {
    throw CoreError("hardware", "this CPU cannot run kernel " + name);
  }
  return kernel;
}

syshax_dtype dtype_named(const std::string& name) {
  if (name == "float32") return SYSHAX_FLOAT32;
  if (name == "float16") return SYSHAX_FLOAT16;
  if (name == "bfloat16") return SYSHAX_BFLOAT16;
  invalid("unknown dtype \"" + name + "\": use float32, float16 or bfloat16");
}

// One row at a time, which matters only to formats whose block is a row.
Bytes encode(const std::string& name, const Floats& values) {
  const syshax_format& format = format_named(name);
  const size_t k = values.ndim() == 2 ? size_t(values.shape(1)) : size_t(values.size());
  const size_t rows = k ? size_t(values.size()) / k : 0;
  if (k % block_values(format)) invalid(name + ": the number of values is no multiple of the block");
  const size_t row_bytes = syshax_row_bytes(&format, k);
  Bytes blocks(py::ssize_t(rows * row_bytes));
  for (size_t row = 0; row < rows; ++row) {
    format.encode(values.data() + row * k, k, blocks.mutable_data() + row * row_bytes);
  }
  return blocks;
}

Floats decode(const std::string& name, const Bytes& blocks, size_t values) {
  const syshax_format& format = format_named(name);
  if (values % block_values(format) || size_t(blocks.size()) != syshax_row_bytes(&format, values)) {
    invalid(name + ": " + std::to_string(values) + " values do not take " + std::to_string(blocks.size()) + " bytes");
  }
  Floats decoded{py::ssize_t(values)};
  format.decode(blocks.data(), values, decoded.mutable_data());
  return decoded;
}

std::vector<std::string> dtype_names(uint32_t dtypes) {
  std::vector<std::string> names;
  if (dtypes >> SYSHAX_FLOAT32 & 1) names.emplace_back("float32");
  if (dtypes >> SYSHAX_FLOAT16 & 1) names.emplace_back("float16");
  if (dtypes >> SYSHAX_BFLOAT16 & 1) names.emplace_back("bfloat16");
  return names;
}

py::list kernels(const std::string& isa_cap) {
  const CpuFeatures features = cap_cpu_features(detect_cpu_features(), isa_cap);
  py::list rows;
  for (const syshax_kernel* kernel : all_kernels()) {
    py::dict row;
    row["name"] = kernel->name;
    row["format"] = kernel->packing->format;
    row["activation"] = kernel->activation->name;
    row["isa"] = kernel->isa;
    row["packing"] = kernel->packing->name;
    row["features"] = CpuFeatures{kernel->required_features}.names();
    row["dtypes"] = dtype_names(kernel->dtypes);
    row["rank"] = kernel->rank;
    row["usable"] = features.has(kernel->required_features);
    row["vendor"] = kernel_vendor(kernel);
    rows.append(row);
  }
  return rows;
}

// One weight matrix in panels.
struct Packed {
  Packed(const syshax_kernel& kernel, const Bytes& blocks, size_t rows, size_t k) : packing(*kernel.packing) {
    const syshax_format& format = format_named(packing.format);
    if (rows == 0 || k == 0 || k % block_values(format)) invalid("rows or k is 0, or k is no multiple of the block");
    row_bytes = syshax_row_bytes(&format, k);
    if (size_t(blocks.size()) != rows * row_bytes) {
      invalid("[" + std::to_string(rows) + ", " + std::to_string(k) + "] takes " + std::to_string(rows * row_bytes) +
              " bytes of " + packing.format + ", not " + std::to_string(blocks.size()));
    }
    k_padded = (k + packing.k_multiple - 1) / packing.k_multiple * packing.k_multiple;
    if (format.block_values == 0 && k != k_padded) invalid(packing.format + std::string(" wants whole rows"));
    padded_row_bytes = syshax_row_bytes(&format, k_padded);
    num_panels = (rows + packing.panel_rows - 1) / packing.panel_rows;
    panels = aligned(num_panels * packing.panel_bytes(k_padded));
    std::vector<uint8_t> padded(packing.panel_rows * padded_row_bytes);
    for (size_t p = 0; p < num_panels; ++p) {
      const size_t first = p * packing.panel_rows, count = std::min<size_t>(packing.panel_rows, rows - first);
      for (size_t r = 0; r < count; ++r) {
        std::memcpy(&padded[r * padded_row_bytes], blocks.data() + (first + r) * row_bytes, row_bytes);
      }
      packing.pack(padded.data(), padded_row_bytes, uint32_t(count), k_padded, panel(p));
    }
  }
  char* panel(size_t index) const { return panels.get() + index * packing.panel_bytes(k_padded); }

  const syshax_packing& packing;
  size_t row_bytes, k_padded, padded_row_bytes, num_panels;
  Aligned panels;
};

Floats run_kernel(const std::string& name, const Bytes& blocks, size_t rows, size_t k, const Floats& activations) {
  const syshax_kernel& kernel = usable_kernel(name);
  if (activations.ndim() != 2 || activations.shape(0) < 1 || size_t(activations.shape(1)) != k) {
    invalid("activations must be [tokens, " + std::to_string(k) + "]");
  }
  const Packed weights(kernel, blocks, rows, k);
  const size_t tokens = size_t(activations.shape(0)), row_bytes = kernel.activation->row_bytes(weights.k_padded);
  const Aligned packed = aligned(tokens * row_bytes);
  std::vector<const void*> pointers(tokens);
  std::vector<float> padded(weights.k_padded);
  for (size_t t = 0; t < tokens; ++t) {
    char* row = packed.get() + t * row_bytes;
    std::copy_n(activations.data() + t * k, k, padded.begin());
    syshax_pack_row(kernel.activation, padded.data(), weights.k_padded, row);
    pointers[t] = row;
  }
  const size_t stride = weights.num_panels * kernel.packing->panel_rows;
  const Aligned out = aligned(tokens * stride * 4);
  const syshax_matmul_args args = {weights.panels.get(),
                                   uint32_t(weights.num_panels),
                                   uint32_t(tokens),
                                   weights.k_padded,
                                   pointers.data(),
                                   reinterpret_cast<float*>(out.get()),
                                   stride};
  {
    const py::gil_scoped_release release;
    kernel.run(&args);
  }
  Floats result({tokens, rows});
  for (size_t t = 0; t < tokens; ++t) std::memcpy(result.mutable_data() + t * rows, args.out + t * stride, rows * 4);
  return result;
}

Bytes pack_unpack(const std::string& name, const Bytes& blocks, size_t rows, size_t k) {
  const Packed weights(kernel_named(name), blocks, rows, k);
  Bytes result{py::ssize_t(blocks.size())};
  const size_t panel_rows = weights.packing.panel_rows;
  std::vector<uint8_t> padded(panel_rows * weights.padded_row_bytes);
  for (size_t row = 0; row < rows; ++row) {
    if (row % panel_rows == 0) {
      weights.packing.unpack(weights.panel(row / panel_rows), weights.k_padded,
                             uint32_t(std::min(panel_rows, rows - row)), padded.data(), weights.padded_row_bytes);
    }
    std::memcpy(result.mutable_data() + row * weights.row_bytes, &padded[row % panel_rows * weights.padded_row_bytes],
                weights.row_bytes);
  }
  return result;
}

py::dict operator_checks() {
  py::dict checks;
  checks["format"] = format_checks();
  checks["kernel"] = kernel_checks();
  return checks;
}

std::pair<bool, std::string> check_operator(const std::string& kind, const std::string& name,
                                            const std::string& check) {
  if (kind != "format" && kind != "kernel") invalid("there are no checks of \"" + kind + "\"");
  const syshax_kernel* kernel = kind == "kernel" ? &usable_kernel(name) : nullptr;
  const py::gil_scoped_release release;
  const CheckResult result = kernel ? check_kernel(*kernel, check) : check_format(format_named(name), check);
  return {result.ok, result.text};
}

const VectorOps& vector_ops_of(const std::string& isa) {
  for (const VectorOps* ops : usable_vector_ops(detect_cpu_features())) {
    if (isa == ops->isa) return *ops;
  }
  invalid("no element-wise operations for ISA \"" + isa + "\" on this CPU");
}

std::vector<std::string> vector_isas() {
  std::vector<std::string> names;
  for (const VectorOps* ops : usable_vector_ops(detect_cpu_features())) names.emplace_back(ops->isa);
  return names;
}

py::array narrow(const VectorOps& ops, const Floats& values, syshax_dtype dtype) {
  py::array result = dtype == SYSHAX_FLOAT32 ? py::array(Floats(values.size())) : py::array(Halves(values.size()));
  ops.narrow(values.data(), size_t(values.size()), dtype, result.mutable_data());
  return result;
}

py::array vector_op(const std::string& isa, const std::string& op, const py::args& args) {
  const VectorOps& ops = vector_ops_of(isa);
  if (op == "silu_mul" && args.size() == 1) {
    const auto tile = args[0].cast<Floats>();
    if (tile.size() % 32) invalid("silu_mul wants pairs of 16 gate and 16 up values");
    Floats out(tile.size() / 2);
    ops.silu_mul(tile.data(), size_t(tile.size()) / 32, out.mutable_data());
    return std::move(out);
  }
  if (op == "accumulate" && args.size() == 3) {
    const auto src = args[1].cast<Floats>(), dst = args[2].cast<Floats>();
    if (src.size() != dst.size()) invalid("accumulate wants src and dst of one size");
    Floats out(dst.size());
    std::memcpy(out.mutable_data(), dst.data(), size_t(dst.size()) * 4);
    ops.accumulate(args[0].cast<float>(), src.data(), size_t(src.size()), out.mutable_data());
    return std::move(out);
  }
  if (op == "widen" && args.size() == 2) {
    const syshax_dtype dtype = dtype_named(args[1].cast<std::string>());
    const py::array src =
        dtype == SYSHAX_FLOAT32 ? py::array(args[0].cast<Floats>()) : py::array(args[0].cast<Halves>());
    Floats out(src.size());
    ops.widen(src.data(), dtype, size_t(src.size()), out.mutable_data());
    return std::move(out);
  }
  if (op == "narrow" && args.size() == 2) {
    return narrow(ops, args[0].cast<Floats>(), dtype_named(args[1].cast<std::string>()));
  }
  invalid("vector_op: unknown operation or wrong arguments: \"" + op + "\"");
}

}  // namespace

void bind_kernels(py::module_& m) {
  m.def("formats", [] {
    std::vector<std::string> names;
    for (const syshax_format* format : all_formats()) names.emplace_back(format->name);
    return names;
  });
  m.def(
      "format_blocks",
      [](const std::string& name) {
        const syshax_format& format = format_named(name);
        return py::make_tuple(format.block_values, format.block_bytes);
      },
      py::arg("format"));
  m.def(
      "format_row_bytes",
      [](const std::string& name, size_t values) { return syshax_row_bytes(&format_named(name), values); },
      py::arg("format"), py::arg("values"));
  m.def("encode", encode, py::arg("format"), py::arg("values"));
  m.def("decode", decode, py::arg("format"), py::arg("blocks"), py::arg("values"));
  m.def("kernels", kernels, py::arg("isa_cap") = "");
  m.def(
      "select_kernel",
      [](const std::string& format, const std::string& dtype, const std::string& isa_cap) {
        const CpuFeatures features = cap_cpu_features(detect_cpu_features(), isa_cap);
        return std::string(select_kernel(format, dtype_named(dtype), features)->name);
      },
      py::arg("format"), py::arg("dtype"), py::arg("isa_cap") = "");
  m.def(
      "select_kernel_for",
      [](const std::string& format, const std::string& dtype, const std::vector<std::string>& features) {
        return std::string(select_kernel(format, dtype_named(dtype), features_named(features))->name);
      },
      py::arg("format"), py::arg("dtype"), py::arg("features"));
  m.def("load_operator_library", load_operator_library, py::arg("path"));
  m.def("operator_checks", operator_checks);
  m.def("check_operator", check_operator, py::arg("kind"), py::arg("name"), py::arg("check"));
  m.def("run_kernel", run_kernel, py::arg("kernel"), py::arg("blocks"), py::arg("rows"), py::arg("k"),
        py::arg("activations"));
  m.def("pack_unpack", pack_unpack, py::arg("kernel"), py::arg("blocks"), py::arg("rows"), py::arg("k"));
  m.def("vector_isas", vector_isas);
  m.def("vector_op", vector_op, py::arg("isa"), py::arg("op"));
}
