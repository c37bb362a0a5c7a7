// Decides drafted tokens by the rules of ridgeline/decoding/rejection.py, in the same numbers: float64 without contraction
// and whole numbers. p is what a row would sample from, q what its drafted token was sampled from.
#pragma once

#include "kernels/sample/sample.h"

namespace ridgeline::RIDGELINE_LEVEL {

inline constexpr uint64_t kAcceptance = 0xD1342543DE82EF95u, kResidual = 0xAF251AF3B0F025B5u;
inline constexpr double kResidualOne = 0x1p44, kMassOne = 0x1p62;

// What a row samples from: candidates in order of id, and the sum of their whole weights, 0 where nothing is finite.
struct Weighed {
  const float* weight;
  const int32_t* ids;  // null: all tokens
  int64_t n;
  uint64_t total;

  int64_t id(int64_t i) const { return ids ? ids[i] : i; }
  uint64_t of(int64_t token) const {
    if (!ids) return token < n ? (uint64_t)(int64_t)weight[token] : 0;
    int64_t i = 0;
    while (i < n && ids[i] < token) i++;
    return i < n && ids[i] == token ? (uint64_t)(int64_t)weight[i] : 0;
  }
};

static inline Weighed weigh(const SampleRow& row, const float* logits, int64_t vocab_size,
                            const SampleScratch& scratch) {
  const Look found = look(row, logits, vocab_size, scratch);
  const int64_t n = found.narrow ? row.top_k : vocab_size;
  if (!found.draws) return {scratch.weight, nullptr, 0, 0};
  uint64_t total = softmax_weights(found.narrow ? scratch.z : found.logits, n, found.scaling, scratch.z, scratch.weight,
                                   scratch.sums);
  if (row.top_p < 1) total = take_top_p(row.top_p, found.scaling.maximum, n, total, scratch);
  return {scratch.weight, found.narrow ? scratch.ids : nullptr, n, total};
}

// Rounded down, for 0 <= w < 2^52; unlike a conversion to integers it is vectorized at every level.
RL_INLINE double whole(float w) {
  const double exact = w, nearest = (exact + 0x1p52) - 0x1p52;
  return nearest > exact ? nearest - 1.0 : nearest;
}

static inline uint64_t total_of(const Trial& trial) {
  uint64_t total = 0;
  for (int64_t i = 0; i < trial.size; i++) total += (uint64_t)(int64_t)trial.weights[i];
  return total;
}

// Writes max(factor * p - q, 0) of every candidate to `more`; returns the largest.
static inline double write_excess(const Weighed& p, const Trial& trial, double factor, double* more) {
  const double p_total = (double)(int64_t)p.total, q_total = (double)(int64_t)total_of(trial);
  double most = 0;
  const auto put = [&](int64_t i, double q) {
    const double excess = factor * (whole(p.weight[i]) / p_total) - q;
    more[i] = excess > 0 ? excess : 0.0;
    most = more[i] > most ? more[i] : most;
  };
  const int64_t both = p.ids ? 0 : (p.n < trial.size ? p.n : trial.size);
  for (int64_t i = 0; i < both; i++) put(i, whole(trial.weights[i]) / q_total);
  for (int64_t i = both; i < p.n; i++) {
    const int64_t id = p.id(i);
    put(i, id < trial.size ? whole(trial.weights[id]) / q_total : 0.0);
  }
  return most;
}

// The token that `word` takes from max(factor * p - q, 0), in 44 bits; -1 where that is nothing.
static inline int64_t draw_residual(const Weighed& p, const Trial& trial, double factor, uint64_t word, double* more) {
  const double most = write_excess(p, trial, factor, more);
  if (!(most > 0)) return -1;
  const double scale = kResidualOne / most;
  uint64_t total = 0;
  for (int64_t i = 0; i < p.n; i++) total += (uint64_t)(int64_t)(more[i] * scale);
  uint64_t target = (uint64_t)((UInt128)word * total >> 64);
  for (int64_t i = 0;; i++) {
    const uint64_t mass = (uint64_t)(int64_t)(more[i] * scale);
    if (target < mass) return p.id(i);
    target -= mass;
  }
}

// Whether word / 2^64 < p(x) / q(x), exactly.
static inline bool is_accepted(const Weighed& p, const Trial& trial, uint64_t word) {
  const UInt128 left = (UInt128)(uint64_t)(int64_t)trial.weights[trial.token] * p.total;
  const UInt128 right = (UInt128)p.of(trial.token) * total_of(trial);
  const UInt128 high = (UInt128)word * (uint64_t)(left >> 64), low = (UInt128)word * (uint64_t)left;
  return high + (low >> 64) < right;  // what is left of `low` is less than one
}

static inline int64_t verify_one(const SampleRow& row, const Weighed& p, double* more) {
  if (is_accepted(p, *row.trial, random_word(row.seed ^ kAcceptance, row.num_output))) return row.trial->token;
  const int64_t token = draw_residual(p, *row.trial, 1.0, random_word(row.seed ^ kResidual, row.num_output), more);
  return token < 0 ? row.trial->token : token;
}

// Whether so many tokens are accepted together, whose factor is the share accepted so far, where max(factor * p - q, 0)
// of the row behind them sums up to `mass` of 2^62.
static inline bool is_block_accepted(double factor, uint64_t mass, uint64_t word) {
  const uint64_t rest = (uint64_t)kMassOne - (uint64_t)(factor * kMassOne);
  return factor >= 1 || (UInt128)word * (mass + rest) < (UInt128)mass << 64;
}

static inline double factor_after(double factor, const Weighed& p, const Trial& trial) {
  const double p_share = (double)(int64_t)p.of(trial.token) / (double)(int64_t)p.total;
  const double ratio = factor * p_share / (whole(trial.weights[trial.token]) / (double)(int64_t)total_of(trial));
  return ratio < 1 ? ratio : 1.0;
}

// Rows behind the first that is not finite are not verified.
static inline void verify_block(SampleRow* rows, int64_t count, const float* logits, int64_t stride, int64_t vocab_size,
                                const SampleScratch& scratch) {
  double* const more = (double*)scratch.cut.x;
  double factors[kMaxBlock + 1] = {1.0};
  const auto weighed = [&](int64_t i) {
    return weigh(rows[i], logits + rows[i].logit_row * stride, vocab_size, scratch);
  };
  const auto word = [&](int64_t i, uint64_t stream) { return random_word(rows[i].seed ^ stream, rows[i].num_output); };
  int64_t accepted = 0;
  for (int64_t i = 0; i < count; i++) {
    const Weighed p = weighed(i);
    if (!p.total) {
      rows[i].token = -1;
      count = i;
      break;
    }
    const double factor = factors[i];
    if (i > 0) {
      write_excess(p, *rows[i].trial, factor, more);
      uint64_t mass = 0;
      for (int64_t j = 0; j < p.n; j++) mass += (uint64_t)(int64_t)(more[j] * kMassOne);
      if (is_block_accepted(factor, mass, word(i - 1, kAcceptance))) accepted = i;
    }
    factors[i + 1] = factor_after(factor, p, *rows[i].trial);
    rows[i].token = rows[i].trial->token;
  }
  if (count > 0 && (factors[count] >= 1 ||
                    word(count - 1, kAcceptance) < (uint64_t)(factors[count] * kMassOne) << 2))
    accepted = count;
  for (; accepted < count; accepted++) {
    const Weighed p = weighed(accepted);
    const int64_t token = draw_residual(p, *rows[accepted].trial, factors[accepted], word(accepted, kResidual), more);
    if (token < 0) continue;
    rows[accepted].token = token;
    return;
  }
}

static inline void verify(SampleRow* rows, const float* logits, int64_t stride, int64_t vocab_size,
                          void* scratch_memory) {
  const SampleScratch scratch(scratch_memory, vocab_size);
  const Trial& trial = *rows->trial;
  if (trial.block > 0) {
    verify_block(rows, trial.block, logits, stride, vocab_size, scratch);
    return;
  }
  const Weighed p = weigh(*rows, logits + rows->logit_row * stride, vocab_size, scratch);
  rows->token = p.total ? verify_one(*rows, p, (double*)scratch.cut.x) : -1;
}

// Decides a row at a temperature, and writes what it is sampled from: zeros where nothing is finite.
static inline void sample_and_tell(SampleRow& row, const float* logits, int64_t vocab_size, void* scratch_memory) {
  const SampleScratch scratch(scratch_memory, vocab_size);
  const Weighed p = weigh(row, logits, vocab_size, scratch);
  __builtin_memset(row.told, 0, (size_t)vocab_size * sizeof *row.told);
  for (int64_t i = 0; i < p.n; i++) row.told[p.id(i)] = (float)whole(p.weight[i]);
  row.token = -1;
  if (!p.total) return;
  const auto target = (uint64_t)((UInt128)random_word(row.seed, row.num_output) * p.total >> 64);
  row.token = p.id(locate(p.weight, scratch.sums, target));
}

}  // namespace ridgeline::RIDGELINE_LEVEL
