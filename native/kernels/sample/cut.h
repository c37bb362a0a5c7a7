// Where to cut a row so that its largest values make up a given count (top_k) or mass (top_p), without sorting it.
#pragma once

#include "kernels/sample/scan.h"
#include "kernels/simd.h"

namespace ridgeline::RIDGELINE_LEVEL {

inline constexpr uint32_t kBuckets = 2048;

// Keeps values above `value`, and the first `ties` that equal it.
struct Cut {
  float value;
  int64_t ties;
};

// Values and what each of them counts: its weight rounded down, or 1. Equal values have equal weights.
template <bool Weighted>
struct Values {
  const float* x;
  const float* weight;
  int64_t n;

  uint64_t mass(int64_t i) const { return Weighted ? (uint64_t)(int64_t)weight[i] : 1; }
};

// Where a cut is looked for: room for as many values, and kBuckets + 1 sums.
struct CutScratch {
  float* x;
  float* weight;
  uint64_t* buckets;
};

// Ascends as the float does; both zeros are the same.
RL_INLINE Words order_of(Floats x) {
  const Ints bits = (Ints)(x + 0.0f);
  return (Words)bits ^ ((Words)(bits >> 31) | 0x80000000u);
}

RL_INLINE float value_of(uint32_t order) {
  const uint32_t bits = order & 0x80000000u ? order ^ 0x80000000u : ~order;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// The vector at x[i], filled up with x[0] past the end.
RL_INLINE Floats load_some(const float* x, int64_t i, int64_t n) {
  if (i + kLanes <= n) return load<Floats>(x + i);
  Floats v = splat(x[0]);
  for (int64_t j = i; j < n; j++) v[j - i] = x[j];
  return v;
}

struct Range {
  uint32_t low, high;
};

static inline Range range_of(const float* x, int64_t n) {
  Words low = order_of(splat(x[0])), high = low;
  for (int64_t i = 0; i < n; i += kLanes) {
    const Words order = order_of(load_some(x, i, n));
    low = order < low ? order : low;
    high = order > high ? order : high;
  }
  Range range{low[0], high[0]};
  for (int lane = 1; lane < kLanes; lane++) {
    range.low = low[lane] < range.low ? low[lane] : range.low;
    range.high = high[lane] > range.high ? high[lane] : range.high;
  }
  return range;
}

// Adds the mass of values i .. i + count, which are the first lanes of `v`.
template <bool Weighted>
RL_INLINE void add_to_buckets(const Values<Weighted>& values, Floats v, int64_t i, int count, uint32_t high, int shift,
                              uint64_t* buckets) {
  const Words bucket = (high - order_of(v)) >> shift;
  const Lanes lanes = spill((Ints)(bucket > kBuckets ? bucket - bucket + kBuckets : bucket));
  for (int j = 0; j < count; j++) buckets[lanes.lane[j]] += values.mass(i + j);
}

// Sums the mass of every bucket: 2^shift values of the order, counted from range.high down. What lies below the range
// may be left out.
template <bool Weighted>
static inline void fill_buckets(const Values<Weighted>& values, Range range, int shift, uint64_t* buckets) {
  __builtin_memset(buckets, 0, (kBuckets + 1) * sizeof *buckets);
  const float low = value_of(range.low);
  int64_t i = 0;
  for (; i + kLanes <= values.n; i += kLanes) {
    const Floats v = load<Floats>(values.x + i);
    if (any(v >= low)) add_to_buckets(values, v, i, kLanes, range.high, shift, buckets);
  }
  if (i < values.n)
    add_to_buckets(values, load_some(values.x, i, values.n), i, (int)(values.n - i), range.high, shift, buckets);
}

// The cut that keeps the fewest largest values whose mass sums to at least `need`,
// where 1 <= need <= the mass of all that are >= floor.
//
// A radix selection: the range of values is divided into buckets, and those in the bucket in which the mass is reached
// go on to the next round, until they are all equal.
template <bool Weighted>
static inline Cut find_cut(Values<Weighted> values, float floor, uint64_t need, const CutScratch& scratch) {
  for (;;) {
    Range range = range_of(values.x, values.n);
    const uint32_t lowest = order_of(splat(floor))[0];
    if (range.low < lowest) range.low = lowest;
    if (range.low >= range.high) {
      const float value = value_of(range.high);
      const uint64_t each = values.mass(first_equal(values.x, 0, values.n, value));
      return {value, (int64_t)((need + each - 1) / each)};
    }
    int shift = 0;
    while ((range.high - range.low) >> shift >= kBuckets) shift++;
    fill_buckets(values, range, shift, scratch.buckets);
    uint32_t bucket = 0;
    while (need > scratch.buckets[bucket]) need -= scratch.buckets[bucket++];
    range.high -= bucket << shift;
    const uint32_t width = (1u << shift) - 1;
    range.low = range.high - range.low > width ? range.high - width : range.low;
    floor = value_of(range.low);
    values.n = gather(values.x, values.n, floor, value_of(range.high), [&](int64_t i, int64_t at) {
      scratch.x[at] = values.x[i];
      if (Weighted) scratch.weight[at] = values.weight[i];
    });
    values = {scratch.x, scratch.weight, values.n};
  }
}

// Drops from (x, ids) what the cut does not keep, in place and in order; returns how many are left.
static inline int64_t keep(Cut cut, float* x, int32_t* ids, int64_t n) {
  int64_t left = 0;
  for (int64_t i = 0; i < n; i++) {
    const bool equal = x[i] == cut.value;
    const bool stays = (x[i] > cut.value) | (equal & (cut.ties > 0));
    cut.ties -= equal;
    x[left] = x[i];
    ids[left] = ids[i];
    left += stays;
  }
  return left;
}

}  // namespace ridgeline::RIDGELINE_LEVEL
