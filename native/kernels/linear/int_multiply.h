// Matrix products with weights of 8 and 4 bits, with inputs as 16-bit or 8-bit integers.
#pragma once

#include "kernels/linear/int_gemm.h"
#include "kernels/linear/int_input.h"
#include "kernels/linear/int_pack.h"
#include "kernels/linear/int_panels.h"
#include "kernels/types.h"

#if RIDGELINE_TILES
#include "kernels/linear/int_tiles.h"
#endif

namespace ridgeline::RIDGELINE_LEVEL::linear_int {

#if !RIDGELINE_TILES
inline constexpr int64_t kScratchBytes = 0;
#endif

template <WeightKind kind, bool bytes, bool zero_points>
static void multiply_in_vectors(const Matrix& matrix, const void* input, int64_t num_rows, int64_t begin, int64_t end,
                                const Epilogue& epilogue) {
  if constexpr (kSeveralPanels && kind != WeightKind::nf4_high)
    if (num_rows <= kSeveralPanelsRows && matrix.tuning.panels > 1)
      begin = multiply_several<kind, bytes, zero_points>(matrix, input, num_rows, begin, end, epilogue);
  multiply_vectors<kind, bytes, zero_points>(matrix, input, num_rows, begin, end, epilogue);
}

template <WeightKind kind, bool zero_points>
static inline void multiply_kind(const Matrix& matrix, const void* input, int64_t num_rows, int64_t begin, int64_t end,
                                 const Epilogue& epilogue, [[maybe_unused]] void* scratch) {
#if RIDGELINE_TILES
  if constexpr (!is_table(kind))
    if (in_tiles(kind, num_rows)) {
      const auto tiles = matrix.input == InputKind::int16 ? multiply_tiles<kind, zero_points, true>
                                                          : multiply_tiles<kind, zero_points, false>;
      return tiles(matrix, input, num_rows, begin, end, epilogue, scratch);
    }
#endif
  constexpr bool can = multiplies_bytes(kind);
  const auto vectors = can && matrix.input == InputKind::int8 ? multiply_in_vectors<kind, can, zero_points>
                                                              : multiply_in_vectors<kind, false, zero_points>;
  vectors(matrix, input, num_rows, begin, end, epilogue);
}

static inline void multiply(const Matrix& matrix, const void* input, int64_t num_rows, int64_t begin, int64_t end,
                            bool /*exact_batch: always*/, const Epilogue& epilogue, void* scratch) {
  if (num_rows == 0) return;
  const auto kernel = matrix.kind == WeightKind::int8          ? multiply_kind<WeightKind::int8, false>
                      : matrix.kind == WeightKind::int8_groups ? multiply_kind<WeightKind::int8_groups, false>
                      : matrix.kind == WeightKind::int8_minima ? multiply_kind<WeightKind::int8_minima, false>
                      : matrix.kind == WeightKind::int4_minima ? multiply_kind<WeightKind::int4_minima, false>
                      : matrix.kind == WeightKind::int8_super  ? multiply_kind<WeightKind::int8_super, false>
                      : matrix.kind == WeightKind::int8_super_minima
                          ? multiply_kind<WeightKind::int8_super_minima, false>
                      : matrix.kind == WeightKind::int4_super_minima
                          ? multiply_kind<WeightKind::int4_super_minima, false>
                      : matrix.kind == WeightKind::mxfp4       ? multiply_kind<WeightKind::mxfp4, false>
                      : matrix.kind == WeightKind::nvfp4       ? multiply_kind<WeightKind::nvfp4, false>
                      : matrix.kind == WeightKind::fp4         ? multiply_kind<WeightKind::fp4, false>
                      : matrix.kind == WeightKind::nf4 && matrix.input == InputKind::int8
                          ? multiply_kind<WeightKind::nf4, false>
                      : matrix.kind == WeightKind::nf4         ? multiply_kind<WeightKind::nf4_high, false>
                      : matrix.has_zero_points                 ? multiply_kind<WeightKind::int4, true>
                                                               : multiply_kind<WeightKind::int4, false>;
  kernel(matrix, input, num_rows, begin, end, epilogue, scratch);
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_int
