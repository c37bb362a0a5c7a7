// Integer products in vector registers.
//
// Per output and group of inputs: sum = dot(weights, q) - zero * sum(q) in int32, exact; total += float(sum) * scale in
// float32, groups in order. With minima it is sum = dot(weights, q), total += (sum * scale + sum(q) * minimum) * scale of
// the inputs. Products and sums are each rounded, so every level, every number of rows and every division of the panels
// gives the same bits.
#pragma once

#include "kernels/linear/epilogue.h"
#include "kernels/linear/int_input.h"
#include "kernels/linear/int_pack.h"
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

// What one group's sums of `kLanes` outputs are corrected and scaled by.
struct GroupVector {
  Floats scale, minimum;
  Words zero;
};

// `lane` is the first of the outputs. Without scales by group there is none until the end.
template <WeightKind kind, bool zero_points>
RL_INLINE GroupVector group_vector(const PanelLayout& layout, const uint8_t* panel, int64_t group, int64_t lane) {
  GroupVector v{};
  const uint8_t* own = panel + layout.weights + group * layout.group_bytes;
  if constexpr (is_fp4(kind)) {
    v.scale = load_fp4_scales<kind>(panel + group * kPanel + lane);
  } else if constexpr (is_super(kind)) {
    const uint8_t* halves = panel + (group >> layout.super_shift) * layout.super_bytes + lane * 2;
    v.scale = to_floats(load_signed_bytes(own + layout.scales + lane)) * load_half(halves);
    if constexpr (has_minima(kind))
      v.minimum = to_floats(load_signed_bytes(own + layout.minima + lane)) * load_half(halves + kPanel * 2);
  } else {
    if constexpr (is_table(kind)) v.scale = load<Floats>(own + layout.scales + lane * 4);
    else if constexpr (scales_by_group(kind)) v.scale = load_half(own + layout.scales + lane * 2);
    if constexpr (kind == WeightKind::nf4_high) v.scale *= (float)kPlane;
    if constexpr (has_minima(kind)) v.minimum = load_half(own + layout.minima + lane * 2);
  }
  if constexpr (zero_points) v.zero = load_bytes(panel + group * kPanel + lane);
  return v;
}

// What a group's sums of products begin with: the correction of the row, where all outputs have the same.
template <WeightKind kind, bool zero_points>
RL_INLINE Ints first_sum(int32_t of_row) {
  return has_minima(kind) || zero_points ? Ints{} : splat_int(of_row);
}

// A group's products added to a row's totals; `of_row` is what prepare_row left for the correction of the sums.
template <WeightKind kind, bool zero_points>
RL_INLINE Floats with_group(const GroupVector& v, float input_scale, int32_t of_row, Ints sums, Floats total) {
  if constexpr (has_minima(kind)) {
    const Floats sum = rounded(to_floats(sums) * v.scale) + rounded(v.minimum * (float)of_row);
    return total + rounded(sum * input_scale);
  }
  if constexpr (zero_points) sums = (Ints)((Words)sums + v.zero * (Words)splat_int(of_row));
  const Floats scale = scales_by_group(kind) ? v.scale * input_scale : splat(input_scale);
  return total + rounded(to_floats(sums) * scale);
}

// Sends the totals of `rows` rows of a panel through the epilogue.
static inline void finish_rows(const Matrix& matrix, const PanelLayout& layout, const Epilogue& epilogue,
                               const float* totals, int64_t first, int64_t rows, int64_t panel) {
  const uint8_t* scales = matrix.data + panel * matrix.panel_bytes + layout.scales;
  for (int64_t row = 0; row < rows; row++) {
    PanelSums sums;
    for (int i = 0; i < kVectors; i++) {
      sums.part[i] = load<Floats>(totals + row * kPanel + i * kLanes);
      if (!scales_by_group(matrix.kind))
        sums.part[i] = rounded(sums.part[i] * load<Floats>(scales + i * kVectorBytes));
      else if (matrix.kind == WeightKind::nvfp4)
        sums.part[i] = rounded(times_outer(sums.part[i], load<Floats>(scales + i * kVectorBytes)));
    }
    finish(epilogue, sums, first + row, panel);
  }
}

// Dot products per vector of weights.
template <WeightKind kind, bool bytes>
inline constexpr int kDots = (is_int4(kind) ? 4 : 2) / (bytes ? 2 : 1);

// A vector of words of weights as the operands of its dot products; in_word_order says which inputs they meet.
template <WeightKind kind, bool bytes>
RL_INLINE void expand(Ints x, Ints (&w)[kDots<kind, bytes>]) {
  if constexpr (!is_int4(kind) && bytes) {
    w[0] = x;
  } else if constexpr (!is_int4(kind)) {
    w[0] = x & 0x00ff00ff;
    w[1] = (Ints)((UShorts)x >> 8);
  } else if constexpr (is_fp4(kind)) {
    const Ints low = e2m1_factors(x & 0x0f0f0f0f), high = e2m1_factors((Ints)((UShorts)x >> 4) & 0x0f0f0f0f);
    w[0] = bytes ? low : low & 0x00ff00ff;
    w[1] = bytes ? high : high & 0x00ff00ff;
    if constexpr (!bytes) {
      w[2] = (Ints)((UShorts)low >> 8);
      w[3] = (Ints)((UShorts)high >> 8);
    }
  } else if constexpr (is_table(kind)) {
    table_factors<kind>(x, w);
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

// Two cache lines fetched with every step of a pass over a group: from `ahead` bytes past its weights on, `second`
// bytes apart, `step` bytes further each time.
struct Prefetch {
  int64_t ahead, second, step;
  bool far = false;  // into the second-level cache
};

RL_INLINE void fetch(const Prefetch& prefetch, const uint8_t* line) {
  if (prefetch.far) {
    __builtin_prefetch(line, 0, 2);
    __builtin_prefetch(line + prefetch.second, 0, 2);
  } else {
    __builtin_prefetch(line);
    __builtin_prefetch(line + prefetch.second);
  }
}

// A single block of rows goes through a panel at the memory's pace. How far ahead is best depends on the hardware's own
// prefetcher: on Zen 4, one row, 384 bytes reach 95 % of a pure read and 1024 bytes 80 %; Intel's cores want 4 KB.
RL_INLINE Prefetch streamed(const Tuning& tuning) { return {tuning.ahead, 64, kStepBytes}; }
// Several blocks use a group, or a panel, in turn while it is in the caches. The first two fetch half of what comes next
// each, so that memory works during all products and not during the first block's alone. Two panels of bytes are more
// than the first cache holds; those of int4, half as large, are better fetched into it.
inline constexpr int64_t kMinAhead = 2048;

template <WeightKind kind>
RL_INLINE Prefetch prefetch_of(const Tuning& tuning, const PanelLayout& layout, bool turns, int64_t block,
                               int64_t num_blocks) {
  if (num_blocks == 1) return streamed(tuning);
  if (block >= 2) return turns ? Prefetch{0, 0, 0} : Prefetch{1024, 64, kStepBytes};
  const int64_t turn_bytes = turns ? layout.group_bytes : layout.bytes;
  const int64_t ahead = turn_bytes < kMinAhead ? kMinAhead : turn_bytes;
  return {ahead + block * (layout.group_bytes / 2), 0, kStepBytes / 2, !turns && !is_int4(kind)};
}

// Rows from which on inputs may come from memory with every product: fewer leave the loads to bind.
inline constexpr int kRowsFromMemory = kLanes == 16 ? 4 : 1000;

// sums += the steps' weights times the rows' inputs.
template <WeightKind kind, bool bytes, bool from_memory, int rows, int vectors>
RL_INLINE void accumulate(const uint8_t* weights, const uint8_t* inputs, int64_t steps, Prefetch prefetch,
                          Ints (&sums)[rows][vectors]) {
  constexpr int dots = kDots<kind, bytes>;
  // One row has too few sums to hide the products' latency: its products take turns at two.
  constexpr bool turns = rows == 1 && dots > 1;
  Ints own[rows][vectors], second[vectors] = {};
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) own[r][v] = sums[r][v];
  const uint8_t* line = weights + prefetch.ahead;
  for (int64_t step = 0; step < steps; step++) {
    Ints w[vectors][dots];
    fetch(prefetch, line);
    line += prefetch.step;
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) expand<kind, bytes>(load<Ints>(weights + v * kVectorBytes), w[v]);
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
      for (int d = 0; d < dots; d++) {
        const uint8_t* word = inputs + (r * dots + d) * 4;
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) {
          Ints& sum = turns && d % 2 ? second[v] : own[r][v];
          if constexpr (from_memory)
            sum = bytes ? dot_u8s8_broadcast(sum, w[v][d], word) : dot_i16_broadcast(sum, w[v][d], word);
          else
            sum = bytes ? dot_u8s8(sum, w[v][d], splat_word(word)) : dot_i16(sum, w[v][d], splat_word(word));
        }
      }
    weights += kStepBytes;
    inputs += rows * dots * 4;
  }
#pragma GCC unroll 16
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) sums[r][v] = turns ? own[r][v] + second[v] : own[r][v];
}

#if RIDGELINE_BYTE_PAIRS

// The same for a block of rows where 16 registers hold its sums and little else: one operand of the weights at a time.
template <WeightKind kind, bool bytes, int rows, int vectors>
RL_INLINE void accumulate_by_operand(const uint8_t* weights, const uint8_t* inputs, int64_t steps, Prefetch prefetch,
                                     Ints (&sums)[rows][vectors]) {
  constexpr int dots = kDots<kind, bytes>;
  // Sums of two bytes' products fit 16 bits eight times, 15 * 127 * 2 * 8 < 2^15, of 4-bit floats four times,
  // 24 * 127 * 2 * 4 < 2^15: then they are widened.
  constexpr int kTogether = bytes ? (is_fp4(kind) ? 4 : 8) / dots : 1;
  const uint8_t* line = weights + prefetch.ahead;
  for (int64_t step = 0; step < steps; step += kTogether) {
    [[maybe_unused]] Shorts pairs[rows][vectors] = {};
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; i++, line += prefetch.step) {
      fetch(prefetch, line);
#pragma GCC unroll 4
      for (int d = 0; d < dots; d++) {
        Ints w[vectors];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
          Ints operands[dots];  // one of them is computed
          expand<kind, bytes>(load<Ints>(weights + i * kStepBytes + v * kVectorBytes), operands);
          w[v] = operands[d];
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
          const Ints q = splat_word(inputs + ((i * rows + r) * dots + d) * 4);
#pragma GCC unroll 4
          for (int v = 0; v < vectors; v++)
            if constexpr (bytes) pairs[r][v] = add_u8s8(pairs[r][v], w[v], q);
            else sums[r][v] = in_order(dot_i16(sums[r][v], w[v], q));
        }
      }
    }
    if constexpr (bytes)
#pragma GCC unroll 16
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[r][v] = dot_i16(sums[r][v], (Ints)pairs[r][v], splat_int(0x00010001));
    weights += kTogether * kStepBytes;
    inputs += kTogether * rows * dots * 4;
  }
}

#endif

// Rows of a block whose totals stay in registers beside their sums, from group to group: int4's operands leave no room.
template <WeightKind kind>
inline constexpr int kHeldRows = kLanes == 16 && !is_int4(kind) ? 6 : 0;

// Adds groups [begin, end) to the totals of one block of rows.
template <WeightKind kind, bool bytes, bool zero_points, bool from_memory, int rows>
static __attribute__((noinline)) void multiply_block(const PanelLayout& layout, const InputBlock& block,
                                                     const uint8_t* panel, int64_t begin, int64_t end,
                                                     Prefetch prefetch, float* totals) {
  constexpr int vectors = rows == 1 || kVectors < 2 ? kVectors : 2;
  constexpr bool held = rows <= kHeldRows<kind>;
  constexpr int step_bytes = rows * kDots<kind, bytes> * 4;
  const int64_t group_steps = layout.group / step_inputs(kind);
  for (int64_t first = 0; first < kVectors; first += vectors) {
    [[maybe_unused]] Floats own[rows][vectors];
    const auto total = [&](int r, int v) { return totals + r * kPanel + (first + v) * kLanes; };
    if constexpr (held)
#pragma GCC unroll 16
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) own[r][v] = load<Floats>(total(r, v));
    for (int64_t g = begin; g < end; g++) {
      const int64_t left = layout.inputs - g * layout.group;
      const int64_t steps = (left < layout.group ? left : layout.group) / step_inputs(kind);
      const int32_t* corrections = block.corrections + g * rows;
      Ints sums[rows][vectors];
#pragma GCC unroll 16
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) sums[r][v] = first_sum<kind, zero_points>(corrections[r]);
      const uint8_t* weights = panel + layout.weights + g * layout.group_bytes + first * kVectorBytes;
#if RIDGELINE_BYTE_PAIRS
      if constexpr (bytes || rows > 1)
        accumulate_by_operand<kind, bytes>(weights, block.values + g * group_steps * step_bytes, steps, prefetch, sums);
      else
#endif
      accumulate<kind, bytes, from_memory>(weights, block.values + g * group_steps * step_bytes, steps, prefetch, sums);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++) {
        const GroupVector group = group_vector<kind, zero_points>(layout, panel, g, (first + v) * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
          const auto add = [&](Floats sum) {
            return with_group<kind, zero_points>(group, block.scales[g * rows + r], corrections[r], sums[r][v], sum);
          };
          if constexpr (held) own[r][v] = add(own[r][v]);
          else store(total(r, v), add(load<Floats>(total(r, v))));
        }
      }
    }
    if constexpr (held)
#pragma GCC unroll 16
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) store(total(r, v), own[r][v]);
  }
}

template <WeightKind kind, bool bytes, bool zero_points, int rows = kMaxBlockRows>
RL_INLINE void multiply_rows(const PanelLayout& layout, const InputBlock& block, const uint8_t* panel, int64_t begin,
                             int64_t end, Prefetch prefetch, bool from_memory, float* totals) {
  if (block.rows == rows) {
    if constexpr (rows >= kRowsFromMemory)
      if (from_memory)
        return multiply_block<kind, bytes, zero_points, true, rows>(layout, block, panel, begin, end, prefetch, totals);
    return multiply_block<kind, bytes, zero_points, false, rows>(layout, block, panel, begin, end, prefetch, totals);
  }
  if constexpr (rows > 1)
    multiply_rows<kind, bytes, zero_points, rows - 1>(layout, block, panel, begin, end, prefetch, from_memory, totals);
}

inline constexpr int64_t kTurnRows = 64;  // that take turns at a group: their totals stay in the cache beside it

template <WeightKind kind, bool bytes, bool zero_points>
static void multiply_vectors(const Matrix& matrix, const void* input, int64_t num_rows, int64_t begin, int64_t end,
                             const Epilogue& epilogue) {
  constexpr bool planes = kind == WeightKind::nf4_high;  // whose low plane takes its turn at every group after it
  const PanelLayout layout = panel_layout(matrix);
  const InputLayout inputs = input_layout(matrix, layout, num_rows);
  const int64_t size = inputs.block_rows, turn_rows = kTurnRows / size * size;
  // More rows are bound by products, not by memory: a group's end, and beginning the next one, weigh more than overlap.
  const bool turns = planes || (matrix.tuning.turns && num_rows <= kTurnRows);
  alignas(64) float totals[kTurnRows * kPanel];
  for (int64_t p = begin; p < end; p++) {
    const uint8_t* panel = matrix.data + p * matrix.panel_bytes;
    // Zero points are read here and there; fetched in order they keep the panels one stream.
    for (int64_t i = 0; i < layout.weights; i += 64) __builtin_prefetch(panel + matrix.tuning.ahead + i);
    for (int64_t first = 0; first < num_rows; first += turn_rows) {
      const int64_t rows = num_rows - first < turn_rows ? num_rows - first : turn_rows;
      const int64_t blocks = (rows + size - 1) / size;
      const int64_t groups = (blocks == 1 && !planes) || !turns ? layout.groups : 1;
      __builtin_memset(totals, 0, (size_t)(rows * kPanel) * sizeof(float));
      for (int64_t g = 0; g < layout.groups; g += groups)
        for (int64_t b = 0; b < blocks; b++) {
          const InputBlock block = input_block(inputs, layout.groups, input, num_rows, first + b * size);
          if (g + groups == layout.groups) prefetch_results(epilogue, block.first, block.rows, p);
          multiply_rows<kind, bytes, zero_points>(layout, block, panel, g, g + groups,
                                                  prefetch_of<kind>(matrix.tuning, layout, turns, b, blocks),
                                                  matrix.tuning.from_memory, totals + b * size * kPanel);
          if constexpr (planes)
            multiply_rows<WeightKind::nf4_low, bytes, zero_points>(layout, block, panel, g, g + groups, {0, 0, 0},
                                                                   matrix.tuning.from_memory, totals + b * size * kPanel);
        }
      finish_rows(matrix, layout, epilogue, totals, first, rows, p);
    }
  }
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_int
