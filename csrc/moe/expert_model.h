// What the dispatcher needs of a loaded model: its geometry and forward passes. Lets ipc and the dispatcher know
// nothing of formats, kernels and threads, and lets tests use a model that only echoes.
#pragma once
#include <cstdint>
#include <memory>
#include <string>

#include "syshax/quantization_base.h"

namespace syshax {

struct MoeGeometry {
  uint32_t num_layers = 0;  // MoE layers, numbered 0.. in checkpoint order
  uint32_t num_experts = 0;
  uint32_t hidden_size = 0;
  uint32_t intermediate_size = 0;
  uint32_t top_k = 0;  // the checkpoint's; a request may use any top_k in [1, num_experts]
};

// One session's rows of a request.
struct MoeRows {
  uint32_t num_tokens;        // >= 1
  const void* hidden_states;  // [num_tokens, hidden_size] of the request's dtype; may change while it is read
  void* output;               // the same, overwritten
};

// One layer's work, for one session or for several whose rows follow one another. Ids and weights are private copies,
// checked: every id is -1 or in [0, num_experts).
struct MoeRequest {
  uint32_t layer;
  uint32_t num_tokens;  // of all parts
  uint32_t top_k;       // >= 1
  syshax_dtype dtype;
  const MoeRows* parts;
  uint32_t num_parts;         // >= 1
  const int32_t* topk_ids;    // [num_tokens, top_k]
  const float* topk_weights;  // [num_tokens, top_k]
};

// A forward pass that can be interrupted, with the working memory that it needs. Passes of one model may be in progress
// side by side; one computes at a time. No allocation, lock, log, throw.
class ForwardPass {
 public:
  virtual ~ForwardPass() = default;
  // Forgets what it was at. Everything the request points to stays until the pass is through or begins another.
  virtual void begin(const MoeRequest& request) noexcept = 0;
  // Computes until all is done (true), or until shortly after until_ns of CLOCK_MONOTONIC (false; call it again).
  virtual bool advance(uint64_t until_ns) noexcept = 0;
};

class ExpertModel {
 public:
  virtual ~ExpertModel() = default;
  virtual const std::string& name() const = 0;
  virtual MoeGeometry geometry() const = 0;
  // For requests of any number of tokens; more than max_tokens are cut into chunks inside. Throws CoreError. The model
  // must outlive it.
  virtual std::unique_ptr<ForwardPass> make_pass(uint32_t max_tokens) = 0;
};

}  // namespace syshax
