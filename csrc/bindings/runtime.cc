// Runtime and Model of daemon/_core.pyi. Blocking calls run without the GIL; everything from Python is checked here or
// in the core before it is used.
#include "runtime.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "base/error.h"
#include "bindings/bindings.h"
#include "ipc/ring_server.h"

namespace py = pybind11;

namespace {

using namespace syshax;
using ModelPtr = std::shared_ptr<CpuModel>;
using FloatArray = py::array_t<float, py::array::c_style>;

struct Dtype {
  const char* name;
  syshax_dtype value;
  const char* numpy;  // bfloat16 travels as its bits
  size_t bytes;
};
constexpr Dtype kDtypes[] = {
    {"float32", SYSHAX_FLOAT32, "f4", 4}, {"float16", SYSHAX_FLOAT16, "f2", 2}, {"bfloat16", SYSHAX_BFLOAT16, "u2", 2}};

const Dtype& find_dtype(const std::string& name) {
  for (const Dtype& dtype : kDtypes)
    if (name == dtype.name) return dtype;
  throw CoreError("invalid_argument", "dtype \"" + name + "\" is none of float32, float16, bfloat16");
}

template <typename T>
T field(const py::dict& dict, const char* key) {
  if (!dict.contains(key)) throw CoreError("invalid_argument", std::string(key) + " is missing");
  try {
    return dict[key].cast<T>();
  } catch (const py::cast_error&) {
    throw CoreError("invalid_argument", std::string(key) + " is " + py::repr(dict[key]).cast<std::string>());
  }
}

MoeGeometry to_geometry(const py::dict& dict) {
  MoeGeometry geometry;
  geometry.num_layers = field<uint32_t>(dict, "num_layers");
  geometry.num_experts = field<uint32_t>(dict, "num_experts");
  geometry.hidden_size = field<uint32_t>(dict, "hidden_size");
  geometry.intermediate_size = field<uint32_t>(dict, "intermediate_size");
  geometry.top_k = field<uint32_t>(dict, "top_k");
  return geometry;
}

py::dict from_geometry(const MoeGeometry& geometry) {
  return py::dict(py::arg("num_layers") = geometry.num_layers, py::arg("num_experts") = geometry.num_experts,
                  py::arg("hidden_size") = geometry.hidden_size,
                  py::arg("intermediate_size") = geometry.intermediate_size, py::arg("top_k") = geometry.top_k);
}

}  // namespace

std::vector<NodePlan> to_plan(const std::vector<py::dict>& nodes) {
  std::vector<NodePlan> plan;
  for (const py::dict& node : nodes)
    plan.push_back({field<int>(node, "node"), field<std::vector<int>>(node, "cpus"), field<uint32_t>(node, "threads"),
                    field<double>(node, "share")});
  return plan;
}

namespace {

// ---- Model ------------------------------------------------------------------------------------------------------

// The bytes of one expert's matrix; views keeps the buffer alive.
const void* matrix(const py::handle& object, const char* name, size_t expert, size_t rows, size_t columns,
                   const Dtype& dtype, std::vector<py::buffer_info>& views) {
  const std::string where = std::string(name) + "[" + std::to_string(expert) + "]";
  if (!PyObject_CheckBuffer(object.ptr())) throw CoreError("invalid_argument", where + " is no buffer");
  py::buffer_info view = py::reinterpret_borrow<py::buffer>(object).request();
  const size_t bytes = static_cast<size_t>(view.size) * static_cast<size_t>(view.itemsize);
  std::string shape;
  for (const auto size : view.shape) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  const bool fits = view.ndim != 2 || (view.shape[0] == static_cast<py::ssize_t>(rows) &&
                                       view.shape[1] == static_cast<py::ssize_t>(columns));
  if (!fits || bytes != rows * columns * dtype.bytes)
    throw CoreError("invalid_argument", where + " has shape [" + shape + "] and " + std::to_string(bytes) +
                                            " bytes; wanted [" + std::to_string(rows) + ", " + std::to_string(columns) +
                                            "] " + dtype.name + ", " + std::to_string(rows * columns * dtype.bytes) +
                                            " bytes");
  if (!PyBuffer_IsContiguous(view.view(), 'C')) throw CoreError("invalid_argument", where + " is not in C order");
  views.push_back(std::move(view));
  return views.back().ptr;
}

void load_layer(CpuModel& model, uint32_t layer, const py::list& gate, const py::list& up, const py::list& down,
                const std::string& dtype_name) {
  const Dtype& dtype = find_dtype(dtype_name);
  const MoeGeometry g = model.geometry();
  for (const auto& [name, list] : {std::pair{"gate", &gate}, {"up", &up}, {"down", &down}})
    if (list->size() != g.num_experts)
      throw CoreError("invalid_argument", std::string(name) + " has " + std::to_string(list->size()) +
                                              " matrices; wanted one for each of " + std::to_string(g.num_experts) +
                                              " experts");
  std::vector<py::buffer_info> views;
  views.reserve(size_t{3} * g.num_experts);
  std::vector<ExpertSource> experts;
  for (size_t i = 0; i < g.num_experts; ++i)
    experts.push_back({matrix(gate[i], "gate", i, g.intermediate_size, g.hidden_size, dtype, views),
                       matrix(up[i], "up", i, g.intermediate_size, g.hidden_size, dtype, views),
                       matrix(down[i], "down", i, g.hidden_size, g.intermediate_size, dtype, views)});
  const py::gil_scoped_release no_gil;
  model.load_layer(layer, experts, dtype.value);
}

void load_packed_layer(CpuModel& model, uint32_t layer,
                       const std::map<uint32_t, std::pair<int, std::vector<uint64_t>>>& given) {
  std::vector<PackedFile> files(model.layout().num_nodes());
  for (const auto& [node, file] : given) {
    if (node >= files.size()) throw CoreError("invalid_argument", "there is no node " + std::to_string(node));
    files[node] = {file.first, file.second};
  }
  const py::gil_scoped_release no_gil;
  model.load_packed_layer(layer, files);
}

void check_array(const py::array& array, const char* name, const char* type, std::vector<py::ssize_t> shape) {
  const bool same =
      array.ndim() == static_cast<py::ssize_t>(shape.size()) && std::equal(shape.begin(), shape.end(), array.shape());
  if (same && array.dtype().equal(py::dtype(type)) && (array.flags() & py::array::c_style)) return;
  std::string wanted, seen;
  for (const auto size : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
  for (py::ssize_t i = 0; i < array.ndim(); ++i) seen += (seen.empty() ? "" : ", ") + std::to_string(array.shape(i));
  throw CoreError("invalid_argument", std::string(name) + " is [" + seen + "] " +
                                          py::str(array.dtype()).cast<std::string>() + "; wanted [" + wanted + "] " +
                                          py::str(py::dtype(type)).cast<std::string>() + " in C order");
}

py::array forward(CpuModel& model, uint32_t layer, const py::array& hidden_states, const py::array& topk_ids,
                  const py::array& topk_weights, const std::string& dtype_name, bool interrupted,
                  const std::vector<uint32_t>& part_tokens) {
  const Dtype& dtype = find_dtype(dtype_name);
  if (topk_ids.ndim() != 2) throw CoreError("invalid_argument", "topk_ids is not [num_tokens, top_k]");
  const py::ssize_t tokens = topk_ids.shape(0), top_k = topk_ids.shape(1);
  const py::ssize_t hidden = model.geometry().hidden_size;
  check_array(hidden_states, "hidden_states", dtype.numpy, {tokens, hidden});
  check_array(topk_ids, "topk_ids", "i4", {tokens, top_k});
  check_array(topk_weights, "topk_weights", "f4", {tokens, top_k});
  py::array output(py::dtype(dtype.numpy), std::vector<py::ssize_t>{tokens, hidden});
  const size_t row_bytes = static_cast<size_t>(hidden) * dtype.bytes;
  const char* in = static_cast<const char*>(hidden_states.data());
  char* out = static_cast<char*>(output.mutable_data());
  std::vector<MoeRows> parts;
  py::ssize_t row = 0;
  for (const uint32_t count : part_tokens.empty() ? std::vector{static_cast<uint32_t>(tokens)} : part_tokens) {
    const size_t offset = static_cast<size_t>(row) * row_bytes;
    parts.push_back({count, in + offset, out + offset});
    row += count;
  }
  if (row != tokens) throw CoreError("invalid_argument", "the parts' tokens are not all tokens");
  const MoeRequest request{layer,
                           static_cast<uint32_t>(tokens),
                           static_cast<uint32_t>(top_k),
                           dtype.value,
                           parts.data(),
                           static_cast<uint32_t>(parts.size()),
                           static_cast<const int32_t*>(topk_ids.data()),
                           static_cast<const float*>(topk_weights.data())};
  const py::gil_scoped_release no_gil;
  model.forward_checked(request, interrupted);
  return output;
}

py::tuple dequantized(const CpuModel& model, uint32_t layer, uint32_t expert) {
  const MoeGeometry g = model.geometry();
  FloatArray gate({g.intermediate_size, g.hidden_size}), up({g.intermediate_size, g.hidden_size}),
      down({g.hidden_size, g.intermediate_size});
  {
    float *gate_data = gate.mutable_data(), *up_data = up.mutable_data(), *down_data = down.mutable_data();
    const py::gil_scoped_release no_gil;
    model.dequantize(layer, expert, gate_data, up_data, down_data);
  }
  return py::make_tuple(gate, up, down);
}

std::map<uint32_t, size_t> by_node(const CpuModel& model, size_t (CpuModel::*bytes)(uint32_t) const) {
  std::map<uint32_t, size_t> result;
  for (uint32_t node = 0; node < model.layout().num_nodes(); ++node) result[node] = (model.*bytes)(node);
  return result;
}

size_t pool_bytes(const CpuModel& model) {
  size_t sum = 0;
  for (uint32_t node = 0; node < model.layout().num_nodes(); ++node) sum += model.node_bytes(node);
  return sum;
}

std::map<std::string, std::string> kernel_names(const CpuModel& model) {
  std::map<std::string, std::string> names;
  for (const Dtype& dtype : kDtypes) names[dtype.name] = model.kernel(dtype.value)->name;
  return names;
}

py::list arenas(const CpuModel& model) {
  py::list result;
  try {
    for (uint32_t node = 0; node < model.layout().num_nodes(); ++node) {
      const int fd = model.duplicate_arena(node);
      if (fd < 0) continue;
      result.append(py::dict(py::arg("index") = node, py::arg("fd") = fd, py::arg("bytes") = model.node_bytes(node)));
    }
  } catch (...) {
    for (const auto& arena : result) ::close(arena["fd"].cast<int>());
    throw;
  }
  return result;
}

void bind_model(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<CpuModel, ModelPtr>(m, "Model")
      .def_property_readonly("name", &CpuModel::name)
      .def_property_readonly("format", [](const CpuModel& model) { return model.layout().format().name; })
      .def_property_readonly("packing", [](const CpuModel& model) { return model.layout().packing().name; })
      .def("geometry", [](const CpuModel& model) { return from_geometry(model.geometry()); })
      .def("pool_bytes", pool_bytes)
      .def("node_bytes", [](const CpuModel& model) { return by_node(model, &CpuModel::node_bytes); })
      .def("huge_bytes", [](const CpuModel& model) { return by_node(model, &CpuModel::huge_bytes); })
      .def("kernels", kernel_names)
      .def("arenas", arenas)
      .def("prefault", &CpuModel::prefault, no_gil)
      .def("load_layer", load_layer, py::arg("layer"), py::arg("gate"), py::arg("up"), py::arg("down"),
           py::arg("dtype"))
      .def("load_packed_layer", load_packed_layer, py::arg("layer"), py::arg("files"))
      .def("layer_bytes", [](const CpuModel& model) { return by_node(model, &CpuModel::layer_bytes); })
      .def("fill_random", &CpuModel::fill_random, py::arg("seed"), no_gil)
      .def("seal", &CpuModel::seal, no_gil)
      .def("forward_calls", &CpuModel::forward_calls)
      .def("expert_tokens",
           [](const CpuModel& model) {
             const syshax::MoeGeometry g = model.geometry();
             py::array_t<uint64_t> tokens({g.num_layers, g.num_experts});
             model.expert_use().read(tokens.mutable_data());
             return tokens;
           })
      .def("expert_reads", [](const CpuModel& model) { return model.expert_use().reads(); })
      .def("forward", forward, py::arg("layer"), py::arg("hidden_states"), py::arg("topk_ids"), py::arg("topk_weights"),
           py::arg("dtype"), py::arg("interrupted") = false, py::arg("part_tokens") = std::vector<uint32_t>{})
      .def("dequantized", dequantized, py::arg("layer"), py::arg("expert"));
}

// ---- Runtime ----------------------------------------------------------------------------------------------------

RingShape ring_shape(const CpuModel& model, uint32_t max_tokens, uint32_t top_k, uint32_t element_bytes,
                     uint32_t num_slots) {
  const MoeGeometry g = model.geometry();
  return {num_slots, max_tokens, g.hidden_size, top_k, element_bytes, g.num_layers};
}

py::dict session_layout(const Runtime&, const CpuModel& model, uint32_t max_tokens, uint32_t top_k,
                        uint32_t element_bytes, uint32_t num_slots) {
  return ring_header_dict(ring_layout(ring_shape(model, max_tokens, top_k, element_bytes, num_slots)));
}

void add_session(Runtime& runtime, uint64_t session_id, const ModelPtr& model, int shm_fd, int doorbell_fd,
                 const py::bytes& boot_id, uint32_t max_tokens, uint32_t top_k, uint32_t element_bytes,
                 uint32_t num_slots, uint32_t spin_us, uint32_t priority, uint32_t share) {
  SessionSpec spec;
  const std::string id = boot_id;
  if (id.size() != sizeof spec.boot_id)
    throw CoreError("invalid_argument", "boot_id has " + std::to_string(id.size()) + " bytes, wanted 16");
  std::memcpy(spec.boot_id, id.data(), id.size());
  spec.session_id = session_id;
  spec.shm_fd = shm_fd;
  spec.doorbell_fd = doorbell_fd;
  spec.max_tokens = max_tokens;
  spec.top_k = top_k;
  spec.element_bytes = element_bytes;
  spec.num_slots = num_slots;
  spec.spin_us = spin_us;
  spec.priority = static_cast<Priority>(priority);
  spec.share = share;
  const py::gil_scoped_release no_gil;
  runtime.add_session(model, spec);
}

py::list session_stats(const Runtime& runtime) {
  std::vector<SessionStats> all;
  {
    const py::gil_scoped_release no_gil;
    all = runtime.session_stats();
  }
  py::list result;
  for (const SessionStats& s : all) result.append(session_stats_dict(s));
  return result;
}

py::dict stats(const Runtime& runtime) {
  DispatcherStats s;
  std::vector<uint64_t> busy;
  {
    const py::gil_scoped_release no_gil;
    s = runtime.dispatcher_stats();
    busy = runtime.busy_ns();
  }
  return py::dict(py::arg("requests_completed") = s.requests_completed, py::arg("requests_failed") = s.requests_failed,
                  py::arg("tokens") = s.tokens, py::arg("compute_ns") = s.compute_ns, py::arg("busy_ns") = busy,
                  py::arg("heartbeat_age_ns") = s.heartbeat_age_ns);
}

std::shared_ptr<Runtime> make_runtime(const std::vector<py::dict>& nodes, const std::string& isa_cap, uint32_t spin_us,
                                      const std::string& huge_pages, uint32_t chunk_tokens) {
  std::vector<NodePlan> plan = to_plan(nodes);
  const py::gil_scoped_release no_gil;
  return std::make_shared<Runtime>(std::move(plan), isa_cap, spin_us, huge_pages, chunk_tokens);
}

ModelPtr create_model(Runtime& runtime, const std::string& name, const py::dict& geometry, const std::string& format) {
  const MoeGeometry g = to_geometry(geometry);
  const py::gil_scoped_release no_gil;
  return runtime.create_model(name, g, format);
}

ModelPtr adopt_model(Runtime& runtime, const std::string& name, const py::dict& geometry, const std::string& format,
                     const std::map<uint32_t, int>& arenas) {
  const MoeGeometry g = to_geometry(geometry);
  const py::gil_scoped_release no_gil;
  return runtime.adopt_model(name, g, format, arenas);
}

void bind_runtime_class(py::module_& m) {
  const py::call_guard<py::gil_scoped_release> no_gil;
  py::class_<Runtime, std::shared_ptr<Runtime>>(m, "Runtime")
      .def(py::init(&make_runtime), py::arg("nodes"), py::arg("isa_cap") = "", py::arg("spin_us") = 50,
           py::arg("huge_pages") = "auto", py::arg("chunk_tokens") = 1024)
      .def_static(
          "plan_bytes",
          [](const py::dict& geometry, const std::string& format, const std::vector<py::dict>& nodes) {
            return plan_bytes(to_geometry(geometry), format, to_plan(nodes));
          },
          py::arg("geometry"), py::arg("format"), py::arg("nodes"))
      .def("create_model", create_model, py::arg("name"), py::arg("geometry"), py::arg("format"))
      .def("adopt_model", adopt_model, py::arg("name"), py::arg("geometry"), py::arg("format"), py::arg("arenas"))
      .def("drop_model", &Runtime::drop_model, py::arg("model"), no_gil)
      .def("start", &Runtime::start, no_gil)
      .def("drain", &Runtime::drain, py::arg("timeout_s"), no_gil)
      .def("stop", &Runtime::stop, no_gil)
      .def("session_layout", session_layout, py::arg("model"), py::arg("max_tokens"), py::arg("top_k"),
           py::arg("element_bytes"), py::arg("num_slots"))
      .def("add_session", add_session, py::arg("session_id"), py::arg("model"), py::arg("shm_fd"),
           py::arg("doorbell_fd"), py::arg("boot_id"), py::arg("max_tokens"), py::arg("top_k"),
           py::arg("element_bytes"), py::arg("num_slots"), py::arg("spin_us"), py::arg("priority") = 1,
           py::arg("share") = 0)
      .def("remove_session", &Runtime::remove_session, py::arg("session_id"), no_gil)
      .def("end_session", &Runtime::end_session, py::arg("session_id"), py::arg("closing"), no_gil)
      .def(
          "configure_session",
          [](Runtime& runtime, uint64_t id, uint32_t priority, uint32_t share) {
            runtime.configure_session(id, static_cast<Priority>(priority), share);
          },
          py::arg("session_id"), py::arg("priority"), py::arg("share"), no_gil)
      .def("set_class_weights", &Runtime::set_class_weights, py::arg("weights"), no_gil)
      .def("session_stats", session_stats)
      .def("stats", stats);
}

}  // namespace

void bind_runtime(py::module_& m) {
  m.attr("PACKED_CHUNK_BYTES") = kPackedChunkBytes;
  m.attr("ARENA_LAYOUT_VERSION") = kArenaLayoutVersion;
  bind_model(m);
  bind_runtime_class(m);
}
