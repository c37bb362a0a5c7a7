// Weights of blocks of tokens in float32, at a fraction of what the exact ones cost, and the token where they are good
// enough to be sure of it: almost always. What they cannot tell is asked of the exact weights (weights.h), so that the
// tokens are those of the rule either way.
#pragma once

#include "kernels/sample/cut.h"
#include "kernels/sample/scan.h"
#include "kernels/sample/weights.h"
#include "kernels/simd.h"

namespace ridgeline::RIDGELINE_LEVEL {

// How far an estimated sum of weights, in units of the largest weight, may be from the exact one: by this share of it,
// and by this much for each of its tokens (exact weights are rounded down). The share is that of rough_exp, 2^-23 at
// every level for all float32, and of two sums in float32, 2^-24 each.
inline constexpr double kEstimateShare = 0x1.2p-22, kEstimateEach = 0x1p-43;

// e^x for -31 <= x <= 0; below that anything.
RL_INLINE Floats rough_exp(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
  const Floats shifted = fma(x, splat(1.44269504088896341f), magic), n = shifted - magic;
  return (Floats)((Ints)exp_fraction(x, n) + ((Ints)shifted << 23));
}

template <bool Divides>
RL_INLINE Floats rough_weight(Floats x, const Scaling& scaling, Floats floor) {
  const Floats z = Divides ? x / scaling.temperature : x;
  return z < floor ? Floats{} : rough_exp(z - scaling.maximum);
}

RL_INLINE Doubles widened_sum(Floats v) {
  HalfFloats half[2];
  __builtin_memcpy(half, &v, sizeof v);
  return widen(half[0]) + widen(half[1]);
}

template <bool Divides>
static inline void estimate_blocks(const float* x, int64_t n, const Scaling& scaling, double* masses) {
  constexpr int64_t kStep = 4 * kLanes;
  const float zero = scaling.maximum + kAllZero;
  const Floats floor = splat(scaling.floor > zero ? scaling.floor : zero);
  for (int64_t begin = 0; begin < n; begin += kWeightBlock) {
    float tail[kWeightBlock];
    const float* from = x + begin;
    if (begin + kWeightBlock > n) {
      for (int64_t i = 0; i < kWeightBlock; i++) tail[i] = begin + i < n ? from[i] : -kInfinity;
      from = tail;
    }
    Doubles block{};
    for (int64_t i = 0; i < kWeightBlock; i += kStep) {
      Floats weight[4];
      for (int j = 0; j < 4; j++) weight[j] = rough_weight<Divides>(load<Floats>(from + i + j * kLanes), scaling, floor);
      block += widened_sum((weight[0] + weight[1]) + (weight[2] + weight[3]));
    }
    double mass = 0;
    for (int lane = 0; lane < kDoubleLanes; lane++) mass += block[lane];
    masses[begin / kWeightBlock] = mass;
  }
}

// Writes the sum of every block of kWeightBlock weights to `masses`.
static inline void estimate_masses(const float* x, int64_t n, const Scaling& scaling, double* masses) {
  if (scaling.temperature == 1.0f)
    estimate_blocks<false>(x, n, scaling, masses);
  else
    estimate_blocks<true>(x, n, scaling, masses);
}

// What locate() finds in exact weights with the random word: the token whose share of the sum `total` of `masses` the
// word points into. -1 where an end of that share is nearer than the estimate is good for. `z` and `weight` get a
// block.
//
// The word lies u of the way. A running sum c is beyond it if c (1 - u) > (total - c) u, so an error of a share e in all
// weights moves that comparison by at most e (c (1 - u) + (total - c) u).
static inline int64_t locate_roughly(const float* x, int64_t n, const Scaling& scaling, const double* masses,
                                     double total, uint64_t word, float* z, float* weight) {
  const double u = (double)word * 0x1p-64, target = u * total;
  const int64_t last = (n - 1) / kWeightBlock;
  int64_t block = 0;
  double sum = 0;
  while (block < last && sum + masses[block] <= target) sum += masses[block++];
  const auto is_beyond = [&](double end, double sign) {
    const double error = kEstimateShare * (end * (1 - u) + (total - end) * u) + kEstimateEach * (double)n;
    return sign * (end - target) > error;
  };
  const int64_t begin = block * kWeightBlock;
  const int64_t count = begin + kWeightBlock < n ? kWeightBlock : n - begin;
  uint64_t unused;
  softmax_weights(x + begin, count, scaling, z, weight, &unused);
  for (int64_t i = 0; i < count; i++) {
    const double end = sum + (double)(int64_t)weight[i] * 0x1p-44;
    if (end > target) {
      const bool sure = is_beyond(end, 1) && (begin + i == 0 || is_beyond(sum, -1));
      return sure ? begin + i : -1;
    }
    sum = end;
  }
  return -1;
}

}  // namespace ridgeline::RIDGELINE_LEVEL
