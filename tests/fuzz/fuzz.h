// What the fuzz targets share: a script read from an input's bytes, the table of targets, and the end of the process
// with one line at the first thing that is wrong.
//
// A target is a function of bytes. It must not remember anything between inputs that changes what a later one finds,
// so that any input can be run again alone. `driver.cc` makes inputs without coverage and needs a C++ compiler alone;
// `libfuzzer.cc` gives the same targets to libFuzzer or AFL++.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "../native/native_test.h"

namespace fuzz {

using native_test::fail;
using native_test::Random;
using Bytes = std::vector<uint8_t>;

// Reads an input as a script. Beyond the end everything is 0.
class Script {
 public:
  Script(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}
  bool done() const { return at_ == end_; }
  uint8_t byte() { return at_ == end_ ? 0 : *at_++; }
  uint32_t below(uint32_t limit) { return byte() % limit; }  // limit <= 256
  uint32_t word() {
    uint32_t low = byte();
    return low | uint32_t{byte()} << 8;
  }
  // Half of the time a number at an edge, else any.
  uint32_t number() {
    static constexpr uint32_t kEdges[] = {
        0,          1,          2,    3,    4,          7,          8,        9,        16,      63,
        64,         65,         255,  256,  4095,       4096,       4097,     0xFFFF,   0x10000, 0x7FFFFFFF,
        0x80000000, 0x80000001, ~63u, ~64u, 0xFFFFFFFE, 0xFFFFFFFF, 0x100000, 0x100001, 0x8000,  12288};
    uint8_t kind = byte();
    if (kind < 128) return kEdges[kind % (sizeof(kEdges) / sizeof(kEdges[0]))];
    uint32_t low = word();
    return low | word() << 16;
  }
  void fill(void* into, size_t bytes) {
    for (size_t i = 0; i < bytes; ++i) static_cast<uint8_t*>(into)[i] = byte();
  }

 private:
  const uint8_t *at_, *end_;
};

struct Target {
  const char* name;
  const char* what;
  void (*run)(const uint8_t* data, size_t size);
  std::vector<Bytes> (*seeds)();  // scripts from which others are made
  uint32_t longest;               // bytes of an input
};

const std::vector<Target>& targets();
const Target* find_target(const std::string& name);  // null when there is none

void run_layout(const uint8_t*, size_t);
void run_ring(const uint8_t*, size_t);
void run_dispatcher(const uint8_t*, size_t);
void run_client(const uint8_t*, size_t);
void run_files(const uint8_t*, size_t);
std::vector<Bytes> dispatcher_seeds();
std::vector<Bytes> ring_seeds();
std::vector<Bytes> client_seeds();

}  // namespace fuzz
