// For tests alone: the ring's ABI as compiled, and a dispatcher over a fake model, so that ring, dispatcher and client
// are tested without kernels. Also the conversions of ring structs to Python that other bindings use.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>

#include "base/error.h"
#include "bindings/bindings.h"
#include "dispatcher.h"
#include "ipc/ring_layout.h"
#include "ipc/ring_server.h"
#include "threads/event.h"

namespace py = pybind11;
using namespace pybind11::literals;

py::dict ring_header_dict(const syshax_ring_header& h) {
  return py::dict("magic"_a = h.magic, "version_major"_a = h.version_major, "version_minor"_a = h.version_minor,
                  "num_slots"_a = h.num_slots, "max_tokens"_a = h.max_tokens, "hidden_size"_a = h.hidden_size,
                  "top_k"_a = h.top_k, "element_bytes"_a = h.element_bytes, "num_layers"_a = h.num_layers,
                  "requests_offset"_a = h.requests_offset, "completions_offset"_a = h.completions_offset,
                  "slots_offset"_a = h.slots_offset, "slot_bytes"_a = h.slot_bytes, "ids_offset"_a = h.ids_offset,
                  "weights_offset"_a = h.weights_offset, "output_offset"_a = h.output_offset,
                  "total_bytes"_a = h.total_bytes);
}

py::dict session_stats_dict(const syshax::SessionStats& s) {
  return py::dict(
      "session_id"_a = s.session_id, "requests"_a = s.requests, "tokens"_a = s.tokens, "errors"_a = s.errors,
      "in_flight"_a = s.in_flight, "queued_ns"_a = s.queued_ns, "compute_ns"_a = s.compute_ns,
      "last_active_ns_ago"_a = s.last_active_ns_ago, "heartbeat"_a = s.heartbeat, "client_wait_ns"_a = s.client_wait_ns,
      "poisoned"_a = s.poisoned, "ended"_a = s.ended, "priority"_a = static_cast<uint32_t>(s.priority),
      "share"_a = s.share, "charged_ns"_a = s.charged_ns, "batched"_a = s.batched, "throttled_ns"_a = s.throttled_ns,
      "tokens_in_flight"_a = s.tokens_in_flight, "wait_us_p50"_a = s.wait_us_p50, "wait_us_p99"_a = s.wait_us_p99,
      "service_us_p50"_a = s.service_us_p50, "service_us_p99"_a = s.service_us_p99);
}

namespace {

#define FIELD(type, name) fields[#name] = py::make_tuple(offsetof(type, name), sizeof(type::name))

py::dict abi_of_request() {
  py::dict fields;
  using T = syshax_ring_request;
  FIELD(T, tag), FIELD(T, slot), FIELD(T, layer), FIELD(T, num_tokens), FIELD(T, top_k), FIELD(T, dtype);
  FIELD(T, flags), FIELD(T, reserved);
  return py::dict("size"_a = sizeof(T), "fields"_a = fields);
}

py::dict abi_of_completion() {
  py::dict fields;
  using T = syshax_ring_completion;
  FIELD(T, tag), FIELD(T, status), FIELD(T, detail), FIELD(T, detail2), FIELD(T, state), FIELD(T, queued_ns);
  FIELD(T, compute_ns), FIELD(T, waiters), FIELD(T, pad), FIELD(T, reserved);
  return py::dict("size"_a = sizeof(T), "fields"_a = fields);
}

py::dict abi_of_header() {
  py::dict fields;
  using T = syshax_ring_header;
  FIELD(T, magic), FIELD(T, version_major), FIELD(T, version_minor), FIELD(T, boot_id), FIELD(T, session_id);
  FIELD(T, num_slots), FIELD(T, max_tokens), FIELD(T, hidden_size), FIELD(T, top_k), FIELD(T, element_bytes);
  FIELD(T, num_layers), FIELD(T, requests_offset), FIELD(T, completions_offset), FIELD(T, slots_offset);
  FIELD(T, slot_bytes), FIELD(T, ids_offset), FIELD(T, weights_offset), FIELD(T, output_offset);
  FIELD(T, total_bytes), FIELD(T, reserved0), FIELD(T, submit_tail), FIELD(T, reserved1), FIELD(T, client_heartbeat);
  FIELD(T, client_wait_ns), FIELD(T, reserved2), FIELD(T, submit_head), FIELD(T, parked), FIELD(T, daemon_heartbeat),
      FIELD(T, spin_us);
  FIELD(T, closing), FIELD(T, reserved3);
  return py::dict("size"_a = sizeof(T), "fields"_a = fields);
}

py::dict ring_abi() {
  py::dict constants("magic"_a = SYSHAX_RING_MAGIC, "version_major"_a = SYSHAX_RING_VERSION_MAJOR,
                     "version_minor"_a = SYSHAX_RING_VERSION_MINOR, "page"_a = SYSHAX_RING_PAGE,
                     "max_slots"_a = SYSHAX_RING_MAX_SLOTS, "first_position"_a = syshax::kFirstPosition,
                     "OK"_a = int(SYSHAX_RING_OK), "BAD_REQUEST"_a = int(SYSHAX_RING_BAD_REQUEST),
                     "BAD_LAYER"_a = int(SYSHAX_RING_BAD_LAYER), "BAD_SHAPE"_a = int(SYSHAX_RING_BAD_SHAPE),
                     "BAD_EXPERT_ID"_a = int(SYSHAX_RING_BAD_EXPERT_ID), "MODEL_GONE"_a = int(SYSHAX_RING_MODEL_GONE),
                     "SHUTTING_DOWN"_a = int(SYSHAX_RING_SHUTTING_DOWN), "INTERNAL"_a = int(SYSHAX_RING_INTERNAL),
                     "OPEN"_a = int(SYSHAX_RING_OPEN), "DRAINING"_a = int(SYSHAX_RING_DRAINING),
                     "BROKEN_QUEUE"_a = int(SYSHAX_RING_BROKEN_QUEUE), "TRUNCATED"_a = int(SYSHAX_RING_TRUNCATED),
                     "KICKED"_a = int(SYSHAX_RING_KICKED), "STOPPED"_a = int(SYSHAX_RING_STOPPED));
  return py::dict("syshax_ring_header"_a = abi_of_header(), "syshax_ring_request"_a = abi_of_request(),
                  "syshax_ring_completion"_a = abi_of_completion(), "constants"_a = constants);
}

// Output shows every input: which layer, which token's ids and weights, which hidden states. In integers, so that any
// dtype compares exactly.
template <typename Element>
void mix(const syshax::MoeRequest& r, uint32_t hidden_size) {
  size_t at = 0;
  for (uint32_t p = 0; p < r.num_parts; ++p) {
    const auto* in = static_cast<const Element*>(r.parts[p].hidden_states);
    auto* out = static_cast<Element*>(r.parts[p].output);
    for (uint32_t t = 0; t < r.parts[p].num_tokens; ++t, in += hidden_size, out += hidden_size) {
      uint32_t sum = r.layer;
      for (uint32_t k = 0; k < r.top_k; ++k, ++at) {
        uint32_t bits;
        std::memcpy(&bits, &r.topk_weights[at], sizeof(bits));
        sum += (static_cast<uint32_t>(r.topk_ids[at]) + 1) * bits;
      }
      for (size_t i = 0; i < hidden_size; ++i) out[i] = static_cast<Element>(in[i] + sum);
    }
  }
}

class FakeModel final : public syshax::ExpertModel {
 public:
  FakeModel(syshax::MoeGeometry geometry, bool worker_thread) : geometry_(geometry), worker_thread_(worker_thread) {}
  const std::string& name() const override { return name_; }
  syshax::MoeGeometry geometry() const override { return geometry_; }
  std::unique_ptr<syshax::ForwardPass> make_pass(uint32_t) override { return std::make_unique<Pass>(*this); }

  std::atomic<bool> held{false};
  std::atomic<uint32_t> delay_us{0};  // of a token; slices end between tokens
  std::atomic<uint64_t> calls{0}, running{0};

 private:
  class Pass final : public syshax::ForwardPass {
   public:
    explicit Pass(FakeModel& model) : model_(model) {}
    void begin(const syshax::MoeRequest& request) noexcept override {
      request_ = request;
      waited_ = 0;
    }
    bool advance(uint64_t until_ns) noexcept override {
      model_.running.fetch_add(1);
      while (model_.held.load()) std::this_thread::sleep_for(std::chrono::microseconds(100));
      const bool through = wait(until_ns);
      if (through) {
        if (model_.worker_thread_)
          std::thread([&] { model_.compute(request_); }).join();
        else
          model_.compute(request_);
        model_.calls.fetch_add(1);
      }
      model_.running.fetch_sub(1);
      return through;
    }

   private:
    bool wait(uint64_t until_ns) noexcept {
      while (waited_ < request_.num_tokens) {
        const uint32_t us = model_.delay_us.load();
        if (us == 0) return true;
        std::this_thread::sleep_for(std::chrono::microseconds(us));
        if (++waited_ < request_.num_tokens && syshax::now_ns() >= until_ns) return false;
      }
      return true;
    }

    FakeModel& model_;
    syshax::MoeRequest request_{};
    uint32_t waited_ = 0;
  };

  void compute(const syshax::MoeRequest& request) const {
    if (request.dtype == SYSHAX_FLOAT32)
      mix<uint32_t>(request, geometry_.hidden_size);
    else
      mix<uint16_t>(request, geometry_.hidden_size);
  }

  const std::string name_ = "fake";
  const syshax::MoeGeometry geometry_;
  const bool worker_thread_;
};

class TestHarness {
 public:
  TestHarness(uint32_t num_layers, uint32_t num_experts, uint32_t hidden_size, uint32_t top_k, uint32_t spin_us,
              std::vector<int> cpus, bool worker_thread)
      : geometry_{num_layers, num_experts, hidden_size, 1, top_k},
        model_(std::make_shared<FakeModel>(geometry_, worker_thread)),
        watched_(model_),
        dispatcher_(spin_us, std::move(cpus)) {}
  ~TestHarness() { release(); }

  py::dict layout(uint32_t max_tokens, uint32_t top_k, uint32_t element_bytes, uint32_t num_slots) const {
    return ring_header_dict(syshax::ring_layout(
        {num_slots, max_tokens, geometry_.hidden_size, top_k, element_bytes, geometry_.num_layers}));
  }

  void add_session(uint64_t session_id, int shm_fd, int doorbell_fd, const std::string& boot_id, uint32_t max_tokens,
                   uint32_t top_k, uint32_t element_bytes, uint32_t num_slots, uint32_t spin_us, uint32_t priority,
                   uint32_t share) {
    syshax::SessionSpec spec;
    if (boot_id.size() != sizeof(spec.boot_id)) throw syshax::CoreError("invalid_argument", "boot_id has 16 bytes");
    std::memcpy(spec.boot_id, boot_id.data(), boot_id.size());
    spec.session_id = session_id;
    spec.model = model_;
    spec.shm_fd = shm_fd;
    spec.doorbell_fd = doorbell_fd;
    spec.max_tokens = max_tokens;
    spec.top_k = top_k;
    spec.element_bytes = element_bytes;
    spec.num_slots = num_slots;
    spec.spin_us = spin_us;
    spec.priority = static_cast<syshax::Priority>(priority);
    spec.share = share;
    py::gil_scoped_release unlocked;
    dispatcher_.add_session(spec);
  }

  void forget_model() {
    std::shared_ptr<FakeModel> model = std::move(model_);
    dispatcher_.forget_model(model.get());
  }

  void release() {
    if (auto model = watched_.lock()) model->held = false;
  }
  FakeModel& model() {
    if (!model_) throw syshax::CoreError("internal", "the harness has forgotten its model");
    return *model_;
  }
  bool model_alive() const { return !watched_.expired(); }
  syshax::Dispatcher& dispatcher() { return dispatcher_; }

 private:
  const syshax::MoeGeometry geometry_;
  std::shared_ptr<FakeModel> model_;
  std::weak_ptr<FakeModel> watched_;
  syshax::Dispatcher dispatcher_;
};

py::dict stats_dict(const syshax::DispatcherStats& s) {
  return py::dict("requests_completed"_a = s.requests_completed, "requests_failed"_a = s.requests_failed,
                  "tokens"_a = s.tokens, "compute_ns"_a = s.compute_ns, "heartbeat_age_ns"_a = s.heartbeat_age_ns);
}

}  // namespace

void bind_harness(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  m.def("ring_abi", &ring_abi);
  py::class_<TestHarness>(m, "TestHarness")
      .def(py::init<uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, std::vector<int>, bool>(), "num_layers"_a,
           "num_experts"_a, "hidden_size"_a, "top_k"_a, "spin_us"_a = 0, "cpus"_a = std::vector<int>{},
           "worker_thread"_a = false)
      .def("layout", &TestHarness::layout, "max_tokens"_a, "top_k"_a, "element_bytes"_a, "num_slots"_a)
      .def("add_session", &TestHarness::add_session, "session_id"_a, "shm_fd"_a, "doorbell_fd"_a, "boot_id"_a,
           "max_tokens"_a, "top_k"_a, "element_bytes"_a, "num_slots"_a, "spin_us"_a = 0, "priority"_a = 1,
           "share"_a = 0)
      .def(
          "end_session", [](TestHarness& h, uint64_t id, uint32_t closing) { h.dispatcher().end_session(id, closing); },
          Unlocked())
      .def(
          "remove_session", [](TestHarness& h, uint64_t id) { h.dispatcher().remove_session(id); }, Unlocked())
      .def("forget_model", &TestHarness::forget_model, Unlocked())
      .def("model_alive", &TestHarness::model_alive)
      .def(
          "start", [](TestHarness& h) { h.dispatcher().start(); }, Unlocked())
      .def(
          "stop", [](TestHarness& h) { h.dispatcher().stop(); }, Unlocked())
      .def(
          "drain", [](TestHarness& h, double timeout_s) { return h.dispatcher().drain(timeout_s); }, Unlocked())
      .def("session_stats",
           [](TestHarness& h) {
             py::list all;
             for (const auto& stats : h.dispatcher().session_stats()) all.append(session_stats_dict(stats));
             return all;
           })
      .def("stats", [](TestHarness& h) { return stats_dict(h.dispatcher().stats()); })
      .def("hold", [](TestHarness& h) { h.model().held = true; })
      .def("release", &TestHarness::release)
      .def("set_delay_us", [](TestHarness& h, uint32_t delay_us) { h.model().delay_us = delay_us; })
      .def("forward_calls", [](TestHarness& h) { return h.model().calls.load(); })
      .def("forwards_running", [](TestHarness& h) { return h.model().running.load(); });
}
