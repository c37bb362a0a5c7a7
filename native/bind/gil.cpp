#include "bind/gil.h"

#include <unistd.h>

#include <thread>

#include "bind/bind.h"
#include "runtime/tape.h"

namespace nb = nanobind;

namespace ridgeline {
namespace {

// Held shared while anything is computed, and for good by the thread that ends the interpreter, of whose end the others
// learn under the GIL.
struct Gate {
  std::shared_mutex mutex;
  std::thread::id ended_by;
  std::set<Tape*> started;
  const pid_t process = getpid();
};

Gate& gate() {
  static Gate& gate = *new Gate;  // never destroyed: threads may outlive the end of main
  return gate;
}

void wait_for_computations() {
  if (getpid() != gate().process) return;  // forked: what was computing then, no thread of this process finishes
  gate().ended_by = std::this_thread::get_id();
  const nb::gil_scoped_release released;
  gate().mutex.lock();
  for (Tape* const tape : gate().started) tape->finish();
}

}  // namespace

std::set<Tape*>& started_tapes() { return gate().started; }

WithoutGil::WithoutGil() {
  const std::thread::id ended_by = gate().ended_by;
  const bool ending = ended_by != std::thread::id();
  if (!ending) computing_ = std::shared_lock(gate().mutex);
  released_.emplace();
  while (ending && ended_by != std::this_thread::get_id()) pause();
}

WithoutGil::~WithoutGil() { released_.reset(); }

void bind_gil(nb::module_&) {
  gate();
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&wait_for_computations));
}

}  // namespace ridgeline
