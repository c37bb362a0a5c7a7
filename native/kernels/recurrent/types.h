// What the kernels of recurrent layers are called with: plain structs, the same at every ISA level.
//
// Legend: C channels · W taps · H heads · N state size · K key size · V value size. All state is float32.
#pragma once

#include <cstdint>

#include "kernels/types.h"

namespace ridgeline {

// Columns of a step's rows: row t begins at data + t * stride.
struct Columns {
  float* data;
  int64_t stride;

  float* row(int64_t t) const { return data + t * stride; }
};

// The inputs of a layer for a sequence's last tokens: that at position p is in row p % rows, all of a token side by side.
struct InputLog {
  float* data;
  int64_t width, rows;

  float* row(int64_t position) const { return data + position % rows * width; }
  // The log's rows of one input, to be read by position % rows.
  Columns columns(int64_t offset) const { return {data ? data + offset : nullptr, width}; }
};

// Rows [first_row, first_row + length) of a step, which continue one sequence at position `start`, and the state that
// its layer has of it: of the tokens before the last `pending` ones, which are in the log. The span adds these to the
// state and then its own tokens, unless it `logs` them: then the state is left as it is before them.
struct RecurrentSpan {
  int64_t first_row, length;
  bool begins;  // a new sequence: what `state` holds is rubbish, and counts as 0
  float* state;
  InputLog log{};
  int64_t start = 0, pending = 0;
  bool logs = false;

  // Calls each(row) for the rows of the log that the state lacks.
  template <class Each>
  void for_pending(Each each) const {
    for (int64_t position = start - pending; position < start; position++) each(position % log.rows);
  }
};

// The state is [C][W - 1], the inputs before the span, oldest first. Its log has x [C].
struct Convolution {
  static constexpr int64_t kMaxTaps = 64;
  int64_t channels, taps;  // 2 <= taps <= kMaxTaps
  const float* weight;     // [W][C]
  const float* bias;       // [C] or null
  bool has_activation;
  Activation activation;
};

// Mamba (arXiv 2312.00752). The state is [C][N], the log x and dt [C] each, then B [N].
struct SelectiveScan {
  int64_t channels, size;
  const float* rate;  // [C][N]: -exp(A_log)
  const float* skip;  // [C]
};

enum class RecurrenceKind : uint8_t { ssd, delta, retention };

// A matrix per head that shrinks by a factor and gains an outer product k v^T at every token, read by a query:
// Mamba-2's state-space duality (arXiv 2405.21060) with C, B, x for q, k, v; the gated delta rule (arXiv 2412.06464);
// retention (arXiv 2307.08621). The state is [H][V][K] for ssd, [H][K][V] for the others; the log k, v, dt, beta.
struct Recurrence {
  static constexpr int64_t kBlock = 32;  // values of a head that are computed together
  RecurrenceKind kind;
  int64_t heads, key_heads, key_size, value_size;  // heads is a multiple of key_heads, which they share in order
  const float* rate;     // [H]: the log of the factor, for each unit of step size; retention: the log of the factor
  const float* dt_bias;  // [H]; not for retention
  const float* skip;     // [H]; ssd alone
  float dt_min, dt_max;  // ssd alone

  int64_t blocks_per_head() const { return (value_size + kBlock - 1) / kBlock; }
  int64_t blocks() const { return heads * blocks_per_head(); }
};

// q, k are [T, key heads * K], v and out [T, H * V], dt and beta [T, H]: dt alone for ssd, both for the delta rule.
struct RecurrenceRows {
  Columns q, k, v, dt, beta, out;
};

// out = weight * rms_norm(x) * silu(z), or weight * rms_norm(x * silu(z)), over `width` entries.
struct GatedNorm {
  int64_t width;
  float eps;
  bool norm_before_gate;
};

}  // namespace ridgeline
