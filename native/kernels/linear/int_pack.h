// Panels of integer weights (layout: kernels/types.h): where their parts lie, packing and unpacking.
#pragma once

#include "kernels/linear/int_fp4.h"
#include "kernels/linear/int_table.h"
#include "kernels/simd.h"
#include "kernels/types.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_int {

// A step is the smallest run of inputs that fills whole words: 4 of 8 bits, 8 of int4, for the panel's 32 outputs.
inline constexpr int64_t kStepBytes = 4 * kPanel;

RL_INLINE constexpr bool is_int4(WeightKind kind) {
  return kind == WeightKind::int4 || kind == WeightKind::int4_minima || kind == WeightKind::int4_super_minima ||
         is_fp4(kind) || is_table(kind);
}

RL_INLINE constexpr int64_t step_inputs(WeightKind kind) { return is_int4(kind) ? 8 : 4; }

// Whether every group of inputs has scales of its own; without, a panel has them once.
RL_INLINE constexpr bool scales_by_group(WeightKind kind) { return kind != WeightKind::int8; }

// Floats that an output comes with: a scale, or one per group, and as many minima; then what each 256 inputs have, or
// in nvfp4 all of them.
RL_INLINE int64_t num_scales_of(WeightKind kind, int64_t groups, int64_t group) {
  const int64_t supers = is_super(kind) ? (groups * group + kSuperInputs - 1) / kSuperInputs : 0;
  if (kind == WeightKind::nvfp4) return groups + 1;
  return kind == WeightKind::int8 ? 1 : (groups + supers) * (has_minima(kind) ? 2 : 1);
}

RL_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Offsets within a panel.
struct PanelLayout {
  int64_t group;        // inputs that share a scale of the inputs, and of the weights where they have one by group
  int64_t groups;       // ceil(K / group)
  int64_t inputs;       // K padded
  int64_t group_bytes;  // from one group to the next
  int64_t weights;      // of the first group; before it come the bytes [G][32] of zero points, or of scales
  int64_t scales;       // the panel's float scales, or within a group its float16 scales
  int64_t minima;       // within a group, where it has any
  int64_t super_shift;  // the groups of 256 inputs are 2 to this power
  int64_t super_bytes;  // from what 256 inputs have to what the next have, before the weights
  int64_t bytes;
};

static inline PanelLayout panel_layout(WeightKind kind, int64_t inputs, int32_t group, bool has_zero_points) {
  PanelLayout layout{};
  const bool by_group = scales_by_group(kind);
  layout.group = group;
  layout.groups = (inputs + layout.group - 1) / layout.group;
  layout.inputs = round_up(inputs, by_group ? layout.group : 64);
  layout.group_bytes = layout.group / step_inputs(kind) * kStepBytes;
  if (!by_group) {
    layout.scales = layout.inputs / step_inputs(kind) * kStepBytes;
    layout.bytes = layout.scales + kPanel * (int64_t)sizeof(float);
    return layout;
  }
  if (is_fp4(kind)) {
    layout.weights = round_up(layout.groups * kPanel, 64);
    layout.scales = layout.weights + layout.groups * layout.group_bytes;
    layout.bytes = layout.scales + (kind == WeightKind::nvfp4 ? kPanel * (int64_t)sizeof(float) : 0);
    return layout;
  }
  layout.scales = layout.group_bytes;
  const size_t scale_bytes = is_super(kind) ? sizeof(int8_t) : is_table(kind) ? sizeof(float) : sizeof(uint16_t);
  layout.minima = layout.scales + kPanel * (int64_t)scale_bytes;
  layout.group_bytes = has_minima(kind) ? 2 * layout.minima - layout.scales : layout.minima;
  layout.weights = has_zero_points ? round_up(layout.groups * kPanel, 64) : 0;
  if (is_super(kind)) {
    layout.super_shift = __builtin_ctzll((unsigned long long)(kSuperInputs / layout.group));
    layout.super_bytes = kPanel * (int64_t)sizeof(uint16_t) * (has_minima(kind) ? 2 : 1);
    layout.weights = (((layout.groups - 1) >> layout.super_shift) + 1) * layout.super_bytes;
  }
  layout.bytes = layout.weights + layout.groups * layout.group_bytes;
  return layout;
}

static inline PanelLayout panel_layout(const Matrix& matrix) {
  return panel_layout(matrix.kind, matrix.inputs, matrix.group, matrix.has_zero_points);
}

static inline int64_t panel_bytes(WeightKind kind, int64_t inputs, int32_t group, bool has_zero_points) {
  return panel_layout(kind, inputs, group, has_zero_points).bytes;
}

// One output of a matrix as it comes: `values` [K] and one scale, and zero point, per group; minima follow the scales,
// and then what 256 inputs have. Null values: zeros.
struct Source {
  const uint8_t* values;
  const float* scales;
  const uint8_t* zero_points;

  uint8_t zero(int64_t group) const { return values && zero_points ? zero_points[group] : 8; }
  float scale(int64_t index) const { return values ? scales[index] : 0.0f; }
};

static inline void pack_int8(const PanelLayout& layout, int64_t inputs, const Source& source, int64_t lane,
                             uint8_t* panel) {
  for (int64_t k = 0; k < layout.inputs; k += 4) {
    uint8_t word[4];
    for (int64_t i = 0; i < 4; i++) word[i] = source.values && k + i < inputs ? source.values[k + i] : 128;
    __builtin_memcpy(panel + k / 4 * kStepBytes + lane * 4, word, 4);
  }
  const float scale = source.values ? source.scales[0] : 0.0f;
  __builtin_memcpy(panel + layout.scales + lane * 4, &scale, 4);
}

// Writes what group `g` of an output has beside its words.
static inline void pack_scales(WeightKind kind, const PanelLayout& layout, const Source& source, int64_t g,
                               int64_t lane, uint8_t* panel) {
  if (is_fp4(kind)) {
    panel[g * kPanel + lane] = fp4_scale_byte(kind, source.scale(g));
    return;
  }
  uint8_t* to = panel + layout.weights + g * layout.group_bytes;
  if (is_table(kind)) {
    const float scale = source.scale(g);
    __builtin_memcpy(to + layout.scales + lane * 4, &scale, 4);
    return;
  }
  const auto half = [&](int64_t index, uint8_t* at) {
    const uint16_t bits = to_half(source.scale(index));
    __builtin_memcpy(at + lane * 2, &bits, 2);
  };
  const int64_t numbers = has_minima(kind) ? 2 : 1;
  for (int64_t i = 0; i < numbers; i++) {
    uint8_t* at = to + (i == 0 ? layout.scales : layout.minima);
    if (!is_super(kind)) {
      half(i * layout.groups + g, at);
      continue;
    }
    at[lane] = (uint8_t)(int8_t)source.scale(i * layout.groups + g);
    const int64_t supers = layout.weights / layout.super_bytes, own = g >> layout.super_shift;
    half(numbers * layout.groups + i * supers + own, panel + own * layout.super_bytes + i * kPanel * 2);
  }
}

// The scale of group `g` of an output, or with `i` 1 its minimum.
static inline float unpack_scale(WeightKind kind, const PanelLayout& layout, const uint8_t* panel, int64_t g,
                                 int64_t lane, int64_t i) {
  if (is_fp4(kind)) {
    const float scale = fp4_scale(kind, panel[g * kPanel + lane]);
    if (kind == WeightKind::mxfp4) return scale;
    float outer;
    __builtin_memcpy(&outer, panel + layout.scales + lane * 4, 4);
    return outer < 0.0f ? scale / -outer : scale * outer;
  }
  const uint8_t* at = panel + layout.weights + g * layout.group_bytes + (i == 0 ? layout.scales : layout.minima);
  if (is_table(kind)) return load<float>(at + lane * 4);
  const uint8_t* halves = is_super(kind) ? panel + (g >> layout.super_shift) * layout.super_bytes + i * kPanel * 2 : at;
  uint16_t bits;
  __builtin_memcpy(&bits, halves + lane * 2, 2);
  return from_half(bits) * (is_super(kind) ? (float)(int8_t)at[lane] : 1.0f);
}

static inline void pack_int8_groups(const PanelLayout& layout, const Matrix& matrix, const Source& source, int64_t lane,
                                    uint8_t* panel) {
  const uint8_t zero = has_minima(matrix.kind) ? 0 : 128;
  for (int64_t g = 0; g < layout.groups; g++) {
    uint8_t* to = panel + layout.weights + g * layout.group_bytes;
    for (int64_t k = 0; k < layout.group; k++) {
      const int64_t input = g * layout.group + k;
      to[k / 4 * kStepBytes + lane * 4 + k % 4] = source.values && input < matrix.inputs ? source.values[input] : zero;
    }
    pack_scales(matrix.kind, layout, source, g, lane, panel);
  }
}

// Eight codes, a byte each, as their word: codes 0, 2, 4 and 6 in its low half, the others in its high half.
static inline uint32_t int4_word(uint64_t codes) {
  const auto half = [](uint64_t bytes) {
    bytes &= 0x000F000F000F000Fu;
    return (uint32_t)((bytes | bytes >> 12 | bytes >> 24 | bytes >> 36) & 0xFFFFu);
  };
  return half(codes) | half(codes >> 8) << 16;
}

// The same of eight codes that lie one after the other, the first in the low bits.
static inline uint32_t int4_word(uint32_t codes) {
  const auto half = [](uint32_t nibbles) {
    nibbles &= 0x0F0F0F0Fu;
    nibbles = (nibbles | nibbles >> 4) & 0x00FF00FFu;
    return (nibbles | nibbles >> 8) & 0xFFFFu;
  };
  return half(codes) | half(codes >> 4) << 16;
}

static inline void pack_int4(const PanelLayout& layout, const Matrix& matrix, const Source& source, int64_t lane,
                             uint8_t* panel) {
  for (int64_t g = 0; g < layout.groups; g++) {
    uint8_t* to = panel + layout.weights + g * layout.group_bytes;
    const uint8_t zero = is_fp4(matrix.kind) ? 0 : is_table(matrix.kind) ? table_zero(matrix.kind) : source.zero(g);
    for (int64_t k = 0; k < layout.group; k += 8) {
      const int64_t input = g * layout.group + k, left = source.values ? matrix.inputs - input : 0;
      uint64_t codes = zero * 0x0101010101010101u;
      if (left >= 8)
        __builtin_memcpy(&codes, source.values + input, 8);
      else if (left > 0)
        __builtin_memcpy(&codes, source.values + input, (size_t)left);
      const uint32_t word = int4_word(codes);
      __builtin_memcpy(to + k / 8 * kStepBytes + lane * 4, &word, 4);
    }
    pack_scales(matrix.kind, layout, source, g, lane, panel);
    if (matrix.has_zero_points) panel[g * kPanel + lane] = zero;
  }
  if (matrix.kind == WeightKind::nvfp4) {
    const float by = source.scale(layout.groups), outer = by < 0.0f ? by / kE4m3Unit : by * kE4m3Unit;
    __builtin_memcpy(panel + layout.scales + lane * 4, &outer, 4);
  }
}

static inline void pack(const Matrix& matrix, const void* rows, const float* scales, const uint8_t* zero_points,
                        const int64_t* order, int64_t begin, int64_t end) {
  const PanelLayout layout = panel_layout(matrix);
  const int64_t num_scales = num_scales_of(matrix.kind, layout.groups, layout.group);
  for (int64_t p = begin; p < end; p++) {
    uint8_t* panel = const_cast<uint8_t*>(matrix.data) + p * matrix.panel_bytes;
    __builtin_memset(panel, 0, (size_t)layout.weights);
    for (int64_t lane = 0; lane < kPanel; lane++) {
      const int64_t row = order[p * kPanel + lane];
      Source source{};
      if (row >= 0)
        source = {(const uint8_t*)rows + row * matrix.inputs, scales + row * num_scales,
                  matrix.has_zero_points ? zero_points + row * num_scales : nullptr};
      if (matrix.kind == WeightKind::int8)
        pack_int8(layout, matrix.inputs, source, lane, panel);
      else if (!is_int4(matrix.kind))
        pack_int8_groups(layout, matrix, source, lane, panel);
      else
        pack_int4(layout, matrix, source, lane, panel);
    }
  }
}

// 16 lanes of int4 that are consecutive rows get consecutive words, so that a vector has them.
static inline void pack_half(const PanelLayout& layout, const Matrix& matrix, const Int4Words& from,
                             const int64_t* rows, const uint8_t* zeros, uint8_t* to) {
  constexpr int64_t kHalf = kPanel / 2;
  bool follow = rows[0] >= 0;
  for (int64_t i = 1; i < kHalf; i++) follow &= rows[i] == rows[0] + i;
  for (int64_t g = 0; g < layout.groups; g++) {
    for (int64_t k = 0; k < layout.group; k += 8) {
      const int64_t input = g * layout.group + k;
      const bool inside = input < matrix.inputs;
      const uint8_t* at = from.data + input / 8 * from.stride;
      uint32_t words[kHalf];
      if (inside && follow) {
        __builtin_memcpy(words, at + rows[0] * 4, sizeof words);
      } else {
        for (int64_t i = 0; i < kHalf; i++) {
          words[i] = (matrix.has_zero_points ? zeros[g * kPanel + i] : 8) * 0x11111111u;
          if (inside && rows[i] >= 0) __builtin_memcpy(words + i, at + rows[i] * 4, 4);
        }
      }
      for (int64_t i = 0; i < kHalf; i++) words[i] = int4_word(words[i]);
      __builtin_memcpy(to + g * layout.group_bytes + k / 8 * kStepBytes, words, sizeof words);
    }
  }
}

static inline void pack_words(const Matrix& matrix, const Int4Words& from, const float* scales,
                              const uint8_t* zero_points, const int64_t* order, int64_t begin, int64_t end) {
  const PanelLayout layout = panel_layout(matrix);
  for (int64_t p = begin; p < end; p++) {
    uint8_t* panel = const_cast<uint8_t*>(matrix.data) + p * matrix.panel_bytes;
    __builtin_memset(panel, 0, (size_t)layout.weights);
    for (int64_t lane = 0; lane < kPanel; lane++) {
      const int64_t row = order[p * kPanel + lane];
      Source source{};
      if (row >= 0)
        source = {from.data, scales + row * layout.groups, zero_points ? zero_points + row * layout.groups : nullptr};
      for (int64_t g = 0; g < layout.groups; g++) {
        pack_scales(matrix.kind, layout, source, g, lane, panel);
        if (matrix.has_zero_points) panel[g * kPanel + lane] = source.zero(g);
      }
    }
    for (int64_t lane = 0; lane < kPanel; lane += kPanel / 2)
      pack_half(layout, matrix, from, order + p * kPanel + lane, panel + lane, panel + layout.weights + lane * 4);
  }
}

static inline void unpack_output(const Matrix& matrix, int64_t output, float* to) {
  const PanelLayout layout = panel_layout(matrix);
  const int64_t lane = output % kPanel;
  const uint8_t* panel = matrix.data + output / kPanel * matrix.panel_bytes;
  const auto input = [&](int64_t k) { return matrix.order ? matrix.order[k] : k; };
  if (matrix.kind == WeightKind::int8) {
    float scale;
    __builtin_memcpy(&scale, panel + layout.scales + lane * 4, 4);
    for (int64_t k = 0; k < matrix.inputs; k++)
      to[input(k)] = (float)(panel[k / 4 * kStepBytes + lane * 4 + k % 4] - 128) * scale;
    return;
  }
  const bool int4 = is_int4(matrix.kind), minima = has_minima(matrix.kind);
  const bool codes = is_fp4(matrix.kind) || is_table(matrix.kind);
  for (int64_t g = 0; g < layout.groups; g++) {
    const uint8_t* words = panel + layout.weights + g * layout.group_bytes + lane * 4;
    const float scale = unpack_scale(matrix.kind, layout, panel, g, lane, 0);
    const float minimum = minima ? unpack_scale(matrix.kind, layout, panel, g, lane, 1) : 0.0f;
    const int32_t zero = minima || codes ? 0 : matrix.has_zero_points ? panel[g * kPanel + lane] : int4 ? 8 : 128;
    const int64_t begin = g * layout.group;
    const int64_t count = matrix.inputs - begin < layout.group ? matrix.inputs - begin : layout.group;
    for (int64_t k = 0; k < count; k++) {
      int32_t value = words[k / 4 * kStepBytes + k % 4];
      if (int4) {
        uint32_t word;
        __builtin_memcpy(&word, words + k / 8 * kStepBytes, 4);
        value = (int32_t)(word >> (k % 8 / 2 * 4 + k % 2 * 16) & 15u);
      }
      // The product is rounded to float before the sum: with a scale of 17 bits it may have 25.
      const float level = is_table(matrix.kind) ? table_level(matrix.kind, (uint32_t)value)
                          : is_fp4(matrix.kind) ? (float)e2m1_twice((uint32_t)value) / 2
                                                : (float)(value - zero);
      volatile float product = level * scale;
      to[input(begin + k)] = minima ? product + minimum : product;
    }
  }
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_int
