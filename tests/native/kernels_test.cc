// Every kernel, activation packer and element-wise operation that this CPU can run, without Python: for emulated CPUs
// and sanitizers. Rows that promise the scalar row's bits are compared with it bit for bit, all of them with float64
// within a bound computed from the inputs. SYSHAX_ISA caps as it does elsewhere. The suite under tests/kernels looks
// at more inputs; this one at the same edges.
#include <cmath>
#include <string>
#include <vector>

#include "base/float16.h"
#include "kernels/activations.h"
#include "kernels/table.h"
#include "native_test.h"

using namespace syshax;
using namespace native_test;

namespace {

struct Case {
  uint32_t rows, tokens;
  size_t k;
  enum Kind { kNumbers, kExtremes, kAnyBits, kPoison } kind;
};

const char* kind_name(Case::Kind kind) {
  const char* const names[] = {"numbers", "extremes", "any bits", "a NaN in one token"};
  return names[kind];
}

size_t row_bytes(const syshax_format& format, size_t k) { return k / format.block_values * format.block_bytes; }

// Weights as blocks [rows, k_padded]; behind k zeros.
std::vector<unsigned char> make_blocks(const syshax_format& format, const Case& c, size_t k_padded, Random& random) {
  const size_t bytes = row_bytes(format, k_padded), used = row_bytes(format, c.k);
  std::vector<unsigned char> blocks(c.rows * bytes);
  std::vector<float> row(k_padded);
  for (uint32_t r = 0; r < c.rows; ++r) {
    unsigned char* const at = blocks.data() + r * bytes;
    for (size_t i = 0; i < k_padded; ++i) row[i] = i < c.k ? random.unit() * float(1 + r % 5) : 0.0f;
    format.encode(row.data(), k_padded, at);
    if (c.kind == Case::kAnyBits)
      for (size_t i = 0; i < used; ++i) at[i] = static_cast<unsigned char>(random.bits());
    if (c.kind == Case::kExtremes &&
        format.block_values > 1) {  // the ends of what the integers hold, scales as they are
      const unsigned char end = format.block_bytes == 34 ? (r % 2 ? 0x80 : 0x7f) : (r % 2 ? 0x00 : 0xff);
      for (size_t i = 0; i < used; ++i)
        if (i % format.block_bytes >= 2) at[i] = end;
    }
  }
  return blocks;
}

std::vector<float> make_tokens(const Case& c, size_t k_padded, Random& random) {
  std::vector<float> x(c.tokens * k_padded);
  for (uint32_t t = 0; t < c.tokens; ++t)
    for (size_t i = 0; i < c.k; ++i)
      x[t * k_padded + i] =
          c.kind == Case::kExtremes ? (i % 4 < 2) == (t % 2 == 0) ? 127.0f : -127.0f : random.unit() * float(1 + t % 3);
  if (c.kind == Case::kPoison) x[c.tokens / 2 * k_padded + c.k / 3] = std::nanf("");
  return x;
}

// The matrix in panels, the tokens packed, the product [tokens, panel rows of all panels].
class Product {
 public:
  Product(const syshax_kernel& kernel, const std::vector<unsigned char>& blocks, const std::vector<float>& x,
          const Case& c, size_t k_padded)
      : kernel_(kernel),
        case_(c),
        k_padded_(k_padded),
        panels_((c.rows + kernel.packing->panel_rows - 1) / kernel.packing->panel_rows),
        stride_(panels_ * kernel.packing->panel_rows) {
    const syshax_packing& packing = *kernel.packing;
    const size_t panel_bytes = packing.panel_bytes(k_padded), bytes = blocks.size() / c.rows;
    packed_ = make_memory<char>(panels_ * panel_bytes);
    for (uint32_t p = 0; p < panels_; ++p) {
      const uint32_t first = p * packing.panel_rows, rows = std::min(packing.panel_rows, c.rows - first);
      char* const panel = packed_.get() + p * panel_bytes;
      packing.pack(blocks.data() + first * bytes, bytes, rows, k_padded, panel);
      std::vector<unsigned char> back(rows * bytes);
      packing.unpack(panel, k_padded, rows, back.data(), bytes);
      if (std::memcmp(back.data(), blocks.data() + first * bytes, back.size()) != 0)
        fail("%s does not unpack what it packed, panel %u, k %zu", packing.name, p, c.k);
    }
    for (uint32_t t = 0; t < c.tokens; ++t) {
      rows_.push_back(make_memory<char>(kernel.activation->row_bytes(k_padded)));
      kernel.activation->pack(x.data() + t * k_padded, c.k, 0, k_padded, rows_.back().get());
      const size_t begin = (c.k + 63) / 64 * 64;
      if (begin < k_padded)
        kernel.activation->pack(x.data() + t * k_padded + begin, k_padded - begin, begin, k_padded, rows_.back().get());
      pointers_.push_back(rows_.back().get());
    }
    out_ = make_memory<float>(c.tokens * stride_);
  }

  void run() {
    const syshax_matmul_args args = {packed_.get(),    panels_,    case_.tokens, k_padded_,
                                     pointers_.data(), out_.get(), stride_};
    kernel_.run(&args);
  }
  float at(uint32_t token, uint32_t row) const { return out_[token * stride_ + row]; }

  // What the kernel multiplies with, [k_padded].
  std::vector<double> activations(uint32_t token) const {
    const std::string name = kernel_.activation->name;
    const char* const row = rows_[token].get();
    std::vector<double> values(k_padded_);
    for (size_t i = 0; i < k_padded_; ++i) {
      if (name == "q8" || name == "q8x2") {
        values[i] = q8_value(row, i);
        if (name == "q8x2") values[i] += q8_value(row + q8_row_bytes(k_padded_), i);
      } else if (name == "bf16") {
        values[i] = bf16_to_float(reinterpret_cast<const uint16_t*>(row)[i]);
      } else if (name == "f32") {
        values[i] = reinterpret_cast<const float*>(row)[i];
      } else {
        fail("no reference for activations of kind %s", name.c_str());
      }
    }
    return values;
  }

 private:
  double q8_value(const char* row, size_t i) const {
    return double(static_cast<int8_t>(row[i])) * q8_scales(row, k_padded_)[i / 32];
  }

  const syshax_kernel& kernel_;
  const Case case_;
  const size_t k_padded_;
  const uint32_t panels_;
  const size_t stride_;
  Memory<char> packed_;
  std::vector<Memory<char>> rows_;
  std::vector<const void*> pointers_;
  Memory<float> out_;
};

// k fused terms in float32: (k + 4) roundings of half an ulp of the sum of magnitudes, and what underflow may take;
// bf16 dot products take subnormals as zero.
void check_against_float64(const syshax_kernel& kernel, const Product& product, const Case& c,
                           const std::vector<float>& weights, size_t k_padded) {
  const bool bf16 = std::string(kernel.activation->name) == "bf16";
  const bool twice = std::string(kernel.activation->name) == "q8x2";
  const bool q8 = twice || std::string(kernel.activation->name) == "q8";
  for (uint32_t t = 0; t < c.tokens; ++t) {
    const std::vector<double> a = product.activations(t);
    for (uint32_t r = 0; r < c.rows; ++r) {
      double exact = 0, magnitudes = 0, singles = 0;
      for (size_t i = 0; i < k_padded; ++i) {
        const double w = weights[r * k_padded + i];
        exact += w * a[i];
        magnitudes += std::fabs(w * a[i]);
        singles += std::fabs(w) + std::fabs(a[i]);
      }
      if (!(magnitudes < 3e38)) continue;
      const double terms = double(k_padded) * (twice ? 2 : 1);
      double bound = magnitudes * (terms + 4) * 0x1p-24 + terms * 0x1p-149 * (q8 ? 128 * 127 : 1);
      if (bf16) bound += (double(k_padded) + singles) * 0x1p-126;
      if (!(std::fabs(product.at(t, r) - exact) <= bound))
        fail("%s: token %u row %u is %.9g, float64 says %.9g +- %.3g (%u rows, %u tokens, k %zu, %s)", kernel.name, t,
             r, double(product.at(t, r)), exact, bound, c.rows, c.tokens, c.k, kind_name(c.kind));
    }
  }
}

void check_case(const syshax_kernel& kernel, const Case& c) {
  const syshax_format& format = *find_format(kernel.packing->format);
  const size_t multiple = kernel.packing->k_multiple, k_padded = (c.k + multiple - 1) / multiple * multiple;
  Random random(c.rows * 1000003u + c.tokens * 1009u + c.k * 31u + unsigned(c.kind));
  const std::vector<unsigned char> blocks = make_blocks(format, c, k_padded, random);
  const std::vector<float> x = make_tokens(c, k_padded, random);
  Product product(kernel, blocks, x, c, k_padded);
  product.run();
  std::vector<float> weights(c.rows * k_padded);
  for (uint32_t r = 0; r < c.rows; ++r)
    format.decode(blocks.data() + r * (blocks.size() / c.rows), k_padded, weights.data() + r * k_padded);
  check_against_float64(kernel, product, c, weights, k_padded);
  const std::string activation = kernel.activation->name;
  if (activation == "bf16") return;
  Product reference(*find_kernel(std::string(format.name) + "_" + activation + "_scalar"), blocks, x, c, k_padded);
  reference.run();
  for (uint32_t t = 0; t < c.tokens; ++t)
    for (uint32_t r = 0; r < c.rows; ++r)
      if (!same(product.at(t, r), reference.at(t, r)))
        fail("%s: token %u row %u is %.9g, the scalar kernel says %.9g (%u rows, %u tokens, k %zu, %s)", kernel.name, t,
             r, double(product.at(t, r)), double(reference.at(t, r)), c.rows, c.tokens, c.k, kind_name(c.kind));
}

// Rows, tokens and k around every edge of the tiles.
uint32_t check_kernel(const syshax_kernel& kernel) {
  uint32_t cases = 0;
  const auto check = [&](uint32_t rows, uint32_t tokens, size_t k, Case::Kind kind) {
    check_case(kernel, {rows, tokens, k, kind});
    ++cases;
  };
  for (const uint32_t tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 25, 33}) {
    check(33, tokens, 96, Case::kNumbers);
    check(80, tokens, 128, Case::kNumbers);
  }
  for (const uint32_t rows : {1, 15, 16, 17, 48, 64, 65, 129})
    for (const uint32_t tokens : {1, 2, 5}) check(rows, tokens, 64, Case::kNumbers);
  for (const size_t k : {32, 64, 96, 160, 768})
    for (const uint32_t tokens : {1, 6}) check(17, tokens, k, Case::kNumbers);
  for (const uint32_t tokens : {1, 2, 3, 6, 13})
    for (const Case::Kind kind : {Case::kExtremes, Case::kAnyBits, Case::kPoison}) check(40, tokens, 192, kind);
  return cases;
}

// ---- activation packers -------------------------------------------------------------------------------------------

void check_packer(const syshax_activation& packer) {
  const std::string name = packer.name;
  constexpr size_t kPadded = 256;
  Random random(7);
  for (size_t values = 1; values <= 192; ++values) {
    std::vector<float> x(values);
    for (float& v : x) {
      v = random.unit() * 0x1p40f;
      const uint32_t bits = static_cast<uint32_t>(random.bits());
      if (values % 3 == 1) v = float(int32_t(bits % 255) - 127) * 0.5f;  // ties
      if (values % 3 == 2) std::memcpy(&v, &bits, 4);                    // anything, NaN and subnormal too
    }
    auto row = make_memory<unsigned char>(packer.row_bytes(kPadded)),
         wanted = make_memory<unsigned char>(packer.row_bytes(kPadded));
    packer.pack(x.data(), values, 64, kPadded, row.get());
    if (name == "bf16") {
      std::vector<uint16_t> halves((values + 63) / 64 * 64);
      for (size_t i = 0; i < values; ++i) halves[i] = bf16_from_float(x[i]);
      std::memcpy(wanted.get() + 128, halves.data(), halves.size() * 2);
    } else {
      const syshax_activation& reference = name == "q8"     ? activation_q8_scalar
                                           : name == "q8x2" ? activation_q8x2_scalar
                                                            : activation_f32_scalar;
      reference.pack(x.data(), values, 64, kPadded, wanted.get());
    }
    // A NaN scale may be any NaN.
    const size_t terms = name == "q8x2" ? 2 : name == "q8" ? 1 : 0;
    for (size_t i = 0; i < terms * kPadded / 32; ++i) {
      const size_t at = i / (kPadded / 32) * q8_row_bytes(kPadded);
      float &a = q8_scales(row.get() + at, kPadded)[i % (kPadded / 32)],
            &b = q8_scales(wanted.get() + at, kPadded)[i % (kPadded / 32)];
      if (a != a && b != b) a = b;
    }
    if (std::memcmp(row.get(), wanted.get(), packer.row_bytes(kPadded)) != 0)
      fail("the %s packer differs from the reference for %zu values", packer.name, values);
  }
}

}  // namespace

int main() {
  const CpuFeatures features = detect_cpu_features();
  std::string names;
  for (const std::string& name : features.names()) names += " " + name;
  std::printf("CPU features:%s\n", names.empty() ? " none" : names.c_str());
  for (const syshax_kernel* kernel : all_kernels()) {
    if (!features.has(kernel->required_features)) continue;
    check_packer(*kernel->activation);
    const uint32_t cases = check_kernel(*kernel);
    std::printf("%-24s %u cases\n", kernel->name, cases);
  }
  return 0;
}
