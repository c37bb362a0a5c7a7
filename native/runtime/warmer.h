// Has the system give memory its pages before it is used, on a thread that yields to all others.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace ridgeline {

class MemoryWarmer {
 public:
  MemoryWarmer() : state_(std::make_shared<State>()) {}
  ~MemoryWarmer() { state_->stop = true; }
  MemoryWarmer(const MemoryWarmer&) = delete;
  MemoryWarmer& operator=(const MemoryWarmer&) = delete;

  // Begins to take pieces of memory, (address, bytes) each, in that order; their contents stay. False, and nothing
  // happens, while the last call's are not done, or where the system cannot be asked. Should their memory be unmapped
  // meanwhile, at most a piece of 2 MiB that lies there by then gets its pages.
  bool take(std::vector<std::pair<uintptr_t, size_t>> pieces);
  bool busy() const { return state_->busy; }

 private:
  struct State {
    std::atomic<bool> stop{false}, busy{false};
  };
  std::shared_ptr<State> state_;  // the thread's as well: it may outlive this, and a fork has none
};

}  // namespace ridgeline
