// The attention kernels of one ISA level.
#include "kernels/attention/attention.h"

#include "kernels/level.h"

namespace ridgeline::RIDGELINE_LEVEL {

void fill_attention(AttentionKernels& kernels) {
  kernels = {kv_block_bytes, kv_write, kv_fetch, kv_read, attend, merge, (int64_t)sizeof(AttentionRows)};
}

}  // namespace ridgeline::RIDGELINE_LEVEL
