// The probe kernels of one ISA level.
#include "kernels/level.h"
#include "kernels/probe.h"

namespace ridgeline::RIDGELINE_LEVEL {

void fill_probe(ProbeKernels& kernels) {
#if RIDGELINE_TILES
  kernels = {read, peak, true};
#else
  kernels = {read, peak, false};
#endif
}

}  // namespace ridgeline::RIDGELINE_LEVEL
