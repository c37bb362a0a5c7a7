// Decides one token from one row of logits by the rules of ridgeline/decoding (its docstring gives the order,
// random_sample.py the choice): a grammar's mask, top_k, temperature, min_p, top_p, then the inverse CDF in integers. Nothing is
// ever sorted.
//
// Tokens are those of the Python implementation but where the last bit of exp decides: here exp is rounded correctly
// (nearly always), torch's may be one unit away.
#pragma once

#include "kernels/sample/cut.h"
#include "kernels/sample/estimate.h"
#include "kernels/sample/scan.h"
#include "kernels/sample/types.h"
#include "kernels/sample/weights.h"

namespace ridgeline::RIDGELINE_LEVEL {

// One thread's memory. Candidates are the tokens that top_k leaves, or all, in order of id.
struct SampleScratch {
  float* z;        // of the candidates: their logits, later divided by the temperature
  float* weight;   // of the candidates
  int32_t* ids;    // of the candidates, where these are not the whole vocabulary
  float* allowed;  // the logits that a mask allows, -inf for the others
  uint64_t* sums;  // of the blocks of weights
  double* masses;  // of the blocks, estimated
  CutScratch cut;

  static inline int64_t array_bytes(int64_t vocab_size) { return (4 * (vocab_size + kPanel) + 63) / 64 * 64; }
  static inline int64_t sums_bytes(int64_t vocab_size) { return 8 * (vocab_size / kWeightBlock + 8) / 64 * 64; }

  inline SampleScratch(void* memory, int64_t vocab_size) {
    uint8_t* at = (uint8_t*)memory;
    const auto take = [&](int64_t bytes) { return (void*)((at += bytes) - bytes); };
    z = (float*)take(array_bytes(vocab_size));
    weight = (float*)take(array_bytes(vocab_size));
    ids = (int32_t*)take(array_bytes(vocab_size));
    allowed = (float*)take(array_bytes(vocab_size));
    cut.x = (float*)take(array_bytes(vocab_size));
    cut.weight = (float*)take(array_bytes(vocab_size));
    sums = (uint64_t*)take(sums_bytes(vocab_size));
    masses = (double*)take(sums_bytes(vocab_size));
    cut.buckets = (uint64_t*)at;
  }
};

static inline int64_t sample_scratch_bytes(int64_t vocab_size) {
  return 6 * SampleScratch::array_bytes(vocab_size) + 2 * SampleScratch::sums_bytes(vocab_size) + 8 * (kBuckets + 1);
}

// What at least `k` logits reach, by the maxima of a row's groups: the least maximum of `k` or a few more parts of it.
static inline float floor_of_largest(const float* maxima, int64_t num_groups, int64_t k) {
  const int64_t stride = (k + kLanes - 1) / kLanes * kLanes;
  Floats least = splat(kInfinity);
  for (int64_t part = 0; part < stride; part += kLanes) {
    Floats best = load<Floats>(maxima + part);
    for (int64_t i = part + stride; i < num_groups; i += stride) best = max(load<Floats>(maxima + i), best);
    least = best < least ? best : least;
  }
  return -largest(-least);
}

// The `k` largest logits and their ids to scratch.z and scratch.ids, in order of id. Few of the maxima of the row's
// groups, which may be in scratch.z, reach the floor of the k largest.
static inline void take_top_k(const float* logits, int64_t vocab_size, int64_t k, const float* maxima,
                              const SampleScratch& scratch) {
  const int64_t num_groups = vocab_size / kScanBlock * kLanes;
  float floor = k <= num_groups ? floor_of_largest(maxima, num_groups, k) : -kInfinity;
  if (k <= num_groups && floor == -kInfinity)  // a mask leaves some of the parts nothing
    floor = find_cut<false>({maxima, nullptr, num_groups}, floor, (uint64_t)k, scratch.cut).value;
  int64_t num_candidates = 0;
  const auto gather_ids = [&](int64_t begin, int64_t n) {
    num_candidates += gather(logits + begin, n, floor, kInfinity, [&](int64_t i, int64_t at) {
      scratch.ids[num_candidates + at] = (int32_t)(begin + i);
    });
  };
  const int64_t whole = num_groups * kGroup;
  for (int64_t i = 0; i < whole; i += kScanBlock)
    if (any(load<Floats>(maxima + i / kGroup) >= floor)) gather_ids(i, kScanBlock);
  gather_ids(whole, vocab_size - whole);
  for (int64_t i = 0; i < num_candidates; i++) scratch.z[i] = logits[scratch.ids[i]];
  const Cut cut = find_cut<false>({scratch.z, nullptr, num_candidates}, floor, (uint64_t)k, scratch.cut);
  keep(cut, scratch.z, scratch.ids, num_candidates);
}

// Divided logits below this are outside of the nucleus of `top_p` among `n` weights, which sum up to `total` of the
// largest one: those whose weight is below `rest` / n sum up to less than `rest`, the mass that may stay outside. It is
// set a little lower than that, so that rounding does not matter.
static inline float nucleus_floor(double top_p, float maximum, int64_t n, double total) {
  constexpr double kSlack = 0.01;
  const double distance = -__builtin_log((1.0 - top_p) * total / (double)n);
  return maximum - (float)((distance < -kAllZero ? distance : -kAllZero) + kSlack);
}

// Gives weight 0 to what lies outside of the nucleus; returns the sum of the weights inside.
static inline uint64_t take_top_p(double top_p, float maximum, int64_t n, uint64_t total, const SampleScratch& scratch) {
  const float floor = nucleus_floor(top_p, maximum, n, (double)total * 0x1p-44);
  const Cut cut = find_cut<true>({scratch.z, scratch.weight, n}, floor, min_mass(top_p, total), scratch.cut);
  return drop(cut, scratch.z, scratch.weight, n, scratch.sums);
}

// Logits, and what is known of the token once all have been looked at. `token` is the decision unless `draws`.
struct Look {
  const float* logits;
  int64_t token;
  Scaling scaling;
  bool narrow;  // top_k's candidates are in the scratch memory
  bool draws;
};

// Writes the tokens of the k largest of more logits, by logit and then by id; returns whether all are finite.
static inline bool likeliest(const float* logits, int64_t vocab_size, const float* maxima, int64_t k, int64_t* ids,
                             void* scratch_memory) {
  const SampleScratch scratch(scratch_memory, vocab_size);
  if (!maxima && !scan_row(logits, vocab_size, scratch.z).finite) return false;
  take_top_k(logits, vocab_size, k, maxima ? maxima : scratch.z, scratch);
  for (int64_t i = 1; i < k; i++) {  // they are in order of id
    const float z = scratch.z[i];
    const int32_t id = scratch.ids[i];
    int64_t at = i;
    for (; at > 0 && scratch.z[at - 1] < z; at--) {
      scratch.z[at] = scratch.z[at - 1];
      scratch.ids[at] = scratch.ids[at - 1];
    }
    scratch.z[at] = z;
    scratch.ids[at] = id;
  }
  for (int64_t i = 0; i < k; i++) ids[i] = scratch.ids[i];
  return true;
}

static inline Look look(const SampleRow& row, const float* logits, int64_t vocab_size, const SampleScratch& scratch) {
  const bool narrow = row.temperature > 0 && row.top_k > 0 && row.top_k < vocab_size;
  Look found{logits, -1, {row.temperature, 0.0f, -kInfinity}, narrow, false};
  if (row.mask && !(row.temperature > 0) && !allows_all(row.mask, row.mask_words, vocab_size)) {
    const Scan scan = scan_allowed(logits, vocab_size, row.mask, row.mask_words);
    if (scan.finite) found.token = scan.at;
    return found;
  }
  if (row.mask && row.temperature > 0) {
    if (!write_allowed(logits, vocab_size, row.mask, row.mask_words, scratch.allowed)) return found;
    found.logits = scratch.allowed;
  }
  const Scan scan = scan_row(found.logits, vocab_size, narrow ? scratch.z : row.maxima);
  if (!scan.finite) return found;
  if (!(row.temperature > 0)) {
    if (row.maxima) row.maxima[vocab_size / 16] = 1;
    found.token = scan.at;
    return found;
  }
  if (narrow) take_top_k(found.logits, vocab_size, row.top_k, scratch.z, scratch);
  const float maximum = found.scaling.maximum = scan.maximum / row.temperature;
  found.draws = maximum - maximum == 0;  // a small temperature may take even the largest to an infinity
  if (row.min_p > 0) found.scaling.floor = maximum + (float)__builtin_log(row.min_p);
  return found;
}

// The token that the row's random word points at among n weights, which sum up to `total`.
static inline int64_t draw(const SampleRow& row, const Look& found, int64_t n, uint64_t total,
                           const SampleScratch& scratch) {
  if (row.top_p < 1) total = take_top_p(row.top_p, found.scaling.maximum, n, total, scratch);
  const uint64_t target = (uint64_t)((UInt128)random_word(row.seed, row.num_output) * total >> 64);
  const int64_t at = locate(scratch.weight, scratch.sums, target);
  return found.narrow ? scratch.ids[at] : at;
}

// The same from the exact weights of those logits alone that may be in the nucleus, where the estimated `total` says
// which of them are. -1 where it does not, and where they are many.
static inline int64_t draw_from_nucleus(const SampleRow& row, const Look& found, int64_t vocab_size, double total,
                                        const SampleScratch& scratch) {
  const float floor = nucleus_floor(row.top_p, found.scaling.maximum, vocab_size, total) * row.temperature;
  const float lowest = floor - __builtin_fabsf(floor) * 0x1p-20f;  // the product is rounded
  if (count_from(found.logits, vocab_size, lowest) > vocab_size / 4) return -1;
  const int64_t n = gather(found.logits, vocab_size, lowest, kInfinity, [&](int64_t i, int64_t at) {
    scratch.z[at] = found.logits[i];
    scratch.ids[at] = (int32_t)i;
  });
  const uint64_t mass = softmax_weights(scratch.z, n, found.scaling, scratch.z, scratch.weight, scratch.sums);
  const double need = row.top_p * total;
  const double error = kEstimateShare * total + kEstimateEach * (double)vocab_size;
  const uint64_t least = need > error ? (uint64_t)((need - error) * 0x1p44) : 0;
  const uint64_t most = (uint64_t)((need + error) * 0x1p44) + 1;
  if (most > mass) return -1;
  const Cut cut = find_cut<true>({scratch.z, scratch.weight, n}, -kInfinity, most, scratch.cut);
  const uint64_t inside = drop(cut, scratch.z, scratch.weight, n, scratch.sums);
  const auto last = (uint64_t)(int64_t)scratch.weight[first_equal(scratch.z, 0, n, cut.value)];
  if (inside - last >= least) return -1;  // one token less might do
  const uint64_t target = (uint64_t)((UInt128)random_word(row.seed, row.num_output) * inside >> 64);
  return scratch.ids[locate(scratch.weight, scratch.sums, target)];
}

// The token by the masses of the blocks, or by the exact weights of all candidates where those are not enough.
static inline int64_t decide(const SampleRow& row, const Look& found, int64_t vocab_size,
                             const SampleScratch& scratch) {
  if (!found.narrow) {
    double total = 0;
    for (int64_t block = 0; block * kWeightBlock < vocab_size; block++) total += scratch.masses[block];
    const int64_t token = row.top_p < 1 ? draw_from_nucleus(row, found, vocab_size, total, scratch)
                                        : locate_roughly(found.logits, vocab_size, found.scaling, scratch.masses, total,
                                                         random_word(row.seed, row.num_output), scratch.z,
                                                         scratch.weight);
    if (token >= 0) return token;
  }
  const int64_t n = found.narrow ? row.top_k : vocab_size;
  const uint64_t total = softmax_weights(found.narrow ? scratch.z : found.logits, n, found.scaling, scratch.z,
                                         scratch.weight, scratch.sums);
  return draw(row, found, n, total, scratch);
}

static inline void sample_and_tell(SampleRow& row, const float* logits, int64_t vocab_size, void* scratch_memory);

static inline void sample(SampleRow& row, const float* logits, int64_t vocab_size, void* scratch_memory) {
  if (row.told) return sample_and_tell(row, logits, vocab_size, scratch_memory);
  const SampleScratch scratch(scratch_memory, vocab_size);
  const Look found = look(row, logits, vocab_size, scratch);
  row.token = found.token;
  if (!found.draws) return;
  if (!found.narrow) estimate_masses(found.logits, vocab_size, found.scaling, scratch.masses);
  row.token = decide(row, found, vocab_size, scratch);
}

// The same for a row without top_k, by several workers: each looks at all logits, and estimates its share of the blocks.
// `all` is the memory of them together, `own` of the caller alone.
static inline void sample_share(SampleRow& row, const float* logits, int64_t vocab_size, void* own, void* all,
                                const SampleTeam& team) {
  const SampleScratch scratch(all, vocab_size);
  const Look found = look(row, logits, vocab_size, SampleScratch(own, vocab_size));
  const int64_t blocks = (vocab_size + kWeightBlock - 1) / kWeightBlock;
  const int64_t first = blocks * team.index / team.count, last = blocks * (team.index + 1) / team.count;
  const int64_t begin = first * kWeightBlock;
  const int64_t end = last * kWeightBlock < vocab_size ? last * kWeightBlock : vocab_size;
  if (found.draws) estimate_masses(found.logits + begin, end - begin, found.scaling, scratch.masses + first);
  team.barrier(team.worker);
  if (team.index > 0) return;
  row.token = found.draws ? decide(row, found, vocab_size, scratch) : found.token;
}

}  // namespace ridgeline::RIDGELINE_LEVEL
