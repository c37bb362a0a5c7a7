// Latents: keys whose first entries are the values. A panel of keys has tokens side by side and a panel of values has
// dims, so a tile's values are transposed from its keys in the thread's own memory, once for all rows.
#pragma once

#include "kernels/attention/state.h"

namespace ridgeline::RIDGELINE_LEVEL {

// The second half of each pair of words changes places with the first half of the next: [dim][token] within 64 bits.
template <int... Half>
RL_INLINE Ints pair_tokens(Ints v, std::integer_sequence<int, Half...>) {
  const Shorts halves = (Shorts)v;
  return (Ints)__builtin_shufflevector(halves, halves, (Half / 4 * 4 + Half % 2 * 2 + Half % 4 / 2)...);
}

template <int Bit>
RL_INLINE void exchange_all(Ints (&v)[8]) {
  for (int i = 0; i < 8; i++)
    if (!(i >> (Bit - 1) & 1)) exchange<Bit>(v[i], v[i | 1 << (Bit - 1)], std::make_integer_sequence<int, kLanes>{});
}

// The steps of 16 dims of 16 tokens, from the order of keys to that of values.
template <class Kind>
RL_INLINE void transpose_steps(const uint8_t* from, uint8_t* to) {
  if constexpr (Kind::kElements == 2 && kLanes == 16) {
    Ints v[8];
    RL_UNROLL for (int i = 0; i < 8; i++)
      v[i] = pair_tokens(load<Ints>(from + i * kStepBytes), std::make_integer_sequence<int, 2 * kLanes>{});
    exchange_all<1>(v), exchange_all<2>(v), exchange_all<3>(v);
    RL_UNROLL for (int i = 0; i < 8; i++) store(to + i * kStepBytes, v[i]);
  } else if constexpr (!Kind::kScaled) {
    constexpr int64_t kWord = Kind::kElements, kBytes = 4 / kWord;
    for (int64_t token = 0; token < kGroup; token++)
      for (int64_t dim = 0; dim < kGroup; dim++)
        __builtin_memcpy(to + token / kWord * kStepBytes + dim * 4 + token % kWord * kBytes,
                         from + dim / kWord * kStepBytes + token * 4 + dim % kWord * kBytes, kBytes);
  }
}

template <class Kind>
static void transpose_keys(const Attention& a, AttentionRows& rows, Tile& tile) {
  const int64_t panel_bytes = a.value_panel_stride, group_bytes = a.shape.value_dims / kGroup * panel_bytes;
  for (int64_t g = tile.begin; g < tile.end; g++) {
    uint8_t* to = rows.values + g * group_bytes;
    for (int64_t at = 0; at < group_bytes; at += panel_bytes) transpose_steps<Kind>(tile.keys[g] + at, to + at);
    tile.values[g] = to;
  }
  for (int64_t g = 0; g < kTileGroups; g++)
    if (g < tile.begin || g >= tile.end) tile.values[g] = tile.values[tile.begin];
}

}  // namespace ridgeline::RIDGELINE_LEVEL
