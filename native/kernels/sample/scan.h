// Passes over a row of logits that look at every one: the maximum, and the few above a floor.
#pragma once

#include "kernels/simd.h"

namespace ridgeline::RIDGELINE_LEVEL {

inline constexpr float kInfinity = __builtin_inff();
inline constexpr float kLargestFloat = 3.40282347e38f;

inline constexpr int64_t kGroup = 16;                   // logits whose maximum is stored, one from each of 16 vectors
inline constexpr int64_t kScanBlock = kGroup * kLanes;  // logits scanned together: kLanes groups

// The maximum and the lowest index that has it. Not finite: a NaN or +inf anywhere, or nothing above -inf.
struct Scan {
  bool finite;
  float maximum;
  int64_t at;
};

static inline bool has_nan_or_plus_inf(const float* x, int64_t n) {
  Ints bad{};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) bad |= ~(load<Floats>(x + i) <= kLargestFloat);
  bool rest_bad = false;
  for (; i < n; i++) rest_bad |= !(x[i] <= kLargestFloat);
  return any(bad) || rest_bad;
}

RL_INLINE int64_t first_equal(const float* x, int64_t begin, int64_t end, float value) {
  while (begin < end && x[begin] != value) begin++;
  return begin;
}

// Writes the maximum of every group of the whole blocks to `groups`, unless that is null.
static inline Scan scan_row(const float* x, int64_t n, float* groups) {
  const int64_t whole = n / kScanBlock * kScanBlock;
  Floats max_lanes = splat(-kInfinity), spoiled{};
  Ints first{};  // for each lane, the first block that has its maximum
  for (int64_t i = 0; i < whole; i += kScanBlock) {
    Floats group = load<Floats>(x + i);
    Floats nothing = group - group;  // 0, or NaN for an infinity or a NaN: which of them is rare enough to ask later
    for (int64_t j = kLanes; j < kScanBlock; j += kLanes) {
      const Floats v = load<Floats>(x + i + j);
      group = max(v, group);
      nothing += v - v;
    }
    if (groups) store(groups + i / kGroup, group);
    first = group > max_lanes ? splat_int((int32_t)(i / kScanBlock)) : first;
    max_lanes = max(group, max_lanes);
    spoiled += nothing;
  }
  float rest_spoiled = 0, maximum = whole ? largest(max_lanes) : -kInfinity;
  int64_t block = whole / kScanBlock;  // the tail, unless a whole block has the maximum
  for (int64_t i = whole; i < n; i++) {
    rest_spoiled += x[i] - x[i];
    if (x[i] > maximum) maximum = x[i];
  }
  for (int lane = 0; whole && lane < kLanes; lane++)
    if (max_lanes[lane] == maximum && first[lane] < block) block = first[lane];
  const float any_spoiled = sum(spoiled) + rest_spoiled;
  if (any_spoiled != any_spoiled && has_nan_or_plus_inf(x, n)) return {false, 0, 0};
  return {maximum > -kInfinity, maximum, first_equal(x, block * kScanBlock, n, maximum)};
}

// Writes the logits that `mask` allows to `to`, and -inf for the others; false where any of them is NaN or +inf.
static inline bool write_allowed(const float* x, int64_t n, const uint64_t* mask, int64_t mask_words, float* to) {
  Ints lane_bit, bad{};
  for (int lane = 0; lane < kLanes; lane++) lane_bit[lane] = 1 << lane;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const uint64_t bits = i / 64 < mask_words ? mask[i / 64] : 0;
    for (int64_t j = 0; j < 64; j += kLanes) {
      const Floats v = load<Floats>(x + i + j);
      bad |= ~(v <= kLargestFloat);
      const Ints allowed = (splat_int((int32_t)(uint32_t)(bits >> j)) & lane_bit) != 0;
      store(to + i + j, allowed ? v : splat(-kInfinity));
    }
  }
  bool rest_bad = false;
  for (; i < n; i++) {
    rest_bad |= !(x[i] <= kLargestFloat);
    to[i] = i / 64 < mask_words && (mask[i / 64] >> (i % 64) & 1) ? x[i] : -kInfinity;
  }
  return !(any(bad) || rest_bad);
}

// Whether a mask allows all of n tokens.
static inline bool allows_all(const uint64_t* mask, int64_t mask_words, int64_t n) {
  const int64_t num_words = (n + 63) / 64;
  if (mask_words < num_words) return false;
  uint64_t common = ~(uint64_t)0;
  for (int64_t i = 0; i < num_words; i++) common &= mask[i];
  return !~common;
}

// What `scan_row` finds of them, a part at a time: they are nowhere written as a whole, nor where all are allowed.
static inline Scan scan_allowed(const float* x, int64_t n, const uint64_t* mask, int64_t mask_words) {
  constexpr int64_t kPart = 16 * kScanBlock;
  static_assert(kPart % 64 == 0, "a part begins with a word of the mask");
  float part[kPart];
  Scan best{false, -kInfinity, -1};
  for (int64_t begin = 0; begin < n; begin += kPart) {
    const int64_t count = begin + kPart < n ? kPart : n - begin;
    const uint64_t* const words = mask + begin / 64;
    const int64_t words_left = mask_words - begin / 64;
    const bool all = allows_all(words, words_left, count);
    if (!all && !write_allowed(x + begin, count, words, words_left, part)) return {false, 0, 0};
    const Scan scan = scan_row(all ? x + begin : part, count, nullptr);
    if (!scan.finite && scan.maximum > -kInfinity) return scan;  // NaN or +inf
    if (scan.finite && scan.maximum > best.maximum) best = {true, scan.maximum, begin + scan.at};
  }
  return best;
}

// How many of x reach `low`.
static inline int64_t count_from(const float* x, int64_t n, float low) {
  Ints count{};
  int64_t i = 0, rest = 0;
  for (; i + kLanes <= n; i += kLanes) count -= load<Floats>(x + i) >= low;
  for (; i < n; i++) rest += x[i] >= low;
  return sum(count) + rest;
}

// Calls take(i, count so far) for every x[i] in [low, high], ascending, and for some of their neighbours: what is taken
// for one of these is overwritten by the next, or lies at the end and does not count. Returns the count.
template <class Take>
RL_INLINE int64_t gather(const float* x, int64_t n, float low, float high, Take take) {
  int64_t count = 0, i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Floats v = load<Floats>(x + i);
    const Ints inside = (v >= low) & (v <= high);  // -1 where true
    if (!any(inside)) continue;
    const Lanes lanes = spill(inside);
    for (int j = 0; j < kLanes; j++) {
      take(i + j, count);
      count -= lanes.lane[j];
    }
  }
  for (; i < n; i++) {
    const float v = x[i];
    take(i, count);
    count += (v >= low) & (v <= high);
  }
  return count;
}

}  // namespace ridgeline::RIDGELINE_LEVEL
