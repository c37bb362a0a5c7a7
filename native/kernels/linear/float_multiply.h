// Matrix products with float32, bfloat16 and 8-bit float weights: which kernel takes which.
#pragma once

#include "kernels/linear/float_gemm.h"
#include "kernels/linear/float_pack.h"
#include "kernels/linear/float_tiles.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_float {

inline constexpr int64_t kScratchBytes = 0;

static inline void multiply(const Matrix& matrix, const void* input, int64_t num_rows, int64_t begin, int64_t end,
                            [[maybe_unused]] bool exact_batch, const Epilogue& epilogue, void*) {
  if (num_rows == 0) return;
  const uint8_t* rows = (const uint8_t*)input;
  if (matrix.kind == WeightKind::f32) return multiply_blocks<Float32>(matrix, rows, num_rows, begin, end, epilogue);
  if (matrix.kind == WeightKind::e4m3) {
#if defined(__AVX512BF16__)
    if (in_pairs(matrix)) return multiply_blocks<Fp8Pairs>(matrix, rows, num_rows, begin, end, epilogue);
#endif
    return multiply_blocks<Fp8Floats>(matrix, rows, num_rows, begin, end, epilogue);
  }
#if RIDGELINE_TILES
  if (num_rows >= kMinTileBatch && !exact_batch && in_pairs(matrix))
    return multiply_tiles(matrix, rows, num_rows, begin, end, epilogue);
#endif
#if defined(__AVX512BF16__)
  if (in_pairs(matrix)) return multiply_blocks<Bfloat16Pairs>(matrix, rows, num_rows, begin, end, epilogue);
#endif
  multiply_blocks<Bfloat16Floats>(matrix, rows, num_rows, begin, end, epilogue);
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_float
