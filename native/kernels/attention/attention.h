// Attention over the paged cache with a running softmax (FlashAttention, arXiv 2205.14135), for any number of rows.
//
// A row is one query head of one query token; rows that share a KV head share every load of keys and values. A row's
// result depends on its own query and keys alone: tiles lie at fixed positions, sums run in the order of the tokens,
// and a hidden token adds exactly 0. AMX levels run this code too: its panels are tile operands, but at decode's few
// rows the stream of the cache is the limit, not the products.
#pragma once

#include "kernels/attention/latent.h"
#include "kernels/attention/softmax.h"

namespace ridgeline::RIDGELINE_LEVEL {

// q . k of rows [first, first + Rows) with the tile's visible groups.
template <class Kind, int Rows, int Panels>
static void score_rows(const Attention& a, AttentionRows& rows, const Tile& tile, const Tile& next, int64_t first,
                       int64_t group) {
  const uint8_t *panels[1][kWidth], *ahead[1][kWidth];
  for (int p = 0; p < Panels; p++) panels[0][p] = tile.keys[group + p], ahead[0][p] = next.keys[group + p];
  float* to = rows.scores + first * kTileTokens + group * kGroup;
  product<Kind, Rows, Panels>(
      rows.queries + first * rows.query_stride, rows.query_stride, panels, ahead, 1, a.shape.dims / Kind::kElements,
      [&](int r, int) {
        if constexpr (Kind::kElements == 4) return splat_int(rows.query_bias[first + r]);
        else return Floats{};
      },
      [&](int r, int p, auto sum) {
        if constexpr (Kind::kElements == 4) store(to + r * kTileTokens + p * kLanes, to_floats(sum));
        else store(to + r * kTileTokens + p * kLanes, sum);
      });
}

// outputs = outputs * rescale + weights . values, for panels [panel, panel + Panels) of dims.
template <class Kind, int Rows, int Panels>
static void accumulate_values(const Attention& a, AttentionRows& rows, const Tile& tile, const Tile& next,
                              int64_t first, int64_t panel) {
  const uint8_t *panels[kTileGroups][kWidth], *ahead[kTileGroups][kWidth];
  for (int64_t g = tile.begin; g < tile.end; g++)
    for (int p = 0; p < Panels; p++) {
      const int64_t offset = (panel + p) * a.value_panel_stride;
      panels[g - tile.begin][p] = tile.values[g] + offset, ahead[g - tile.begin][p] = next.values[g] + offset;
    }
  constexpr int64_t kSteps = kGroup / Kind::kElements;
  const int64_t skipped = tile.begin * kSteps * Kind::kRowWords;
  float* outputs = rows.outputs + first * a.shape.value_dims + panel * kGroup;
  product<Kind, Rows, Panels>(
      rows.weights + first * kTileTokens + skipped, kTileTokens, panels, ahead, tile.end - tile.begin, kSteps,
      [&](int r, int p) {
        if constexpr (Kind::kElements == 4) return splat_int(rows.weight_bias[first + r]);
        else return load<Floats>(outputs + r * a.shape.value_dims + p * kLanes) * rows.rescale[first + r];
      },
      [&](int r, int p, auto sum) {
        float* to = outputs + r * a.shape.value_dims + p * kLanes;
        if constexpr (Kind::kElements == 4) {
          const Floats before = load<Floats>(to) * rows.rescale[first + r];
          store(to, fma(to_floats(sum), splat(rows.weight_scale[first + r]), before));
        } else {
          store(to, sum);
        }
      });
}

// One tile for all rows.
template <class Kind>
static void run_tile(const Attention& a, AttentionRows& rows, const Tile& tile, const Tile& next) {
  const int64_t num_panels = a.shape.value_dims / kGroup;
  for (int64_t first = 0; first < rows.count; first += Kind::kRows) {
    const int64_t count = rows.count - first < Kind::kRows ? rows.count - first : Kind::kRows;
    with_rows<Kind::kRows>(count, [&]<int Rows>() {
      int64_t group = tile.begin;
      for (; group + kWidth <= tile.end; group += kWidth)
        score_rows<Kind, Rows, kWidth>(a, rows, tile, next, first, group);
      for (; group < tile.end; group++) score_rows<Kind, Rows, 1>(a, rows, tile, next, first, group);
    });
    for (int64_t r = first; r < first + count; r++) online_softmax<Kind>(a, rows, tile, r);
  }
  for (int64_t first = 0; first < rows.count; first += Kind::kRows) {
    const int64_t count = rows.count - first < Kind::kRows ? rows.count - first : Kind::kRows;
    with_rows<Kind::kRows>(count, [&]<int Rows>() {
      int64_t panel = 0;
      for (; panel + kWidth <= num_panels; panel += kWidth)
        accumulate_values<Kind, Rows, kWidth>(a, rows, tile, next, first, panel);
      for (; panel < num_panels; panel++) accumulate_values<Kind, Rows, 1>(a, rows, tile, next, first, panel);
    });
  }
}

// Rows [begin, begin + rows.count) of the call, row = (query row of the span) * group_heads + head of the group.
template <class Kind>
static void start_rows(const Attention& a, AttentionRows& rows, int64_t begin, const float* q, int64_t q_stride) {
  const int64_t head_dim = a.layout.head_dim, width = round_up(head_dim, kPanel);
  alignas(64) float query[kMaxHeadDim] = {};
  rows.query_stride = width / (Kind::kElements == 1 ? 1 : 2);
  for (int64_t r = 0; r < rows.count; r++) {
    const int64_t row = (begin + r) / a.group_heads, head = a.head * a.group_heads + (begin + r) % a.group_heads;
    __builtin_memcpy(query, q + (a.span.first_row + row) * q_stride + head * head_dim, (size_t)head_dim * 4);
    set_query(Kind{}, rows, r, query, width, a.spec.scale);
    visible(a, row, rows.visible_begin[r], rows.visible_end[r]);
    rows.position[r] = span_start(a.span) + row;
    rows.slope[r] = a.spec.slopes ? a.spec.slopes[head] : 0.0f;
    rows.maximum[r] = kNoMaximum;
  }
  __builtin_memset(rows.outputs, 0, (size_t)(rows.count * a.shape.value_dims) * 4);
  __builtin_memset(rows.weight_sums, 0, (size_t)(rows.count * kGroup) * 4);
}

template <class Kind>
static void run_rows(const Attention& a, AttentionRows& rows) {
  int64_t begin = rows.visible_begin[0], end = rows.visible_end[0];
  for (int64_t r = 1; r < rows.count; r++) {
    begin = rows.visible_begin[r] < begin ? rows.visible_begin[r] : begin;
    end = rows.visible_end[r] > end ? rows.visible_end[r] : end;
  }
  if (begin >= end) return;
  const int64_t tile_tokens = kTileGroups * a.group_tokens;
  const int64_t last = (end - 1) / tile_tokens;
  Tile tile = locate(a, begin / tile_tokens, begin, end);
  for (int64_t index = begin / tile_tokens; index <= last; index++) {
    const Tile next = index < last ? locate(a, index + 1, begin, end) : tile;
    if (a.layout.values_in_keys) transpose_keys<Kind>(a, rows, tile);
    run_tile<Kind>(a, rows, tile, next);
    tile = next;
  }
}

// out = values * factor for the head's true width: its neighbours are other threads' to write.
RL_INLINE void write_scaled(float* out, const float* values, int64_t width, float factor) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) store(out + d, load<Floats>(values + d) * factor);
  for (; d < width; d++) out[d] = values[d] * factor;
}

RL_INLINE float exp_scalar(float x) { return exp(splat(x))[0]; }

// What turns sums around `maximum` into the result: 1 / (their weights and the head's sink), 0 where nothing was seen.
RL_INLINE float normalizer(const AttentionSpec& spec, int64_t head, float maximum, float total) {
  float shrink = 1.0f;
  if (spec.sinks) {
    const float sink = spec.sinks[head];
    const float highest = sink > maximum ? sink : maximum;
    shrink = exp_scalar(maximum - highest);
    total = total * shrink + exp_scalar(sink - highest);
  }
  return total == 0.0f ? 0.0f : shrink / total;
}

template <class Kind>
static void finish_rows(const Attention& a, AttentionRows& rows, int64_t begin, float* out, int64_t out_stride,
                        float* partial) {
  const int64_t width = a.layout.value_dim;
  for (int64_t r = 0; r < rows.count; r++) {
    float* values = rows.outputs + r * a.shape.value_dims;
    // AVX512-BF16 takes subnormal sums for 0, but only where a tile is multiplied: do it once more for all.
    if constexpr (Kind::kElements == 2)
      for (int64_t d = 0; d < a.shape.value_dims; d += kLanes)
        store(values + d, dot_bf16(load<Floats>(values + d), Ints{}, Ints{}));
    float total = sum(load<Floats>(rows.weight_sums + r * kGroup));
    const int64_t row = (begin + r) / a.group_heads, head = a.head * a.group_heads + (begin + r) % a.group_heads;
    if (partial) {
      float* to = partial + (begin + r) * (2 + width);
      to[0] = rows.maximum[r], to[1] = total;
      write_scaled(to + 2, values, width, 1.0f);
    } else {
      write_scaled(out + (a.span.first_row + row) * out_stride + head * width, values, width,
                   normalizer(a.spec, head, rows.maximum[r], total));
    }
  }
}

template <class Kind>
static void attend_kind(const Attention& a, AttentionRows& rows, const float* q, int64_t q_stride, float* out,
                        int64_t out_stride, int64_t begin, int64_t end, float* partial) {
  for (int64_t first = begin; first < end; first += kMaxRows) {
    rows.count = end - first < kMaxRows ? end - first : kMaxRows;
    start_rows<Kind>(a, rows, first, q, q_stride);
    run_rows<Kind>(a, rows);
    finish_rows<Kind>(a, rows, first, out, out_stride, partial);
  }
}

static inline void attend(const AttentionSpec& spec, const KvMemory& memory, const SpanView& span, const float* q,
                          int64_t q_stride, float* out, int64_t out_stride, int32_t head, int64_t row_begin,
                          int64_t row_end, int64_t key_begin, int64_t key_end, float* partial, void* scratch) {
  const KvLayout& layout = memory.layout;
  const KvShape shape = kv_shape(layout);
  const uint8_t* keys = slice_of(memory, shape, 0, head);
  const int64_t group_heads = spec.num_heads / layout.num_heads;
  const int64_t group_tokens = layout.block_size < kGroup ? layout.block_size : kGroup;
  const Attention a{spec, layout, shape, span, keys, keys + shape.keys.num_bytes, head, group_heads,
                    group_tokens, __builtin_ctzll((uint64_t)group_tokens), __builtin_ctz((uint32_t)layout.block_size),
                    layout.num_heads * shape.slice_bytes(),
                    layout.values_in_keys ? kGroup * kGroup * shape.element_bytes : shape.value_panel_bytes(),
                    key_begin, key_end};
  AttentionRows& rows = *(AttentionRows*)scratch;
  for (int64_t lane = 0; lane < kTileTokens; lane++) {
    const int64_t token = lane / kGroup * a.group_tokens + lane % kGroup;
    rows.lane_token[lane] = (int32_t)(lane % kGroup < a.group_tokens ? token : 2 * kTileTokens);
  }
  // Partials count rows from row_begin.
  if (partial) partial -= row_begin * group_heads * (2 + layout.value_dim);
  const int64_t begin = row_begin * group_heads, end = row_end * group_heads;
  switch (layout.kind) {
    case KvKind::f32:
      return attend_kind<F32>(a, rows, q, q_stride, out, out_stride, begin, end, partial);
    case KvKind::bf16:
      return attend_kind<Bf16>(a, rows, q, q_stride, out, out_stride, begin, end, partial);
    case KvKind::int8:
      return attend_kind<Int8>(a, rows, q, q_stride, out, out_stride, begin, end, partial);
  }
}

// Sums of parts around different maxima, brought to the largest of them.
static inline void merge(const AttentionSpec& spec, const KvMemory& memory, const SpanView& span, float* out,
                         int64_t out_stride, int32_t head, int64_t row_begin, int64_t row_end, const float* partials,
                         int64_t num_parts, int64_t part_stride) {
  const int64_t width = memory.layout.value_dim, group_heads = spec.num_heads / memory.layout.num_heads;
  for (int64_t r = 0; r < (row_end - row_begin) * group_heads; r++) {
    const float* parts = partials + r * (2 + width);
    float highest = kNoMaximum, total = 0;
    for (int64_t i = 0; i < num_parts; i++)
      highest = parts[i * part_stride] > highest ? parts[i * part_stride] : highest;
    alignas(64) float sums[kMaxHeadDim] = {};
    for (int64_t i = 0; i < num_parts; i++) {
      const float* part = parts + i * part_stride;
      const float factor = exp_scalar(part[0] - highest);
      total += part[1] * factor;
      for (int64_t d = 0; d < width; d++) sums[d] += part[2 + d] * factor;
    }
    const int64_t query_head = head * group_heads + r % group_heads;
    write_scaled(out + (span.first_row + row_begin + r / group_heads) * out_stride + query_head * width, sums,
                 width, normalizer(spec, query_head, highest, total));
  }
}

}  // namespace ridgeline::RIDGELINE_LEVEL
