// What the conformance checks are built from: memory between forbidden pages, random numbers, a weight matrix in panels
// and tokens in rows. For conformance*.cc alone.
#pragma once
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "kernels/table.h"

namespace syshax {
namespace {

constexpr size_t kPage = 4096;

// Thrown by a check that finds a promise broken.
struct Broken : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void demand(bool ok, const std::string& what) {
  if (!ok) throw Broken(what);
}

// Bytes that end where a forbidden page begins, after at least `kPage` bytes of a known pattern and a forbidden page.
class Buffer {
 public:
  explicit Buffer(size_t bytes, unsigned char fill = 0xa5) : bytes_(bytes) {
    inside_ = (bytes + 2 * kPage - 1) / kPage * kPage;
    void* all = mmap(nullptr, inside_ + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<unsigned char*>(all);
    mprotect(base_ + kPage, inside_, PROT_READ | PROT_WRITE);
    std::memset(base_ + kPage, 0xa5, inside_);
    std::memset(data(), fill, bytes);
  }
  ~Buffer() { munmap(base_, inside_ + 2 * kPage); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  unsigned char* data() const { return base_ + kPage + inside_ - bytes_; }
  float* floats() const { return reinterpret_cast<float*>(data()); }
  size_t bytes() const { return bytes_; }
  bool equals(const Buffer& other) const { return std::memcmp(data(), other.data(), bytes_) == 0; }
  void demand_intact(const std::string& what) const {
    for (const unsigned char* p = base_ + kPage; p < data(); ++p)
      demand(*p == 0xa5, what + " writes before its output");
  }

 private:
  size_t bytes_, inside_;
  unsigned char* base_;
};

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  float uniform() {  // in [-1, 1)
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return float(int32_t(state_ >> 32)) * 0x1p-31f;
  }
  float bell() { return uniform() + uniform() + uniform() + uniform(); }
  std::vector<float> bells(size_t count, float scale = 1.0f) {
    std::vector<float> values(count);
    for (float& value : values) value = bell() * scale;
    return values;
  }

 private:
  uint64_t state_;
};

inline const syshax_format& format_of(const syshax_kernel& kernel) { return *find_format(kernel.packing->format); }

// [rows, k] encoded, decoded and packed. k is a multiple of the packing's.
struct Matrix {
  Matrix(const syshax_kernel& kernel, const std::vector<float>& values, size_t rows_, size_t k_)
      : rows(rows_),
        k(k_),
        num_panels(uint32_t((rows_ + kernel.packing->panel_rows - 1) / kernel.packing->panel_rows)),
        row_bytes(syshax_row_bytes(&format_of(kernel), k_)),
        panel_bytes(kernel.packing->panel_bytes(k_)),
        blocks(rows_ * row_bytes),
        panels(num_panels * panel_bytes),
        decoded(rows_ * k_) {
    const syshax_format& format = format_of(kernel);
    const size_t panel_rows = kernel.packing->panel_rows;
    for (size_t r = 0; r < rows; ++r) {
      format.encode(&values[r * k], k, blocks.data() + r * row_bytes);
      format.decode(blocks.data() + r * row_bytes, k, &decoded[r * k]);
    }
    for (uint32_t p = 0; p < num_panels; ++p) {
      const size_t first = p * panel_rows, count = rows - first < panel_rows ? rows - first : panel_rows;
      kernel.packing->pack(blocks.data() + first * row_bytes, row_bytes, uint32_t(count), k,
                           panels.data() + p * panel_bytes);
    }
  }
  double weight(size_t row, size_t i) const { return double(decoded[row * k + i]); }

  size_t rows, k;
  uint32_t num_panels;
  size_t row_bytes, panel_bytes;
  Buffer blocks, panels;
  std::vector<float> decoded;
};

// Packed tokens [count, k].
struct Tokens {
  Tokens(const syshax_kernel& kernel, const std::vector<float>& x, size_t count, size_t k)
      : row_bytes(kernel.activation->row_bytes(k)), rows(count * row_bytes) {
    for (size_t t = 0; t < count; ++t) {
      Buffer source(k * 4);
      std::memcpy(source.data(), &x[t * k], k * 4);
      syshax_pack_row(kernel.activation, source.floats(), k, rows.data() + t * row_bytes);
      pointers.push_back(rows.data() + t * row_bytes);
    }
    rows.demand_intact("activation.pack");
  }
  size_t count() const { return pointers.size(); }

  size_t row_bytes;
  Buffer rows;
  std::vector<const void*> pointers;
};

// Runs panels [first_panel, first_panel + panels) with tokens [first, first + count): [count, panels * panel_rows]. The
// output's rows are further apart than they are long; what lies between must stay.
inline std::vector<float> run(const syshax_kernel& kernel, const Matrix& w, const Tokens& x, size_t first, size_t count,
                              uint32_t first_panel, uint32_t panels) {
  const size_t columns = size_t(panels) * kernel.packing->panel_rows, stride = (columns + 15) / 16 * 16 + 16;
  Buffer out(count * stride * 4);
  const syshax_matmul_args args = {w.panels.data() + first_panel * w.panel_bytes,
                                   panels,
                                   uint32_t(count),
                                   w.k,
                                   x.pointers.data() + first,
                                   out.floats(),
                                   stride};
  kernel.run(&args);
  out.demand_intact("run");
  std::vector<float> result;
  for (size_t t = 0; t < count; ++t) {
    const unsigned char* row = out.data() + t * stride * 4;
    for (size_t i = columns * 4; i < stride * 4; ++i)
      demand(row[i] == 0xa5, "run writes behind a token's outputs (token " + std::to_string(t) + ")");
    result.resize(result.size() + columns);
    std::memcpy(&result[t * columns], row, columns * 4);
  }
  return result;
}

inline std::vector<float> run(const syshax_kernel& kernel, const Matrix& w, const Tokens& x) {
  return run(kernel, w, x, 0, x.count(), 0, w.num_panels);
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {  // a NaN's payload is the hardware's business
    if (std::memcmp(&a[i], &b[i], 4) != 0 && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
  }
  return true;
}

// Four threads do the same at once; `work` gives bytes, which must always be the same.
template <class Work>
void demand_same_in_threads(const std::string& what, Work work) {
  const std::vector<float> expected = work();
  std::vector<std::string> faults(4);
  std::vector<std::thread> threads;
  for (std::string& fault : faults) {
    threads.emplace_back([&expected, &fault, &work, &what] {
      try {
        for (int i = 0; i < 8; ++i) demand(same_bits(work(), expected), what + " depends on other threads");
      } catch (const std::exception& error) {
        fault = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& fault : faults) demand(fault.empty(), fault);
}

inline std::string shape(size_t tokens, size_t rows, size_t k) {
  return std::to_string(tokens) + " tokens x [" + std::to_string(rows) + ", " + std::to_string(k) + "]";
}

}  // namespace
}  // namespace syshax
