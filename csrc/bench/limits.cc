// Runs the loops on the product's own thread pool, each many times for a few milliseconds: on a machine that others
// use too, the best of many short runs is what the hardware can do.
#include "bench/limits.h"

#include <sys/mman.h>

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "base/error.h"
#include "memory/arena.h"
#include "threads/event.h"
#include "threads/pool.h"

namespace syshax {
namespace {

constexpr double kComputeSeconds = 0.003;  // of one repetition
constexpr size_t kPieceBytes = size_t{1} << 20;
constexpr size_t kSmallPieceBytes = size_t{1} << 15;  // about what a kernel reads between two looks at its counter
constexpr size_t kSliceBytes = size_t{32} << 20;      // of one repetition, for each thread
constexpr size_t kFinalists = 5;

// Plain memory with huge pages where they can be had.
class PlainMemory {
 public:
  explicit PlainMemory(size_t bytes) : bytes_(bytes + kHugePageBytes) {
    void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
      throw CoreError("no_memory", "no memory for measuring: " + std::to_string(bytes >> 20) + " MiB");
    base_ = static_cast<char*>(base);
    const uintptr_t start = reinterpret_cast<uintptr_t>(base_);
    data_ = base_ + ((start + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes - start);
    madvise(data_, bytes, MADV_HUGEPAGE);
  }
  ~PlainMemory() { munmap(base_, bytes_); }
  PlainMemory(const PlainMemory&) = delete;
  PlainMemory& operator=(const PlainMemory&) = delete;
  char* data() const { return data_; }

 private:
  const size_t bytes_;
  char* base_ = nullptr;
  char* data_ = nullptr;
};

struct NodeMemory {
  std::unique_ptr<Arena> arena;  // as experts lie in it
  std::unique_ptr<PlainMemory> plain;
};

// What one repetition reads.
struct Slice {
  WorkCounter taken;  // pieces
  size_t begin = 0, bytes = 0;
};

enum class Memory { kArena, kPlain };

}  // namespace

class LimitBench::Impl {
 public:
  Impl(std::vector<NodePlan> plan, CpuFeatures features, uint32_t spin_us, size_t bytes)
      : plan_(plan), features_(features), pool_(std::move(plan), spin_us) {
    uint32_t threads = 0;
    for (uint32_t node = 0; node < pool_.num_nodes(); ++node) threads += pool_.num_threads(node);
    for (const IsaLoops& loops : all_loops()) choose(loops);
    threads_ = threads;
    for (uint32_t node = 0; node < pool_.num_nodes(); ++node) {
      const size_t part = bytes / threads * pool_.num_threads(node);
      node_bytes_.push_back((part + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes);
    }
    slices_ = std::make_unique<Slice[]>(pool_.num_nodes());
  }

  // The first time every loop runs; later those that were best, and one of the others in turn.
  std::vector<LimitVariant> measure(Limit limit, double seconds) {
    const uint64_t end = now_ns() + static_cast<uint64_t>(seconds * 1e9);
    Contest& contest = contests_[limit];
    const bool first = contest.variants.empty();
    if (first) contest.variants = limit == Limit::kRead ? read_variants() : compute_variants(limit);
    for (Variant& variant : contest.variants) variant.reached.clear();
    if (first) contest.run(0, contest.variants.size());
    if (first) contest.run(0, contest.variants.size());
    contest.sort();
    do {
      contest.run(0, std::min(kFinalists, contest.variants.size()));
      contest.next = (contest.next + 1) % contest.variants.size();
      contest.run(contest.next, contest.next + 1);
    } while (now_ns() < end);
    contest.sort();
    std::vector<LimitVariant> result;
    for (const Variant& variant : contest.variants)
      if (!variant.reached.empty()) result.push_back({variant.name, variant.best(), variant.median()});
    return result;
  }

 private:
  struct Variant {
    std::string name;
    std::function<double()> run;  // gives bytes or operations per second
    std::vector<double> reached = {};
    double best() const { return reached.empty() ? 0 : *std::max_element(reached.begin(), reached.end()); }
    double median() const {
      std::vector<double> sorted = reached;
      std::nth_element(sorted.begin(), sorted.begin() + static_cast<ptrdiff_t>(sorted.size() / 2), sorted.end());
      return sorted[sorted.size() / 2];
    }
  };
  struct Contest {  // of all loops for one limit
    std::vector<Variant> variants;
    size_t next = 0;
    void run(size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) variants[i].reached.push_back(variants[i].run());
    }
    void sort() {
      std::stable_sort(variants.begin(), variants.end(),
                       [](const Variant& a, const Variant& b) { return a.best() > b.best(); });
    }
  };
  struct Work {  // of one repetition
    Impl* self;
    const ComputeLoop* compute;
    uint64_t rounds;
    const ReadLoop* read;
    Memory memory;
    size_t piece_bytes;
  };

  // Of the loops that read, the strongest ISA's alone.
  void choose(const IsaLoops& loops) {
    for (const ComputeLoop& loop : loops.compute)
      if (features_.has(loop.needs)) compute_.push_back(&loop);
    if (loops.read.count == 0 || !features_.has(loops.read.first->needs)) return;
    read_.clear();
    for (const ReadLoop& loop : loops.read) read_.push_back(&loop);
  }

  static std::vector<IsaLoops> all_loops() {
    std::vector<IsaLoops> loops = {limit_loops_portable()};
#if defined(__x86_64__)
    for (const auto isa : {limit_loops_avx2, limit_loops_avx512, limit_loops_avx512vnni, limit_loops_avx512bf16})
      loops.push_back(isa());
#elif defined(__aarch64__)
    for (const auto isa : {limit_loops_neon, limit_loops_dotprod, limit_loops_i8mm, limit_loops_armbf16})
      loops.push_back(isa());
#endif
    return loops;
  }

  double timed(ThreadPool::Job job, Work& work) {
    const uint64_t begin = now_ns();
    pool_.run(job, &work);
    return static_cast<double>(std::max<uint64_t>(now_ns() - begin, 1)) * 1e-9;
  }

  std::vector<Variant> compute_variants(Limit limit) {
    std::vector<Variant> variants;
    for (const ComputeLoop* loop : compute_)
      if (loop->limits & limit_bit(limit)) variants.push_back({loop->name, [this, loop] { return compute(*loop); }});
    return variants;
  }

  double compute(const ComputeLoop& loop) {
    uint64_t rounds = rounds_[&loop];
    if (rounds == 0) rounds = 1000;
    const auto job = [](void* context, uint32_t, uint32_t) {
      const Work& work = *static_cast<Work*>(context);
      work.compute->run(work.rounds);
    };
    while (true) {
      Work work = {this, &loop, rounds, nullptr, Memory::kArena, 0};
      const double elapsed = timed(job, work);
      if (elapsed >= kComputeSeconds / 2) {
        rounds_[&loop] = rounds;
        return static_cast<double>(rounds) * loop.operations * threads_ / elapsed;
      }
      rounds = std::max(rounds * 2, static_cast<uint64_t>(static_cast<double>(rounds) * kComputeSeconds / elapsed));
    }
  }

  std::vector<Variant> read_variants() {
    prepare_memory();
    std::vector<Variant> variants;
    for (const ReadLoop* loop : read_)
      for (const size_t piece : {kPieceBytes, kSmallPieceBytes})
        for (const Memory memory : {Memory::kArena, Memory::kPlain}) {
          const std::string name = std::string(loop->name) + (memory == Memory::kArena ? ", arena" : ", plain memory") +
                                   ", pieces of " + std::to_string(piece >> 10) + " KiB";
          variants.push_back({name, [this, loop, memory, piece] { return read(*loop, memory, piece); }});
        }
    return variants;
  }

  // Threads of a node take pieces of a slice of the node's memory until none is left, as kernels take panels. The next
  // repetition reads the next slice, so that none is in a cache.
  double read(const ReadLoop& loop, Memory memory, size_t piece_bytes) {
    Work work = {this, nullptr, 0, &loop, memory, piece_bytes};
    size_t bytes = 0;
    for (uint32_t node = 0; node < pool_.num_nodes(); ++node) {
      Slice& slice = slices_[node];
      slice.begin += slice.bytes;
      slice.bytes = std::min(kSliceBytes * pool_.num_threads(node), node_bytes_[node]);
      if (slice.begin + slice.bytes > node_bytes_[node]) slice.begin = 0;
      slice.taken.reset();
      bytes += slice.bytes;
    }
    const double elapsed = timed(
        [](void* context, uint32_t node, uint32_t) {
          const Work& work = *static_cast<Work*>(context);
          Slice& slice = work.self->slices_[node];
          const char* data = work.self->memory(node, work.memory) + slice.begin;
          const size_t pieces = slice.bytes / work.piece_bytes;
          for (size_t i; (i = slice.taken.take()) < pieces;)
            work.read->run(data + i * work.piece_bytes, work.piece_bytes);
        },
        work);
    return static_cast<double>(bytes) / elapsed;
  }

  const char* memory(uint32_t node, Memory which) const {
    return which == Memory::kArena ? memory_[node].arena->data() : memory_[node].plain->data();
  }

  void prepare_memory() {
    if (!memory_.empty()) return;
    std::vector<NodeMemory> memory(pool_.num_nodes());
    for (uint32_t node = 0; node < pool_.num_nodes(); ++node) {
      const size_t bytes = node_bytes_[node];
      memory[node].arena = std::make_unique<Arena>("syshax-bench-limits", bytes, plan_[node].node, SYSHAX_HUGE_AUTO);
      memory[node].arena->populate(0, bytes);
      memory[node].plain = std::make_unique<PlainMemory>(bytes);
    }
    memory_ = std::move(memory);
    Work work = {this, nullptr, 0, nullptr, Memory::kPlain, 0};
    pool_.run(
        [](void* context, uint32_t node, uint32_t thread) {  // pages come from the node of the thread that touches them
          const Impl& self = *static_cast<Work*>(context)->self;
          const size_t share = self.node_bytes_[node] / kPageBytes / self.pool_.num_threads(node) + 1;
          const size_t end = std::min(self.node_bytes_[node], (thread + 1) * share * kPageBytes);
          for (size_t at = thread * share * kPageBytes; at < end; at += kPageBytes)
            self.memory_[node].plain->data()[at] = 1;
        },
        &work);
  }

  const std::vector<NodePlan> plan_;
  const CpuFeatures features_;
  ThreadPool pool_;
  uint32_t threads_ = 0;
  std::vector<const ComputeLoop*> compute_;
  std::vector<const ReadLoop*> read_;
  std::map<Limit, Contest> contests_;
  std::map<const ComputeLoop*, uint64_t> rounds_;  // that take about kComputeSeconds
  std::vector<size_t> node_bytes_;
  std::vector<NodeMemory> memory_;
  std::unique_ptr<Slice[]> slices_;
};

LimitBench::LimitBench(std::vector<NodePlan> plan, CpuFeatures features, uint32_t spin_us, size_t bytes)
    : impl_(std::make_unique<Impl>(std::move(plan), features, spin_us, bytes)) {}

LimitBench::~LimitBench() = default;

std::vector<LimitVariant> LimitBench::measure(Limit limit, double seconds) { return impl_->measure(limit, seconds); }

}  // namespace syshax
