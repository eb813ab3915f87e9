// The checks of a format. Contract: conformance.h.
#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "kernels/conformance.h"
#include "kernels/conformance_rig.h"

namespace syshax {
namespace {

constexpr size_t kLengths[] = {64, 128, 192, 448, 2048};

std::vector<unsigned char> encoded(const syshax_format& format, const std::vector<float>& x, size_t shift = 0) {
  Buffer source(x.size() * 4), blocks(syshax_row_bytes(&format, x.size()) + shift);
  std::memcpy(source.data(), x.data(), x.size() * 4);
  format.encode(source.floats(), x.size(), blocks.data());
  blocks.demand_intact("encode");
  for (size_t i = 0; i < shift; ++i)
    demand(blocks.data()[blocks.bytes() - shift + i] == 0xa5, "encode writes behind a row's bytes");
  return {blocks.data(), blocks.data() + blocks.bytes() - shift};
}

std::vector<float> decoded(const syshax_format& format, const std::vector<unsigned char>& bytes, size_t values) {
  Buffer blocks(bytes.size()), out(values * 4);
  std::memcpy(blocks.data(), bytes.data(), bytes.size());
  format.decode(blocks.data(), values, out.floats());
  out.demand_intact("decode");
  return {out.floats(), out.floats() + values};
}

std::vector<float> round_trip(const syshax_format& format, const std::vector<float>& x) {
  return decoded(format, encoded(format, x), x.size());
}

std::string check_geometry(const syshax_format& format) {
  size_t before = 0;
  for (const size_t k : kLengths) {
    const size_t bytes = syshax_row_bytes(&format, k);
    demand(bytes > before, "a row of " + std::to_string(k) + " values takes " + std::to_string(bytes) +
                               " bytes, no more than a shorter one");
    before = bytes;
  }
  char text[64];
  std::snprintf(text, sizeof text, "%.2f bits a value in rows of 2048", double(before) * 8 / 2048);
  return text;
}

// Relative root of the mean square of the error; half the values' own is about what one bit a value gives.
std::string check_round_trip(const syshax_format& format) {
  double worst = 0;
  for (const size_t k : kLengths) {
    for (const float scale : {1e-3f, 1.0f, 1e3f}) {
      const std::vector<float> x = Random(k).bells(k, scale), y = round_trip(format, x);
      double error = 0, power = 0;
      for (size_t i = 0; i < k; ++i) {
        demand(std::isfinite(y[i]), "value " + std::to_string(i) + " of numbers decodes to no number");
        error += double(y[i] - x[i]) * double(y[i] - x[i]);
        power += double(x[i]) * double(x[i]);
      }
      worst = std::max(worst, std::sqrt(error / power));
    }
  }
  demand(worst <= 0.7, "decoded values differ from the encoded ones by " + std::to_string(worst * 100) + " % (RMS)");
  char text[64];
  std::snprintf(text, sizeof text, "RMS error %.3f %%", worst * 100);
  return text;
}

std::string check_twice(const syshax_format& format) {
  for (const size_t k : kLengths) {
    const std::vector<float> once = round_trip(format, Random(k + 1).bells(k)), twice = round_trip(format, once);
    float largest = 0;
    for (const float value : once) largest = std::max(largest, std::fabs(value));
    for (size_t i = 0; i < k; ++i)
      demand(std::fabs(twice[i] - once[i]) <= largest * 0x1p-20f,
             "what the format represents does not come back: value " + std::to_string(i) + " of " + std::to_string(k));
  }
  return "";
}

std::string check_zeros(const syshax_format& format) {
  for (const size_t k : kLengths) {
    for (const float value : round_trip(format, std::vector<float>(k, 0.0f)))
      demand(value == 0.0f, "zeros decode to " + std::to_string(value));
    std::vector<float> x(k, 0.0f);
    x[k / 2] = 1.0f;
    const std::vector<float> y = round_trip(format, x);
    demand(std::fabs(y[k / 2] - 1.0f) < 0.7f, "a single 1 among zeros decodes to " + std::to_string(y[k / 2]));
  }
  return "";
}

std::string check_placement(const syshax_format& format) {
  const std::vector<float> x = Random(3).bells(192);
  const std::vector<unsigned char> expected = encoded(format, x);
  const std::vector<float> values = decoded(format, expected, x.size());
  for (size_t shift = 1; shift < 5; ++shift) {
    demand(encoded(format, x, shift) == expected, "encode depends on where its output lies");
    Buffer blocks(expected.size() + shift), out(x.size() * 4 + 4);
    std::memcpy(blocks.data(), expected.data(), expected.size());
    format.decode(blocks.data(), x.size(), out.floats());
    demand(same_bits({out.floats(), out.floats() + x.size()}, values), "decode depends on where its input lies");
  }
  return "";
}

std::string check_blocks(const syshax_format& format) {
  if (format.block_values == 0) return "a block is a row";
  const size_t block = format.block_values, k = 192;
  const std::vector<float> x = Random(4).bells(k);
  const std::vector<unsigned char> whole = encoded(format, x);
  for (size_t i = 0; i < k; i += block) {
    const std::vector<unsigned char> one = encoded(format, {&x[i], &x[i] + block});
    demand(std::equal(one.begin(), one.end(), whole.begin() + ptrdiff_t(i / block * format.block_bytes)),
           "the block of values from " + std::to_string(i) + " depends on other blocks");
  }
  return "";
}

std::string check_non_numbers(const syshax_format& format) {
  for (const float bad : {NAN, INFINITY, -INFINITY}) {
    std::vector<float> x = Random(5).bells(192);
    const std::vector<float> good = round_trip(format, x);
    x[77] = bad;
    const std::vector<float> y = round_trip(format, x);
    demand(!std::isfinite(y[77]), std::to_string(bad) + " decodes to " + std::to_string(y[77]) + ", a number");
    const size_t block = format.block_values ? format.block_values : x.size(), first = 77 / block * block;
    for (size_t i = 0; i < x.size(); ++i) {
      if (i < first || i >= first + block)
        demand(same_bits({y[i]}, {good[i]}), std::to_string(bad) + " changes values of other blocks");
    }
  }
  return "";
}

std::string check_threads(const syshax_format& format) {
  demand_same_in_threads("encode or decode", [&format] { return round_trip(format, Random(6).bells(2048)); });
  return "";
}

// A model in this format must be servable whatever its requests' dtype is.
std::string check_kernels(const syshax_format& format) {
  std::string text;
  for (const syshax_dtype dtype : {SYSHAX_FLOAT32, SYSHAX_FLOAT16, SYSHAX_BFLOAT16}) {
    try {
      const std::string name = select_kernel(format.name, dtype, detect_cpu_features())->name;
      if (text.find(name) == std::string::npos) text += (text.empty() ? "chosen here: " : ", ") + name;
    } catch (const CoreError& error) {
      throw Broken(error.what());
    }
  }
  return text;
}

struct Check {
  const char* name;
  std::string (*run)(const syshax_format&);
};
constexpr Check kChecks[] = {
    {"geometry", check_geometry},
    {"round trip", check_round_trip},
    {"twice", check_twice},
    {"zeros", check_zeros},
    {"placement", check_placement},
    {"blocks", check_blocks},
    {"non-numbers", check_non_numbers},
    {"threads", check_threads},
    {"kernels", check_kernels},
};

}  // namespace

std::vector<std::string> format_checks() {
  std::vector<std::string> names;
  for (const Check& check : kChecks) names.emplace_back(check.name);
  return names;
}

CheckResult check_format(const syshax_format& format, const std::string& name) {
  for (const Check& check : kChecks) {
    if (name != check.name) continue;
    try {
      return {true, check.run(format)};
    } catch (const Broken& broken) {
      return {false, broken.what()};
    }
  }
  throw CoreError("invalid_argument", "there is no check \"" + name + "\" of formats");
}

}  // namespace syshax
