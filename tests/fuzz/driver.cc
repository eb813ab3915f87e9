// Runs targets on inputs made without coverage: mutated seeds and random bytes. Input number i depends on the seed and
// on i alone, so what is found can be found again: `ring_fuzz TARGET --seed S --first I --count 1`.
//
//   ring_fuzz TARGET [--seed S] [--first I] [--count N] [--seconds T] [--file INPUT] [--write-seeds FOLDER]
//
// Ends after N inputs or T seconds, whichever comes first, with one line: target, inputs, seconds, inputs a second.
// A crash, a wrong answer or 60 seconds in one input ends it with the number of that input.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iterator>

#include "fuzz.h"

// The sanitizers' runtimes have it: what to call before they end the process.
extern "C" __attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)());

namespace {

using fuzz::Bytes;
using fuzz::Random;

constexpr unsigned kInputSeconds = 60;

struct Options {
  const fuzz::Target* target = nullptr;
  uint64_t seed = 1, first = 0, count = 1000;
  double seconds = 1e9;
  std::string file, seeds_folder;
};

// Where the process is, for the last words.
const char* current_target = "";
volatile uint64_t current_seed, current_input;

void last_words() {
  char text[200];
  int length =
      std::snprintf(text, sizeof(text), "\nring_fuzz: in input %llu: ring_fuzz %s --seed %llu --first %llu --count 1\n",
                    static_cast<unsigned long long>(current_input), current_target,
                    static_cast<unsigned long long>(current_seed), static_cast<unsigned long long>(current_input));
  if (write(STDERR_FILENO, text, static_cast<size_t>(length)) < 0) return;
}

void on_alarm(int) {
  static const char kText[] = "\nring_fuzz: WRONG: this input has not ended for 60 s";
  if (write(STDERR_FILENO, kText, sizeof(kText) - 1) < 0) _exit(3);
  last_words();
  _exit(2);
}

void on_fault(int number) {
  last_words();
  std::signal(number, SIG_DFL);
  raise(number);
}

void insert(Bytes& input, size_t at, const uint8_t* from, size_t bytes) {
  Bytes copy(from, from + bytes);  // may lie in input itself
  input.insert(input.begin() + static_cast<std::ptrdiff_t>(at), copy.begin(), copy.end());
}

void mutate(Bytes& input, Random& random, const std::vector<Bytes>& seeds) {
  static constexpr uint8_t kBytes[] = {0, 1, 2, 0x7f, 0x80, 0xff, 0xfe, 16, 64};
  if (input.empty()) input.push_back(0);
  size_t at = random.below(static_cast<uint32_t>(input.size()));
  size_t left = input.size() - at, some = random.below(static_cast<uint32_t>(left < 24 ? left : 24)) + 1;
  switch (random.below(7)) {
    case 0:
      input[at] ^= static_cast<uint8_t>(1u << random.below(8));
      break;
    case 1:
      input[at] = static_cast<uint8_t>(random.bits());
      break;
    case 2:
      input[at] = kBytes[random.below(sizeof(kBytes))];
      break;
    case 3:
      input.erase(input.begin() + static_cast<std::ptrdiff_t>(at),
                  input.begin() + static_cast<std::ptrdiff_t>(at + some));
      break;
    case 4:
      insert(input, at, input.data() + at, some);
      break;
    case 5: {
      const Bytes& other = seeds[random.below(static_cast<uint32_t>(seeds.size()))];
      size_t from = random.below(static_cast<uint32_t>(other.size()));
      insert(input, at, other.data() + from, std::min<size_t>(other.size() - from, random.below(40) + 1));
      break;
    }
    default: {
      uint64_t bits = random.bits();
      insert(input, at, reinterpret_cast<const uint8_t*>(&bits), random.below(8) + 1);
    }
  }
}

Bytes make_input(const fuzz::Target& target, const std::vector<Bytes>& seeds, uint64_t seed, uint64_t number) {
  Random random(seed * 0x2545f4914f6cdd1du + number);
  Bytes input;
  if (random.below(4) == 0) {
    input.resize(random.below(target.longest) + 1);
    for (uint8_t& byte : input) byte = static_cast<uint8_t>(random.bits());
  } else {
    input = seeds[random.below(static_cast<uint32_t>(seeds.size()))];
    for (uint32_t left = 1u << random.below(6); left != 0; --left) mutate(input, random, seeds);
  }
  if (input.size() > target.longest) input.resize(target.longest);
  return input;
}

[[noreturn]] void usage() {
  std::fprintf(stderr,
               "ring_fuzz TARGET [--seed S] [--first I] [--count N] [--seconds T] [--file INPUT] [--write-seeds "
               "FOLDER]\ntargets:\n");
  for (const auto& target : fuzz::targets()) std::fprintf(stderr, "  %-12s %s\n", target.name, target.what);
  std::exit(2);
}

Options parse(int count, char** words) {
  Options options;
  if (count < 2 || !(options.target = fuzz::find_target(words[1]))) usage();
  for (int i = 2; i < count; i += 2) {
    std::string name = words[i];
    if (i + 1 == count) usage();
    std::string value = words[i + 1];
    if (name == "--seed")
      options.seed = std::stoull(value);
    else if (name == "--first")
      options.first = std::stoull(value);
    else if (name == "--count")
      options.count = std::stoull(value);
    else if (name == "--seconds")
      options.seconds = std::stod(value);
    else if (name == "--file")
      options.file = value;
    else if (name == "--write-seeds")
      options.seeds_folder = value;
    else
      usage();
  }
  return options;
}

int run_file(const Options& options) {
  std::ifstream file(options.file, std::ios::binary);
  if (!file) fuzz::fail("%s cannot be read", options.file.c_str());
  Bytes input((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  options.target->run(input.data(), input.size());
  return 0;
}

int write_seeds(const Options& options) {
  int number = 0;
  for (const Bytes& seed : options.target->seeds()) {
    std::ofstream file(options.seeds_folder + "/" + options.target->name + std::to_string(number++), std::ios::binary);
    file.write(reinterpret_cast<const char*>(seed.data()), static_cast<std::streamsize>(seed.size()));
    if (!file) fuzz::fail("%s cannot be written to", options.seeds_folder.c_str());
  }
  return 0;
}

}  // namespace

int main(int count, char** words) {
  Options options = parse(count, words);
  if (!options.file.empty()) return run_file(options);
  if (!options.seeds_folder.empty()) return write_seeds(options);
  current_target = options.target->name;
  current_seed = options.seed;
  std::signal(SIGALRM, on_alarm);
  std::signal(SIGABRT, on_fault);
  if (__sanitizer_set_death_callback)
    __sanitizer_set_death_callback(last_words);
  else
    std::signal(SIGSEGV, on_fault);
  std::atexit([] {
    if (current_input != ~uint64_t{0}) last_words();
  });
  const std::vector<Bytes> seeds = options.target->seeds();
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  uint64_t done = 0;
  double seconds = 0;
  for (; done < options.count && seconds < options.seconds; ++done) {
    current_input = options.first + done;
    const Bytes input = make_input(*options.target, seeds, options.seed, current_input);
    alarm(kInputSeconds);
    options.target->run(input.data(), input.size());
    seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  }
  alarm(0);
  current_input = ~uint64_t{0};
  std::printf("%s: %llu inputs in %.1f s, %.0f a second\n", options.target->name, static_cast<unsigned long long>(done),
              seconds, static_cast<double>(done) / (seconds > 0 ? seconds : 1));
  return 0;
}
