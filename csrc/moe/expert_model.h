// What the dispatcher needs of a loaded model: its geometry and a forward pass. Lets ipc and the dispatcher know
// nothing of formats, kernels and threads, and lets tests use a model that only echoes.
#pragma once
#include <cstdint>
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

// One layer's work. Ids and weights are private copies, checked: every id is -1 or in [0, num_experts).
struct MoeRequest {
  uint32_t layer;
  uint32_t num_tokens;  // >= 1
  uint32_t top_k;       // >= 1
  syshax_dtype dtype;
  const void* hidden_states;  // [num_tokens, hidden_size] of dtype; may change while it is read (client memory)
  const int32_t* topk_ids;    // [num_tokens, top_k]
  const float* topk_weights;  // [num_tokens, top_k]
  void* output;               // [num_tokens, hidden_size] of dtype, overwritten
};

class ExpertModel {
 public:
  virtual ~ExpertModel() = default;
  virtual const std::string& name() const = 0;
  virtual MoeGeometry geometry() const = 0;
  // Computes the layer with the runtime's threads; called by one thread at a time, any number of tokens (large
  // batches are cut into chunks inside). No allocation, lock, log, throw.
  virtual void forward(const MoeRequest& request) noexcept = 0;
};

}  // namespace syshax
