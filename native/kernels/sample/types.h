// What the sampling kernel decides from; filled by the step's caller, one struct per row that is decided natively.
#pragma once

#include <cstdint>

namespace ridgeline {

// The most rows that are verified together.
inline constexpr int64_t kMaxBlock = 64;

// A drafted token, and the whole numbers [size] that it was sampled from; later tokens have 0. `block`: 0 where it is
// verified alone, else how many rows are from this one on, -1 in all but the first of these.
struct Trial {
  int64_t token;
  const float* weights;
  int64_t size;
  int64_t block;
};

// Options of one row. `token` is the decision, -1 where the logits are not finite: NaN or +inf anywhere, or nothing
// above -inf.
struct SampleRow {
  float temperature;  // 0: greedy
  int32_t top_k;      // 0: all
  double top_p;       // 1: all
  double min_p;       // 0: all
  uint64_t seed;
  uint64_t num_output;
  int64_t logit_row;
  int64_t token;
  const uint64_t* mask = nullptr;  // bit i % 64 of word i / 64 allows token i; null: all are allowed
  int64_t mask_words = 0;          // tokens past the last word are not allowed
  const Trial* trial = nullptr;    // null: the token is sampled
  float* told = nullptr;           // [V] gets what the token is sampled from; null: nobody asks
  float* maxima = nullptr;         // [V / 16] gets those of a greedy row with a mask that allows all; null: nobody asks
};

// Where a row of `stride` logits has room for the maxima of its groups, and for 1 behind them where they are there. Null
// where it has none.
inline float* room_for_maxima(float* logits, int64_t vocab_size, int64_t stride) {
  const int64_t begin = (vocab_size + 31) / 32 * 32;
  return stride - begin > vocab_size / 16 ? logits + begin : nullptr;
}

// The workers that decide a row together; all wait at the barrier.
struct SampleTeam {
  int index, count;
  void (*barrier)(const void* worker);
  const void* worker;
};

// Widest row that may be sampled from: 2^44 for each of its tokens still sums up to less than 2^63.
inline constexpr int64_t kMaxSampledVocab = (1 << 19) - 1;

}  // namespace ridgeline
