// The linear kernels of one ISA level.
#include "kernels/level.h"
#include "kernels/simd.h"

namespace ridgeline::RIDGELINE_LEVEL {

void fill_linear(LinearKernels& kernels) { kernels = {}; }

}  // namespace ridgeline::RIDGELINE_LEVEL
