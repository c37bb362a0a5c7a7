#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <set>
#include <shared_mutex>

namespace ridgeline {

class Tape;

// The tapes with a step that was started and is not finished, to be changed with the GIL. An exiting interpreter finishes
// them, before the memory goes that they compute with.
std::set<Tape*>& started_tapes();

// Releases the GIL while something is computed, so that an exiting interpreter does not meet the thread within it.
//
// Until version 3.13 Python unwinds the stack of a thread that comes back to an exiting interpreter for the GIL, and
// C++ frames on that stack end in std::terminate. So the exit waits for what is being computed, and a thread that
// would compute later, necessarily a daemon, sleeps until the process ends.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil();
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  std::shared_lock<std::shared_mutex> computing_;  // let go of once the GIL is back: destroyed after it
  std::optional<nanobind::gil_scoped_release> released_;
};

}  // namespace ridgeline
