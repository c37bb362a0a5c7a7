// The vector kernels: blocks of rows times panels, one accumulator for each of their outputs.
//
// Every sum runs over k in order in a single accumulator, whatever the block it is computed in, so that a row's result
// does not depend on the rows and panels beside it.
#pragma once

#include "kernels/epilogue.h"
#include "kernels/linear_float_pack.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_float {

inline constexpr int kParts = kPanel / kLanes;

// Rows whose accumulators fit the registers beside what a step loads.
#if defined(__AVX512F__)
inline constexpr int kMaxRows = 12;
#elif defined(__AVX2__) || defined(__aarch64__)
inline constexpr int kMaxRows = 3;
#else
inline constexpr int kMaxRows = 1;
#endif

// How a step's words of weights and of one row's inputs enter a sum. `kPasses` words of inputs belong to a step.
struct Float32 {
  static constexpr int kPasses = 1;
  template <int Pass>
  RL_INLINE Floats weights(Ints words) {
    return (Floats)words;
  }
  RL_INLINE Floats dot(Floats acc, Ints x, Floats w) { return fma((Floats)x, w, acc); }
};

struct Bfloat16Pairs {
  static constexpr int kPasses = 1;
  template <int Pass>
  RL_INLINE Ints weights(Ints words) {
    return words;
  }
  RL_INLINE Floats dot(Floats acc, Ints x, Ints w) { return dot_bf16(acc, x, w); }
};

struct Bfloat16Widened {
  static constexpr int kPasses = 2;
  template <int Pass>
  RL_INLINE Floats weights(Ints words) {
    return Pass == 0 ? bf16_low((Words)words) : bf16_high((Words)words);
  }
  RL_INLINE Floats dot(Floats acc, Ints x, Floats w) { return fma((Floats)x, w, acc); }
};

// A block's panels and its rows of inputs.
struct Operands {
  const uint8_t* panels;
  int64_t panel_bytes;
  const uint8_t* rows;
  int64_t stride;
  int64_t steps;
};

// Weights to come, asked of memory at an even pace while a block computes: `lines` cache lines every kUnroll steps.
struct Stream {
  const uint8_t* next;
  int64_t lines;
};

inline constexpr int64_t kUnroll = 4;
inline constexpr int64_t kLine = 64;

template <int Rows, int Panels>
struct Block {
  Floats sums[Panels][Rows][kParts];
};

template <class Dot, int Pass, int Rows, int Panels>
RL_INLINE void add_pass(Block<Rows, Panels>& block, const Operands& from, const uint8_t* words, const uint8_t* x) {
#pragma GCC unroll 4
  for (int p = 0; p < Panels; p++) {
    const uint8_t* line = words + p * from.panel_bytes;
    if constexpr (kParts <= 2) {  // the weights in registers, one row's inputs at a time
      decltype(Dot::template weights<Pass>(Ints{})) w[kParts];
#pragma GCC unroll 2
      for (int v = 0; v < kParts; v++) w[v] = Dot::template weights<Pass>(load<Ints>(line + v * kVectorBytes));
#pragma GCC unroll 12
      for (int r = 0; r < Rows; r++) {
        const Ints word = splat_word(x + r * from.stride);
#pragma GCC unroll 2
        for (int v = 0; v < kParts; v++) block.sums[p][r][v] = Dot::dot(block.sums[p][r][v], word, w[v]);
      }
    } else {  // the rows' inputs in registers, one vector of weights at a time
      Ints word[Rows];
#pragma GCC unroll 12
      for (int r = 0; r < Rows; r++) word[r] = splat_word(x + r * from.stride);
#pragma GCC unroll 8
      for (int v = 0; v < kParts; v++) {
        const auto w = Dot::template weights<Pass>(load<Ints>(line + v * kVectorBytes));
#pragma GCC unroll 12
        for (int r = 0; r < Rows; r++) block.sums[p][r][v] = Dot::dot(block.sums[p][r][v], word[r], w);
      }
    }
  }
}

template <class Dot, int Rows, int Panels>
RL_INLINE void add_step(Block<Rows, Panels>& block, const Operands& from, int64_t step) {
  const uint8_t* words = from.panels + step * kStepBytes;
  const uint8_t* x = from.rows + step * 4 * Dot::kPasses;
  add_pass<Dot, 0>(block, from, words, x);
  if constexpr (Dot::kPasses == 2) add_pass<Dot, 1>(block, from, words, x + 4);
}

// Rows x panels of sums to `sums`, [panels][rows][32].
template <class Dot, int Rows, int Panels>
static void sum_block(const Operands& operands, Stream& stream, float* sums) {
  const Operands from = operands;
  Block<Rows, Panels> block = {};
  int64_t step = 0;
  const uint8_t* next = stream.next;
  for (; step + kUnroll <= from.steps; step += kUnroll) {
    for (int64_t i = 0; i < stream.lines; i++, next += kLine) __builtin_prefetch(next, 0, 3);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kUnroll; i++) add_step<Dot>(block, from, step + i);
  }
  for (; step < from.steps; step++) add_step<Dot>(block, from, step);
  stream.next = next;
  for (int p = 0; p < Panels; p++)
    for (int r = 0; r < Rows; r++)
      for (int v = 0; v < kParts; v++) store(sums + (p * Rows + r) * kPanel + v * kLanes, block.sums[p][r][v]);
}

static __attribute__((noinline)) void finish_block(const Epilogue& epilogue, const float* sums, int64_t row,
                                                   int64_t num_rows, int64_t panel) {
  for (int64_t r = 0; r < num_rows; r++) {
    PanelSums done;
    for (int v = 0; v < kParts; v++) done.part[v] = load<Floats>(sums + r * kPanel + v * kLanes);
    finish(epilogue, done, row + r, panel);
  }
}

using SumBlock = void (*)(const Operands&, Stream&, float*);

template <class Dot>
static SumBlock block_of(int64_t rows) {
  switch (rows) {
    case 1: return sum_block<Dot, 1, 1>;
    case 2: return sum_block<Dot, (kMaxRows < 2 ? 1 : 2), 1>;
    case 3: return sum_block<Dot, (kMaxRows < 3 ? 1 : 3), 1>;
    case 4: return sum_block<Dot, (kMaxRows < 4 ? 1 : 4), 1>;
    case 5: return sum_block<Dot, (kMaxRows < 5 ? 1 : 5), 1>;
    case 6: return sum_block<Dot, (kMaxRows < 6 ? 1 : 6), 1>;
    case 7: return sum_block<Dot, (kMaxRows < 7 ? 1 : 7), 1>;
    case 8: return sum_block<Dot, (kMaxRows < 8 ? 1 : 8), 1>;
    case 9: return sum_block<Dot, (kMaxRows < 9 ? 1 : 9), 1>;
    case 10: return sum_block<Dot, (kMaxRows < 10 ? 1 : 10), 1>;
    case 11: return sum_block<Dot, (kMaxRows < 11 ? 1 : 11), 1>;
    default: return sum_block<Dot, (kMaxRows < 12 ? 1 : 12), 1>;
  }
}

// All rows over panels [begin, end). The rows are divided evenly among as few blocks as hold them.
template <class Dot>
static void multiply_blocks(const Matrix& matrix, const void* input, int64_t num_rows, int64_t begin, int64_t end,
                            const Epilogue& epilogue) {
  const int64_t num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  const int64_t stride = input_stride(matrix);
  alignas(64) float sums[kMaxRows * kPanel];
  for (int64_t panel = begin; panel < end; panel++) {
    const uint8_t* words = matrix.data + panel * matrix.panel_bytes;
    Stream stream{words + (num_blocks == 1 ? 2048 : matrix.panel_bytes), (8 + num_blocks - 1) / num_blocks};
    for (int64_t b = 0; b < num_blocks; b++) {
      const int64_t first = num_rows * b / num_blocks, rows = num_rows * (b + 1) / num_blocks - first;
      const Operands operands{words, matrix.panel_bytes, (const uint8_t*)input + first * stride, stride,
                              num_steps(matrix.kind, matrix.inputs)};
      block_of<Dot>(rows)(operands, stream, sums);
      finish_block(epilogue, sums, first, rows, panel);
    }
  }
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_float
