// What attention keeps for the rows it computes together, and where the tokens of a tile are.
#pragma once

#include "kernels/attention/product.h"

namespace ridgeline::RIDGELINE_LEVEL {

inline constexpr int64_t kMaxRows = 48;    // a row is one query head of one query token
inline constexpr int64_t kTileGroups = 8;  // groups of 16 tokens whose softmax is one update
inline constexpr int64_t kTileTokens = kTileGroups * kGroup;
inline constexpr int kTileVectors = kTileTokens / kLanes;

// Maximum of a row that has seen no key: finite, so that no difference of maxima is NaN.
inline constexpr float kNoMaximum = -3.402823466e38f;

inline constexpr float kLog2E = 1.44269504088896341f;

// One call's constants.
struct Attention {
  AttentionSpec spec;
  KvLayout layout;
  KvShape shape;
  SpanView span;
  const uint8_t *keys, *values;  // of the head, in block 0
  int64_t head;
  int64_t group_heads;   // query heads per KV head
  int64_t group_tokens;  // tokens in a group: 16, or the block size where that is smaller
  int group_shift, block_shift;  // log2 of group_tokens and of the block size
  int64_t block_stride;  // bytes between a head's slices in consecutive blocks
  int64_t value_panel_stride;  // bytes from one panel of a group's values to the next
  int64_t row_begin, row_end;  // a row is one query head of one query token of the span
  int64_t key_begin, key_end;
};

RL_INLINE Attention attention_of(const AttentionSpec& spec, const KvMemory& memory, const AttentionPart& part) {
  const KvLayout& layout = memory.layout;
  const KvShape shape = kv_shape(layout);
  const uint8_t* keys = slice_of(memory, shape, 0, part.head);
  const int64_t group_heads = spec.num_heads / layout.num_heads;
  const int64_t group_tokens = layout.block_size < kGroup ? layout.block_size : kGroup;
  const int64_t panel_stride = layout.values_in_keys ? shape.group_bytes() : shape.value_panel_bytes();
  return {spec,
          layout,
          shape,
          part.span,
          keys,
          keys + shape.keys.num_bytes,
          part.head,
          group_heads,
          group_tokens,
          __builtin_ctzll((uint64_t)group_tokens),
          __builtin_ctz((uint32_t)layout.block_size),
          layout.num_heads * shape.slice_bytes(),
          panel_stride,
          part.row_begin * group_heads,
          part.row_end * group_heads,
          part.key_begin,
          part.key_end};
}

// Rows of the step's queries or results that one part of the attention reads or writes: `count` from row `begin` on.
struct StepRows {
  const Attention* a;
  const float* from;
  int64_t stride, width;
  int64_t begin, count;

  void fetch(int64_t r) const {
    if (r >= count) return;
    const int64_t row = (uint32_t)(begin + r) / (uint32_t)a->group_heads;  // a call has far fewer than 2^32 rows
    const int64_t head = a->head * a->group_heads + begin + r - row * a->group_heads;
    const float* entries = from + (a->span.first_row + row) * stride + head * width;
    for (int64_t d = 0; d < width; d += 64 / (int64_t)sizeof(float)) __builtin_prefetch(entries + d, 0, 2);
  }
};

// The calling thread's working memory.
struct alignas(64) AttentionRows {
  uint32_t queries[kMaxRows * kMaxHeadDim];
  float scores[kGroup * kTileTokens];  // of one block of rows
  uint32_t weights[kMaxRows * kTileTokens];
  float outputs[kMaxRows * kMaxHeadDim];  // sums of weighted values
  uint8_t values[kTileTokens * kMaxHeadDim * 4];  // of a tile whose keys hold them: [groups][dims / 16][steps]
  float weight_sums[kMaxRows * kGroup];   // one sum a lane
  float maximum[kMaxRows + kGroup];  // of the logits times log2(e), as all that follows
  float rescale[kMaxRows];       // what sums so far are multiplied by since the running maximum rose
  float score_scale[kMaxRows];   // from q . k as multiplied to the logit
  float slope[kMaxRows];         // ALiBi: what a logit gains for each position
  float weight_scale[kMaxRows];  // kinds with scales: of the tile's weights
  int32_t query_bias[kMaxRows];  // integers: what the zero of the keys adds to q . k, negated
  int32_t weight_bias[kMaxRows];
  int64_t position[kMaxRows];                              // of the query
  int64_t visible_begin[kMaxRows], visible_end[kMaxRows];  // positions
  int64_t block_begin[kMaxRows], block_end[kMaxRows];      // what any row of block i of rows sees
  int32_t lane_token[kTileTokens];                         // a lane's token in the tile; past every tile where none
  int64_t count;                                           // rows
  int64_t query_stride;                                    // words
};

// Groups of 16 tokens of a tile, none where begin >= end.
struct Groups {
  int64_t begin, end;
};

// Those of tile number `index` that hold positions of [visible_begin, visible_end).
RL_INLINE Groups groups_of(const Attention& a, int64_t index, int64_t visible_begin, int64_t visible_end) {
  const int64_t first_group = index * kTileGroups;
  const int64_t low = (visible_begin >> a.group_shift) - first_group;
  const int64_t high = ((visible_end + a.group_tokens - 1) >> a.group_shift) - first_group;
  return {low > 0 ? low : 0, high < kTileGroups ? high : kTileGroups};
}

// `count` rows from row `first` on that go through products together, and the groups of a tile that they see.
struct RowBlock {
  int64_t first, count;
  Groups groups;
};

// Tokens are cut into tiles at multiples of 4 groups from position 0, so a row meets the same tiles whatever else is in
// the step. Groups outside [begin, end) are hidden from every row.
struct Tile {
  int64_t index, first_token;
  int64_t begin, end;
  const uint8_t* keys[kTileGroups];    // panel of each group
  const uint8_t* values[kTileGroups];  // first step of each group in the first panel that is not fine
  const uint8_t* fine[kTileGroups];    // and in the first fine one
  const uint16_t* key_scales[kTileGroups];
  const uint16_t* value_scales[kTileGroups];
};

RL_INLINE Tile locate(const Attention& a, int64_t index, int64_t visible_begin, int64_t visible_end) {
  Tile tile;
  const int64_t width = a.group_tokens;
  const Groups groups = groups_of(a, index, visible_begin, visible_end);
  tile.index = index;
  tile.first_token = index * kTileGroups * width;
  tile.begin = groups.begin, tile.end = groups.end;
  for (int64_t g = tile.begin; g < tile.end; g++) {
    const int64_t token = tile.first_token + g * width - a.span.first_token;
    const int64_t group = (token & (a.layout.block_size - 1)) / kGroup;
    const int64_t offset = a.span.table[token >> a.block_shift] * a.block_stride;
    tile.keys[g] = a.keys + offset + group * a.shape.key_panel_bytes();
    tile.values[g] = a.layout.values_in_keys ? tile.keys[g]  // until `transpose_keys`
                                             : a.values + offset + a.shape.fine_bytes() + group * a.shape.group_bytes();
    tile.fine[g] = a.values + offset + group * kFineBytes;
    tile.key_scales[g] = (const uint16_t*)(a.keys + offset + a.shape.keys.data_bytes) + group * kGroup;
    tile.value_scales[g] = (const uint16_t*)(a.values + offset + a.shape.values.data_bytes) + group * kGroup;
  }
  // Hidden groups point at one that is there: they are read where whole tiles are, and masked.
  for (int64_t g = 0; g < kTileGroups; g++) {
    if (g >= tile.begin && g < tile.end) continue;
    tile.keys[g] = tile.keys[tile.begin], tile.values[g] = tile.values[tile.begin];
    tile.fine[g] = tile.fine[tile.begin];
    tile.key_scales[g] = tile.key_scales[tile.begin], tile.value_scales[g] = tile.value_scales[tile.begin];
  }
  return tile;
}

RL_INLINE int64_t span_start(const SpanView& span) { return span.kv_length - span.length; }

// Positions that row `row` of the span sees, within the keys asked for. May be empty.
RL_INLINE void visible(const Attention& a, int64_t row, int64_t& begin, int64_t& end) {
  const int64_t query = span_start(a.span) + row;
  begin = a.key_begin > a.span.first_token ? a.key_begin : a.span.first_token;
  end = a.key_end < a.span.kv_length ? a.key_end : a.span.kv_length;
  const int64_t run_end = span_start(a.span) + (row / a.span.bidirectional_block + 1) * a.span.bidirectional_block;
  if (run_end < end) end = run_end;
  if (a.spec.window > 0 && query - a.spec.window + 1 > begin) begin = query - a.spec.window + 1;
  if (end < begin) end = begin;
}

// The tile that a call begins with; false where its first row sees no key.
RL_INLINE bool first_tile(const Attention& a, Tile& tile) {
  int64_t begin, end, last_begin, last_end;
  visible(a, a.row_begin / a.group_heads, begin, end);
  if (begin >= end) return false;
  visible(a, (a.row_end - 1) / a.group_heads, last_begin, last_end);
  tile = locate(a, begin / (kTileGroups * a.group_tokens), begin, last_end > end ? last_end : end);
  return true;
}

// Fetches the groups of a tile for which `tile`, which is computed before it, has no group to fetch them with.
RL_INLINE void fetch_rest(const Attention& a, const Tile& tile, const Tile& after) {
  const int64_t panel_bytes = a.shape.group_bytes();
  for (int64_t g = after.begin; g < after.end; g++) {
    if (g >= tile.begin && g < tile.end) continue;
    for (int64_t at = 0; at < a.shape.key_panel_bytes(); at += 64) __builtin_prefetch(after.keys[g] + at, 0, 2);
    if (a.layout.values_in_keys) continue;
    for (int64_t p = 0; p < a.shape.fine_panels; p++)
      for (int64_t at = 0; at < kFineBytes; at += 64)
        __builtin_prefetch(after.fine[g] + p * a.shape.fine_panel_bytes() + at, 0, 2);
    for (int64_t p = 0; p < a.shape.value_dims / kGroup - a.shape.fine_panels; p++)
      for (int64_t at = 0; at < panel_bytes; at += 64)
        __builtin_prefetch(after.values[g] + p * a.value_panel_stride + at, 0, 2);
  }
}

// Exchanges bit `Bit` of the lane number for what tells u from v.
template <int Bit, class Vector, int... Lane>
RL_INLINE void exchange(Vector& u, Vector& v, std::integer_sequence<int, Lane...>) {
  const Vector low = __builtin_shufflevector(u, v, (Lane >> Bit & 1 ? kLanes + (Lane ^ 1 << Bit) : Lane)...);
  v = __builtin_shufflevector(u, v, (Lane >> Bit & 1 ? kLanes + Lane : Lane ^ 1 << Bit)...);
  u = low;
}

// Joins lanes whose numbers agree modulo Distance by a binary tree; every one of them gets the result.
template <int Distance = 1, class Vector, class Join>
RL_INLINE Vector fold_lanes(Vector v, Join join) {
  if constexpr (Distance < kLanes)
    return fold_lanes<Distance * 2>(join(v, cross_lanes<Distance>(v, std::make_integer_sequence<int, kLanes>{})), join);
  else return v;
}

// Joins the lanes of N vectors at once, N a power of two: lane i of the result is what vector i % N folds to.
template <int N, int Left = N, class Vector, class Join>
RL_INLINE Vector fold_rows(Vector* v, Join join) {
  if constexpr (Left == 1) return fold_lanes<N>(v[0], join);
  else {
    constexpr int kHalf = Left / 2, kBit = __builtin_ctz(kHalf);
    RL_UNROLL for (int i = 0; i < kHalf; i++) {
      exchange<kBit>(v[i], v[i + kHalf], std::make_integer_sequence<int, kLanes>{});
      v[i] = join(v[i], v[i + kHalf]);
    }
    return fold_rows<N, kHalf>(v, join);
  }
}

RL_INLINE Floats larger(Floats a, Floats b) { return max(a, b); }

template <class Vector>
RL_INLINE Vector added(Vector a, Vector b) {
  return a + b;
}

// Rounds |x| <= 32767 and stores it in order; returns what was stored, also of a NaN.
RL_INLINE Ints store_int16(int16_t* to, Floats x) {
  typedef int16_t Packed __attribute__((vector_size(2 * kLanes)));
  const Packed packed = __builtin_convertvector(truncate_to_ints(round_even(x)), Packed);
  __builtin_memcpy(to, &packed, sizeof packed);
  return __builtin_convertvector(packed, Ints);
}

// A query of `width` entries, a multiple of 32, as a row of `product`.
RL_INLINE void set_query(F32, AttentionRows& rows, int64_t r, const float* q, int64_t width, float scale) {
  __builtin_memcpy(rows.queries + r * rows.query_stride, q, (size_t)width * 4);
  rows.score_scale[r] = scale;
}

#if defined(__AVX512BF16__)
RL_INLINE void set_query(Bf16Pairs, AttentionRows& rows, int64_t r, const float* q, int64_t width, float scale) {
  uint16_t* to = (uint16_t*)(rows.queries + r * rows.query_stride);
  for (int64_t d = 0; d < width; d += 2 * kLanes) store_bf16(to + d, load<Floats>(q + d), load<Floats>(q + d + kLanes));
  rows.score_scale[r] = scale;
}
#endif

RL_INLINE void set_query(Bf16Floats, AttentionRows& rows, int64_t r, const float* q, int64_t width, float scale) {
  uint32_t* to = rows.queries + r * rows.query_stride;
  for (int64_t d = 0; d < width; d += kLanes) store(to + d, bf16_bits(load<Floats>(q + d)) << 16);
  rows.score_scale[r] = scale;
}

// Stores 2 * kLanes numbers of a row of `product` from entry `at` on, and returns what integers add up to.
template <class Kind>
RL_INLINE Ints store_entries(Kind, uint32_t* row, int64_t at, Floats low, Floats high) {
  if constexpr (kIsInteger<Kind>) {
    int16_t* to = (int16_t*)row + at;
    return store_int16(to, low) + store_int16(to + kLanes, high);
  } else if constexpr (Kind::kRowWords * 2 == Kind::kElements) {
    store_bf16((uint16_t*)row + at, low, high);
  } else {
    store(row + at, low), store(row + at + kLanes, high);
  }
  return Ints{};
}

// What numbers up to `bound` are multiplied by to be a row of a kind with scales.
template <class Kind>
RL_INLINE float to_top(float bound) {
  return bound > Kind::kLeast ? Kind::kTop / bound : 0.0f;
}

// q around its largest entry, for kinds with scales. A query that is not finite gives NaN.
template <class Kind>
RL_INLINE void set_query(Kind, AttentionRows& rows, int64_t r, const float* q, int64_t width, float scale) {
  Floats max_lanes{}, poison{};
  for (int64_t d = 0; d < width; d += kLanes) {
    const Floats x = load<Floats>(q + d);
    max_lanes = max(max(x, -x), max_lanes);
    poison += x * 0.0f;
  }
  const float bound = fold_lanes(max_lanes, larger)[0], inverse = to_top<Kind>(bound);
  uint32_t* to = rows.queries + r * rows.query_stride;
  Ints total{};
  for (int64_t d = 0; d < width; d += 2 * kLanes)
    total += store_entries(Kind{}, to, d, load<Floats>(q + d) * inverse, load<Floats>(q + d + kLanes) * inverse);
  if constexpr (kIsInteger<Kind>) rows.query_bias[r] = -Kind::kZero * fold_lanes(total, added<Ints>)[0];
  rows.score_scale[r] = bound / Kind::kDivisor * scale + fold_lanes(poison, added<Floats>)[0];
}

}  // namespace ridgeline::RIDGELINE_LEVEL
