// Integer products in vector registers.
//
// Per output and group of inputs: sum = start + dot(weights, q) in int32, exact; total += float(sum) * scale in
// float32, groups in order. The two float operations are rounded each for itself, so that every level, every number of
// rows and every division of the panels gives the same bits.
#pragma once

#include "kernels/epilogue.h"
#include "kernels/linear_int_input.h"
#include "kernels/linear_int_pack.h"
#include "kernels/simd.h"
#include "kernels/types.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_int {

inline constexpr int kVectors = kPanel / kLanes;  // of a panel's outputs

// The rounded value: keeps the compiler from fusing a product into the sum that it goes to.
RL_INLINE Floats rounded(Floats v) {
#if defined(__AVX512F__)
  __asm__("" : "+v"(v));
#elif defined(__x86_64__)
  __asm__("" : "+x"(v));
#else
  __asm__("" : "+w"(v));
#endif
  return v;
}

// What one group's sums of `kLanes` outputs start from and are scaled by.
struct GroupVector {
  Floats scale;
  Words zero;
};

// `lane` is the first of the outputs. int8: no scale until the end.
template <WeightKind kind, bool zero_points>
RL_INLINE GroupVector group_vector(const PanelLayout& layout, const uint8_t* panel, int64_t group, int64_t lane) {
  typedef uint8_t Narrow __attribute__((vector_size(kLanes)));
  GroupVector v{};
  if constexpr (kind == WeightKind::int4)
    v.scale = load_half(panel + group * layout.group_bytes + layout.scales + lane * 2);
  if constexpr (zero_points)
    v.zero = __builtin_convertvector(load<Narrow>(panel + layout.zero_points + group * kPanel + lane), Words);
  return v;
}

template <bool zero_points>
RL_INLINE Ints start_of(const GroupVector& v, int32_t start) {
  if constexpr (zero_points) return (Ints)(v.zero * (Words)splat_int(start));
  return splat_int(start);
}

template <WeightKind kind>
RL_INLINE void add_group(const GroupVector& v, float input_scale, Ints sum, float* total) {
  const Floats scale = kind == WeightKind::int4 ? v.scale * input_scale : splat(input_scale);
  store(total, load<Floats>(total) + rounded(to_floats(sum) * scale));
}

// Sends the totals of `rows` rows of a panel through the epilogue.
static inline void finish_rows(const Matrix& matrix, const PanelLayout& layout, const Epilogue& epilogue,
                               const float* totals, int64_t first, int64_t rows, int64_t panel) {
  const uint8_t* scales = matrix.data + panel * matrix.panel_bytes + layout.scales;
  for (int64_t row = 0; row < rows; row++) {
    PanelSums sums;
    for (int i = 0; i < kVectors; i++) {
      sums.part[i] = load<Floats>(totals + row * kPanel + i * kLanes);
      if (matrix.kind == WeightKind::int8) sums.part[i] = rounded(sums.part[i] * load<Floats>(scales + i * kVectorBytes));
    }
    finish(epilogue, sums, first + row, panel);
  }
}

// Dot products per vector of weights.
template <WeightKind kind, bool bytes>
inline constexpr int kDots = (kind == WeightKind::int8 ? 2 : 4) / (bytes ? 2 : 1);

// A vector of words of weights as the operands of its dot products; in_word_order says which inputs they meet.
template <WeightKind kind, bool bytes>
RL_INLINE void expand(Ints x, Ints (&w)[kDots<kind, bytes>]) {
  if constexpr (kind == WeightKind::int8 && bytes) {
    w[0] = x;
  } else if constexpr (kind == WeightKind::int8) {
    w[0] = x & 0x00ff00ff;
    w[1] = (Ints)((UShorts)x >> 8);
  } else if constexpr (bytes) {
    w[0] = x & 0x0f0f0f0f;
    w[1] = (Ints)((UShorts)x >> 4) & 0x0f0f0f0f;
  } else {
    w[0] = x & 0x000f000f;
    w[1] = (Ints)((UShorts)x >> 4) & 0x000f000f;
    w[2] = (Ints)((UShorts)x >> 8) & 0x000f000f;
    w[3] = (Ints)((UShorts)x >> 12);
  }
}

inline constexpr int64_t kPrefetchBytes = 1024;

// sums += the steps' weights times the rows' inputs.
template <WeightKind kind, bool bytes, int rows, int vectors>
RL_INLINE void accumulate(const uint8_t* weights, const uint8_t* inputs, int64_t steps, Ints (&sums)[rows][vectors]) {
  constexpr int dots = kDots<kind, bytes>;
  for (int64_t step = 0; step < steps; step++) {
    Ints w[vectors][dots];
    __builtin_prefetch(weights + kPrefetchBytes);
    __builtin_prefetch(weights + kPrefetchBytes + 64);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) expand<kind, bytes>(load<Ints>(weights + v * kVectorBytes), w[v]);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int d = 0; d < dots; d++) {
        const Ints q = splat_word(inputs + (r * dots + d) * 4);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
          sums[r][v] = bytes ? dot_u8s8(sums[r][v], w[v][d], q) : dot_i16(sums[r][v], w[v][d], q);
      }
    weights += kStepBytes;
    inputs += rows * dots * 4;
  }
}

// The totals of one block of rows.
template <WeightKind kind, bool bytes, bool zero_points, int rows>
static void multiply_block(const PanelLayout& layout, const InputBlock& block, const uint8_t* panel, float* totals) {
  constexpr int vectors = rows <= 2 || kVectors < 2 ? kVectors : 2;
  for (int64_t i = 0; i < rows * kPanel; i += kLanes) store(totals + i, Floats{});
  for (int64_t first = 0; first < kVectors; first += vectors) {
    const uint8_t* inputs = block.values;
    for (int64_t g = 0; g < layout.groups; g++) {
      const int64_t left = layout.inputs - g * layout.group;
      const int64_t steps = (left < layout.group ? left : layout.group) / layout.step_inputs;
      GroupVector group[vectors];
      Ints sums[rows][vectors];
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++) {
        group[v] = group_vector<kind, zero_points>(layout, panel, g, (first + v) * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) sums[r][v] = start_of<zero_points>(group[v], block.starts[g * rows + r]);
      }
      accumulate<kind, bytes>(panel + g * layout.group_bytes + first * kVectorBytes, inputs, steps, sums);
      inputs += steps * rows * kDots<kind, bytes> * 4;
#pragma GCC unroll 16
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
          add_group<kind>(group[v], block.scales[g * rows + r], sums[r][v],
                          totals + r * kPanel + (first + v) * kLanes);
    }
  }
}

template <WeightKind kind, bool bytes, bool zero_points, int rows = kBlockRows>
RL_INLINE void multiply_rows(const PanelLayout& layout, const InputBlock& block, const uint8_t* panel, float* totals) {
  if (block.rows == rows) return multiply_block<kind, bytes, zero_points, rows>(layout, block, panel, totals);
  if constexpr (rows > 1) multiply_rows<kind, bytes, zero_points, rows - 1>(layout, block, panel, totals);
}

template <WeightKind kind, bool bytes, bool zero_points>
static void multiply_vectors(const Matrix& matrix, const void* input, int64_t num_rows, int64_t begin, int64_t end,
                             const Epilogue& epilogue) {
  const PanelLayout layout = panel_layout(matrix);
  const InputLayout inputs = input_layout(matrix, layout, num_rows);
  alignas(64) float totals[kBlockRows * kPanel];
  for (int64_t p = begin; p < end; p++)
    for (int64_t first = 0; first < num_rows; first += inputs.block_rows) {
      const InputBlock block = input_block(inputs, layout.groups, input, num_rows, first);
      multiply_rows<kind, bytes, zero_points>(layout, block, matrix.data + p * matrix.panel_bytes, totals);
      finish_rows(matrix, layout, epilogue, totals, first, block.rows, p);
    }
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_int
