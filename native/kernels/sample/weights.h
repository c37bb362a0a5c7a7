// Integer weights of tokens, their sums, and the token that a random word points at: the rule of
// ridgeline/decoding/random_sample.py. Every level computes the same bits: float64 without contraction (CMakeLists.txt).
#pragma once

#include "kernels/sample/cut.h"
#include "kernels/sample/scan.h"
#include "kernels/simd.h"

namespace ridgeline::RIDGELINE_LEVEL {

__extension__ typedef unsigned __int128 UInt128;

inline constexpr float kAllZero = -31.0f;  // 2^44 * exp(-31) < 1
inline constexpr double kLogOfOne = 44 * 0.69314718055994531;  // of the largest weight
inline constexpr int64_t kWeightBlock = 512;  // weights summed in float64: at most 512 * 2^44 = 2^53, exact

// Four vectors at a time: their chains of dependent operations fill each other's gaps.
inline constexpr int kStrip = 4;
inline constexpr int64_t kStripWidth = kStrip * kDoubleLanes;

struct Strip {
  HalfFloats part[kStrip];
};

// gcc 12 converts whole vectors by halves.
RL_INLINE Doubles widen(HalfFloats v) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)v);
#else
  return __builtin_convertvector(v, Doubles);
#endif
}

RL_INLINE HalfFloats narrow(Doubles v) {
#if defined(__AVX512F__)
  return (HalfFloats)_mm512_maskz_cvtpd_ps(0xff, (__m512d)v);
#else
  return __builtin_convertvector(v, HalfFloats);
#endif
}

RL_INLINE Strip load_strip(const float* from) {
  Strip strip;
  for (int i = 0; i < kStrip; i++) strip.part[i] = load<HalfFloats>(from + i * kDoubleLanes);
  return strip;
}

RL_INLINE void store_strip(float* to, const Strip& strip) {
  for (int i = 0; i < kStrip; i++) store(to + i * kDoubleLanes, strip.part[i]);
}

// 2^44 * e^x for -31 <= x <= 0, rounded to float32: correctly but in one case of 30000, where the neighbour is as good.
// e^x = 2^n * e^r, n = round(x / ln 2); on |r| <= ln 2 / 2 a minimax polynomial with relative error below 2^-39.
RL_INLINE void scaled_exp(Strip& strip) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer, held in the low bits
  constexpr double kCoefficients[] = {0.0001990895242558933, 0.001388919725151058, 0.00833328178757674,
                                      0.04166666440373694,   0.16666666784512063,  0.5000000000427148,
                                      1.0,                   1.0};
  Doubles r[kStrip], p[kStrip];
  Longs exponent[kStrip];
  for (int i = 0; i < kStrip; i++) {
    const Doubles x = widen(strip.part[i]);
    const Doubles shifted = x * 1.4426950408889634 + kMagic;
    exponent[i] = ((Longs)shifted + 44) << 52;
    r[i] = x - (shifted - kMagic) * 0.69314718055994531;
    p[i] = Doubles{} + 2.4708270879744255e-05;
  }
  for (const double coefficient : kCoefficients)
    for (int i = 0; i < kStrip; i++) p[i] = p[i] * r[i] + coefficient;
  for (int i = 0; i < kStrip; i++)
    strip.part[i] = narrow((Doubles)((Longs)p[i] + exponent[i]));
}

// Rounded down, exactly.
RL_INLINE Doubles whole_weights(HalfFloats weight) {
  constexpr double kNoFraction = 4503599627370496.0;  // 2^52
  const Doubles w = widen(weight);
  const Doubles nearest = (w + kNoFraction) - kNoFraction;
  return nearest > w ? nearest - 1.0 : nearest;
}

RL_INLINE uint64_t exact_sum(Doubles v) {
  double total = 0;
  for (int lane = 0; lane < kDoubleLanes; lane++) total += v[lane];
  return (uint64_t)(int64_t)total;
}

// Calls each(i) -> Strip, the weights from i on, for all n of them, and writes the sum of every block of kWeightBlock
// to `sums`. Returns the sum of all.
template <class Each>
RL_INLINE uint64_t sum_blocks(int64_t n, uint64_t* sums, Each each) {
  uint64_t total = 0;
  for (int64_t begin = 0; begin < n; begin += kWeightBlock) {
    const int64_t end = begin + kWeightBlock < n ? begin + kWeightBlock : n;
    Doubles block{};
    for (int64_t i = begin; i < end; i += kStripWidth) {
      const Strip weights = each(i);
      for (int j = 0; j < kStrip; j++) block += whole_weights(weights.part[j]);
    }
    sums[begin / kWeightBlock] = exact_sum(block);
    total += sums[begin / kWeightBlock];
  }
  return total;
}

// How a row's logits become weights.
struct Scaling {
  float temperature;
  float maximum;  // divided by the temperature
  float floor;    // of min_p: what is below, divided, has weight 0
};

// z = x / temperature, and weight = 2^44 * exp(z - maximum), 0 where z < floor. z may be x. Both are written up to the
// next multiple of kStripWidth, z with -inf. Returns the sum of the weights, rounded down each.
static inline uint64_t softmax_weights(const float* x, int64_t n, const Scaling& scaling, float* z, float* weight,
                                       uint64_t* sums) {
  const float temperature = scaling.temperature, maximum = scaling.maximum, floor = scaling.floor;
  return sum_blocks(n, sums, [&](int64_t i) {
    float tail[kStripWidth];
    if (i + kStripWidth > n)
      for (int64_t j = 0; j < kStripWidth; j++) tail[j] = i + j < n ? x[i + j] : -kInfinity;
    Strip scaled = load_strip(i + kStripWidth > n ? tail : x + i), weights;
    for (int j = 0; j < kStrip; j++) {
      scaled.part[j] /= temperature;
      const HalfFloats below = scaled.part[j] - maximum;
      weights.part[j] = below < kAllZero ? HalfFloats{} + kAllZero : below;
    }
    scaled_exp(weights);
    for (int j = 0; j < kStrip; j++) weights.part[j] = scaled.part[j] < floor ? HalfFloats{} : weights.part[j];
    store_strip(z + i, scaled);
    store_strip(weight + i, weights);
    return weights;
  });
}

// Gives weight 0 to what the cut does not keep. Returns the new sum.
static inline uint64_t drop(Cut cut, const float* z, float* weight, int64_t n, uint64_t* sums) {
  return sum_blocks(n, sums, [&](int64_t i) {
    const Strip scaled = load_strip(z + i);
    Strip weights = load_strip(weight + i);
    for (int j = 0; j < kStrip; j++) {
      const HalfFloats v = scaled.part[j];
      HalfFloats& w = weights.part[j];
      w = v < cut.value ? HalfFloats{} : w;
      if (any(v == cut.value))
        for (int lane = 0; lane < kDoubleLanes; lane++)
          if (v[lane] == cut.value && --cut.ties < 0) w[lane] = 0;
    }
    store_strip(weight + i, weights);
    return weights;
  });
}

// First word of Philox4x64-10 (Salmon et al., SC 2011) with key (seed, 0) and counter (num_output + 1, 0, 0, 0).
RL_INLINE uint64_t random_word(uint64_t seed, uint64_t num_output) {
  uint64_t c0 = num_output + 1, c1 = c0 == 0, c2 = 0, c3 = 0, k0 = seed, k1 = 0;
  for (int round = 0; round < 10; round++) {
    const UInt128 left = (UInt128)0xD2E7470EE14C6C93u * c0, right = (UInt128)0xCA5A826395121157u * c2;
    c0 = (uint64_t)(right >> 64) ^ c1 ^ k0;
    c1 = (uint64_t)right;
    c2 = (uint64_t)(left >> 64) ^ c3 ^ k1;
    c3 = (uint64_t)left;
    k0 += 0x9E3779B97F4A7C15u;
    k1 += 0xBB67AE8584CAA73Bu;
  }
  return c0;
}

// ceil(top_p * total), exactly, for 0 < top_p < 1 and 0 < total < 2^63.
RL_INLINE uint64_t min_mass(double top_p, uint64_t total) {
  uint64_t bits;
  __builtin_memcpy(&bits, &top_p, 8);
  const int exponent = (int)(bits >> 52);
  const uint64_t fraction = bits & ((1ull << 52) - 1);
  const UInt128 mass = (UInt128)(exponent ? fraction | (1ull << 52) : fraction) * total;  // below 2^116
  const int shift = 1075 - (exponent ? exponent : 1);
  if (shift > 116) return 1;
  return (uint64_t)((mass + (((UInt128)1 << shift) - 1)) >> shift);
}

// The lowest index whose running sum of weights exceeds `target`, which is less than the sum of all.
RL_INLINE int64_t locate(const float* weight, const uint64_t* sums, uint64_t target) {
  int64_t block = 0;
  while (target >= sums[block]) target -= sums[block++];
  int64_t i = block * kWeightBlock;
  for (;; i++) {
    const uint64_t mass = (uint64_t)(int64_t)weight[i];
    if (target < mass) return i;
    target -= mass;
  }
}

}  // namespace ridgeline::RIDGELINE_LEVEL
