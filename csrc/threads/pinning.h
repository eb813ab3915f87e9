// Where threads run. Every failure is an error that names the CPU and the reason: nothing runs unpinned in silence.
#pragma once
#include <string>
#include <vector>

namespace syshax {

// Restricts the calling thread to these CPUs. Returns "" or what went wrong.
std::string pin_this_thread(const std::vector<int>& cpus);

// The same for work that may run on any of them: those that went offline or out of the cpuset are left out as long as
// one is there.
std::string pin_this_thread_among(const std::vector<int>& cpus);

constexpr const char* kPinningHint = "choose CPUs that are online and inside the cpuset and affinity";

// Tries to pin, in a thread that ends at once. Throws CoreError("hardware").
void check_pinning(const std::vector<int>& cpus);

// At most 15 characters are shown by ps and top.
void name_this_thread(const std::string& name);

// Lets every computing thread go first.
void lower_this_threads_priority();

}  // namespace syshax
