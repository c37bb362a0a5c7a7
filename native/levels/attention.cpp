// The attention kernels of one ISA level.
#include "kernels/level.h"
#include "kernels/simd.h"

namespace ridgeline::RIDGELINE_LEVEL {

void fill_attention(AttentionKernels& kernels) { kernels = {}; }

}  // namespace ridgeline::RIDGELINE_LEVEL
