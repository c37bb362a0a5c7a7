// The softmax of one row over one tile, between the two products.
#pragma once

#include "kernels/attention/state.h"
#include "kernels/rows.h"

namespace ridgeline::RIDGELINE_LEVEL {

// 2^x for x <= 0, within 1e-7 of it, exactly 1 of 0; 0 below -150, NaN stays NaN. A third of the instructions of exp():
// 2^f for |f| <= 1/2 by a minimax polynomial, and the exponent without a range check.
RL_INLINE Floats exp2_nonpositive(Floats x) {
#if defined(__AVX512F__)
  const Floats f = (Floats)_mm512_maskz_reduce_ps((__mmask16)-1, (__m512)x, 8);  // -0 of -infinity
  const Floats n = x - f;
#else
  const Floats lowest = splat(-150.0f), t = lowest > x ? lowest : x, n = round_even(t), f = t - n;
#endif
  Floats p = splat(1.5353362e-4f);
  p = fma(p, f, splat(1.3398875e-3f));
  p = fma(p, f, splat(9.618437e-3f));
  p = fma(p, f, splat(5.5503324e-2f));
  p = fma(p, f, splat(2.4022648e-1f));
  p = fma(p, f, splat(6.9314718e-1f));
  p = fma(p, f, splat(1.0f));
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_scalef_ps((__mmask16)-1, (__m512)p, (__m512)n);
#else
  const Floats power = p * (Floats)((truncate_to_ints(n) + 127) << 23);
  return t < -126.0f ? Floats{} : power;
#endif
}

inline constexpr int kPieceVectors = 2 * kParts;  // of the 32 tokens whose weights are made together
typedef Floats Piece[kPieceVectors];

// Stores the weights of 32 tokens as words of a row of `product` and returns what they add to the row's sums. bfloat16
// weights are summed as rounded, so that what multiplies the values adds up to one.
RL_INLINE Floats store_weights(F32, uint32_t* to, const Piece& weights) {
  Floats total{};
  RL_UNROLL for (int i = 0; i < kPieceVectors; i++) {
    store(to + i * kLanes, weights[i]);
    total += weights[i];
  }
  return total;
}

#if defined(__AVX512BF16__)
RL_INLINE Floats store_weights(Bf16Pairs, uint32_t* to, const Piece& weights) {
  store_bf16((uint16_t*)to, weights[0], weights[1]);
  return dot_bf16(Floats{}, load<Ints>(to), splat_int(0x3f803f80));  // times one
}
#endif

RL_INLINE Floats store_weights(Bf16Floats, uint32_t* to, const Piece& weights) {
  Floats total{};
  RL_UNROLL for (int i = 0; i < kPieceVectors; i++) {
    const Words rounded = bf16_bits(weights[i]) << 16;
    store(to + i * kLanes, rounded);
    total += (Floats)rounded;
  }
  return total;
}

// The rows of a block, a lane each.
struct BlockState {
  alignas(64) float factor[kLanes];  // from a row's scores to logits times log2(e)
  alignas(64) float maximum[kLanes];
  alignas(64) float rescale[kLanes];
};

// Joins all lanes of every row's vector; lane r of the result is row r's.
template <class Kind, class Vector, class Join>
RL_INLINE Vector fold_block(const Vector (&of)[Kind::kRows], int64_t count, Join join) {
  constexpr int kMost = Kind::kRows > 4 ? 8 : Kind::kRows;
  static_assert(kMost <= kLanes);
  Vector v[kMost] = {of[0], of[1]};
  if (count <= 2) return fold_rows<2>(v, join);
  for (int r = 2; r < Kind::kRows; r++) v[r] = of[r];
  return fold_rows<kMost>(v, join);
}

// Makes logits times log2(e) of vectors [begin, end) of a row's scores where some tokens are hidden, which gives
// -infinity, or logits are capped or moved by their distance.
static inline void transform_scores(const Attention& a, const AttentionRows& rows, const Tile& tile, int64_t r,
                                    int64_t begin, int64_t end, float* scores) {
  const float scale = rows.score_scale[r], cap = a.spec.softcap * kLog2E;
  const bool moves = a.spec.slopes || cap > 0.0f;
  const auto within = [&](int64_t position) {
    const int64_t token = position - tile.first_token;
    return splat_int((int32_t)(token < 0 ? 0 : token > kTileTokens ? kTileTokens : token));
  };
  const Ints low = within(rows.visible_begin[r]), high = within(rows.visible_end[r]);
  const int32_t distance = (int32_t)(tile.first_token - rows.position[r]);
  for (int64_t i = begin; i < end; i++) {
    Floats s = load<Floats>(scores + i * kLanes) * scale;
    const Ints token = load<Ints>(rows.lane_token + i * kLanes);
    if (moves) {
      if (cap > 0.0f) s = cap * tanh(s / cap);
      if (a.spec.slopes) s = fma(to_floats(token + distance), splat(rows.slope[r]), s);
    }
    store(scores + i * kLanes, ((token >= low) & (token < high)) ? s : splat(-__builtin_inff()));
  }
}

// Stores weights times their values' scales in `scores`, adds the weights to `total`, and returns each lane's largest
// magnitude of them. A scale of NaN, a value that was not finite, makes the row's sum NaN.
RL_INLINE Floats scale_weights(const Tile& tile, int64_t vector, Piece& weights, float* scores, Floats& total) {
  Floats most{};
  RL_UNROLL for (int i = 0; i < kPieceVectors; i++) {
    const int64_t at = vector + i;
    const Floats scaled = weights[i] * bf16_low(load_shorts(tile.value_scales[at / kParts] + at % kParts * kLanes));
    total += fma(scaled, Floats{}, weights[i]);
    store(scores + at * kLanes, scaled);
    most = max((Floats)((Words)scaled & 0x7fffffffu), most);  // int4's scales have a sign
  }
  return most;
}

// Makes rows of `product` of what `scale_weights` left, around each row's largest.
template <class Kind>
RL_INLINE void round_weights(AttentionRows& rows, int64_t first, int64_t count, int64_t begin, int64_t end,
                             const Floats (&largest)[Kind::kRows]) {
  const Floats bound = fold_block<Kind>(largest, count, larger);
  alignas(64) float inverse[kLanes], scale[kLanes];
  store(inverse, bound > Kind::kLeast ? Kind::kTop / bound : Floats{});
  store(scale, bound / Kind::kDivisor);
  Ints sums[Kind::kRows] = {};
  for (int64_t r = 0; r < count; r++)
    for (int64_t at = begin * kLanes; at < end * kLanes; at += 2 * kLanes) {
      const float* from = rows.scores + r * kTileTokens + at;
      sums[r] += store_entries(Kind{}, rows.weights + (first + r) * kTileTokens, at,
                               load<Floats>(from) * inverse[r], load<Floats>(from + kLanes) * inverse[r]);
    }
  for (int64_t r = 0; r < count; r++) rows.weight_scale[first + r] = scale[r];
  if constexpr (kIsInteger<Kind>) {
    alignas(64) int32_t bias[kLanes];
    store(bias, -Kind::kZero * fold_block<Kind>(sums, count, added<Ints>));
    for (int64_t r = 0; r < count; r++) rows.weight_bias[first + r] = bias[r];
  }
}

// Whether row r sees the whole tile and its logits are scores times a factor that keeps their order: a property of the
// row alone, as it decides where a logit is rounded.
RL_INLINE bool is_plain(const Attention& a, const AttentionRows& rows, const Tile& tile, int64_t r) {
  return rows.visible_begin[r] <= tile.first_token && rows.visible_end[r] >= tile.first_token + kTileTokens &&
         a.group_tokens == kGroup && !(a.spec.softcap > 0.0f) && !a.spec.slopes && rows.score_scale[r] >= 0.0f;
}

// Raises the rows' maxima to their largest logits, in vectors [begin, end) of the scores.
template <class Kind>
RL_INLINE void raise_maxima(const Attention& a, AttentionRows& rows, const Tile& tile, const RowBlock& block,
                            int64_t begin, int64_t end, BlockState& state) {
  Floats largest[Kind::kRows] = {};
  for (int64_t r = 0; r < block.count; r++) {
    float* scores = rows.scores + r * kTileTokens;
    const bool plain = is_plain(a, rows, tile, block.first + r);
    if (!plain) transform_scores(a, rows, tile, block.first + r, begin, end, scores);
    state.factor[r] = plain ? rows.score_scale[block.first + r] : 1.0f;
    largest[r] = load<Floats>(scores + begin * kLanes);
    for (int64_t i = begin + 1; i < end; i++) largest[r] = max(load<Floats>(scores + i * kLanes), largest[r]);
  }
  const Floats before = load<Floats>(rows.maximum + block.first);
  const Floats after = max(fold_block<Kind>(largest, block.count, larger) * load<Floats>(state.factor), before);
  store(state.maximum, after), store(state.rescale, exp2_nonpositive(before - after));
}

// Online softmax (arXiv 1805.02867) of a block of rows over a tile: scores become weights exp(logit - running maximum),
// and `rescale` is what all sums so far are multiplied by where the maximum rose. A hidden token's weight is exactly 0,
// and a tile that the row does not see changes nothing but a rounding to the same value. The rows take each stage
// together: a row alone would wait for every one.
template <class Kind>
RL_INLINE void online_softmax(const Attention& a, AttentionRows& rows, const Tile& tile, const RowBlock& block) {
  const int64_t begin = block.groups.begin / 2 * kPieceVectors, end = (block.groups.end + 1) / 2 * kPieceVectors;
  BlockState state{};
  raise_maxima<Kind>(a, rows, tile, block, begin, end, state);
  Floats largest[Kind::kRows] = {};
  for (int64_t r = 0; r < block.count; r++) {
    const int64_t row = block.first + r;
    float* scores = rows.scores + r * kTileTokens;
    [[maybe_unused]] uint32_t* to = rows.weights + row * kTileTokens;
    const Floats factor = splat(state.factor[r]), maximum = splat(state.maximum[r]);
    Floats total{};
    for (int64_t at = begin; at < end; at += kPieceVectors) {
      Piece weights;
      RL_UNROLL for (int i = 0; i < kPieceVectors; i++)
        weights[i] = exp2_nonpositive(fma(load<Floats>(scores + (at + i) * kLanes), factor, -maximum));
      if constexpr (Kind::kScaled)
        largest[r] = max(scale_weights(tile, at, weights, scores, total), largest[r]);
      else
        total += store_weights(Kind{}, to + at * kLanes * Kind::kRowWords / Kind::kElements, weights);
    }
    float* sums = rows.weight_sums + row * kGroup;
    store(sums, fma(load<Floats>(sums), splat(state.rescale[r]), total));
    rows.rescale[row] = state.rescale[r], rows.maximum[row] = state.maximum[r];
  }
  if constexpr (Kind::kScaled) round_weights<Kind>(rows, block.first, block.count, begin, end, largest);
}

}  // namespace ridgeline::RIDGELINE_LEVEL
