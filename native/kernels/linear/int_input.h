// Inputs of integer products: quantised per row and group, and stored in the order in which the kernels read them.
//
// A group of inputs x becomes q = round(x / s), s = max |x| / 32767 (127 for 8 bits), ties to even. A group whose s is
// below the least normal float32 counts as zeros; one with an infinity or NaN has s = NaN, so that its row's outputs
// are NaN.
#pragma once

#include "kernels/linear/int_pack.h"
#include "kernels/rows.h"
#include "kernels/simd.h"
#include "kernels/tiles.h"
#include "kernels/types.h"

#include <type_traits>

namespace ridgeline::RIDGELINE_LEVEL::linear_int {

// Whether products of bytes are instructions. Where not, 8-bit inputs are held, and multiplied, as 16-bit ones: but for
// those of int4 weights at AVX2, whose products with int4 alone fit what its instruction sums two of. Tables are of 16 bits.
#if defined(__AVX512VNNI__)
inline constexpr bool kByteDots = true;
#else
inline constexpr bool kByteDots = false;
#endif
RL_INLINE constexpr bool multiplies_bytes(WeightKind kind) {
#if RIDGELINE_BYTE_PAIRS
  return is_int4(kind) && !is_table(kind);
#else
  return kByteDots && !is_table(kind);
#endif
}

// Rows that one pass over a panel serves, if the tuning does not say it: at most as many as have sums in registers.
#if defined(__AVX512F__)
inline constexpr int kBlockRows = 8, kMaxBlockRows = 12;
#elif defined(__AVX2__)
inline constexpr int kBlockRows = 4, kMaxBlockRows = 6;
#else
inline constexpr int kBlockRows = 4, kMaxBlockRows = 4;
#endif

#if RIDGELINE_TILES
inline constexpr int64_t kMinTiledRows = 5;
RL_INLINE bool in_tiles(WeightKind kind, int64_t num_rows) { return num_rows >= kMinTiledRows && !is_table(kind); }
#else
RL_INLINE bool in_tiles(WeightKind, int64_t) { return false; }
#endif

// Rows come in blocks of `block_rows`, the last one smaller, and a block as [units][its rows][unit_bytes]: a unit is
// what a kernel reads of a row at once. In tiles of 16-bit inputs it is the high bytes (signed), then the low bytes.
struct InputLayout {
  bool bytes;      // elements are bytes, else int16
  int64_t planes;  // 2: bytes are the halves of 16-bit inputs
  int64_t block_rows;
  int64_t unit_inputs;
  int64_t unit_bytes;
  int64_t row_bytes;
  int64_t scales;       // offset of float scales: per block [G][its rows]
  int64_t corrections;  // offset of int32 corrections of the sums, like the scales: see prepare_row
  int64_t total_bytes;
};

RL_INLINE int64_t block_rows_of(const Tuning& tuning) {
  const int64_t chosen = tuning.block_rows ? tuning.block_rows : kBlockRows;
  return chosen < kMaxBlockRows ? chosen : kMaxBlockRows;
}

static inline InputLayout input_layout(const Matrix& matrix, const PanelLayout& panel, int64_t num_rows) {
  InputLayout layout{};
  const bool tiled = in_tiles(matrix.kind, num_rows), int16 = matrix.input == InputKind::int16;
  const int64_t most = tiled ? 16 : block_rows_of(matrix.tuning), blocks = (num_rows + most - 1) / most;
  layout.block_rows = (num_rows + blocks - 1) / blocks;
  layout.bytes = tiled || (multiplies_bytes(matrix.kind) && !int16);
  layout.planes = tiled && int16 ? 2 : 1;
  layout.unit_inputs = !tiled ? step_inputs(matrix.kind)
                       : panel.group % 64 == 0 ? 64
                       : panel.group % 32 == 0 ? 32
                                               : 16;
  layout.unit_bytes = layout.unit_inputs * (layout.bytes ? layout.planes : 2);
  layout.row_bytes = panel.inputs / layout.unit_inputs * layout.unit_bytes;
  // A tile has block_rows rows in the last block too, so it reads past the end of the values.
  static_assert(16 * 128 + 4 * 64 <= kInputSlack, "rows and bytes of a unit, and three pieces rounded up");
  const int64_t slack = tiled ? layout.block_rows * layout.unit_bytes : 0;
  layout.scales = round_up(num_rows * layout.row_bytes + slack, 64);
  layout.corrections = layout.scales + round_up(num_rows * panel.groups * 4, 64);
  layout.total_bytes = layout.corrections + round_up(num_rows * panel.groups * 4, 64);
  return layout;
}

static inline int64_t input_bytes(const Matrix& matrix, int64_t rows) {
  return rows == 0 ? 0 : input_layout(matrix, panel_layout(matrix), rows).total_bytes;
}

// One block of prepared rows.
struct InputBlock {
  int64_t first, rows;
  const uint8_t* values;
  const float* scales;
  const int32_t* corrections;
};

RL_INLINE InputBlock input_block(const InputLayout& layout, int64_t groups, const void* input, int64_t num_rows,
                                 int64_t first) {
  const uint8_t* base = (const uint8_t*)input;
  const int64_t rest = num_rows - first;
  return {first, rest < layout.block_rows ? rest : layout.block_rows, base + first * layout.row_bytes,
          (const float*)(base + layout.scales) + first * groups,
          (const int32_t*)(base + layout.corrections) + first * groups};
}

// The scale, and the integers' sum, of one row's group.
struct Quantized {
  float scale;
  int32_t sum;
};

// `count` is a multiple of 16.
static inline Quantized quantize(const float* x, int64_t count, float limit, int16_t* q) {
  Ints most{};  // magnitudes compare like their bits, and NaN is above all numbers
  for (int64_t i = 0; i < count; i += kLanes) {
    const Ints magnitude = load<Ints>(x + i) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  const int32_t bits = largest(most);
  float magnitude;
  __builtin_memcpy(&magnitude, &bits, 4);
  const float scale = magnitude / limit;
  const bool finite = bits < 0x7f800000;
  if (!finite || scale < 0x1p-126f) {
    __builtin_memset(q, 0, (size_t)count * sizeof(int16_t));
    return {finite ? 0.0f : __builtin_nanf(""), 0};
  }
  typedef int16_t Half __attribute__((vector_size(2 * kLanes)));
  Ints total{};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Ints integers = nearest(load<Floats>(x + i) / scale);
    total += integers;
    store(q + i, __builtin_convertvector(integers, Half));
  }
  return {scale, sum(total)};
}

// Inputs in the order in which a word of weights, once masked and shifted, yields them: 16-bit ones, and 8-bit ones.
typedef int16_t Eight __attribute__((vector_size(16)));
RL_INLINE Eight in_word_order(Eight q, bool int8_weights) {
  return int8_weights ? __builtin_shufflevector(q, q, 0, 2, 1, 3, 4, 6, 5, 7) : q;
}
typedef int16_t Sixteen __attribute__((vector_size(32)));
typedef int8_t SixteenBytes __attribute__((vector_size(16)));
RL_INLINE SixteenBytes bytes_in_word_order(Sixteen q, bool int8_weights) {
  if (!int8_weights) q = __builtin_shufflevector(q, q, 0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
  return __builtin_convertvector(q, SixteenBytes);
}

template <int size>
RL_INLINE void scatter(const uint8_t* from, int64_t count, uint8_t* to, int64_t stride) {
  for (int64_t i = 0; i < count; i++) __builtin_memcpy(to + i * stride, from + i * size, size);
}

// Writes `count` units of `size` bytes, `stride` apart.
static inline void write_units(const uint8_t* from, int64_t count, int64_t size, uint8_t* to, int64_t stride) {
  switch (size) {
    case 4: return scatter<4>(from, count, to, stride);
    case 8: return scatter<8>(from, count, to, stride);
    case 16: return scatter<16>(from, count, to, stride);
    case 32: return scatter<32>(from, count, to, stride);
    default: return scatter<64>(from, count, to, stride);
  }
}

// Writes inputs of 8 bits in units of `size` bytes, `stride` apart; `count` is a multiple of 16.
template <bool int8_weights, int size>
RL_INLINE void write_bytes(const int16_t* q, int64_t count, uint8_t* to, int64_t stride) {
  typedef std::conditional_t<size == 4, int32_t, int64_t> Unit __attribute__((vector_size(16)));
  for (int64_t i = 0; i < count; i += 16, to += 16 / size * stride) {
    const Unit units = (Unit)bytes_in_word_order(load<Sixteen>(q + i), int8_weights);
#pragma GCC unroll 4
    for (int unit = 0; unit < 16 / size; unit++) {
      const auto bytes = units[unit];
      __builtin_memcpy(to + unit * stride, &bytes, size);
    }
  }
}

// Stores one group of a row: `to` is where its first unit goes.
static inline void store_group(const Matrix& matrix, const InputLayout& layout, const int16_t* q, int64_t count,
                               uint8_t* to, int64_t stride) {
  const bool int8_weights = !is_int4(matrix.kind);
  if (layout.bytes && layout.unit_bytes <= 8)
    return int8_weights ? write_bytes<true, 4>(q, count, to, stride) : write_bytes<false, 8>(q, count, to, stride);
  alignas(64) uint8_t elements[2 * kMaxInputGroup];
  const int64_t units = count / layout.unit_inputs, plane_bytes = layout.unit_bytes / layout.planes;
  if (!layout.bytes) {
    for (int64_t i = 0; i < count; i += 8) store(elements + 2 * i, in_word_order(load<Eight>(q + i), int8_weights));
    return write_units(elements, units, plane_bytes, to, stride);
  }
  for (int64_t plane = 0; plane < layout.planes; plane++) {  // of two the high bytes come first
    const int shift = plane + 1 < layout.planes ? 8 : 0;
    for (int64_t i = 0; i < count; i += 16)
      store(elements + i, bytes_in_word_order(load<Sixteen>(q + i) >> shift, int8_weights));
    write_units(elements, units, plane_bytes, to + plane * plane_bytes, stride);
  }
}

// Entries [first, first + count) of a row, in that order if there is one, under its norm of this mean and factor.
static inline void normalize_part(const Norm& norm, float mean, float factor, const float* x, int64_t first,
                                  int64_t count, const int32_t* order, float* to) {
  if (order) {
    for (int64_t i = 0; i < count; i++) {
      const int64_t k = order[first + i];
      to[i] = norm.kind == NormKind::none ? x[k] : (x[k] - mean) * factor * norm.weight[k];
    }
    if (norm.bias)
      for (int64_t i = 0; i < count; i++) to[i] += norm.bias[order[first + i]];
    return;
  }
  if (norm.kind == NormKind::none) {
    __builtin_memcpy(to, x + first, (size_t)count * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < count; i++) to[i] = (x[first + i] - mean) * factor * norm.weight[first + i];
  if (norm.bias)
    for (int64_t i = 0; i < count; i++) to[i] += norm.bias[first + i];
}

// One row. The correction of a group's sums is -zero * sum(q) where all weights have the same zero, else -sum(q), which
// the kernel multiplies by the zero points, or sum(q), which it multiplies by the minima.
static inline void prepare_row(const Matrix& matrix, const Norm& norm, const PanelLayout& panel,
                               const InputLayout& layout, const float* x, const InputBlock& block, int64_t row) {
  const int64_t width = matrix.inputs;
  const float limit = matrix.input == InputKind::int16 ? 32767.0f : 127.0f;
  const int32_t zero = has_minima(matrix.kind)           ? -1
                       : is_fp4(matrix.kind)             ? kE2m1Zero
                       : is_table(matrix.kind)           ? 0
                       : matrix.kind != WeightKind::int4 ? 128
                       : matrix.has_zero_points          ? 1
                                                         : 8;
  const float unit = is_table(matrix.kind) ? table_unit(matrix.kind, matrix.input) : is_fp4(matrix.kind) ? 2.0f : 1.0f;
  float mean = 0.0f, factor = 1.0f;
  if (norm.kind == NormKind::layer) mean = row_sum(x, width) / (float)width;
  if (norm.kind != NormKind::none)
    factor = 1.0f / square_root(row_squares(x, width, mean) / (float)width + norm.eps);
  const int64_t stride = block.rows * layout.unit_bytes;
  uint8_t* to = const_cast<uint8_t*>(block.values) + (row - block.first) * layout.unit_bytes;
  for (int64_t g = 0; g < panel.groups; g++) {
    alignas(64) float values[kMaxInputGroup];
    alignas(64) int16_t q[kMaxInputGroup];
    const int64_t first = g * panel.group, left = width - first, padded_left = panel.inputs - first;
    const int64_t count = left < panel.group ? left : panel.group;
    const int64_t padded = padded_left < panel.group ? padded_left : panel.group;
    const bool as_it_is = norm.kind == NormKind::none && count == padded && !matrix.order;
    if (!as_it_is) {
      normalize_part(norm, mean, factor, x, first, count, matrix.order, values);
      __builtin_memset(values + count, 0, (size_t)(padded - count) * sizeof(float));
    }
    const Quantized quantized = quantize(as_it_is ? x + first : values, padded, limit, q);
    store_group(matrix, layout, q, padded, to + first / layout.unit_inputs * stride, stride);
    const int64_t at = g * block.rows + row - block.first;
    const_cast<float*>(block.scales)[at] = quantized.scale / unit;
    const_cast<int32_t*>(block.corrections)[at] = -zero * quantized.sum;
  }
}

static inline void prepare_input(const Matrix& matrix, const Norm& norm, const float* x, int64_t stride,
                                 const int64_t* index, int64_t begin, int64_t end, int64_t num_rows, void* input) {
  if (begin >= end) return;
  const PanelLayout panel = panel_layout(matrix);
  const InputLayout layout = input_layout(matrix, panel, num_rows);
  for (int64_t row = begin; row < end; row++) {
    const int64_t first = row / layout.block_rows * layout.block_rows;
    const InputBlock block = input_block(layout, panel.groups, input, num_rows, first);
    prepare_row(matrix, norm, panel, layout, x + (index ? index[row] : row) * stride, block, row);
  }
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_int
