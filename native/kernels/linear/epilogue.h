// The end of a matrix product: what becomes of the sums of some rows of one panel.
#pragma once

#include "kernels/rows.h"
#include "kernels/simd.h"
#include "kernels/types.h"

namespace ridgeline::RIDGELINE_LEVEL {

// One row's 32 sums, still in registers.
struct PanelSums {
  Floats part[kPanel / kLanes];
};

// A NaN stays a NaN.
RL_INLINE Floats clamped_gate(Floats gate, Floats up, float limit, float alpha) {
  const Floats g = gate > limit ? splat(limit) : gate;
  const Floats u = up > limit ? splat(limit) : up < -limit ? splat(-limit) : up;
  return (u + 1.0f) * g / (1.0f + exp(-alpha * g));
}

// Where a row's results of a panel go.
RL_INLINE float* destination(const Epilogue& epilogue, int64_t row, int64_t panel) {
  const int64_t width = epilogue.kind == EpilogueKind::gate ? kPanel / 2 : kPanel;
  return epilogue.out + row * epilogue.stride + panel * width;
}

// Fetches the lines that `finish` will write for rows [first, first + rows) of a panel, which are far apart.
RL_INLINE void prefetch_results(const Epilogue& epilogue, int64_t first, int64_t rows, int64_t panel) {
  const int64_t width = epilogue.kind == EpilogueKind::gate ? kPanel / 2 : kPanel;
  const float* out = destination(epilogue, first, panel);
  for (int64_t row = 0; row < rows; row++, out += epilogue.stride) {
    __builtin_prefetch(out, 1, 2);
    __builtin_prefetch(out + width - 1, 1, 2);
  }
}

// Finishes row `row` of panel `panel`. Always inlined, so that the sums never leave the registers.
RL_INLINE void finish(const Epilogue& epilogue, PanelSums sums, int64_t row, int64_t panel) {
  constexpr int kParts = kPanel / kLanes;
  if (epilogue.bias)
    for (int i = 0; i < kParts; i++) sums.part[i] += load<Floats>(epilogue.bias + panel * kPanel + i * kLanes);
  float* out = destination(epilogue, row, panel);
  if (epilogue.kind == EpilogueKind::gate) {
    for (int i = 0; i < kParts / 2; i++) {
      const Floats gate = sums.part[i], up = sums.part[i + kParts / 2];
      store(out + i * kLanes, epilogue.limit > 0.0f ? clamped_gate(gate, up, epilogue.limit, epilogue.alpha)
                                                    : apply(epilogue.activation, gate) * up);
    }
    return;
  }
  for (int i = 0; i < kParts; i++) {
    Floats y = sums.part[i];
    if (epilogue.kind == EpilogueKind::add) y += load<Floats>(out + i * kLanes);
    if (epilogue.kind == EpilogueKind::activate) y = apply(epilogue.activation, y);
    if (epilogue.softcap > 0.0f) y = epilogue.softcap * tanh(y / epilogue.softcap);
    store(out + i * kLanes, y);
  }
}

}  // namespace ridgeline::RIDGELINE_LEVEL
