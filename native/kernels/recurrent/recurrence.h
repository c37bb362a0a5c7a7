// A recurrence over one span of a step, for some of its heads: token by token or chunk by chunk.
#pragma once

#include "kernels/recurrent/chunk.h"

namespace ridgeline::RIDGELINE_LEVEL::recurrent {

inline constexpr int64_t kFewTokens = 8;  // up to here one token after the other is faster

static inline int64_t scratch_bytes(const Recurrence& r) { return ChunkMemory::floats(r) * (int64_t)sizeof(float); }

// Calls each(part) for what blocks [begin, end) have of each head.
template <class Each>
RL_INLINE void for_parts(const Recurrence& r, int64_t begin, int64_t end, Each each) {
  const int64_t per_head = r.blocks_per_head();
  while (begin < end) {
    const int64_t head = begin / per_head, last = end < (head + 1) * per_head ? end : (head + 1) * per_head;
    const int64_t value_end = (last - head * per_head) * Recurrence::kBlock;
    each(HeadPart{head, (begin - head * per_head) * Recurrence::kBlock, value_end < r.value_size ? value_end : r.value_size});
    begin = last;
  }
}

static inline void clear(const Recurrence& r, const HeadPart& part, float* state) {
  const bool by_value = r.kind == RecurrenceKind::ssd;
  const int64_t rows = by_value ? part.width() : r.key_size, width = by_value ? r.key_size : part.width();
  const int64_t row_size = by_value ? r.key_size : r.value_size;
  float* from = state + part.begin * (by_value ? r.key_size : 1);
  for (int64_t row = 0; row < rows; row++) __builtin_memset(from + row * row_size, 0, (size_t)width * sizeof(float));
}

static inline void recur(const Recurrence& r, const RecurrenceRows& rows, const RecurrentSpan& span, int64_t begin,
                         int64_t end, bool by_token, void* scratch) {
  const auto state = [&](const HeadPart& part) { return span.state + part.head * r.key_size * r.value_size; };
  if (span.begins) for_parts(r, begin, end, [&](const HeadPart& part) { clear(r, part, state(part)); });
  if (by_token || span.length <= kFewTokens) {
    for_parts(r, begin, end, [&](const HeadPart& part) {
      for (int64_t t = 0; t < span.length; t++) step(r, rows, part, span.first_row + t, state(part));
    });
    return;
  }
  const ChunkMemory m(r, (float*)scratch);
  Chunk chunk;
  for (int64_t t = 0; t < span.length; t += kChunk) {
    chunk.first = span.first_row + t;
    chunk.count = span.length - t < kChunk ? span.length - t : kChunk;
    int64_t packed = -1;  // the key head
    for_parts(r, begin, end, [&](const HeadPart& part) {
      if (key_head(r, part.head) != packed) pack_keys(r, rows, chunk, packed = key_head(r, part.head), m);
      make_scores(r, rows, chunk, part.head, m);
      pack_values(r, rows, chunk, part, state(part), m);
      if (r.kind == RecurrenceKind::delta) solve(r, chunk, part.width(), m);
      read_out(r, rows, chunk, part, m);
      update(r, chunk, part, state(part), m);
    });
  }
}

}  // namespace ridgeline::RIDGELINE_LEVEL::recurrent
