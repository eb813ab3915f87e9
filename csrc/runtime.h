// One process's data plane: the plan's thread pool, the models and, once started, the dispatcher that serves sessions.
// What the daemon's Python drives; every call may come from any Python thread.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "dispatcher.h"
#include "moe/cpu_model.h"

namespace syshax {

class Runtime {
 public:
  // Throws CoreError("hardware") for a plan, ISA or CPU that this machine does not have.
  Runtime(std::vector<NodePlan> plan, const std::string& isa_cap, uint32_t spin_us, const std::string& huge_pages,
          uint32_t chunk_tokens);
  ~Runtime();

  std::shared_ptr<CpuModel> create_model(const std::string& name, const MoeGeometry& geometry,
                                         const std::string& format);
  // A model whose arenas an earlier process filled and sealed: descriptors by index of the plan's nodes, duplicated
  // here. Reads and copies no bytes, checks no memory: it is taken already. Throws CoreError("hardware") for a
  // descriptor that is no sealed arena, CoreError("invalid_argument") for an arena missing, too many or of another
  // size.
  std::shared_ptr<CpuModel> adopt_model(const std::string& name, const MoeGeometry& geometry, const std::string& format,
                                        const std::map<uint32_t, int>& arenas);
  // Its sessions get MODEL_GONE from now on; returns when its memory is given back.
  void drop_model(const std::shared_ptr<CpuModel>& model);

  void start();
  bool drain(double timeout_s);
  void stop();
  // Throw CoreError("shutting_down") before start and after stop, CoreError("model_not_ready") for a model that is not
  // sealed or is being dropped.
  void add_session(const std::shared_ptr<CpuModel>& model, SessionSpec spec);
  void remove_session(uint64_t session_id);
  // As the dispatcher's; nothing happens where none runs.
  void end_session(uint64_t session_id, uint32_t closing);
  void configure_session(uint64_t session_id, Priority priority, uint32_t share);
  // Kept, for the dispatcher that runs and those to come.
  void set_class_weights(const ClassWeights& weights);

  std::vector<SessionStats> session_stats() const;
  DispatcherStats dispatcher_stats() const;
  std::vector<uint64_t> busy_ns() const;

 private:
  std::shared_ptr<Dispatcher> running() const;  // nullptr when it does not run

  const std::shared_ptr<Compute> compute_;
  const uint32_t spin_us_;
  std::mutex creating_;       // models are made one after the other: each sees what memory the last one left
  std::mutex attaching_;      // a model is not closed between the check that it serves and its session's beginning
  mutable std::mutex mutex_;  // guards the two below
  ClassWeights class_weights_ = kClassWeights;
  std::shared_ptr<Dispatcher> dispatcher_;
};

}  // namespace syshax
