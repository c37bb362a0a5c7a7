#include "bind/bind.h"

namespace nb = nanobind;

namespace ridgeline {

void bind_attention(nb::module_& module) { (void)module; }

}  // namespace ridgeline
