// How float32 and bfloat16 weights and inputs lie in memory.
//
// A product advances by steps. A step holds one 32-bit word of each of a panel's 32 outputs, a float32, the bfloat16 of
// two inputs or the 8-bit floats of four, so all kinds of panel are [steps][32] words, 8-bit floats with 32 scales after
// every group of inputs, and share their kernels.
#pragma once

#include "kernels/linear/float_fp8.h"
#include "kernels/rows.h"
#include "kernels/simd.h"
#include "kernels/types.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_float {

inline constexpr int64_t kStepBytes = 4 * kPanel;
inline constexpr int64_t kChunk = 32;  // bfloat16 inputs are padded to whole chunks

#if defined(__AVX512BF16__)
inline constexpr bool kPairs = true;
#else
inline constexpr bool kPairs = false;
#endif

// Whether a matrix is multiplied by products of bfloat16 pairs. Elsewhere the inputs, rounded to bfloat16, are float32.
RL_INLINE bool in_pairs(const Matrix& matrix) {
  return kPairs && matrix.input == InputKind::bf16 && !matrix.tuning.float32;
}

RL_INLINE int64_t num_steps(WeightKind kind, int64_t inputs) {
  const int64_t padded = (inputs + kChunk - 1) / kChunk * kChunk;
  return kind == WeightKind::f32 ? inputs : kind == WeightKind::bf16 ? padded / 2 : padded / 4;
}

// Steps of a group; without groups all of a panel.
RL_INLINE int64_t group_steps(WeightKind kind, int64_t inputs, int32_t group) {
  return kind == WeightKind::e4m3 && group ? group / 4 : num_steps(kind, inputs);
}

// Groups with scales.
RL_INLINE int64_t num_groups(WeightKind kind, int64_t inputs, int32_t group) {
  return kind != WeightKind::e4m3 ? 0 : group ? (inputs + group - 1) / group : 1;
}

static inline int64_t panel_bytes(WeightKind kind, int64_t inputs, int32_t group, bool) {
  return (num_steps(kind, inputs) + num_groups(kind, inputs, group)) * kStepBytes;
}

// Steps [begin, end) of one output. `row` is its weights, `row_bytes` of them, or null for zeros.
RL_INLINE void pack_output(const uint8_t* row, int64_t row_bytes, int64_t begin, int64_t end, uint8_t* to) {
  for (int64_t step = begin; step < end; step++) {
    uint32_t word = 0;
    const int64_t left = row_bytes - 4 * step;
    if (row && left >= 4) __builtin_memcpy(&word, row + 4 * step, 4);
    if (row && left == 2) __builtin_memcpy(&word, row + 4 * step, 2);
    __builtin_memcpy(to + step * kStepBytes, &word, 4);
  }
}

// One output of 8-bit floats; null values are zeros.
static inline void pack_e4m3(const Matrix& matrix, const uint8_t* values, const float* scales, uint8_t* to) {
  const int64_t each = group_steps(matrix.kind, matrix.inputs, matrix.group);
  for (int64_t step = 0; step < num_steps(matrix.kind, matrix.inputs); step++) {
    uint8_t word[4] = {};
    for (int64_t i = 0; i < 4; i++)
      if (values && 4 * step + i < matrix.inputs) word[kByteOf[i]] = values[4 * step + i];
    __builtin_memcpy(to + (step + step / each) * kStepBytes, word, 4);
  }
  for (int64_t g = 0; g < num_groups(matrix.kind, matrix.inputs, matrix.group); g++) {
    const int64_t steps = num_steps(matrix.kind, matrix.inputs), end = (g + 1) * each < steps ? (g + 1) * each : steps;
    const float scale = values ? scales[g] : 0.0f;
    __builtin_memcpy(to + (end + g) * kStepBytes, &scale, 4);
  }
}

static inline void pack(const Matrix& matrix, const void* rows, const float* scales, const uint8_t*,
                        const int64_t* order, int64_t begin, int64_t end) {
  if (matrix.kind == WeightKind::e4m3) {
    const int64_t groups = num_groups(matrix.kind, matrix.inputs, matrix.group);
    for (int64_t n = begin * kPanel; n < end * kPanel; n++) {
      uint8_t* to = const_cast<uint8_t*>(matrix.data) + n / kPanel * matrix.panel_bytes + n % kPanel * 4;
      const int64_t row = order[n];
      pack_e4m3(matrix, row < 0 ? nullptr : (const uint8_t*)rows + row * matrix.inputs, scales + row * groups, to);
    }
    return;
  }
  const int64_t steps = num_steps(matrix.kind, matrix.inputs);
  const int64_t row_bytes = matrix.inputs * (matrix.kind == WeightKind::f32 ? 4 : 2);
  constexpr int64_t kBlock = 16;  // steps: a cache line of every row, and 2 KiB of the panel
  for (int64_t panel = begin; panel < end; panel++) {
    uint8_t* to = const_cast<uint8_t*>(matrix.data) + panel * matrix.panel_bytes;
    for (int64_t step = 0; step < steps; step += kBlock)
      for (int64_t n = 0; n < kPanel; n++) {
        const int64_t row = order[panel * kPanel + n];
        const uint8_t* from = row < 0 ? nullptr : (const uint8_t*)rows + row * row_bytes;
        pack_output(from, row_bytes, step, step + kBlock < steps ? step + kBlock : steps, to + 4 * n);
      }
  }
}

static inline void unpack_output(const Matrix& matrix, int64_t output, float* to) {
  const uint8_t* words = matrix.data + output / kPanel * matrix.panel_bytes + output % kPanel * 4;
  if (matrix.kind == WeightKind::e4m3) {
    const int64_t steps = num_steps(matrix.kind, matrix.inputs);
    const int64_t each = group_steps(matrix.kind, matrix.inputs, matrix.group);
    for (int64_t k = 0; k < matrix.inputs; k++) {
      const int64_t g = k / 4 / each, end = (g + 1) * each < steps ? (g + 1) * each : steps;
      to[k] = e4m3(words[(k / 4 + g) * kStepBytes + kByteOf[k % 4]]) * load<float>(words + (end + g) * kStepBytes);
    }
    return;
  }
  for (int64_t k = 0; k < matrix.inputs; k++) {
    uint16_t half;
    if (matrix.kind == WeightKind::f32) {
      __builtin_memcpy(to + k, words + k * kStepBytes, 4);
    } else {
      __builtin_memcpy(&half, words + k / 2 * kStepBytes + k % 2 * 2, 2);
      to[k] = from_bf16(half);
    }
  }
}

// Bytes from one row of inputs to the next: an odd number of cache lines, so that the rows of a block do not fall into
// the same sets of the cache.
RL_INLINE int64_t input_stride(const Matrix& matrix) {
  const bool pairs = in_pairs(matrix);
  const int64_t padded = (matrix.inputs + kChunk - 1) / kChunk * kChunk;
  return ((padded * (pairs ? 2 : 4) / 64) | 1) * 64;
}

static inline int64_t input_bytes(const Matrix& matrix, int64_t rows) { return rows * input_stride(matrix); }

RL_INLINE void round_to_bf16(float (&x)[kChunk]) {
  for (int64_t i = 0; i < kChunk; i += kLanes) store(x + i, bf16_bits(load<Floats>(x + i)) << 16);
}

static inline void prepare_input(const Matrix& matrix, const Norm& norm, const float* x, int64_t stride,
                                 const int64_t* index, int64_t begin, int64_t end, int64_t, void* input) {
  const int64_t inputs = matrix.inputs, to_stride = input_stride(matrix);
  const bool bf16 = matrix.input == InputKind::bf16, pairs = in_pairs(matrix);
  for (int64_t r = begin; r < end; r++) {
    const float* from = x + (index ? index[r] : r) * stride;
    uint8_t* to = (uint8_t*)input + r * to_stride;
    const RowScale scale = row_scale(norm, from, inputs);
    for (int64_t k = 0; k < inputs; k += kChunk) {
      alignas(64) float chunk[kChunk];
      const int64_t width = inputs - k < kChunk ? inputs - k : kChunk;
      if (norm.kind == NormKind::none && width == kChunk) {
        __builtin_memcpy(chunk, from + k, sizeof chunk);  // of a size that the compiler knows: a few moves, no call
      } else {
        for (int64_t i = width; i < kChunk; i++) chunk[i] = 0.0f;
        normalize_part(norm, scale, from, k, width, chunk);
      }
      if (pairs) {
        for (int64_t i = 0; i < kChunk; i += 2 * kLanes)
          store_bf16((uint16_t*)to + k + i, load<Floats>(chunk + i), load<Floats>(chunk + i + kLanes));
      } else {
        if (bf16) round_to_bf16(chunk);
        __builtin_memcpy((float*)to + k, chunk, sizeof chunk);
      }
    }
  }
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_float
