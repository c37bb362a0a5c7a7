// The extension module: one bind_* function per area, each in a file of its own.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/bind.h"
#include "runtime/isa.h"

NB_MODULE(_native, module) {
  module.doc() = "Ridgeline's native CPU kernels; see ridgeline.backends.native";
  module.def("runnable_levels", &ridgeline::runnable_levels, "ISA levels this machine can run, narrowest first.");
  module.def("filled_levels", &ridgeline::filled_levels, "ISA levels of this build whose code has run to fill a table.");
  module.def("best_level", &ridgeline::best_level, "The widest ISA level that is not an emulation.");
  ridgeline::bind_gil(module);
  ridgeline::bind_linear(module);
  ridgeline::bind_tuning(module);
  ridgeline::bind_attention(module);
  ridgeline::bind_rows(module);
  ridgeline::bind_sample(module);
  ridgeline::bind_probe(module);
  ridgeline::bind_kv(module);
  ridgeline::bind_lookup(module);
  ridgeline::bind_parts(module);
  ridgeline::bind_runtime(module);
}
