// Vectors that are filled in part, and vectors whose lanes change places.
#pragma once

#include <utility>

#include "kernels/simd.h"

namespace ridgeline::RIDGELINE_LEVEL {

// The first `count` floats at `from`, then zeros; all lanes from kLanes on. Reads nothing beyond them.
RL_INLINE Floats load_first(const float* from, int64_t count) {
  if (count >= kLanes) return load<Floats>(from);
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#else
  Floats v{};
  for (int lane = 0; lane < kLanes; lane++)
    if (lane < count) v[lane] = from[lane];
  return v;
#endif
}

// The first `count` lanes, all from kLanes on.
RL_INLINE void store_first(float* to, Floats v, int64_t count) {
  if (count >= kLanes) return store(to, v);
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)v);
#else
  for (int lane = 0; lane < kLanes; lane++)
    if (lane < count) to[lane] = v[lane];
#endif
}

// Calls body(offset, count) over whole vectors of a row, and over the rest of it.
template <class Body>
RL_INLINE void for_vectors(int64_t width, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i, (int64_t)kLanes);
  if (i < width) body(i, width - i);
}

// For each lane l: where l has bit `Bit`, lane l ^ Swap of b, else of a, for Swap of its own for either.
template <int Bit, int SwapA, int SwapB, int... Lane>
RL_INLINE Floats woven(Floats a, Floats b, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(a, b, (Lane & Bit ? kLanes + (Lane ^ SwapB) : Lane ^ SwapA)...);
}

// The sums of kLanes vectors: lane l is that of rows[l], by a binary tree.
template <int Distance = kLanes / 2>
RL_INLINE Floats sums_of(Floats* rows) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 16
  for (int i = 0; i < Distance; i++) {
    const Floats a = rows[i], b = rows[i + Distance];
    rows[i] = woven<Distance, 0, 0>(a, b, lanes) + woven<Distance, Distance, Distance>(a, b, lanes);
  }
  if constexpr (Distance > 1) return sums_of<Distance / 2>(rows);
  else return rows[0];
}

// Lane j of rows[i] becomes lane i of rows[j].
template <int Distance = kLanes / 2>
RL_INLINE void transpose(Floats* rows) {
  constexpr auto lanes = std::make_integer_sequence<int, kLanes>{};
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i++) {
    if (i & Distance) continue;
    const Floats a = rows[i], b = rows[i + Distance];
    rows[i] = woven<Distance, 0, Distance>(a, b, lanes);
    rows[i + Distance] = woven<Distance, Distance, 0>(a, b, lanes);
  }
  if constexpr (Distance > 1) transpose<Distance / 2>(rows);
}

}  // namespace ridgeline::RIDGELINE_LEVEL
