// Matrix products with float32 and bfloat16 weights.
#pragma once

#include "kernels/linear_float_gemm.h"
#include "kernels/linear_float_pack.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_float {

inline constexpr int64_t kScratchBytes = 0;

static inline void multiply(const Matrix& matrix, const void* input, int64_t num_rows, int64_t begin, int64_t end,
                            bool exact_batch, const Epilogue& epilogue, void* scratch) {
  (void)exact_batch, (void)scratch;
  if (num_rows == 0) return;
  if (matrix.kind == WeightKind::f32) {
    multiply_blocks<Float32>(matrix, input, num_rows, begin, end, epilogue);
  } else if constexpr (kPairs) {
    multiply_blocks<Bfloat16Pairs>(matrix, input, num_rows, begin, end, epilogue);
  } else {
    multiply_blocks<Bfloat16Widened>(matrix, input, num_rows, begin, end, epilogue);
  }
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_float
