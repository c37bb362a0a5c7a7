// The row kernels of one ISA level.
#include "kernels/level.h"
#include "kernels/rows.h"

namespace ridgeline::RIDGELINE_LEVEL {

void fill_rows(RowKernels& kernels) {
  kernels = {normalize, rotate, add, scale, dot, add_scaled, activate, softcap};
}

}  // namespace ridgeline::RIDGELINE_LEVEL
