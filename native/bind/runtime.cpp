#include "bind/bind.h"

namespace nb = nanobind;

namespace ridgeline {

void bind_runtime(nb::module_& module) { (void)module; }

}  // namespace ridgeline
