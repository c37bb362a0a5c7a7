#include "bind/bind.h"

namespace nb = nanobind;

namespace ridgeline {

void bind_probe(nb::module_& module) { (void)module; }

}  // namespace ridgeline
