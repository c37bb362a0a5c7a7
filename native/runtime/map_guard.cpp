#include "runtime/map_guard.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <atomic>

namespace ridgeline {

struct Range {
  std::atomic<uintptr_t> begin{0}, end{0};  // equal: free
  std::atomic<bool> cut{false};
};

namespace {

std::array<Range, 64> ranges;
struct sigaction earlier;  // who else hears of bus errors

void on_bus_error(int, siginfo_t* info, void*) {
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  const auto first = at / (uintptr_t)sysconf(_SC_PAGESIZE) * (uintptr_t)sysconf(_SC_PAGESIZE);
  for (Range& range : ranges) {
    if (at < range.begin || at >= range.end) continue;
    range.cut = true;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    if (mmap(reinterpret_cast<void*>(first), range.end - first, PROT_READ, flags, -1, 0) != MAP_FAILED) return;
  }
  sigaction(SIGBUS, &earlier, nullptr);  // the same access meets them now
}

}  // namespace

MapGuard::MapGuard(int fd, uintptr_t begin, size_t bytes)  // under the GIL
    : fd_(fcntl(fd, F_DUPFD_CLOEXEC, 0)), bytes_(bytes), range_(nullptr) {
  struct sigaction now = {};
  sigaction(SIGBUS, nullptr, &now);
  if (now.sa_sigaction != &on_bus_error) {
    earlier = now;
    now.sa_sigaction = &on_bus_error;
    now.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGBUS, &now, nullptr);
  }
  for (Range& range : ranges) {
    if (range.end) continue;
    range_ = &range;
    range.cut = false, range.begin = begin, range.end = begin + bytes;
    return;
  }
}

MapGuard::~MapGuard() {
  if (range_) range_->end = 0;
  if (fd_ >= 0) close(fd_);
}

bool MapGuard::is_cut() const {
  struct stat found = {};
  return (range_ && range_->cut) || (fd_ >= 0 && fstat(fd_, &found) == 0 && (size_t)found.st_size < bytes_);
}

}  // namespace ridgeline
