// One or two rows through several panels at once: as many streams of memory, and inputs that serve all of them.
//
// A variant for levels whose registers hold the sums; which is best is the machine's to say (Tuning). Sums are those of
// int_gemm.h, so the bits are the same.
#pragma once

#include "kernels/linear/int_gemm.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_int {

inline constexpr bool kSeveralPanels = kVectors == 2;
inline constexpr int64_t kSeveralPanelsRows = 2;  // at most

// What is fetched while a group is used: its lines `ahead` bytes on, and past the panels' `end` those of the next panels.
struct PanelsAhead {
  int64_t ahead;
  const uint8_t* end;  // of the first panel
  int64_t skip;        // the bytes of the other panels

  __attribute__((always_inline)) void fetch(const uint8_t* from, int64_t panel_bytes, int panels) const {
    const uint8_t* line = from + ahead;
    if (line >= end) line += skip;
    for (int p = 0; p < panels; p++) __builtin_prefetch(line + p * panel_bytes);
  }
};

// sums += the steps' weights, at the same place of each panel, times the rows' inputs.
template <WeightKind kind, bool bytes, int rows, int panels>
RL_INLINE void accumulate_panels(const uint8_t* weights, int64_t panel_bytes, const uint8_t* inputs, int64_t steps,
                                 const PanelsAhead& ahead, Ints (&sums)[panels][rows][kVectors]) {
  constexpr int dots = kDots<kind, bytes>;
  for (int64_t step = 0; step < steps; step++, weights += kStepBytes, inputs += rows * dots * 4) {
    ahead.fetch(weights, panel_bytes, panels);
    ahead.fetch(weights + 64, panel_bytes, panels);
    Ints q[rows * dots];
#pragma GCC unroll 8
    for (int i = 0; i < rows * dots; i++) q[i] = splat_word(inputs + i * 4);
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) {
        Ints w[dots];
        expand<kind, bytes>(load<Ints>(weights + p * panel_bytes + v * kVectorBytes), w);
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
          for (int d = 0; d < dots; d++)
            sums[p][r][v] = bytes ? dot_u8s8(sums[p][r][v], w[d], q[r * dots + d])
                                  : dot_i16(sums[p][r][v], w[d], q[r * dots + d]);
      }
  }
}

// All groups of `panels` panels; totals are [panels][rows][32].
template <WeightKind kind, bool bytes, bool zero_points, int rows, int panels>
static void multiply_panels(const PanelLayout& layout, const InputBlock& block, const uint8_t* panel, int64_t ahead,
                            float* totals) {
  constexpr int step_bytes = rows * kDots<kind, bytes> * 4;
  const int64_t group_steps = layout.group / step_inputs(kind);
  const PanelsAhead stream{ahead, panel + layout.bytes, (panels - 1) * layout.bytes};
  for (int64_t at = 0; at < layout.weights; at += 64) stream.fetch(panel + at, layout.bytes, panels);
  for (int64_t g = 0; g < layout.groups; g++) {
    const int64_t left = layout.inputs - g * layout.group;
    const int64_t steps = (left < layout.group ? left : layout.group) / step_inputs(kind);
    Ints sums[panels][rows][kVectors];
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++)
#pragma GCC unroll 2
      for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; v++) sums[p][r][v] = first_sum<kind, zero_points>(block.corrections[g * rows + r]);
    const uint8_t* weights = panel + layout.weights + g * layout.group_bytes;
    accumulate_panels<kind, bytes>(weights, layout.bytes, block.values + g * group_steps * step_bytes, steps, stream,
                                   sums);
    if constexpr (scales_by_group(kind))
      for (int64_t at = layout.scales; at < layout.group_bytes; at += 64)
        stream.fetch(weights + at, layout.bytes, panels);
#pragma GCC unroll 4
    for (int p = 0; p < panels; p++)
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; v++) {
        const GroupVector group = group_vector<kind, zero_points>(layout, panel + p * layout.bytes, g, v * kLanes);
#pragma GCC unroll 2
        for (int r = 0; r < rows; r++) {
          float* total = totals + (p * rows + r) * kPanel + v * kLanes;
          store(total, with_group<kind, zero_points>(group, block.scales[g * rows + r], block.corrections[g * rows + r],
                                                     sums[p][r][v], load<Floats>(total)));
        }
      }
  }
}

// Panels [begin, end) as far as they are whole multiples of the tuning's; returns where it stopped.
template <WeightKind kind, bool bytes, bool zero_points>
static int64_t multiply_several(const Matrix& matrix, const void* input, int64_t num_rows, int64_t begin, int64_t end,
                                const Epilogue& epilogue) {
  using Kernel = void (*)(const PanelLayout&, const InputBlock&, const uint8_t*, int64_t, float*);
  const PanelLayout layout = panel_layout(matrix);
  const InputBlock block = input_block(input_layout(matrix, layout, num_rows), layout.groups, input, num_rows, 0);
  const int64_t panels = matrix.tuning.panels;
  const Kernel two = num_rows == 1 ? multiply_panels<kind, bytes, zero_points, 1, 2>
                                   : multiply_panels<kind, bytes, zero_points, 2, 2>;
  const Kernel four = num_rows == 1 ? multiply_panels<kind, bytes, zero_points, 1, 4>
                                    : multiply_panels<kind, bytes, zero_points, 2, 4>;
  alignas(64) float totals[4 * kSeveralPanelsRows * kPanel];
  for (; begin + panels <= end; begin += panels) {
    for (int64_t p = 0; p < panels; p++) prefetch_results(epilogue, 0, num_rows, begin + p);
    __builtin_memset(totals, 0, (size_t)(panels * num_rows * kPanel) * sizeof(float));
    (panels == 2 ? two : four)(layout, block, matrix.data + begin * layout.bytes, matrix.tuning.ahead, totals);
    for (int64_t p = 0; p < panels; p++)
      finish_rows(matrix, layout, epilogue, totals + p * num_rows * kPanel, 0, num_rows, begin + p);
  }
  return begin;
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_int
