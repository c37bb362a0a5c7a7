// The vector kernels: blocks of rows times panels, one accumulator for each of their outputs.
//
// Every sum runs over k in order in a single accumulator, whatever the block it is computed in, so that a row's result
// does not depend on the rows and panels beside it.
#pragma once

#include "kernels/linear/epilogue.h"
#include "kernels/linear/float_pack.h"

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

// Rows from which on inputs come from memory with every product: fewer leave the loads to bind.
inline constexpr int kRowsFromMemory = kLanes == 16 ? 4 : 1000;

// How a step's words of weights and of one row's inputs enter a sum. `kPasses` words of inputs belong to a step.
// `kScaled`: sums of a group of inputs are multiplied by scales, and these products are summed in the groups' order.
// `kFromMemory`: products read their word of inputs from memory, which saves Intel's cores instructions that they lack
// (Zen 4 loses 2 to 4 %, so that what runs there by default does not).
struct Float32 {
  static constexpr bool kScaled = false;
  static constexpr int kPasses = 1;
  static constexpr bool kFromMemory = false;
  template <int Pass>
  RL_INLINE Floats weights(Ints words) {
    return (Floats)words;
  }
  RL_INLINE Floats dot(Floats acc, Ints x, Floats w) { return fma((Floats)x, w, acc); }
};

#if defined(__AVX512BF16__)
struct Bfloat16Pairs {
  static constexpr bool kScaled = false;
  static constexpr int kPasses = 1;
  static constexpr bool kFromMemory = false;
  template <int Pass>
  RL_INLINE Ints weights(Ints words) {
    return words;
  }
  RL_INLINE Floats dot(Floats acc, Ints x, Ints w) { return dot_bf16(acc, x, w); }
};
#endif

// The inputs, rounded to bfloat16, are float32.
struct Bfloat16Floats {
  static constexpr bool kScaled = false;
  static constexpr int kPasses = 2;
  static constexpr bool kFromMemory = true;
  template <int Pass>
  RL_INLINE Floats weights(Ints words) {
    return Pass == 0 ? bf16_low((Words)words) : bf16_high((Words)words);
  }
  RL_INLINE Floats dot(Floats acc, Ints x, Floats w) { return fma((Floats)x, w, acc); }
  RL_INLINE Floats dot_from(Floats acc, const uint8_t* x, Floats w) { return fma_broadcast(acc, w, x); }
};

#if defined(__AVX512BF16__)
struct Fp8Pairs : Bfloat16Pairs {
  static constexpr bool kScaled = true;
  static constexpr int kPasses = 2;
  template <int Pass>
  RL_INLINE Ints weights(Ints words) {
    return e4m3_pairs(Pass == 0 ? words : (Ints)((UShorts)words >> 8));
  }
};
#endif

struct Fp8Floats : Bfloat16Floats {
  static constexpr bool kScaled = true;
  static constexpr int kPasses = 4;
  template <int Pass>
  RL_INLINE Floats weights(Ints words) {
    return e4m3_floats<Pass>(words);
  }
};

// A block's panels and its rows of inputs.
struct Operands {
  const uint8_t* panels;
  int64_t panel_bytes;
  const uint8_t* rows;
  int64_t stride;
  int64_t steps;
  int64_t group_steps;  // of which one group has this many
};

// Weights to come, asked of memory at `pace` bytes a step while a block computes. A pace of 0 asks for nothing new.
// Several panels are as many streams; past the first one's `end` come the first lines of the next panels, `skip` on.
struct Stream {
  const uint8_t* next;
  int64_t pace;
  const uint8_t* end = nullptr;
  int64_t skip = 0;
  bool past_l2 = false;

  template <int Panels>
  __attribute__((always_inline)) void fetch(int64_t panel_bytes) {
    const uint8_t* line = Panels > 1 && next >= end ? next + skip : next;
#pragma GCC unroll 4
    for (int p = 0; p < Panels; p++) {
      const uint8_t* at = line + p * panel_bytes;
      if (past_l2) {
        __builtin_prefetch(at, 0, 0);
        __builtin_prefetch(at + 64, 0, 0);
      } else {
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + 64, 0, 2);
      }
    }
    next += pace;
  }
};

// Rows of fewer words of inputs a step leave the kernel waiting for memory: how it is read best is the tuning's choice.
inline constexpr int64_t kMinStreamWords = 7;
inline constexpr int64_t kStreamAhead = 8192;  // bytes, where a block is the only one of its panel
inline constexpr int kUnroll = 4;

// A block's rows of inputs as one pointer for four rows: twelve pointers, or offsets, would not fit the registers.
template <int Rows>
struct RowPointers {
  static constexpr int kPointers = (Rows + 3) / 4;
  const uint8_t* at[kPointers];
  int64_t stride;

  RL_INLINE RowPointers from(const Operands& operands) {
    RowPointers x;
    x.stride = operands.stride;
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; i++) {
      x.at[i] = operands.rows + 4 * i * operands.stride;
      __asm__("" : "+r"(x.at[i]));  // else the compiler derives them all from one again
    }
    return x;
  }
  __attribute__((always_inline)) const uint8_t* word(int row, int64_t offset) const {
    return at[row / 4] + row % 4 * stride + offset;
  }
};

template <int Rows, int Panels>
struct Block {
  Floats sums[Panels][Rows][kParts] = {};
};

// Adds the products of one step, or of one of its passes.
template <class Dot, int Pass, int Rows, int Panels>
RL_INLINE void add_pass(Block<Rows, Panels>& block, const uint8_t* words, int64_t panel_bytes,
                        const RowPointers<Rows>& x, int64_t offset) {
#pragma GCC unroll 4
  for (int p = 0; p < Panels; p++) {
    const uint8_t* line = words + p * panel_bytes;
    if constexpr (kParts <= 2) {  // the weights in registers, one row's inputs at a time
      decltype(Dot::template weights<Pass>(Ints{})) w[kParts];
#pragma GCC unroll 2
      for (int v = 0; v < kParts; v++) w[v] = Dot::template weights<Pass>(load<Ints>(line + v * kVectorBytes));
#pragma GCC unroll 12
      for (int r = 0; r < Rows; r++) {
        const uint8_t* word = x.word(r, offset);
#pragma GCC unroll 2
        for (int v = 0; v < kParts; v++)
          if constexpr (Dot::kFromMemory && Rows >= kRowsFromMemory)
            block.sums[p][r][v] = Dot::dot_from(block.sums[p][r][v], word, w[v]);
          else
            block.sums[p][r][v] = Dot::dot(block.sums[p][r][v], splat_word(word), w[v]);
      }
    } else {  // the rows' inputs in registers, one vector of weights at a time
      Ints word[Rows];
#pragma GCC unroll 12
      for (int r = 0; r < Rows; r++) word[r] = splat_word(x.word(r, offset));
#pragma GCC unroll 8
      for (int v = 0; v < kParts; v++) {
        const auto w = Dot::template weights<Pass>(load<Ints>(line + v * kVectorBytes));
#pragma GCC unroll 12
        for (int r = 0; r < Rows; r++) block.sums[p][r][v] = Dot::dot(block.sums[p][r][v], word[r], w);
      }
    }
  }
}

// Adds `Steps` steps and moves on past them.
template <class Dot, int Steps, int Rows, int Panels>
RL_INLINE void add_steps(Block<Rows, Panels>& block, const uint8_t*& words, int64_t panel_bytes, RowPointers<Rows>& x,
                         Stream& stream) {
#pragma GCC unroll 4
  for (int i = 0; i < Steps; i++) {
    stream.fetch<Panels>(panel_bytes);
    const uint8_t* at = words + i * kStepBytes;
    constexpr int bytes = 4 * Dot::kPasses;
    add_pass<Dot, 0>(block, at, panel_bytes, x, i * bytes);
    if constexpr (Dot::kPasses >= 2) add_pass<Dot, 1>(block, at, panel_bytes, x, i * bytes + 4);
    if constexpr (Dot::kPasses == 4) {
      add_pass<Dot, 2>(block, at, panel_bytes, x, i * bytes + 8);
      add_pass<Dot, 3>(block, at, panel_bytes, x, i * bytes + 12);
    }
  }
  words += Steps * kStepBytes;
#pragma GCC unroll 4
  for (int i = 0; i < RowPointers<Rows>::kPointers; i++) x.at[i] += Steps * 4 * Dot::kPasses;
}

// Sends a block's sums to `sums`, [panels][rows][32], or with scales, which lie at `scales`, adds them there.
template <bool Scaled, int Rows, int Panels>
RL_INLINE void store_sums(const Block<Rows, Panels>& block, const uint8_t* scales, int64_t panel_bytes, float* sums) {
#pragma GCC unroll 4
  for (int p = 0; p < Panels; p++)
#pragma GCC unroll 12
    for (int r = 0; r < Rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < kParts; v++) {
        float* to = sums + (p * Rows + r) * kPanel + v * kLanes;
        if constexpr (Scaled)
          store(to, load<Floats>(to) + block.sums[p][r][v] * load<Floats>(scales + p * panel_bytes + v * kVectorBytes));
        else
          store(to, block.sums[p][r][v]);
      }
}

// Rows x panels of sums to `sums`, [panels][rows][32].
template <class Dot, int Rows, int Panels>
static void sum_block(const Operands& operands, Stream& stream, float* sums) {
  Block<Rows, Panels> block;
  Stream ahead = stream;
  RowPointers<Rows> x = RowPointers<Rows>::from(operands);
  const uint8_t* words = operands.panels;
  const int64_t panel_bytes = operands.panel_bytes;
  const auto add = [&](int64_t steps) __attribute__((always_inline)) {
    for (int64_t rounds = steps / kUnroll; rounds > 0; rounds--)
      add_steps<Dot, kUnroll>(block, words, panel_bytes, x, ahead);
    for (int64_t rest = steps % kUnroll; rest > 0; rest--) add_steps<Dot, 1>(block, words, panel_bytes, x, ahead);
  };
  if constexpr (Dot::kScaled) {
    __builtin_memset(sums, 0, sizeof(float) * Panels * Rows * kPanel);
    for (int64_t left = operands.steps; left > 0; left -= operands.group_steps) {
      add(left < operands.group_steps ? left : operands.group_steps);
      store_sums<true>(block, words, panel_bytes, sums);
      block = {};
      words += kStepBytes;
      if (ahead.pace) ahead.next += kStepBytes;
    }
  } else {
    add(operands.steps);
    store_sums<false>(block, nullptr, panel_bytes, sums);
  }
  stream.next = ahead.next;
}

// Rows of one panel's sums, [num_rows][32], through the epilogue; the first of them is row `row`.
static __attribute__((noinline)) void finish_rows(const Epilogue& epilogue, const float* sums, int64_t row,
                                                  int64_t num_rows, int64_t panel) {
  for (int64_t r = 0; r < num_rows; r++) {
    PanelSums done;
    for (int v = 0; v < kParts; v++) done.part[v] = load<Floats>(sums + r * kPanel + v * kLanes);
    finish(epilogue, done, row + r, panel);
  }
}

using SumBlock = void (*)(const Operands&, Stream&, float*);

// The accumulators of few rows of one panel do not hide the latency of their additions; those of several panels do.
constexpr int panels_at_once(int64_t rows) { return (int)((8 + rows * kParts - 1) / (rows * kParts)); }
// One and two rows may go through 2 or 4 panels where the registers hold their sums: the tuning's choice.
inline constexpr int64_t kChosenPanelsRows = kParts == 2 ? 2 : 0;
inline constexpr int64_t kMaxSums = (kMaxRows > panels_at_once(1) ? kMaxRows : panels_at_once(1)) * kPanel;
static_assert(4 * kChosenPanelsRows * kPanel <= kMaxSums);

template <class Dot, int Rows = kMaxRows>
static SumBlock block_of(int64_t rows, int64_t panels) {
  if constexpr (Rows > 1)
    if (rows < Rows) return block_of<Dot, Rows - 1>(rows, panels);
  if constexpr (Rows <= kChosenPanelsRows) {
    if (panels == 2) return sum_block<Dot, Rows, 2>;
    if (panels == 4) return sum_block<Dot, Rows, 4>;
  }
  return panels == 1 ? sum_block<Dot, Rows, 1> : sum_block<Dot, Rows, panels_at_once(Rows)>;
}

// A matrix this small may still be in the cache from the step before. A larger one comes from memory.
inline constexpr int64_t kCachedBytes = 256 << 10;

// All rows over panels [begin, end). The rows are divided evenly among as few blocks as hold them; while they pass over
// a panel, the next one is on its way.
template <class Dot>
static void multiply_blocks(const Matrix& matrix, const uint8_t* input, int64_t num_rows, int64_t begin, int64_t end,
                            const Epilogue& epilogue) {
  const int64_t num_blocks = (num_rows + kMaxRows - 1) / kMaxRows;
  const int64_t stride = input_stride(matrix), steps = num_steps(matrix.kind, matrix.inputs);
  const int64_t each = group_steps(matrix.kind, matrix.inputs, matrix.group);
  const bool cached = matrix.num_panels * matrix.panel_bytes <= kCachedBytes;
  const int64_t chosen = num_rows <= kChosenPanelsRows ? matrix.tuning.panels : 1;
  const int64_t together = cached && num_blocks == 1 ? panels_at_once(num_rows) : chosen;
  const bool streams = num_blocks > 1 || num_rows * Dot::kPasses >= kMinStreamWords;
  const int64_t pace = streams ? (kStepBytes + num_blocks - 1) / num_blocks : matrix.tuning.ahead ? kStepBytes : 0;
  const int64_t ahead = !streams ? matrix.tuning.ahead : num_blocks == 1 ? kStreamAhead : matrix.panel_bytes;
  alignas(64) float sums[kMaxSums];
  for (int64_t panel = begin, panels; panel < end; panel += panels) {
    panels = end - panel < together ? 1 : together;
    const uint8_t* words = matrix.data + panel * matrix.panel_bytes;
    Stream stream{words + ahead, pace, words + matrix.panel_bytes, (panels - 1) * matrix.panel_bytes,
                  matrix.tuning.past_l2 && num_blocks == 1};
    for (int64_t b = 0; b < num_blocks; b++) {
      const int64_t first = num_rows * b / num_blocks, rows = num_rows * (b + 1) / num_blocks - first;
      for (int64_t p = 0; p < panels; p++) prefetch_results(epilogue, first, rows, panel + p);
      const Operands operands{words, matrix.panel_bytes, input + first * stride, stride, steps, each};
      block_of<Dot>(rows, panels)(operands, stream, sums);
      for (int64_t p = 0; p < panels; p++) finish_rows(epilogue, sums + p * rows * kPanel, first, rows, panel + p);
    }
  }
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_float
