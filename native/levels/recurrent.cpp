// The kernels of recurrent layers of one ISA level.
#include "kernels/level.h"
#include "kernels/recurrent/recurrence.h"

namespace ridgeline::RIDGELINE_LEVEL {

void fill_recurrent(RecurrentKernels& kernels) {
  kernels = {recurrent::convolve, recurrent::selective_scan, recurrent::scan_scratch_bytes,
             recurrent::recur,    recurrent::scratch_bytes,  recurrent::gated_norm};
}

}  // namespace ridgeline::RIDGELINE_LEVEL
