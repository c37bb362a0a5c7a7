// Where to cut a row so that its largest values make up a given count (top_k) or mass (top_p), without sorting it.
#pragma once

#include "kernels/simd.h"

namespace ridgeline::RIDGELINE_LEVEL {

inline constexpr uint32_t kBuckets = 1024;

// Keeps values above `value`, and the first `ties` that equal it.
struct Cut {
  float value;
  int64_t ties;
};

// Ascends as the float does; both zeros are the same.
RL_INLINE uint32_t order_of(float x) {
  const float one_zero = x + 0.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &one_zero, 4);
  return bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

template <bool Weighted>
RL_INLINE uint64_t mass_of(const float* weight, int64_t i) {
  return Weighted ? (uint64_t)(int64_t)weight[i] : 1;
}

// The cut that keeps the fewest largest of `n` values whose mass (weights rounded down, or without them the count)
// sums to at least `need`, 1 <= need <= all of it. Equal values have equal weights. Overwrites x and weight.
//
// A radix selection: the range of what is left is divided into buckets, and only the bucket in which the mass is
// reached is left for the next round; after at most four rounds that holds one value.
template <bool Weighted>
static inline Cut find_cut(float* x, float* weight, int64_t n, uint64_t need, uint64_t* buckets) {
  for (;;) {
    uint32_t low = ~0u, high = 0;
    for (int64_t i = 0; i < n; i++) {
      const uint32_t at = order_of(x[i]);
      low = at < low ? at : low;
      high = at > high ? at : high;
    }
    if (low == high) {
      const uint64_t each = mass_of<Weighted>(weight, 0);
      return {x[0], (int64_t)((need + each - 1) / each)};
    }
    int shift = 0;
    while ((high - low) >> shift >= kBuckets) shift++;
    __builtin_memset(buckets, 0, kBuckets * sizeof *buckets);
    for (int64_t i = 0; i < n; i++) buckets[(high - order_of(x[i])) >> shift] += mass_of<Weighted>(weight, i);
    uint32_t bucket = 0;
    while (need > buckets[bucket]) need -= buckets[bucket++];
    int64_t left = 0;
    for (int64_t i = 0; i < n; i++) {
      const bool stays = (high - order_of(x[i])) >> shift == bucket;
      x[left] = x[i];
      if (Weighted) weight[left] = weight[i];
      left += stays;
    }
    n = left;
  }
}

// Drops from (x, ids) what the cut does not keep, in place and in order; returns how many are left.
static inline int64_t keep(Cut cut, float* x, int32_t* ids, int64_t n) {
  int64_t left = 0;
  for (int64_t i = 0; i < n; i++) {
    const bool equal = x[i] == cut.value;
    const bool stays = x[i] > cut.value || (equal && cut.ties > 0);
    cut.ties -= equal;
    x[left] = x[i];
    ids[left] = ids[i];
    left += stays;
  }
  return left;
}

}  // namespace ridgeline::RIDGELINE_LEVEL
