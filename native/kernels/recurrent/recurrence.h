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

// Calls each(offset, bytes) for what a part has of its head's state.
template <class Each>
RL_INLINE void for_runs(const Recurrence& r, const HeadPart& part, Each each) {
  const bool by_value = r.kind == RecurrenceKind::ssd;
  const int64_t rows = by_value ? part.width() : r.key_size, width = by_value ? r.key_size : part.width();
  const int64_t row_size = by_value ? r.key_size : r.value_size, first = part.begin * (by_value ? r.key_size : 1);
  for (int64_t row = 0; row < rows; row++) each(first + row * row_size, (size_t)width * sizeof(float));
}

// The log's rows, as a step's that nobody reads out.
RL_INLINE RecurrenceRows logged(const Recurrence& r, const InputLog& log) {
  const int64_t keys = r.key_heads * r.key_size, values = r.heads * r.value_size;
  const Columns k = log.columns(0), dt = log.columns(keys + values), beta = log.columns(keys + values + r.heads);
  return {k, k, log.columns(keys), dt, beta, {}};
}

// The span's own tokens, one after the other; on a copy of the state where they are logged.
static inline void recur_by_token(const Recurrence& r, const RecurrenceRows& rows, const RecurrentSpan& span,
                                  const HeadPart& part, float* state, float* copy) {
  if (span.logs)
    for_runs(r, part, [&](int64_t at, size_t bytes) { __builtin_memcpy(copy + at, state + at, bytes); });
  for (int64_t t = span.first_row; t < span.first_row + span.length; t++)
    step(r, rows, part, t, span.logs ? copy : state, rows.out.row(t) + part.head * r.value_size);
}

static inline void recur(const Recurrence& r, const RecurrenceRows& rows, const RecurrentSpan& span, int64_t begin,
                         int64_t end, bool by_token, void* scratch) {
  const auto state = [&](const HeadPart& part) { return span.state + part.head * r.key_size * r.value_size; };
  const RecurrenceRows old = logged(r, span.log);
  by_token = by_token || span.logs || span.length <= kFewTokens;
  for_parts(r, begin, end, [&](const HeadPart& part) {
    float* h = state(part);
    if (span.begins) for_runs(r, part, [&](int64_t at, size_t bytes) { __builtin_memset(h + at, 0, bytes); });
    span.for_pending([&](int64_t row) { step(r, old, part, row, h, (float*)scratch); });
    if (by_token) recur_by_token(r, rows, span, part, h, (float*)scratch);
  });
  if (by_token) return;
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
