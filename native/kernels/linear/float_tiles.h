// The matrix unit's kernel for bfloat16: blocks of up to 32 rows of one panel, in 2 x 2 tiles of sums.
#pragma once

#include "kernels/linear/float_gemm.h"
#include "kernels/tiles.h"

#if RIDGELINE_TILES

namespace ridgeline::RIDGELINE_LEVEL::linear_float {

inline constexpr int64_t kTileBlockRows = 2 * kTileRows;
inline constexpr int64_t kMinTileBatch = 5;  // below it the vector kernel keeps up with memory, and is exact
inline constexpr int64_t kChunkBytes = kChunk / 2 * kStepBytes;

// Tiles 0..3 hold the sums [upper rows, lower rows] x [outputs 0..15, 16..31], 4 and 5 the rows' inputs, 6 and 7 the
// weights of the two halves of the panel.
static inline TileShapes tile_shapes(int64_t rows) {
  TileShapes shapes = TileShapes::uniform();
  const uint8_t upper = (uint8_t)((rows + 1) / 2), lower = (uint8_t)(rows / 2);
  shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = upper;
  shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = lower;
  return shapes;
}

// [rows][32] sums of the tiles' rows. `lines` cache lines of the weights to come are asked for with every chunk.
static inline void sum_tiles(const Operands& from, int64_t rows, const uint8_t*& next, int64_t lines, float* sums) {
  const int64_t upper = (rows + 1) / 2;
  const uint8_t *words = from.panels, *x = from.rows;
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int64_t chunk = from.steps / (kChunk / 2); chunk > 0; chunk--, words += kChunkBytes, x += kTileBytes) {
    for (int64_t i = 0; i < lines; i++, next += kTileBytes) __builtin_prefetch(next, 0, 2);
    tile_load<4>(x, from.stride);
    tile_load<6>(words, kStepBytes);
    tile_load<7>(words + kTileBytes, kStepBytes);
    tile_load<5>(x + upper * from.stride, from.stride);
    tile_dot_bf16<0, 4, 6>();
    tile_dot_bf16<1, 4, 7>();
    tile_dot_bf16<2, 5, 6>();
    tile_dot_bf16<3, 5, 7>();
  }
  tile_store<0>(sums, kStepBytes);
  tile_store<1>(sums + kTileRows, kStepBytes);
  tile_store<2>(sums + upper * kPanel, kStepBytes);
  tile_store<3>(sums + upper * kPanel + kTileRows, kStepBytes);
}

// As multiply_blocks. All blocks have the same number of rows, so that the tiles are set up once: where they do not
// divide the rows, the last begins on rows of the one before it and leaves those alone.
static inline void multiply_tiles(const Matrix& matrix, const uint8_t* input, int64_t num_rows, int64_t begin,
                                  int64_t end, const Epilogue& epilogue) {
  const int64_t num_blocks = (num_rows + kTileBlockRows - 1) / kTileBlockRows;
  const int64_t rows = (num_rows + num_blocks - 1) / num_blocks;
  const int64_t stride = input_stride(matrix), steps = num_steps(matrix.kind, matrix.inputs);
  const int64_t lines = (kChunkBytes / kTileBytes + num_blocks - 1) / num_blocks;
  alignas(64) float sums[kTileBlockRows * kPanel];
  set_tiles(tile_shapes(rows));
  for (int64_t panel = begin; panel < end; panel++) {
    const uint8_t* words = matrix.data + panel * matrix.panel_bytes;
    const uint8_t* next = words + (num_blocks == 1 ? kStreamAhead : matrix.panel_bytes);
    for (int64_t b = 0; b < num_blocks; b++) {
      const int64_t done = b * rows, first = done + rows <= num_rows ? done : num_rows - rows;
      prefetch_results(epilogue, done, first + rows - done, panel);
      sum_tiles({words, matrix.panel_bytes, input + first * stride, stride, steps, steps}, rows, next, lines, sums);
      finish_rows(epilogue, sums + (done - first) * kPanel, done, first + rows - done, panel);
    }
  }
  release_tiles();
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_float

#endif  // RIDGELINE_TILES
