// Integer products in the matrix unit: signed bytes of inputs with unsigned bytes of weights.
//
// 8-bit inputs go two blocks of rows at a time. 16-bit inputs are q = 256 * high + low, high signed and low not, and
// their products 256 * (high . w) + (low . w): exact, so the results are those of the vector kernels, bit for bit.
#pragma once

#include "kernels/linear/int_gemm.h"
#include "kernels/tiles.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_int {

inline constexpr int64_t kChunkRows = 128;  // whose totals are held at once, for one expansion of int4

struct alignas(64) TileScratch {
  float totals[kChunkRows][kPanel];
  int32_t products[2][2][kTileRows][16];  // [operand A][half of the panel]
  uint8_t weights[kMaxInputGroup * kPanel];    // a group of int4 in int8's layout
};
inline constexpr int64_t kScratchBytes = sizeof(TileScratch);

template <WeightKind kind>
static inline void expand_group(const uint8_t* words, int64_t bytes, uint8_t* to) {
  for (int64_t at = 0; at < bytes; at += kVectorBytes) {
    Ints w[2];
    expand<kind, true>(load<Ints>(words + at), w);
    uint8_t* low = to + at / kStepBytes * 2 * kStepBytes + at % kStepBytes;
    store(low, w[0]);
    store(low + kStepBytes, w[1]);
  }
}

// A tiles: rows `stride` bytes apart; from one unit of inputs to the next, `step` bytes.
struct TileInput {
  const uint8_t* values;
  int64_t stride, step;
};

// Both operands' products with both halves of the panel, over `units` units of `unit_inputs` inputs.
template <bool split>
static inline void multiply_units(const uint8_t* weights, int64_t unit_inputs, int64_t units, TileInput a, TileInput b,
                                  TileScratch& scratch) {
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int64_t unit = 0; unit < units; unit++) {
    const uint8_t* w = weights + unit * unit_inputs * kPanel;
    tile_load<4>(a.values + unit * a.step, a.stride);
    tile_load<6>(w, kStepBytes);
    tile_load<7>(w + kTileBytes, kStepBytes);
    tile_load<5>(b.values + unit * b.step, b.stride);
    tile_dot_s8u8<0, 4, 6>();
    tile_dot_s8u8<1, 4, 7>();
    if constexpr (split)
      tile_dot_u8u8<2, 5, 6>(), tile_dot_u8u8<3, 5, 7>();
    else
      tile_dot_s8u8<2, 5, 6>(), tile_dot_s8u8<3, 5, 7>();
  }
  tile_store<0>(scratch.products[0][0], kTileBytes);
  tile_store<1>(scratch.products[0][1], kTileBytes);
  tile_store<2>(scratch.products[1][0], kTileBytes);
  tile_store<3>(scratch.products[1][1], kTileBytes);
}

// Adds the products of operand `which` (both, where the inputs are split) to the block's totals.
template <WeightKind kind, bool zero_points, bool split>
static inline void add_products(const InputBlock& block, const GroupVector (&group)[kVectors], int64_t g, int which,
                                const TileScratch& scratch, float (*totals)[kPanel]) {
  for (int64_t r = 0; r < block.rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; v++) {
      const int half = v * kLanes / 16, lane = v * kLanes % 16;
      Words product = load<Words>(&scratch.products[which][half][r][lane]);
      if constexpr (split) product = (product << 8) + load<Words>(&scratch.products[1][half][r][lane]);
      const int32_t of_row = block.corrections[g * block.rows + r];
      product += (Words)first_sum<kind, zero_points>(of_row);
      float* total = &totals[r][v * kLanes];
      store(total, with_group<kind, zero_points>(group[v], block.scales[g * block.rows + r], of_row, (Ints)product,
                                                 load<Floats>(total)));
    }
}

// One group of the panel times the rows [begin, end).
template <WeightKind kind, bool zero_points, bool split>
static void multiply_group(const PanelLayout& layout, const InputLayout& inputs, const void* input, int64_t num_rows,
                           int64_t begin, int64_t end, const uint8_t* panel, int64_t g, TileScratch& scratch) {
  const int64_t left = layout.inputs - g * layout.group, size = left < layout.group ? left : layout.group;
  const int64_t units = size / inputs.unit_inputs, first_unit = g * layout.group / inputs.unit_inputs;
  const uint8_t* weights = panel + layout.weights + g * layout.group_bytes;
  if constexpr (is_int4(kind)) {
    expand_group<kind>(weights, size / step_inputs(kind) * kStepBytes, scratch.weights);
    weights = scratch.weights;
  }
  GroupVector group[kVectors];
  for (int v = 0; v < kVectors; v++) group[v] = group_vector<kind, zero_points>(layout, panel, g, v * kLanes);
  const auto operand = [&](const InputBlock& block) -> TileInput {
    const int64_t step = block.rows * inputs.unit_bytes;
    return {block.values + first_unit * step, inputs.unit_bytes, step};
  };
  const auto block_at = [&](int64_t row) { return input_block(inputs, layout.groups, input, num_rows, row); };
  for (int64_t row = begin; row < end; row += inputs.block_rows) {
    const InputBlock block = block_at(row);
    TileInput a = operand(block), b = a;
    if constexpr (split) {
      b.values += inputs.unit_inputs;
      multiply_units<true>(weights, inputs.unit_inputs, units, a, b, scratch);
      add_products<kind, zero_points, true>(block, group, g, 0, scratch, scratch.totals + (row - begin));
    } else {
      const bool pair = row + inputs.block_rows < end;
      const InputBlock second = pair ? block_at(row + inputs.block_rows) : block;
      multiply_units<false>(weights, inputs.unit_inputs, units, a, operand(second), scratch);
      add_products<kind, zero_points, false>(block, group, g, 0, scratch, scratch.totals + (row - begin));
      if (!pair) continue;
      row += inputs.block_rows;
      add_products<kind, zero_points, false>(second, group, g, 1, scratch, scratch.totals + (row - begin));
    }
  }
}

template <WeightKind kind, bool zero_points, bool split>
static void multiply_tiles(const Matrix& matrix, const void* input, int64_t num_rows, int64_t begin, int64_t end,
                           const Epilogue& epilogue, void* memory) {
  const PanelLayout layout = panel_layout(matrix);
  const InputLayout inputs = input_layout(matrix, layout, num_rows);
  TileScratch& scratch = *(TileScratch*)memory;
  TileShapes shapes = TileShapes::uniform();
  for (int t = 0; t < 6; t++) shapes.rows[t] = (uint8_t)inputs.block_rows;
  for (int t = 4; t < 6; t++) shapes.row_bytes[t] = (uint16_t)inputs.unit_inputs;
  for (int t = 6; t < 8; t++) shapes.rows[t] = (uint8_t)(inputs.unit_inputs / 4);
  set_tiles(shapes);
  const int64_t chunk = kChunkRows / inputs.block_rows * inputs.block_rows;
  for (int64_t p = begin; p < end; p++)
    for (int64_t row = 0; row < num_rows; row += chunk) {
      const int64_t row_end = num_rows - row < chunk ? num_rows : row + chunk;
      const uint8_t* panel = matrix.data + p * matrix.panel_bytes;
      __builtin_memset(scratch.totals, 0, sizeof scratch.totals);
      for (int64_t g = 0; g < layout.groups; g++)
        multiply_group<kind, zero_points, split>(layout, inputs, input, num_rows, row, row_end, panel, g, scratch);
      finish_rows(matrix, layout, epilogue, scratch.totals[0], row, row_end - row, p);
    }
  release_tiles();
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_int
