// How much memory a node and the control group still give, read from the kernel's files. Contract: free_memory.h.
#include "memory/free_memory.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>
#include <string>

namespace syshax {
namespace {

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

// A number from a file; `missing` when it is not there.
uint64_t read_number(const std::string& path, uint64_t missing) {
  std::ifstream file(path);
  uint64_t value = 0;
  return file >> value ? value : missing;
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

std::string nodes_with_memory() {
  std::ifstream file("/sys/devices/system/node/has_memory");
  std::string list;
  return file >> list ? list : "0";
}

int64_t free_huge_pages(int node) {
  const std::string folder = node < 0 ? "/sys/kernel/mm" : "/sys/devices/system/node/node" + std::to_string(node);
  return static_cast<int64_t>(read_number(folder + "/hugepages/hugepages-2048kB/free_hugepages", 0));
}

std::vector<size_t> mapped_huge_bytes(const std::vector<MappedRange>& ranges) {
  std::vector<size_t> sums(ranges.size());
  std::ifstream file("/proc/self/smaps");
  std::string line;
  size_t inside = ranges.size();  // the range that the mapping lies in; all: in none
  while (std::getline(file, line)) {
    unsigned long begin = 0, end = 0;
    char permissions[5];
    if (std::sscanf(line.c_str(), "%lx-%lx %4s ", &begin, &end, permissions) == 3) {
      const auto holds = [&](const MappedRange& range) {
        const uintptr_t first = reinterpret_cast<uintptr_t>(range.base);
        return begin >= first && end <= first + range.bytes;
      };
      inside = static_cast<size_t>(std::find_if(ranges.begin(), ranges.end(), holds) - ranges.begin());
    } else if (inside < ranges.size() &&
               (line.rfind("ShmemPmdMapped:", 0) == 0 || line.rfind("FilePmdMapped:", 0) == 0)) {
      sums[inside] += std::stoull(line.substr(line.find(':') + 1)) * 1024;
    }
  }
  return sums;
}

}  // namespace syshax
