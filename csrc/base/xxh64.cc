// XXH64 as its specification describes it, for little-endian machines. Contract: xxh64.h.
#include "base/xxh64.h"

#include <cstring>
#include <initializer_list>

namespace syshax {
namespace {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87u, kPrime2 = 0xC2B2AE3D27D4EB4Fu, kPrime3 = 0x165667B19E3779F9u,
                   kPrime4 = 0x85EBCA77C2B2AE63u, kPrime5 = 0x27D4EB2F165667C5u;
constexpr size_t kStripe = 32;

uint64_t rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }

template <typename Word>
uint64_t read(const unsigned char* from) {
  Word word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

uint64_t round_of(uint64_t lane, uint64_t word) { return rotate(lane + word * kPrime2, 31) * kPrime1; }

uint64_t merge(uint64_t hash, uint64_t lane) { return (hash ^ round_of(0, lane)) * kPrime1 + kPrime4; }

uint64_t finish(uint64_t hash, const unsigned char* p, size_t left) {
  for (; left >= 8; p += 8, left -= 8) hash = rotate(hash ^ round_of(0, read<uint64_t>(p)), 27) * kPrime1 + kPrime4;
  if (left >= 4) {
    hash = rotate(hash ^ read<uint32_t>(p) * kPrime1, 23) * kPrime2 + kPrime3;
    p += 4, left -= 4;
  }
  for (; left > 0; ++p, --left) hash = rotate(hash ^ *p * kPrime5, 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace

uint64_t xxh64(const void* data, size_t bytes, uint64_t seed) {
  const auto* p = static_cast<const unsigned char*>(data);
  size_t left = bytes;
  uint64_t hash = seed + kPrime5;
  if (bytes >= kStripe) {
    uint64_t a = seed + kPrime1 + kPrime2, b = seed + kPrime2, c = seed, d = seed - kPrime1;
    for (; left >= kStripe; p += kStripe, left -= kStripe) {
      a = round_of(a, read<uint64_t>(p));
      b = round_of(b, read<uint64_t>(p + 8));
      c = round_of(c, read<uint64_t>(p + 16));
      d = round_of(d, read<uint64_t>(p + 24));
    }
    hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
    for (const uint64_t lane : {a, b, c, d}) hash = merge(hash, lane);
  }
  return finish(hash + bytes, p, left);
}

}  // namespace syshax
