// The sample kernels of one ISA level.
#include "kernels/level.h"
#include "kernels/sample/sample.h"

namespace ridgeline::RIDGELINE_LEVEL {

void fill_sample(SampleKernels& kernels) { kernels = {sample, sample_scratch_bytes, sample_share}; }

}  // namespace ridgeline::RIDGELINE_LEVEL
