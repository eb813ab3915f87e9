// Packed weights on their way to a file and back: written with checksums, read straight into their arena and held
// against them. Knows neither experts nor formats.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace syshax {

// One checksum covers so many bytes of a layer, the last one of a layer the rest.
constexpr size_t kPackedChunkBytes = size_t{4} << 20;

// A node's file, laid out as its arena, and the checksums of one layer's chunks.
struct PackedFile {
  int fd = -1;
  std::vector<uint64_t> checksums;
};

// Reads file bytes [offset, offset + bytes) to `into`, which must be mapped already. The pages leave the page cache
// behind it. Throws CoreError("checkpoint") for a file that ends before, an error of the disk, or another checksum.
void read_packed_chunk(int fd, uint64_t offset, size_t bytes, uint64_t checksum, char* into);
// The range is wanted soon. Advice: never fails.
void expect_packed(int fd, uint64_t offset, size_t bytes);
// Copies [offset, offset + bytes) from one file to the same place in another and gives each chunk's checksum. On a
// thread of its own that lets all others go first: a caller that did so itself would hold its locks meanwhile. Needs
// one chunk of memory; what was written is on the disk when it returns, and out of the page cache. error_number: 0, or
// why it failed.
std::vector<uint64_t> copy_packed(int from, int to, uint64_t offset, uint64_t bytes, int* error_number);

}  // namespace syshax
