#include "memory/free_memory.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

namespace syshax {
namespace {

constexpr uint64_t kUnlimited = UINT64_MAX;

// The number behind `key` in a meminfo-like file, in bytes; 0 when it is not there.
uint64_t meminfo_bytes(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    const size_t at = line.find(key);
    if (at == std::string::npos) continue;
    return std::stoull(line.substr(at + key.size())) * 1024;
  }
  return 0;
}

// A number from a control file; `missing` when the file is not there or says "max".
uint64_t read_number(const std::string& path, uint64_t missing) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : missing;
}

uint64_t stat_field(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string name;
  uint64_t value = 0;
  while (file >> name >> value)
    if (name == key) return value;
  return 0;
}

struct CgroupFiles {
  const char *limit, *usage, *reclaimable;
};
constexpr CgroupFiles kV1 = {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_inactive_file"};
constexpr CgroupFiles kV2 = {"/memory.max", "/memory.current", "inactive_file"};

// The tightest limit on the way from `group` up to the root of one hierarchy.
uint64_t hierarchy_free(const std::string& root, std::string group, const CgroupFiles& files) {
  uint64_t free = kUnlimited;
  while (true) {
    const std::string folder = root + group;
    const uint64_t limit = read_number(folder + files.limit, kUnlimited);
    if (limit < (uint64_t{1} << 60)) {
      const uint64_t used = read_number(folder + files.usage, 0);
      const uint64_t inactive = stat_field(folder + "/memory.stat", files.reclaimable);
      const uint64_t fixed = used - std::min(used, inactive);
      free = std::min(free, limit - std::min(limit, fixed));
    }
    const size_t slash = group.find_last_of('/');
    if (slash == std::string::npos || group.empty()) return free;
    group.resize(slash);
  }
}

}  // namespace

uint64_t node_free_bytes(int node) {
  const uint64_t available = meminfo_bytes("/proc/meminfo", "MemAvailable:");
  if (node < 0) return available;
  const std::string path = "/sys/devices/system/node/node" + std::to_string(node) + "/meminfo";
  if (!std::ifstream(path)) return available;
  uint64_t sum = 0;
  for (const char* key : {"MemFree:", "Active(file):", "Inactive(file):", "SReclaimable:"})
    sum += meminfo_bytes(path, key);
  return std::min(sum, available);
}

uint64_t cgroup_free_bytes() {
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  uint64_t free = kUnlimited;
  while (std::getline(file, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") {
      free = std::min(free, hierarchy_free("/sys/fs/cgroup", group, kV2));
      free = std::min(free, hierarchy_free("/sys/fs/cgroup/unified", group, kV2));
    } else if (controllers.find(",memory,") != std::string::npos) {
      free = std::min(free, hierarchy_free("/sys/fs/cgroup/memory", group, kV1));
    }
  }
  return free;
}

std::string nodes_with_memory() {
  std::ifstream file("/sys/devices/system/node/has_memory");
  std::string list;
  return file >> list ? list : "0";
}

int64_t free_huge_pages(int node) {
  const std::string folder = node < 0 ? "/sys/kernel/mm" : "/sys/devices/system/node/node" + std::to_string(node);
  return static_cast<int64_t>(read_number(folder + "/hugepages/hugepages-2048kB/free_hugepages", 0));
}

size_t mapped_huge_bytes(const void* base, size_t bytes) {
  std::ifstream file("/proc/self/smaps");
  std::string line;
  const uintptr_t first = reinterpret_cast<uintptr_t>(base), last = first + bytes;
  bool inside = false;
  size_t sum = 0;
  while (std::getline(file, line)) {
    unsigned long begin = 0, end = 0;
    char permissions[5];
    if (std::sscanf(line.c_str(), "%lx-%lx %4s ", &begin, &end, permissions) == 3)
      inside = begin >= first && end <= last;
    else if (inside && (line.rfind("ShmemPmdMapped:", 0) == 0 || line.rfind("FilePmdMapped:", 0) == 0))
      sum += std::stoull(line.substr(line.find(':') + 1)) * 1024;
  }
  return sum;
}

}  // namespace syshax
