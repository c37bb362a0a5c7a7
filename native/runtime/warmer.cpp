#include "runtime/warmer.h"

#include <algorithm>
#include <system_error>
#include <thread>

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace ridgeline {

#if defined(__linux__)
namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which older headers lack
constexpr size_t kAtOnce = 2 << 20;
constexpr int kLastPriority = 19;

bool populate(uintptr_t begin, size_t bytes) {
  const auto page = (uintptr_t)sysconf(_SC_PAGESIZE), first = begin / page * page;
  return madvise(reinterpret_cast<void*>(first), begin + bytes - first, kPopulateWrite) == 0;
}

}  // namespace

bool MemoryWarmer::take(std::vector<std::pair<uintptr_t, size_t>> pieces) {
  if (state_->busy.exchange(true)) return false;
  const auto work = [state = state_, pieces = std::move(pieces)] {
    setpriority(PRIO_PROCESS, 0, kLastPriority);  // of this thread; where it may not, the work is the same
    bool done = true;
    for (const auto& [begin, bytes] : pieces)
      for (size_t at = 0; at < bytes && done && !state->stop; at += kAtOnce)
        done = populate(begin + at, std::min(kAtOnce, bytes - at));
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
