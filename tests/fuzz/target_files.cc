// Files that are not what they were: a packed chunk at any place with any checksum, and a guarded file that is cut
// short while it is read. Either the right bytes or an error, never a crash.
#include <sys/mman.h>
#include <unistd.h>

#include <memory>

#include "base/error.h"
#include "base/xxh64.h"
#include "fuzz.h"
#include "ipc/guarded_file.h"
#include "memory/packed_file.h"

namespace fuzz {
namespace {

constexpr size_t kBytes = 3 * 4096 + 100;

struct File {
  int fd = memfd_create("fuzz-file", MFD_CLOEXEC);
  Bytes content = Bytes(kBytes);
  File() {
    for (size_t i = 0; i < kBytes; ++i) content[i] = static_cast<uint8_t>(i * 31 + i / 256);
    if (fd < 0 || pwrite(fd, content.data(), kBytes, 0) != static_cast<ssize_t>(kBytes)) fail("files: no memory file");
  }
  ~File() { close(fd); }
};

void read_chunk(const File& file, Script& script) {
  uint64_t offset = script.number();
  if (script.below(4) == 0) offset = offset << 32 | script.number();
  size_t bytes = script.number() % (2 * kBytes);
  bool inside = offset <= kBytes && bytes <= kBytes - offset;
  uint64_t checksum =
      script.below(3) != 0 && inside ? syshax::xxh64(file.content.data() + offset, bytes) : script.number();
  Bytes into(bytes + 1, 0xa5);
  try {
    syshax::read_packed_chunk(file.fd, offset, bytes, checksum, reinterpret_cast<char*>(into.data()));
    if (!inside && bytes != 0) fail("files: a chunk outside of the file was read");
    if (bytes != 0 && std::memcmp(into.data(), file.content.data() + offset, bytes) != 0) fail("files: other bytes");
  } catch (const syshax::CoreError&) {
    if (inside && syshax::xxh64(file.content.data() + offset, bytes) == checksum)
      fail("files: a right chunk is refused");
  }
  if (into[bytes] != 0xa5) fail("files: a byte too far");
}

void read_guarded(const File& file, Script& script) {
  syshax::GuardedFile guarded(file.fd);
  size_t left = script.number() % (kBytes + 1);
  guarded.prefetch(script.number(), script.number());
  if (script.below(2) && ftruncate(file.fd, static_cast<off_t>(left)) != 0) fail("files: ftruncate");
  guarded.release(script.number(), script.number());
  const volatile uint8_t* data = static_cast<const uint8_t*>(guarded.data());
  for (size_t i = 0; i < guarded.bytes(); i += 512) {
    uint8_t seen = data[i];
    if (seen != file.content[i] && seen != 0) fail("files: neither the file's byte nor 0 at %zu", i);
  }
}

}  // namespace

void run_files(const uint8_t* data, size_t size) {
  Script script(data, size);
  File file;
  while (!script.done()) read_chunk(file, script);
  Script again(data, size);
  read_guarded(file, again);
}

}  // namespace fuzz
