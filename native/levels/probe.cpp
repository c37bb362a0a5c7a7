// The probe kernels of one ISA level.
#include "kernels/level.h"
#include "kernels/probe.h"

namespace ridgeline::RIDGELINE_LEVEL {

void fill_probe(ProbeKernels& kernels) {
#if RIDGELINE_TILES
  kernels = {read, peak, nullptr, true};
#elif RIDGELINE_BYTE_PAIRS
  kernels = {read, peak, peak_int4, false};
#else
  kernels = {read, peak, nullptr, false};
#endif
}

}  // namespace ridgeline::RIDGELINE_LEVEL
