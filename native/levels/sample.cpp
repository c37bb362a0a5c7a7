// The sample kernels of one ISA level.
#include "kernels/level.h"
#include "kernels/sample/verify.h"

namespace ridgeline::RIDGELINE_LEVEL {

void fill_sample(SampleKernels& kernels) { kernels = {sample, sample_scratch_bytes, sample_share, likeliest, verify}; }

}  // namespace ridgeline::RIDGELINE_LEVEL
