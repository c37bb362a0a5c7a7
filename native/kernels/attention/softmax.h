// The softmax of one row over one tile, between the two products.
#pragma once

#include "kernels/attention/state.h"
#include "kernels/rows.h"

namespace ridgeline::RIDGELINE_LEVEL {

// e^x for x <= 0, within 1e-7 of it and 3 units in its last place per unit of x; 0 below -104, NaN stays NaN. A third
// of the instructions of exp(): 2^f for |f| <= 1/2 by its Taylor series, and the exponent without a range check.
RL_INLINE Floats exp_nonpositive(Floats x) {
  const Floats lowest = splat(-150.0f), scaled = x * 1.44269504088896341f;
  const Floats t = lowest > scaled ? lowest : scaled;
  const Floats n = round_even(t), f = t - n;
  Floats p = splat(1.5403530393381608e-4f);
  p = fma(p, f, splat(1.3333558146428443e-3f));
  p = fma(p, f, splat(9.6181291076284772e-3f));
  p = fma(p, f, splat(5.5504108664821580e-2f));
  p = fma(p, f, splat(2.4022650695910071e-1f));
  p = fma(p, f, splat(6.9314718055994531e-1f));
  p = fma(p, f, splat(1.0f));
#if defined(__AVX512F__)
  const Floats power = (Floats)_mm512_maskz_scalef_ps((__mmask16)-1, (__m512)p, (__m512)n);
  return (t <= lowest) ? Floats{} : power;
#else
  const Floats power = p * (Floats)((truncate_to_ints(n) + 127) << 23);
  return t < -126.0f ? Floats{} : power;
#endif
}

// Stores a tile's weights as rows of `product` and returns what they add to the row's sums. bfloat16 weights are summed
// as rounded, so that what multiplies the values adds up to one.
RL_INLINE Floats store_weights(F32, AttentionRows& rows, const Tile&, int64_t r,
                               const Floats (&weights)[kTileVectors]) {
  Floats total{};
  RL_UNROLL for (int i = 0; i < kTileVectors; i++) {
    store(rows.weights + r * kTileTokens + i * kLanes, weights[i]);
    total += weights[i];
  }
  return total;
}

#if defined(__AVX512BF16__)
RL_INLINE Floats store_weights(Bf16Pairs, AttentionRows& rows, const Tile&, int64_t r,
                               const Floats (&weights)[kTileVectors]) {
  Floats total{};
  RL_UNROLL for (int i = 0; i < kTileVectors; i += 2) {
    uint32_t* to = rows.weights + r * kTileTokens + i * kLanes / 2;
    store_bf16((uint16_t*)to, weights[i], weights[i + 1]);
    const Words pairs = load<Words>(to);
    total += bf16_low(pairs) + bf16_high(pairs);
  }
  return total;
}
#endif

RL_INLINE Floats store_weights(Bf16Floats, AttentionRows& rows, const Tile&, int64_t r,
                               const Floats (&weights)[kTileVectors]) {
  Floats total{};
  RL_UNROLL for (int i = 0; i < kTileVectors; i++) {
    const Words rounded = bf16_bits(weights[i]) << 16;
    store(rows.weights + r * kTileTokens + i * kLanes, rounded);
    total += (Floats)rounded;
  }
  return total;
}

// Each token's weight times its scale, as int16 around the tile's largest; products below 1e-30 count as 0. A scale of
// NaN, a value that was not finite, makes the row's sum NaN.
RL_INLINE Floats store_weights(Int8, AttentionRows& rows, const Tile& tile, int64_t r,
                               const Floats (&weights)[kTileVectors]) {
  Floats scaled[kTileVectors], total{}, max_lanes{};
  RL_UNROLL for (int i = 0; i < kTileVectors; i++) {
    scaled[i] = weights[i] * load<Floats>(tile.value_scales[i / kParts] + i % kParts * kLanes);
    total += fma(scaled[i], Floats{}, weights[i]);
    max_lanes = max(scaled[i], max_lanes);
  }
  const float bound = largest_lane(max_lanes)[0], inverse = bound > 1e-30f ? 32767.0f / bound : 0.0f;
  int16_t* to = (int16_t*)(rows.weights + r * kTileTokens);
  Ints sums{};
  RL_UNROLL for (int i = 0; i < kTileVectors; i++) sums += store_int16(to + i * kLanes, scaled[i] * inverse);
  rows.weight_bias[r] = -128 * sum_lanes(sums)[0];
  rows.weight_scale[r] = bound / 32767.0f;
  return total;
}

// The scores of row r over a tile become logits, -infinity where hidden, and the row's maximum rises to their largest.
template <class Kind>
RL_INLINE void to_logits(const Attention& a, AttentionRows& rows, const Tile& tile, int64_t r) {
  Floats max_lanes = splat(rows.maximum[r]);
  float* scores = rows.scores + r * kTileTokens;
  const float scale = rows.score_scale[r], cap = a.spec.softcap;
  const int64_t begin = rows.visible_begin[r] - tile.first_token, end = rows.visible_end[r] - tile.first_token;
  const bool whole = begin <= 0 && end >= kTileTokens && a.group_tokens == kGroup;
  const Ints low = splat_int((int32_t)(begin < 0 ? 0 : begin > kTileTokens ? kTileTokens : begin));
  const Ints high = splat_int((int32_t)(end < 0 ? 0 : end > kTileTokens ? kTileTokens : end));
  const int32_t distance = (int32_t)(tile.first_token - rows.position[r]);
  RL_UNROLL for (int i = 0; i < kTileVectors; i++) {
    Floats s = load<Floats>(scores + i * kLanes) * scale;
    if constexpr (Kind::kElements == 4) s *= load<Floats>(tile.key_scales[i / kParts] + i % kParts * kLanes);
    if (cap > 0.0f) s = cap * tanh(s / cap);
    const Ints token = load<Ints>(rows.lane_token + i * kLanes);
    if (a.spec.slopes) s = fma(to_floats(token + distance), splat(rows.slope[r]), s);
    if (!whole) {
      s = ((token >= low) & (token < high)) ? s : splat(-__builtin_inff());
    }
    store(scores + i * kLanes, s);
    max_lanes = max(s, max_lanes);
  }
  rows.maximum[r] = largest_lane(max_lanes)[0];
}

// The logits of row r become weights exp(logit - running maximum), rows of `product`.
template <class Kind>
RL_INLINE void to_weights(AttentionRows& rows, const Tile& tile, int64_t r) {
  Floats weights[kTileVectors];
  const Floats maximum = splat(rows.maximum[r]);
  RL_UNROLL for (int i = 0; i < kTileVectors; i++)
    weights[i] = exp_nonpositive(load<Floats>(rows.scores + r * kTileTokens + i * kLanes) - maximum);
  const Floats total = store_weights(Kind{}, rows, tile, r, weights);
  float* sums = rows.weight_sums + r * kGroup;
  store(sums, fma(load<Floats>(sums), splat(rows.rescale[r]), total));
}

// Online softmax (arXiv 1805.02867) of rows [first, first + count) over a tile, count at most kGroup: scores become
// weights, and `rescale` is what all sums so far are multiplied by where the maximum rose. A hidden token's weight is
// exactly 0, and a tile that the row does not see changes nothing but a rounding to the same value. The rows take each
// stage together: a row alone would wait for every one.
template <class Kind>
RL_INLINE void online_softmax(const Attention& a, AttentionRows& rows, const Tile& tile, int64_t first,
                              int64_t count) {
  alignas(64) float rise[kGroup] = {};
  for (int64_t r = 0; r < count; r++) {
    const float before = rows.maximum[first + r];
    to_logits<Kind>(a, rows, tile, first + r);
    rise[r] = before - rows.maximum[first + r];
  }
  for (int64_t i = 0; i < kGroup; i += kLanes) store(rise + i, exp_nonpositive(load<Floats>(rise + i)));
  for (int64_t r = 0; r < count; r++) {
    rows.rescale[first + r] = rise[r];
    to_weights<Kind>(rows, tile, first + r);
  }
}

}  // namespace ridgeline::RIDGELINE_LEVEL
