#include "runtime/warmer.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace ridgeline {

#if defined(__linux__)
namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers lack
constexpr size_t kAtOnce = 2 << 20;
// Times as long as a piece took nothing is taken, so that steps lose a fifth of one core at most: the system gives a
// huge page without a break, in a virtual machine for 5 ms, and the workers of a step wait for the one without a core.
constexpr int kRests = 4;

bool populate(uintptr_t begin, size_t bytes) {
  const auto page = (uintptr_t)sysconf(_SC_PAGESIZE), first = begin / page * page;
  return madvise(reinterpret_cast<void*>(first), begin + bytes - first, kPopulateWrite) == 0;
}

}  // namespace

bool MemoryWarmer::take(std::vector<std::pair<uintptr_t, size_t>> pieces) {
  if (state_->busy.exchange(true)) return false;
  const auto work = [state = state_, pieces = std::move(pieces)] {
    // Whoever wakes interrupts this thread; the lowest of the usual priorities goes on for milliseconds.
    const sched_param none{};
    sched_setscheduler(0, SCHED_IDLE, &none);  // where it may not, the work is the same
    bool done = true;
    for (const auto& [begin, bytes] : pieces)
      for (size_t at = 0; at < bytes && done && !state->stop; at += kAtOnce) {
        const auto began = std::chrono::steady_clock::now();
        done = populate(begin + at, std::min(kAtOnce, bytes - at));
        std::this_thread::sleep_for(kRests * (std::chrono::steady_clock::now() - began));
      }
    state->busy = false;
  };
  try {
    std::thread(work).detach();
  } catch (const std::system_error&) {  // no thread to be had: steps take the memory as they write it
    state_->busy = false;
    return false;
  }
  return true;
}
#else
bool MemoryWarmer::take(std::vector<std::pair<uintptr_t, size_t>>) { return false; }
#endif

}  // namespace ridgeline
