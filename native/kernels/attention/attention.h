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
  float* to = rows.scores + group * kGroup;
  product<Kind, Rows, Panels>(
      rows.queries + first * rows.query_stride, rows.query_stride, panels, ahead, 1, a.shape.dims / Kind::kElements,
      [&](int r, int) {
        if constexpr (kIsInteger<Kind>) return splat_int(rows.query_bias[first + r]);
        else return Floats{};
      },
      [&](int r, int p, auto sum) {
        if constexpr (Kind::kScaled)
          store(to + r * kTileTokens + p * kLanes,
                __builtin_convertvector(sum, Floats) *
                    bf16_low(load_shorts(tile.key_scales[group + p / kParts] + p % kParts * kLanes)));
        else
          store(to + r * kTileTokens + p * kLanes, sum);
      });
}

// outputs = outputs * rescale + weights . values, for panels [panel, panel + Panels) of dims.
template <class Kind, int Rows, int Panels>
static void accumulate_values(const Attention& a, AttentionRows& rows, const Tile& tile, const Tile& next,
                              Groups groups, int64_t first, int64_t panel) {
  const uint8_t *panels[kTileGroups][kWidth], *ahead[kTileGroups][kWidth];
  const uint8_t *const(&from)[kTileGroups] = kIsFine<Kind> ? tile.fine : tile.values;
  const uint8_t *const(&wanted)[kTileGroups] = kIsFine<Kind> ? next.fine : next.values;
  const int64_t stride = kIsFine<Kind> ? a.shape.fine_panel_bytes() : a.value_panel_stride;
  for (int64_t g = groups.begin; g < groups.end; g++)
    for (int p = 0; p < Panels; p++) {
      const int64_t offset = (panel - (kIsFine<Kind> ? 0 : a.shape.fine_panels) + p) * stride;
      panels[g - groups.begin][p] = from[g] + offset, ahead[g - groups.begin][p] = wanted[g] + offset;
    }
  constexpr int64_t kSteps = kGroup / Kind::kElements;
  const int64_t skipped = groups.begin * kSteps * Kind::kRowWords;
  float* outputs = rows.outputs + first * a.shape.value_dims + panel * kGroup;
  product<Kind, Rows, Panels>(
      rows.weights + first * kTileTokens + skipped, kTileTokens, panels, ahead, groups.end - groups.begin, kSteps,
      [&](int r, int p) {
        if constexpr (kIsInteger<Kind>) return splat_int(rows.weight_bias[first + r] * (kIsFine<Kind> ? 2 : 1));
        else if constexpr (Kind::kScaled) return Floats{};
        else return load<Floats>(outputs + r * a.shape.value_dims + p * kLanes) * rows.rescale[first + r];
      },
      [&](int r, int p, auto sum) {
        float* to = outputs + r * a.shape.value_dims + p * kLanes;
        if constexpr (Kind::kScaled) {
          const Floats before = load<Floats>(to) * rows.rescale[first + r];
          const float scale = rows.weight_scale[first + r] * (kIsFine<Kind> ? 0.5f : 1.0f);
          store(to, fma(__builtin_convertvector(sum, Floats), splat(scale), before));
        } else {
          store(to, sum);
        }
      });
}

// Calls call.operator()<P>(at) for runs of P = kWidth, then fewer panels, that make up [begin, end).
template <int Panels = kWidth, class Call>
RL_INLINE void with_panels(int64_t begin, int64_t end, Call call) {
  for (; begin + Panels <= end; begin += Panels) call.template operator()<Panels>(begin);
  if constexpr (Panels > 1) with_panels<Panels / 2>(begin, end, call);
}

template <class Kind>
RL_INLINE RowBlock row_block(const Attention& a, const AttentionRows& rows, const Tile& tile, int64_t block) {
  const int64_t first = block * Kind::kRows, left = rows.count - first;
  return {first, left < Kind::kRows ? left : Kind::kRows,
          groups_of(a, tile.index, rows.block_begin[block], rows.block_end[block])};
}

// Memory wanted after the tile that is computed: the next tile, and step rows, some of them with every tile.
struct Ahead {
  Tile tile;             // of this part of the attention, or the first one of the next
  StepRows out, queries;  // where results will go, and what the next part begins with
  int64_t turn, turns;    // rows r with r % turns == turn are fetched; a power of two

  void fetch_rows(const RowBlock& block) const {
    if (turn >= turns) return;
    for (int64_t r = block.first + ((turn - block.first) & (turns - 1)); r < block.first + block.count; r += turns)
      out.fetch(r), queries.fetch(r);
  }
};

// One tile for all rows. Groups that a block of rows does not see are left out.
template <class Kind>
static void run_tile(const Attention& a, AttentionRows& rows, const Tile& tile, const Ahead& ahead) {
  const int64_t num_panels = a.shape.value_dims / kGroup, blocks = (rows.count + Kind::kRows - 1) / Kind::kRows;
  for (int64_t i = 0; i < blocks; i++) {
    const RowBlock block = row_block<Kind>(a, rows, tile, i);
    const Tile& wanted = i + 1 == blocks ? ahead.tile : tile;
    ahead.fetch_rows(block);
    if (block.groups.begin >= block.groups.end) continue;
    with_rows<Kind::kRows>(block.count, [&]<int Rows>() {
      with_panels(block.groups.begin, block.groups.end, [&]<int Panels>(int64_t group) {
        score_rows<KeysOf<Kind>, Rows, Panels>(a, rows, tile, wanted, block.first, group);
      });
    });
    online_softmax<Kind>(a, rows, tile, block);
  }
  for (int64_t i = 0; i < blocks; i++) {
    const RowBlock block = row_block<Kind>(a, rows, tile, i);
    const Tile& wanted = i + 1 == blocks ? ahead.tile : tile;
    if (block.groups.begin >= block.groups.end) continue;
    with_rows<Kind::kRows>(block.count, [&]<int Rows>() {
      if constexpr (kIsRotated<Kind>)
        with_panels(0, a.shape.fine_panels, [&]<int Panels>(int64_t panel) {
          accumulate_values<Int5, Rows, Panels>(a, rows, tile, wanted, block.groups, block.first, panel);
        });
      with_panels(a.shape.fine_panels, num_panels, [&]<int Panels>(int64_t panel) {
        accumulate_values<Kind, Rows, Panels>(a, rows, tile, wanted, block.groups, block.first, panel);
      });
    });
  }
}

// Rows [begin, begin + rows.count) of the call, row = (query row of the span) * group_heads + head of the group.
template <class Kind>
static void start_rows(const Attention& a, AttentionRows& rows, int64_t begin, const float* q, int64_t q_stride) {
  const StepRows queries{&a, q, q_stride, a.layout.head_dim, begin, rows.count};
  for (int64_t r = 0; r < rows.count; r++) queries.fetch(r);
  const int64_t head_dim = a.layout.head_dim, width = round_up(head_dim, kPanel);
  alignas(64) float padded[kMaxHeadDim];
  for (int64_t d = head_dim; d < width; d++) padded[d] = 0;
  rows.query_stride = width * Kind::kRowWords / Kind::kElements;
  int64_t row = begin / a.group_heads, head = begin % a.group_heads;
  for (int64_t r = 0; r < rows.count; r++, head++) {
    if (head == a.group_heads) head = 0, row++;
    const int64_t query_head = a.head * a.group_heads + head;
    const float* query = q + (a.span.first_row + row) * q_stride + query_head * head_dim;
    if (width != head_dim || kIsRotated<Kind>) query = (float*)__builtin_memcpy(padded, query, (size_t)head_dim * 4);
    if (kIsRotated<Kind>) rotate(padded, head_dim);
    set_query(KeysOf<Kind>{}, rows, r, query, width, a.spec.scale * kLog2E / (kIsRotated<Kind> ? rotation_width(head_dim) : 1));
    if (head == 0 || r == 0) visible(a, row, rows.visible_begin[r], rows.visible_end[r]);
    else rows.visible_begin[r] = rows.visible_begin[r - 1], rows.visible_end[r] = rows.visible_end[r - 1];
    rows.position[r] = span_start(a.span) + row;
    rows.slope[r] = a.spec.slopes ? a.spec.slopes[query_head] * kLog2E : 0.0f;
    rows.maximum[r] = kNoMaximum;
  }
  __builtin_memset(rows.outputs, 0, (size_t)(rows.count * a.shape.value_dims) * 4);
  __builtin_memset(rows.weight_sums, 0, (size_t)(rows.count * kGroup) * 4);
}

// The positions that any row sees; of every block of rows too.
template <class Kind>
RL_INLINE void find_visible(AttentionRows& rows, int64_t& begin, int64_t& end) {
  begin = rows.visible_begin[0], end = rows.visible_end[0];
  for (int64_t r = 0; r < rows.count; r++) {
    int64_t &block_begin = rows.block_begin[r / Kind::kRows], &block_end = rows.block_end[r / Kind::kRows];
    if (r % Kind::kRows == 0) block_begin = rows.visible_begin[r], block_end = rows.visible_end[r];
    block_begin = rows.visible_begin[r] < block_begin ? rows.visible_begin[r] : block_begin;
    block_end = rows.visible_end[r] > block_end ? rows.visible_end[r] : block_end;
    begin = block_begin < begin ? block_begin : begin;
    end = block_end > end ? block_end : end;
  }
}

constexpr int64_t kTurns = 4;  // tiles over which the fetching of rows is spread: each row is a page of its own

// `after` is where the next part begins, if there is one.
template <class Kind>
static void run_rows(const Attention& a, AttentionRows& rows, Ahead& ahead, const Tile* after) {
  int64_t begin, end;
  find_visible<Kind>(rows, begin, end);
  if (begin >= end) return;
  const int64_t tile_tokens = kTileGroups * a.group_tokens, first = begin / tile_tokens;
  const int64_t last = (end - 1) / tile_tokens;
  Tile tile = locate(a, first, begin, end);
  ahead.turns = last - first + 1 < kTurns ? last - first < 1 ? 1 : 2 : kTurns;
  for (int64_t index = first; index <= last; index++) {
    ahead.turn = index - first;
    ahead.tile = index < last ? locate(a, index + 1, begin, end) : after ? *after : tile;
    if (index == last && after) fetch_rest(a, tile, *after);
    if (a.layout.values_in_keys) transpose_keys<Kind>(a, rows, tile);
    run_tile<Kind>(a, rows, tile, ahead);
    tile = ahead.tile;
  }
}

// out = values * factor for the head's true width: its neighbours are other threads' to write. AVX512-BF16 takes
// subnormal sums for 0, but only where a tile is multiplied: with `settle` that is done once more, for all rows.
template <bool settle = false>
RL_INLINE void write_scaled(float* out, const float* values, int64_t width, float factor) {
  const auto settled = [](Floats v) { return settle ? dot_bf16(v, Ints{}, Ints{}) : v; };
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) store(out + d, settled(load<Floats>(values + d)) * factor);
  if (d == width) return;
  alignas(64) float rest[kLanes];
  store(rest, settled(load<Floats>(values + d)) * factor);
  __builtin_memcpy(out + d, rest, (size_t)(width - d) * 4);
}

RL_INLINE float exp2_scalar(float x) { return exp2_nonpositive(splat(x))[0]; }

// What turns sums around `maximum` into the result: 1 / (their weights and the head's sink), 0 where nothing was seen.
RL_INLINE float normalizer(const AttentionSpec& spec, int64_t head, float maximum, float total) {
  float shrink = 1.0f;
  if (spec.sinks) {
    const float sink = spec.sinks[head] * kLog2E;
    const float highest = sink > maximum ? sink : maximum;
    shrink = exp2_scalar(maximum - highest);
    total = total * shrink + exp2_scalar(sink - highest);
  }
  return total == 0.0f ? 0.0f : shrink / total;
}

template <class Kind>
static void finish_rows(const Attention& a, AttentionRows& rows, int64_t begin, float* out, int64_t out_stride,
                        float* partial) {
  const int64_t width = a.layout.value_dim;
  int64_t row = begin / a.group_heads, head = begin % a.group_heads;
  for (int64_t r = 0; r < rows.count; r++, head++) {
    if (head == a.group_heads) head = 0, row++;
    float* values = rows.outputs + r * a.shape.value_dims;
    if (kIsRotated<Kind>) rotate(values, width);
    const float turned = kIsRotated<Kind> ? 1.0f / rotation_width(width) : 1.0f;
    const auto write = write_scaled<Kind::kElements == 2>;
    const Floats sums = load<Floats>(rows.weight_sums + r * kGroup);
    const float total = fold_lanes(sums, added<Floats>)[0];
    if (partial) {
      float* to = partial + (begin + r) * (2 + width);
      to[0] = rows.maximum[r], to[1] = total;
      write(to + 2, values, width, turned);
    } else {
      const int64_t query_head = a.head * a.group_heads + head;
      write(out + (a.span.first_row + row) * out_stride + query_head * width, values, width,
            normalizer(a.spec, query_head, rows.maximum[r], total) * turned);
    }
  }
}

// Where the queries and the results of one call are.
struct AttentionBuffers {
  const float* q;
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  float* partial;
};

template <class Kind>
static void attend_kind(const Attention& a, const Attention* next, AttentionRows& rows, const AttentionBuffers& at) {
  Tile after;
  const bool fetches = next && first_tile(*next, after);
  for (int64_t first = a.row_begin; first < a.row_end; first += kMaxRows) {
    const bool is_last = first + kMaxRows >= a.row_end;
    rows.count = is_last ? a.row_end - first : kMaxRows;
    start_rows<Kind>(a, rows, first, at.q, at.q_stride);
    Ahead ahead{};
    if (!at.partial) ahead.out = {&a, at.out, at.out_stride, a.layout.value_dim, first, rows.count};
    if (is_last && fetches)
      ahead.queries = {next, at.q, at.q_stride, a.layout.head_dim, next->row_begin, next->row_end - next->row_begin};
    run_rows<Kind>(a, rows, ahead, is_last && fetches ? &after : nullptr);
    finish_rows<Kind>(a, rows, first, at.out, at.out_stride, at.partial);
  }
}

static inline void attend(const AttentionSpec& spec, const KvMemory& memory, const AttentionPart& part,
                          const AttentionPart* next, const float* q, int64_t q_stride, float* out, int64_t out_stride,
                          float* partial, void* scratch) {
  const Attention a = attention_of(spec, memory, part);
  const Attention b = next ? attention_of(spec, memory, *next) : a;
  AttentionRows& rows = *(AttentionRows*)scratch;
  for (int64_t lane = 0; lane < kTileTokens; lane++) {
    const int64_t token = lane / kGroup * a.group_tokens + lane % kGroup;
    rows.lane_token[lane] = (int32_t)(lane % kGroup < a.group_tokens ? token : 2 * kTileTokens);
  }
  // Partials count rows from row_begin.
  if (partial) partial -= a.row_begin * (2 + a.layout.value_dim);
  const AttentionBuffers at{q, q_stride, out, out_stride, partial};
  switch (a.layout.kind) {
    case KvKind::f32:
      return attend_kind<F32>(a, next ? &b : nullptr, rows, at);
    case KvKind::bf16:
#if defined(__AVX512BF16__)
      if (!spec.float32) return attend_kind<Bf16Pairs>(a, next ? &b : nullptr, rows, at);
#endif
      return attend_kind<Bf16Floats>(a, next ? &b : nullptr, rows, at);
    case KvKind::int8:
      return attend_kind<Int8>(a, next ? &b : nullptr, rows, at);
    case KvKind::fp8:
#if defined(__AVX512BF16__)
      if (!spec.float32) return attend_kind<Fp8Pairs>(a, next ? &b : nullptr, rows, at);
#endif
      return attend_kind<Fp8Floats>(a, next ? &b : nullptr, rows, at);
    case KvKind::int4:
      return attend_kind<Int4>(a, next ? &b : nullptr, rows, at);
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
      const float factor = exp2_scalar(part[0] - highest);
      total += part[1] * factor;
      for (int64_t d = 0; d < width; d++) sums[d] += part[2 + d] * factor;
    }
    const int64_t query_head = head * group_heads + r % group_heads;
    write_scaled(out + (span.first_row + row_begin + r / group_heads) * out_stride + query_head * width, sums,
                 width, normalizer(spec, query_head, highest, total));
  }
}

}  // namespace ridgeline::RIDGELINE_LEVEL
