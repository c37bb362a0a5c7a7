// Decides one token from one row of logits by the rules of ridgeline/decoding (its docstring gives the order, draw.py
// the draw): top_k, temperature, min_p, top_p, then the inverse CDF in integers. Nothing is ever sorted.
//
// Tokens are those of the Python implementation but where the last bit of exp decides: here exp is rounded correctly
// (nearly always), torch's may be one unit away.
#pragma once

#include "kernels/sample_cut.h"
#include "kernels/sample_scan.h"
#include "kernels/sample_types.h"
#include "kernels/sample_weights.h"

namespace ridgeline::RIDGELINE_LEVEL {

// One thread's memory: five arrays as long as the row, the sums of the blocks of weights, the buckets of a cut.
struct SampleScratch {
  float* z;              // candidates in order of id: their logits, later divided by the temperature
  float* weight;         // of the candidates
  int32_t* ids;          // of the candidates, where these are not the whole vocabulary
  float* member;         // a cut is found in a copy
  float* member_weight;
  uint64_t* sums;
  uint64_t* buckets;

  static inline int64_t array_bytes(int64_t vocab_size) { return (4 * (vocab_size + kPanel) + 63) / 64 * 64; }
  static inline int64_t sums_bytes(int64_t vocab_size) { return 8 * (vocab_size / kWeightBlock + 8) / 64 * 64 + 64; }

  inline SampleScratch(void* memory, int64_t vocab_size) {
    uint8_t* at = (uint8_t*)memory;
    const auto take = [&](int64_t bytes) { return (void*)((at += bytes) - bytes); };
    z = (float*)take(array_bytes(vocab_size));
    weight = (float*)take(array_bytes(vocab_size));
    ids = (int32_t*)take(array_bytes(vocab_size));
    member = (float*)take(array_bytes(vocab_size));
    member_weight = (float*)take(array_bytes(vocab_size));
    sums = (uint64_t*)take(sums_bytes(vocab_size));
    buckets = (uint64_t*)take(kBuckets * 8);
  }
};

static inline int64_t sample_scratch_bytes(int64_t vocab_size) {
  return 5 * SampleScratch::array_bytes(vocab_size) + SampleScratch::sums_bytes(vocab_size) + kBuckets * 8;
}

// The `k` largest logits and their ids to scratch.z and scratch.ids, in order of id. `scratch.member` holds the maxima
// of the row's groups; the k-th largest of them is a floor that few other logits reach.
static inline void take_top_k(const float* logits, int64_t vocab_size, int64_t k, const SampleScratch& scratch) {
  const int64_t num_groups = vocab_size / kScanBlock * kLanes;
  float floor = -kInfinity;
  if (k <= num_groups)
    floor = find_cut<false>(scratch.member, nullptr, num_groups, (uint64_t)k, scratch.buckets).value;
  const int64_t num_candidates = gather(logits, vocab_size, floor, [&](int64_t i, int64_t at) {
    scratch.z[at] = logits[i];
    scratch.ids[at] = (int32_t)i;
  });
  __builtin_memcpy(scratch.member, scratch.z, (size_t)num_candidates * sizeof(float));
  const Cut cut = find_cut<false>(scratch.member, nullptr, num_candidates, (uint64_t)k, scratch.buckets);
  keep(cut, scratch.z, scratch.ids, num_candidates);
}

// Gives weight 0 to what lies outside of the nucleus; returns the sum of the weights inside.
//
// Candidates whose weight is below `rest` / n sum up to less than `rest`, the mass that may stay outside: none of them
// is in the nucleus. The floor is set a little lower than that, so that rounding does not matter.
static inline uint64_t take_top_p(double top_p, float most, int64_t n, uint64_t total, const SampleScratch& scratch) {
  constexpr double kSlack = 0.01;
  const double rest = (1.0 - top_p) * (double)total;
  const double distance = kLogOfOne - __builtin_log(rest / (double)n) + kSlack;
  const float floor = most - (float)(distance < -kAllZero ? distance : -(double)kAllZero + kSlack);
  const int64_t num_members = gather(scratch.z, n, floor, [&](int64_t i, int64_t at) {
    scratch.member[at] = scratch.z[i];
    scratch.member_weight[at] = scratch.weight[i];
  });
  const Cut cut =
      find_cut<true>(scratch.member, scratch.member_weight, num_members, least_mass(top_p, total), scratch.buckets);
  return drop(cut, scratch.z, scratch.weight, n, scratch.sums);
}

static inline void sample(SampleRow& row, const float* logits, int64_t vocab_size, void* scratch_memory) {
  const SampleScratch scratch(scratch_memory, vocab_size);
  const bool narrow = row.temperature > 0 && row.top_k > 0 && row.top_k < vocab_size;
  const Scan scan = scan_row(logits, vocab_size, narrow ? scratch.member : nullptr);
  row.token = -1;
  if (!scan.finite) return;
  row.token = scan.at;
  if (!(row.temperature > 0)) return;
  const int64_t n = narrow ? row.top_k : vocab_size;
  if (narrow) take_top_k(logits, vocab_size, n, scratch);
  const float most = scan.most / row.temperature;
  row.token = -1;
  if (!(most - most == 0)) return;  // a small temperature took even the largest to an infinity
  const float floor = row.min_p > 0 ? most + (float)__builtin_log(row.min_p) : -kInfinity;
  uint64_t total = weigh(narrow ? scratch.z : logits, n, row.temperature, most, floor, scratch.z, scratch.weight,
                         scratch.sums);
  if (row.top_p < 1) total = take_top_p(row.top_p, most, n, total, scratch);
  const uint64_t target = (uint64_t)((UInt128)random_word(row.seed, row.num_output) * total >> 64);
  const int64_t at = locate(scratch.weight, scratch.sums, target);
  row.token = narrow ? scratch.ids[at] : at;
}

}  // namespace ridgeline::RIDGELINE_LEVEL
