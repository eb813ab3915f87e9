// Whole MoE layers with the kernels that this CPU gets, without Python: loaded, forwarded through threads and nodes,
// and compared with the layer in float64 within a bound computed from the inputs (the one of
// tests/core/moe_reference.py, with quantised activations bounded by half a step). SYSHAX_ISA caps as it does
// elsewhere.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "base/error.h"
#include "base/float16.h"
#include "kernels/activations.h"
#include "moe/cpu_model.h"
#include "native_test.h"

using namespace syshax;
using namespace native_test;

namespace {

constexpr double kUnit = 0x1p-24;  // half an ulp of float32 around 1
constexpr uint32_t kChunkTokens = 32;

struct Bounded {
  double value = 0, error = 0;
};
using Row = std::vector<Bounded>;

struct Setting {
  MoeGeometry geometry;
  std::string format;
  syshax_dtype dtype;
  std::vector<NodePlan> plan;
  uint32_t tokens, top_k;
  bool poison;
};

std::string describe(const Setting& s) {
  char text[256];
  std::snprintf(text, sizeof text, "%s, dtype %d, %u experts, %u x %u, top_k %u, %u tokens, %zu nodes of %u threads",
                s.format.c_str(), s.dtype, s.geometry.num_experts, s.geometry.hidden_size, s.geometry.intermediate_size,
                s.top_k, s.tokens, s.plan.size(), s.plan[0].threads);
  return text;
}

// ---- the layer in float64 -----------------------------------------------------------------------------------------

// What the kernel multiplies with instead of `row`.
Row quantised(const Row& row, const std::string& activation) {
  Row result = row;
  if (activation == "q8" || activation == "q8x2") {
    const double lost = activation == "q8" ? 0.5 + 127 * 8 * kUnit : 0.501 / 254 + 127 * 8 * kUnit;
    for (size_t block = 0; block < row.size(); block += 32) {
      double most = 0;
      const size_t end = std::min(block + 32, row.size());
      for (size_t i = block; i < end; ++i) most = std::max(most, std::fabs(row[i].value) + row[i].error);
      for (size_t i = block; i < end; ++i) result[i].error += most / 127 * lost;
    }
  } else if (activation == "bf16") {
    for (Bounded& x : result) x.error += (std::fabs(x.value) + x.error) * 0x1p-8;
  } else if (activation == "f32") {
    for (Bounded& x : result) x.error += std::fabs(x.value) * kUnit;
  } else {
    fail("no reference for activations of kind %s", activation.c_str());
  }
  return result;
}

Row dense(const Row& x, const std::vector<float>& weights, size_t rows) {
  const size_t k = x.size();
  Row result(rows);
  for (size_t r = 0; r < rows; ++r) {
    double magnitude = 0;
    for (size_t i = 0; i < k; ++i) {
      const double w = weights[r * k + i];
      result[r].value += w * x[i].value;
      result[r].error += std::fabs(w) * x[i].error;
      magnitude += std::fabs(w * x[i].value);
    }
    result[r].error += double(k + 16) * kUnit * magnitude;
  }
  return result;
}

Row silu_mul(const Row& gate, const Row& up) {
  Row result(gate.size());
  for (size_t i = 0; i < gate.size(); ++i) {
    const double s = gate[i].value / (1 + std::exp(-gate[i].value));
    const double s_error = 1.1 * gate[i].error + std::fabs(s) * 16 * kUnit;  // the slope of silu is below 1.1
    result[i].value = s * up[i].value;
    result[i].error = s_error * (std::fabs(up[i].value) + up[i].error) + std::fabs(s) * up[i].error +
                      std::fabs(result[i].value) * 4 * kUnit;
  }
  return result;
}

struct Weights {
  std::vector<float> gate, up, down;
};

Row reference(const std::vector<float>& x, const std::vector<int32_t>& ids, const std::vector<float>& weights,
              const std::vector<Weights>& experts, const std::string& activation, const Setting& s, uint32_t token) {
  const size_t hidden = s.geometry.hidden_size;
  Row input(hidden), output(hidden);
  for (size_t i = 0; i < hidden; ++i) input[i].value = x[token * hidden + i];
  const Row packed = quantised(input, activation);
  std::vector<double> magnitude(hidden);
  for (uint32_t slot = 0; slot < s.top_k; ++slot) {
    const int32_t id = ids[token * s.top_k + slot];
    if (id < 0) continue;
    const Weights& e = experts[static_cast<size_t>(id)];
    const Row h = silu_mul(dense(packed, e.gate, s.geometry.intermediate_size),
                           dense(packed, e.up, s.geometry.intermediate_size));
    const Row y = dense(quantised(h, activation), e.down, hidden);
    const double weight = weights[token * s.top_k + slot];
    for (size_t i = 0; i < hidden; ++i) {
      output[i].value += weight * y[i].value;
      output[i].error += std::fabs(weight) * y[i].error;
      magnitude[i] += std::fabs(weight * y[i].value);
    }
  }
  const double unit = s.dtype == SYSHAX_FLOAT32 ? kUnit : s.dtype == SYSHAX_FLOAT16 ? 0x1p-11 : 0x1p-8;
  for (size_t i = 0; i < hidden; ++i) {
    output[i].error += double(s.top_k + 8) * kUnit * magnitude[i];
    output[i].error += (std::fabs(output[i].value) + output[i].error) * unit + 0x1p-24;
  }
  return output;
}

// ---- the core's ---------------------------------------------------------------------------------------------------

std::vector<char> to_dtype(const std::vector<float>& x, syshax_dtype dtype) {
  std::vector<char> bytes(x.size() * (dtype == SYSHAX_FLOAT32 ? 4 : 2));
  for (size_t i = 0; i < x.size(); ++i) {
    const uint16_t half = dtype == SYSHAX_FLOAT16 ? fp16_from_float(x[i]) : bf16_from_float(x[i]);
    if (dtype == SYSHAX_FLOAT32)
      std::memcpy(bytes.data() + 4 * i, &x[i], 4);
    else
      std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  return bytes;
}

std::vector<float> from_dtype(const std::vector<char>& bytes, syshax_dtype dtype) {
  std::vector<float> x(bytes.size() / (dtype == SYSHAX_FLOAT32 ? 4 : 2));
  for (size_t i = 0; i < x.size(); ++i) {
    uint16_t half;
    std::memcpy(&half, bytes.data() + 2 * i, 2);
    if (dtype == SYSHAX_FLOAT32)
      std::memcpy(&x[i], bytes.data() + 4 * i, 4);
    else
      x[i] = dtype == SYSHAX_FLOAT16 ? fp16_to_float(half) : bf16_to_float(half);
  }
  return x;
}

class Layer {
 public:
  explicit Layer(const Setting& s)
      : setting_(s),
        model_("test", s.geometry, s.format,
               std::make_shared<Compute>(s.plan, detect_cpu_features(), 20, SYSHAX_HUGE_OFF, kChunkTokens)) {
    model_.fill_random(7);
    model_.seal();
  }
  std::string activation() const { return model_.kernel(setting_.dtype)->activation->name; }
  const char* kernel() const { return model_.kernel(setting_.dtype)->name; }
  std::vector<Weights> experts() const {
    const size_t size = size_t{setting_.geometry.hidden_size} * setting_.geometry.intermediate_size;
    std::vector<Weights> all(setting_.geometry.num_experts);
    for (uint32_t i = 0; i < all.size(); ++i) {
      all[i] = {std::vector<float>(size), std::vector<float>(size), std::vector<float>(size)};
      model_.dequantize(setting_.geometry.num_layers - 1, i, all[i].gate.data(), all[i].up.data(), all[i].down.data());
    }
    return all;
  }
  std::vector<float> forward(const std::vector<float>& x, const std::vector<int32_t>& ids,
                             const std::vector<float>& weights) {
    const std::vector<char> in = to_dtype(x, setting_.dtype);
    std::vector<char> out(in.size(), 0x55), again(in.size(), 0x55);
    const MoeRows all = {setting_.tokens, in.data(), out.data()};
    const MoeRequest request = {setting_.geometry.num_layers - 1,
                                setting_.tokens,
                                setting_.top_k,
                                setting_.dtype,
                                &all,
                                1,
                                ids.data(),
                                weights.data()};
    model_.forward_checked(request);
    forward_in_pieces(request, again.data());
    if (out != again)
      fail("%s: interrupted and in parts it gives other bits (%s)", kernel(), describe(setting_).c_str());
    return from_dtype(out, setting_.dtype);
  }

  // Each token a part of its own, interrupted as often as can be.
  void forward_in_pieces(MoeRequest request, char* out) {
    const size_t row_bytes = setting_.geometry.hidden_size * dtype_bytes(setting_.dtype);
    const char* in = static_cast<const char*>(request.parts->hidden_states);
    std::vector<MoeRows> parts;
    for (uint32_t i = 0; i < setting_.tokens; ++i) parts.push_back({1, in + i * row_bytes, out + i * row_bytes});
    request.parts = parts.data();
    request.num_parts = setting_.tokens;
    model_.forward_checked(request, true);
  }

 private:
  const Setting setting_;
  CpuModel model_;
};

// Ids with repeats and holes; the last of several tokens has no expert at all.
std::vector<int32_t> make_ids(const Setting& s, Random& random) {
  std::vector<int32_t> ids(s.tokens * s.top_k);
  for (int32_t& id : ids) id = random.below(8) == 0 ? -1 : int32_t(random.below(s.geometry.num_experts));
  if (s.top_k == s.geometry.num_experts)
    for (uint32_t k = 0; k < s.top_k; ++k) ids[k] = int32_t(k);
  if (s.tokens > 2) std::fill(ids.end() - s.top_k, ids.end(), -1);
  return ids;
}

void check_poison(Layer& layer, const Setting& s, std::vector<float> x, std::vector<int32_t> ids,
                  const std::vector<float>& weights, const std::vector<float>& good) {
  const uint32_t bad = s.tokens / 2;
  const size_t hidden = s.geometry.hidden_size;
  ids[bad * s.top_k] = 0;
  x[bad * hidden + 3] = INFINITY;
  const std::vector<float> y = layer.forward(x, ids, weights);
  for (size_t i = 0; i < y.size(); ++i) {
    const bool mine = i / hidden == bad;
    if (mine ? std::isfinite(y[i]) : !same(y[i], good[i]))
      fail("%s: an infinity in token %u gives %.9g in token %zu (%s)", layer.kernel(), bad, double(y[i]), i / hidden,
           describe(s).c_str());
  }
}

std::vector<float> check(const Setting& s) {
  Layer layer(s);
  Random random(s.tokens * 131u + s.top_k * 17u + unsigned(s.dtype));
  std::vector<float> x(s.tokens * s.geometry.hidden_size), weights(s.tokens * s.top_k);
  for (float& v : x) v = random.unit() * 2;
  for (float& w : weights) w = random.unit();
  x = from_dtype(to_dtype(x, s.dtype), s.dtype);
  const std::vector<int32_t> ids = make_ids(s, random);
  const std::vector<float> y = layer.forward(x, ids, weights);
  const std::vector<Weights> experts = layer.experts();
  const size_t hidden = s.geometry.hidden_size;
  for (uint32_t token = 0; token < s.tokens; token += token < 4 ? 1 : 7) {
    const Row wanted = reference(x, ids, weights, experts, layer.activation(), s, token);
    for (size_t i = 0; i < hidden; ++i)
      if (!(std::fabs(y[token * hidden + i] - wanted[i].value) <= wanted[i].error))
        fail("%s: token %u column %zu is %.9g, float64 says %.9g +- %.3g (%s)", layer.kernel(), token, i,
             double(y[token * hidden + i]), wanted[i].value, wanted[i].error, describe(s).c_str());
  }
  if (s.poison) check_poison(layer, s, x, ids, weights, y);
  return y;
}

NodePlan node_of(uint32_t threads) { return {-1, {}, threads, 1.0}; }

void check_format(const std::string& format, syshax_dtype dtype) {
  const std::vector<NodePlan> one = {node_of(1)}, two_threads = {node_of(2)}, two_nodes = {node_of(1), node_of(2)};
  const MoeGeometry small = {2, 4, 96, 160, 2};
  const std::vector<float> alone = check({small, format, dtype, one, 70, 2, true});
  const std::vector<float> shared = check({small, format, dtype, two_threads, 70, 2, true});
  for (size_t i = 0; i < alone.size(); ++i)
    if (!same(alone[i], shared[i])) fail("%s, dtype %d: two threads give other bits than one", format.c_str(), dtype);
  for (const uint32_t tokens : {1, 3, 17}) check({small, format, dtype, two_nodes, tokens, 2, tokens > 1});
  check({small, format, dtype, two_threads, 6, 4, false});     // top_k = num_experts
  check({{1, 1, 64, 32, 1}, format, dtype, one, 5, 1, true});  // one expert
  if (dtype == SYSHAX_FLOAT32) check({{1, 512, 32, 32, 8}, format, dtype, two_threads, 40, 8, false});
}

void check_refusals() {
  const Setting s = {{1, 2, 32, 32, 1}, "q8_0", SYSHAX_FLOAT32, {node_of(1)}, 0, 1, false};
  Layer layer(s);
  try {
    layer.forward({}, {}, {});
  } catch (const CoreError& error) {
    if (error.code() == "invalid_argument") return;
  }
  fail("zero tokens are not refused");
}

}  // namespace

// short: each format with one dtype, each dtype with some format.
int main(int argc, char** argv) {
  const bool brief = argc > 1 && std::string(argv[1]) == "short";
  for (const char* format : {"bf16", "fp16", "q8_0", "q4_0"}) {
    for (const syshax_dtype dtype : {SYSHAX_FLOAT32, SYSHAX_FLOAT16, SYSHAX_BFLOAT16}) {
      const bool own = std::string(format) == "bf16"   ? dtype == SYSHAX_BFLOAT16
                       : std::string(format) == "q8_0" ? dtype == SYSHAX_FLOAT32
                                                       : dtype == SYSHAX_FLOAT16;
      if (brief && !own) continue;
      check_format(format, dtype);
      std::printf("%s with dtype %d\n", format, dtype);
      std::fflush(stdout);
    }
  }
  check_refusals();
  return 0;
}
