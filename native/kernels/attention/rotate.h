// The rotation of heads whose entries have few bits: Hadamard matrices along the diagonal, as wide as the largest power of
// two that divides a head. One large entry of a key becomes a part of all, so a token's scale suits every entry; queries
// turn alike, and products stay what they were. Not divided by its length, so a rotation there and back multiplies by
// `rotation_width`, exactly.
#pragma once

#include <utility>

#include "kernels/simd.h"
#include "kernels/types.h"

namespace ridgeline::RIDGELINE_LEVEL {

RL_INLINE int64_t rotation_width(int64_t width) { return width & -width; }

template <int Distance, class Vector, int... Lane>
RL_INLINE Vector cross_lanes(Vector v, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(v, v, (Lane ^ Distance)...);
}

// The sign bit in lanes whose number has the bit of `Distance`.
template <int Distance, int... Lane>
RL_INLINE Words odd_signs(std::integer_sequence<int, Lane...>) {
  return Words{(Lane & Distance ? 0x80000000u : 0u)...};
}

// Sums of lanes `Distance` apart in the lower of them, differences in the upper, for every distance below `block`.
template <int Distance = 1>
RL_INLINE Floats rotate_lanes(Floats v, int64_t block) {
  if constexpr (Distance < kLanes) {
    constexpr std::make_integer_sequence<int, kLanes> kEach{};
    if (Distance >= block) return v;
    v = cross_lanes<Distance>(v, kEach) + (Floats)((Words)v ^ odd_signs<Distance>(kEach));
    return rotate_lanes<Distance * 2>(v, block);
  }
  return v;
}

// Rotates `width` entries in place; there is room for a multiple of 16. No part of a caller's sums: not inlined, so that
// no product there is fused into a sum here.
static __attribute__((noinline)) void rotate(float* x, int64_t width) {
  const int64_t block = rotation_width(width);
  for (int64_t d = 0; d < width; d += kLanes) store(x + d, rotate_lanes(load<Floats>(x + d), block));
  for (int64_t half = kLanes; half < block; half *= 2)
    for (int64_t begin = 0; begin < width; begin += 2 * half)
      for (int64_t d = begin; d < begin + half; d += kLanes) {
        const Floats low = load<Floats>(x + d), high = load<Floats>(x + d + half);
        store(x + d, low + high), store(x + d + half, low - high);
      }
}

// Rotates a copy of `width` entries and returns it; zeros behind it, up to a multiple of 16.
RL_INLINE const float* rotate_copy(const float* x, float* to, int64_t width) {
  for (int64_t d = width; d < (width + 15) / 16 * 16; d++) to[d] = 0;
  __builtin_memcpy(to, x, (size_t)width * 4);
  rotate(to, width);
  return to;
}

}  // namespace ridgeline::RIDGELINE_LEVEL
