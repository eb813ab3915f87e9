// The checks of a kernel with its packing and its activation. Contract: conformance.h.
//
// What a kernel multiplies with is learnt from the kernel itself: over rows with a single 1 it gives back each value of
// a token as its activation holds it. Products are then compared with those values times the decoded weights in
// float64, within the roundings of a float32 sum; how far those values are from the true ones is a check of its own.
#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "kernels/conformance.h"
#include "kernels/conformance_rig.h"

namespace syshax {
namespace {

constexpr size_t kTokenCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 15, 16, 17, 24, 31, 33, 48, 64};

size_t k_of(const syshax_kernel& kernel, size_t steps) { return steps * kernel.packing->k_multiple; }

Matrix random_matrix(const syshax_kernel& kernel, size_t rows, size_t k, uint64_t seed) {
  return Matrix(kernel, Random(seed).bells(rows * k, 1.0f / std::sqrt(float(k))), rows, k);
}

// [tokens, k]: the values that the kernel computes with; empty where the format cannot hold a 1 alone.
std::vector<double> effective(const syshax_kernel& kernel, const Tokens& x, size_t k) {
  std::vector<float> unit(k * k, 0.0f);
  for (size_t i = 0; i < k; ++i) unit[i * k + i] = 1.0f;
  const Matrix w(kernel, unit, k, k);
  for (size_t i = 0; i < k * k; ++i) {
    if ((w.decoded[i] != 0.0f) != (i % (k + 1) == 0)) return {};
  }
  const std::vector<float> out = run(kernel, w, x);
  const size_t columns = out.size() / x.count();
  std::vector<double> values(x.count() * k);
  for (size_t t = 0; t < x.count(); ++t) {
    for (size_t i = 0; i < k; ++i) values[t * k + i] = double(out[t * columns + i]) / w.weight(i, i);
  }
  return values;
}

// out [tokens, columns] against the product in float64.
void demand_product(const syshax_kernel& kernel, const Matrix& w, const std::vector<float>& x, const Tokens& packed,
                    const std::vector<float>& out) {
  const size_t k = w.k, columns = out.size() / packed.count();
  const std::vector<double> values = effective(kernel, packed, k);
  const double rounding = values.empty() ? 0.02 : double(k + 16) * 0x1p-24;
  for (size_t t = 0; t < packed.count(); ++t) {
    for (size_t row = 0; row < w.rows; ++row) {
      double exact = 0, magnitude = 0;
      for (size_t i = 0; i < k; ++i) {
        const double product = w.weight(row, i) * (values.empty() ? double(x[t * k + i]) : values[t * k + i]);
        exact += product;
        magnitude += std::fabs(product);
      }
      const double got = double(out[t * columns + row]);
      demand(std::fabs(got - exact) <= magnitude * rounding + 1e-30,
             "token " + std::to_string(t) + ", row " + std::to_string(row) + " of " + shape(packed.count(), w.rows, k) +
                 " is " + std::to_string(got) + ", not " + std::to_string(exact));
    }
    for (size_t i = w.rows; i < columns; ++i)
      demand(out[t * columns + i] == 0.0f, "row " + std::to_string(i) + ", which is padding, gives no 0");
  }
}

void demand_right(const syshax_kernel& kernel, size_t tokens, size_t rows, size_t k, float scale = 1.0f) {
  const Matrix w = random_matrix(kernel, rows, k, tokens + rows + k);
  const std::vector<float> x = Random(tokens * 31 + rows).bells(tokens * k, scale);
  const Tokens packed(kernel, x, tokens, k);
  demand_product(kernel, w, x, packed, run(kernel, w, packed));
}

// ---- packing ------------------------------------------------------------------------------------------------------

void demand_inverse(const syshax_packing& packing, const Matrix& w, size_t gap) {
  const size_t stride = w.row_bytes + gap;
  Buffer blocks(w.rows * stride), clean(w.panel_bytes, 0), back(w.rows * stride);
  for (size_t r = 0; r < w.rows; ++r)
    std::memcpy(blocks.data() + r * stride, w.blocks.data() + r * w.row_bytes, w.row_bytes);
  packing.pack(blocks.data(), stride, uint32_t(w.rows), w.k, clean.data());
  clean.demand_intact("pack");
  const std::string where = std::to_string(w.rows) + " rows of " + std::to_string(w.k);
  demand(clean.equals(w.panels), "pack leaves bytes of a panel unwritten, or depends on row_bytes: " + where);
  packing.unpack(clean.data(), w.k, uint32_t(w.rows), back.data(), stride);
  back.demand_intact("unpack");
  demand(back.equals(blocks), "unpack does not give back what was packed, or writes between rows: " + where);
}

std::string check_packing(const syshax_kernel& kernel) {
  const syshax_packing& packing = *kernel.packing;
  for (const size_t k : {k_of(kernel, 1), k_of(kernel, 3)}) {
    demand(packing.panel_bytes(k) % 64 == 0, "panel_bytes(" + std::to_string(k) + ") is no multiple of 64");
    for (uint32_t rows = 1; rows <= packing.panel_rows; ++rows) {
      const Matrix w = random_matrix(kernel, rows, k, rows + k);
      demand_inverse(packing, w, 0);
      demand_inverse(packing, w, 3);
    }
  }
  char text[64];
  const size_t k = (2048 + packing.k_multiple - 1) / packing.k_multiple * packing.k_multiple;
  std::snprintf(text, sizeof text, "%.2f bits a weight", double(packing.panel_bytes(k)) * 8 / double(k * 16));
  return text;
}

// ---- activation ---------------------------------------------------------------------------------------------------

// A row packed in ranges, last first, as several threads may do it.
std::string check_ranges(const syshax_kernel& kernel) {
  const syshax_activation& activation = *kernel.activation;
  for (const size_t steps : {size_t{1}, size_t{2}, size_t{5}}) {
    const size_t k = k_of(kernel, steps), bytes = activation.row_bytes(k);
    demand(bytes > 0 && bytes % 64 == 0, "row_bytes(" + std::to_string(k) + ") is no multiple of 64");
    for (const size_t real : {k, k - 1, k - 30, k - 63}) {
      std::vector<float> x = Random(real).bells(k);
      std::fill(x.begin() + ptrdiff_t(real), x.end(), 0.0f);
      Buffer whole(bytes), parts(bytes);
      syshax_pack_row(&activation, x.data(), k, whole.data());
      for (size_t begin = k; begin > 0; begin -= 64) {
        const size_t count = std::min(size_t{64}, real - (begin - 64));
        Buffer source(count * 4);
        std::memcpy(source.data(), &x[begin - 64], count * 4);
        activation.pack(source.floats(), count, begin - 64, k, parts.data());
      }
      if (activation.finish) activation.finish(k, parts.data());
      parts.demand_intact("activation.pack");
      demand(whole.equals(parts), "a row of " + std::to_string(real) + " of " + std::to_string(k) +
                                      " values packed in ranges of 64 differs from one packed whole");
    }
  }
  return "";
}

std::string check_activations(const syshax_kernel& kernel) {
  const size_t k = k_of(kernel, 4);
  double worst = 0;
  for (const float scale : {1e-3f, 1.0f, 1e3f}) {
    const std::vector<float> x = Random(11).bells(8 * k, scale);
    const std::vector<double> values = effective(kernel, Tokens(kernel, x, 8, k), k);
    if (values.empty()) return "the format holds no single 1 among zeros: not looked at";
    double error = 0, power = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      error += (values[i] - double(x[i])) * (values[i] - double(x[i]));
      power += double(x[i]) * double(x[i]);
    }
    worst = std::max(worst, std::sqrt(error / power));
  }
  demand(worst <= 0.1, "activations are off by " + std::to_string(worst * 100) + " % (RMS)");
  char text[64];
  std::snprintf(text, sizeof text, "RMS error %.3f %%", worst * 100);
  return text;
}

// ---- products -----------------------------------------------------------------------------------------------------

std::string check_tokens(const syshax_kernel& kernel) {
  for (const size_t tokens : kTokenCounts)
    demand_right(kernel, tokens, 3 * kernel.packing->panel_rows, k_of(kernel, 2));
  return "";
}

std::string check_rows(const syshax_kernel& kernel) {
  for (const size_t rows : {1, 15, 16, 17, 33, 48, 64, 80, 96, 129, 144}) {
    for (const size_t tokens : {1, 2, 3, 5, 7}) demand_right(kernel, tokens, rows, k_of(kernel, 1));
  }
  return "";
}

std::string check_lengths(const syshax_kernel& kernel) {
  for (const size_t steps : {1, 2, 3, 4, 7, 12}) {
    for (const size_t tokens : {1, 6}) demand_right(kernel, tokens, 17, k_of(kernel, steps), 100.0f);
  }
  return "";
}

// Rows longer than what narrow sums hold: nothing may overflow. Compared roughly: with the true activations.
std::string check_long_rows(const syshax_kernel& kernel) {
  const size_t k = (70000 + kernel.packing->k_multiple - 1) / kernel.packing->k_multiple * kernel.packing->k_multiple;
  const std::vector<float> w_values(16 * k, 0.5f), x(2 * k, 1.0f);
  const Matrix w(kernel, w_values, 16, k);
  for (const float value : run(kernel, w, Tokens(kernel, x, 2, k)))
    demand(std::fabs(value - 0.5f * float(k)) < 0.05f * float(k),
           std::to_string(k) + " products of 0.5 sum to " + std::to_string(value));
  return "";
}

// Largest magnitudes of either sign in every combination: what saturates narrow sums.
std::string check_extremes(const syshax_kernel& kernel) {
  const size_t k = k_of(kernel, 2), rows = 32, tokens = 5;
  for (int pattern = 0; pattern < 16; ++pattern) {
    std::vector<float> values(rows * k), x(tokens * k);
    const auto sign = [](size_t i, int kind) { return kind == 0 || (kind == 1 && i % 2) || (kind == 2 && i % 4 < 2); };
    for (size_t i = 0; i < values.size(); ++i) values[i] = sign(i, pattern % 4) ? 1.0f : -1.0f;
    for (size_t i = 0; i < x.size(); ++i) x[i] = sign(i, pattern / 4) ? 127.0f : -127.0f;
    const Matrix w(kernel, values, rows, k);
    const Tokens packed(kernel, x, tokens, k);
    demand_product(kernel, w, x, packed, run(kernel, w, packed));
  }
  return "";
}

// Kernels over integers (activations named q...) give the bits of the scalar kernel of their packing and activation.
std::string check_scalar(const syshax_kernel& kernel) {
  const syshax_kernel* scalar = nullptr;
  const auto same = [](const char* a, const char* b) { return std::strcmp(a, b) == 0; };
  for (const syshax_kernel* other : all_kernels()) {
    if (same(other->isa, "scalar") && same(other->packing->name, kernel.packing->name) &&
        same(other->activation->name, kernel.activation->name))
      scalar = other;
  }
  if (scalar == &kernel) return "is the scalar kernel";
  if (!scalar) return "there is no scalar kernel over this packing and activation";
  bool equal = true;
  for (const size_t tokens : kTokenCounts) {
    const size_t k = k_of(kernel, 3), rows = 80;
    const Matrix w = random_matrix(kernel, rows, k, tokens);
    const std::vector<float> x = Random(tokens).bells(tokens * k, 10.0f);
    equal = equal &&
            same_bits(run(kernel, w, Tokens(kernel, x, tokens, k)), run(*scalar, w, Tokens(*scalar, x, tokens, k)));
    demand(equal || kernel.activation->name[0] != 'q',
           shape(tokens, rows, k) + " differs from " + scalar->name + " in some bit");
  }
  return equal ? std::string("the bits of ") + scalar->name : "not the scalar kernel's bits, and not promised";
}

// A token's outputs depend neither on its batch nor on the number of panels.
std::string check_batch(const syshax_kernel& kernel) {
  const size_t k = k_of(kernel, 3), tokens = 23, rows = 9 * kernel.packing->panel_rows, panel = rows / 9;
  const Matrix w = random_matrix(kernel, rows, k, 1);
  const Tokens x(kernel, Random(2).bells(tokens * k), tokens, k);
  const std::vector<float> all = run(kernel, w, x);
  for (const size_t count : {1, 2, 3, 4, 5, 6, 7, 11}) {
    for (size_t t = 0; t < tokens; t += count) {
      const size_t n = std::min(count, tokens - t);
      demand(same_bits(run(kernel, w, x, t, n, 0, 9), {&all[t * rows], &all[t * rows] + n * rows}),
             "token " + std::to_string(t) + " depends on its batch (of " + std::to_string(n) + " and of 23)");
    }
  }
  for (const uint32_t panels : {1u, 2u, 3u, 5u}) {
    for (uint32_t p = 0; p + panels <= 9; p += panels) {
      const std::vector<float> part = run(kernel, w, x, 0, tokens, p, panels);
      for (size_t t = 0; t < tokens; ++t)
        demand(same_bits({&part[t * panels * panel], &part[t * panels * panel] + panels * panel},
                         {&all[t * rows + p * panel], &all[t * rows + p * panel] + panels * panel}),
               "panel " + std::to_string(p) + " depends on the panels computed with it");
    }
  }
  return "";
}

std::string check_zeros(const syshax_kernel& kernel) {
  const size_t k = k_of(kernel, 2), rows = 20;
  const Matrix zero(kernel, std::vector<float>(rows * k, 0.0f), rows, k), w = random_matrix(kernel, rows, k, 3);
  const Tokens x(kernel, Random(4).bells(7 * k), 7, k), nothing(kernel, std::vector<float>(7 * k, 0.0f), 7, k);
  for (const float value : run(kernel, zero, x)) demand(value == 0.0f, "zero weights give no 0");
  for (const float value : run(kernel, w, nothing)) demand(value == 0.0f, "zero activations give no 0");
  return "";
}

std::string check_non_numbers(const syshax_kernel& kernel) {
  const size_t k = k_of(kernel, 2), rows = 48, tokens = 9;
  std::vector<float> weights = Random(5).bells(rows * k), x = Random(6).bells(tokens * k);
  const Matrix w(kernel, weights, rows, k);
  const std::vector<float> good = run(kernel, w, Tokens(kernel, x, tokens, k));
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> poisoned = x;
    poisoned[4 * k + 77 % k] = bad;
    const std::vector<float> out = run(kernel, w, Tokens(kernel, poisoned, tokens, k));
    for (size_t i = 0; i < out.size(); ++i) {
      if (i / rows == 4) demand(!std::isfinite(out[i]), std::to_string(bad) + " in a token gives a number");
      if (i / rows != 4) demand(same_bits({out[i]}, {good[i]}), std::to_string(bad) + " in a token changes another");
    }
    poisoned = weights;
    poisoned[13 * k + 5] = bad;
    const Matrix sick(kernel, poisoned, rows, k);
    const std::vector<float> answer = run(kernel, sick, Tokens(kernel, x, tokens, k));
    for (size_t i = 0; i < answer.size(); ++i) {
      if (i % rows == 13) demand(!std::isfinite(answer[i]), std::to_string(bad) + " in a weight gives a number");
      if (i % rows != 13) demand(same_bits({answer[i]}, {good[i]}), std::to_string(bad) + " changes another row");
    }
  }
  return "";
}

// Inputs stay as they are; what is written outside is found by every check (run() of the rig).
std::string check_inputs(const syshax_kernel& kernel) {
  const size_t k = k_of(kernel, 2), rows = 80, tokens = 13;
  const Matrix w = random_matrix(kernel, rows, k, 7), same = random_matrix(kernel, rows, k, 7);
  const std::vector<float> values = Random(8).bells(tokens * k);
  const Tokens x(kernel, values, tokens, k), same_x(kernel, values, tokens, k);
  run(kernel, w, x);
  demand(w.panels.equals(same.panels), "run changes the weights");
  demand(x.rows.equals(same_x.rows), "run changes the activations");
  return "";
}

std::string check_threads(const syshax_kernel& kernel) {
  const size_t k = k_of(kernel, 4), rows = 80, tokens = 13;
  demand_same_in_threads("pack or run", [&] {
    return run(kernel, random_matrix(kernel, rows, k, 9), Tokens(kernel, Random(10).bells(tokens * k), tokens, k));
  });
  return "";
}

struct Check {
  const char* name;
  std::string (*run)(const syshax_kernel&);
};
constexpr Check kChecks[] = {
    {"packing", check_packing},     {"ranges", check_ranges},     {"activations", check_activations},
    {"tokens", check_tokens},       {"rows", check_rows},         {"lengths", check_lengths},
    {"long rows", check_long_rows}, {"extremes", check_extremes}, {"scalar", check_scalar},
    {"batch", check_batch},         {"zeros", check_zeros},       {"non-numbers", check_non_numbers},
    {"inputs", check_inputs},       {"threads", check_threads},
};

}  // namespace

std::vector<std::string> kernel_checks() {
  std::vector<std::string> names;
  for (const Check& check : kChecks) names.emplace_back(check.name);
  return names;
}

CheckResult check_kernel(const syshax_kernel& kernel, const std::string& name) {
  for (const Check& check : kChecks) {
    if (name != check.name) continue;
    try {
      return {true, check.run(kernel)};
    } catch (const Broken& broken) {
      return {false, broken.what()};
    }
  }
  throw CoreError("invalid_argument", "there is no check \"" + name + "\" of kernels");
}

}  // namespace syshax
