// The sample kernels of one ISA level.
#include "kernels/level.h"
#include "kernels/simd.h"

namespace ridgeline::RIDGELINE_LEVEL {

void fill_sample(SampleKernels& kernels) { kernels = {}; }

}  // namespace ridgeline::RIDGELINE_LEVEL
