// Matrix products with int8 and int4 weights.
#pragma once

#include "kernels/epilogue.h"
#include "kernels/simd.h"
#include "kernels/types.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_int {

inline constexpr int64_t kScratchBytes = 0;

static inline int64_t panel_bytes(WeightKind, int64_t, int32_t, bool) { return 0; }

static inline void pack(const Matrix&, const void*, const float*, const uint8_t*, const int64_t*, int64_t, int64_t) {}

static inline void unpack_output(const Matrix&, int64_t, float*) {}

static inline int64_t input_bytes(const Matrix&, int64_t) { return 0; }

static inline void prepare_input(const Matrix&, const Norm&, const float*, int64_t, const int64_t*, int64_t, int64_t,
                                 int64_t, void*) {}

static inline void multiply(const Matrix&, const void*, int64_t, int64_t, int64_t, bool, const Epilogue&, void*) {}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_int
