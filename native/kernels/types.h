// What kernels are called with: plain structs, the same at every ISA level.
//
// Legend: M rows (tokens) · N outputs · K inputs · G groups of inputs · D head size · V vocabulary.
// All activations between kernels are float32 rows; a row's stride is a multiple of 32 floats and the entries between
// its width and the next multiple of 32 exist and are 0 or never read.
#pragma once

#include <cstdint>

#include "kernels/tuning.h"

namespace ridgeline {

inline constexpr int64_t kPanel = 32;  // outputs that are stored, and computed, together

enum class WeightKind : uint8_t {
  f32,
  bf16,
  int8,
  int4,
  int8_groups,
  int8_minima,
  int4_minima,
  int8_super,
  int8_super_minima,
  int4_super_minima,
  mxfp4,
  nvfp4,
  nf4,
  fp4,
  nf4_high,  // and nf4_low: nf4 as kernels read it where inputs have 16 bits; no matrix is of these kinds
  nf4_low,
  e4m3
};

inline constexpr int64_t kSuperInputs = 256;  // of the super kinds: their groups' scales are multiples of one float16

[[maybe_unused]] static constexpr bool is_super(WeightKind kind) {
  return kind == WeightKind::int8_super || kind == WeightKind::int8_super_minima ||
         kind == WeightKind::int4_super_minima;
}

[[maybe_unused]] static constexpr bool has_minima(WeightKind kind) {
  return kind == WeightKind::int8_minima || kind == WeightKind::int4_minima || kind == WeightKind::int8_super_minima ||
         kind == WeightKind::int4_super_minima;
}

// Whether products are of floats, not of integers.
[[maybe_unused]] static constexpr bool is_float(WeightKind kind) {
  return kind == WeightKind::f32 || kind == WeightKind::bf16 || kind == WeightKind::e4m3;
}

[[maybe_unused]] static constexpr bool is_fp4(WeightKind kind) {
  return kind == WeightKind::mxfp4 || kind == WeightKind::nvfp4;
}

// Whether codes are looked up in a table of 16-bit integers.
[[maybe_unused]] static constexpr bool is_table(WeightKind kind) {
  return kind == WeightKind::nf4 || kind == WeightKind::fp4 || kind == WeightKind::nf4_high ||
         kind == WeightKind::nf4_low;
}

inline constexpr int32_t kMaxTableGroup = 64;  // 32767 * 1023 * 64 < 2^31

// How a linear layer's inputs are held while it runs: as the weights are, or as integers of 16 or 8 bits with one
// scale per row and group.
enum class InputKind : uint8_t { f32, bf16, int16, int8 };

// A linear layer's weights in panels of 32 outputs ("P32"), `num_panels` of `panel_bytes` each, 64-byte aligned.
//
//   f32   [K][32]
//   bf16  [K / 2][32][2]                                    K padded to 32
//   int8  [K / 4][32][4] unsigned, 128 = zero               K padded to 64; then 32 float scales
//   int8_groups  per group of `group` inputs: int8's words, then 32 float16 scales; K padded to a group
//   int4  with zero points, [G][32] bytes, padded to 64; then per group of `group` inputs: [group / 8][2][16 words],
//         then 32 float16 scales; K padded to a group
//   int8_minima  as int8_groups, and after a group's scales 32 float16 minima: w = value * scale + minimum
//   int4_minima  as int4 without zero points, and after a group's scales 32 float16 minima: w = value * scale + minimum
//   int8_super, int8_super_minima, int4_super_minima  whose scales, and minima, are products, as GGUF's K types have
//         them: [K / 256][1 or 2][32] float16; then as int8_groups and int4_minima, but with 32 signed bytes in place of
//         float16 numbers: a scale is its byte times the first float16 of its 256 inputs, a minimum its byte times the
//         second. A group may have 16 inputs in those of int8.
//   mxfp4, nvfp4  whose values are 4-bit floats, as OCP's MX and NVIDIA have them: [G][32] bytes of scales, padded to 64,
//         E8M0 or E4M3; then int4's words. Behind nvfp4's, whose groups may have 16 inputs, 32 floats: what an output's
//         scales are multiplied by or, if negative, divided by; for the kernels' sake 256 times larger, or smaller.
//   nf4, fp4  whose values are numbers of bitsandbytes' tables: int4's words, then 32 float scales, in groups up to 64
//   e4m3  whose values are 8-bit floats, by inputs of f32 or bf16: per group of `group` inputs, all of them if 0,
//         [group / 4][32][4], in a word inputs k, k + 2, k + 1, k + 3, then 32 float scales; K padded to 32
//
// A word of int4 is one output's 8 inputs k..k+7: bits 4i..4i+3 of its low half are input k + 2i, of its high half
// k + 2i + 1, for i = 0..3. Values are unsigned, 8 = zero unless zero points say otherwise. Padding has value `zero`.
struct Matrix {
  WeightKind kind;
  InputKind input;
  bool has_zero_points;
  int32_t group;       // inputs per scale of the inputs, and of the weights but for int8; up to kMaxInputGroup; or
                       // those of e4m3 weights, a multiple of 32
  int64_t outputs;     // N, padding not counted
  int64_t inputs;      // K, padding not counted
  int64_t num_panels;  // ceil(N / 32)
  int64_t panel_bytes;
  const uint8_t* data;
  Tuning tuning{};
  const int32_t* order = nullptr;  // [K] or null: weight k multiplies input order[k], of integer weights
};

// Codes of int4 as GPTQ stores them: for every 8 inputs a row of N words, each an output's codes, the first in the low
// bits; `stride` bytes from a row to the next.
struct Int4Words {
  const uint8_t* data;
  int64_t stride;
};

// Inputs share a scale in groups of at most this many: 255 * 32767 * 256 < 2^31, sums cannot overflow.
inline constexpr int32_t kMaxInputGroup = 256;

// Bytes of inputs that prepare_input may need beyond those of single rows: the end of a last tile, and what is lost to
// alignment. A multiple of 64.
inline constexpr int64_t kInputSlack = 2304;

enum class NormKind : uint8_t { none, rms, layer };

// Normalisation of a row before it enters a kernel. The weight holds any unit offset already.
struct Norm {
  NormKind kind;
  float eps;
  const float* weight;
  const float* bias;     // layer norm only, or null
  bool by_head = false;  // each head of a row has a weight of its own, one after the other, and a bias

  // The norm of head number `head`, `width` entries wide.
  Norm of_head(int64_t head, int64_t width) const {
    if (!by_head) return *this;
    return {kind, eps, weight + head * width, bias ? bias + head * width : nullptr};
  }
};

enum class Activation : uint8_t { silu, gelu, gelu_tanh, quick_gelu, relu, relu2, sigmoid };

enum class EpilogueKind : uint8_t {
  store,     // out = y
  add,       // out += y
  activate,  // out = act(y)
  gate       // a panel is 16 gates and 16 ups: out = act(gate) * up, 16 a panel; with a `limit`, see there
};

// What happens to y = x W^T + bias, the 32 sums of a panel and row at a time.
struct Epilogue {
  EpilogueKind kind;
  Activation activation;
  float softcap;      // > 0, `store` only: out = softcap * tanh(y / softcap)
  const float* bias;  // [num_panels * 32] in the order of the packed outputs, or null
  float* out;
  int64_t stride;  // floats between rows of `out`
  // > 0, `gate` only: out = (u + 1) * g * sigmoid(alpha * g), g = min(gate, limit), u = up within -limit and limit.
  float limit = 0, alpha = 0;
};

enum class KvKind : uint8_t { f32, bf16, int8, fp8, int4 };

// Whose tokens have a scale for each head's key and value.
inline constexpr bool has_scales(KvKind kind) { return kind >= KvKind::int8; }

inline constexpr int64_t kMaxHeadDim = 576;      // of a key: DeepSeek's latent of 512 entries and 64 rotated ones
inline constexpr int64_t kMaxScaledHeadDim = 256;  // of kinds with scales: 255 * 32767 * 256 < 2^31

// One layer's keys and values in the paged cache. A block holds `block_size` tokens of all heads; its bytes are private
// to kernels/attention: only kv_* functions of the kernel table read or write them.
struct KvLayout {
  KvKind kind;
  int32_t num_heads;
  int32_t head_dim;  // entries of a key
  int32_t block_size;
  int32_t value_dim;
  bool values_in_keys;  // a value is the first entries of its key and takes no memory: latents; not with scales
};

struct KvMemory {
  KvLayout layout;
  uint8_t* blocks;  // 64-byte aligned
};

struct AttentionSpec {
  int32_t num_heads;  // query heads, a multiple of the layout's
  float scale;
  int32_t window;  // tokens, 0: none
  float softcap;   // 0: none
  const float* sinks;   // [num_heads] logits that join the softmax and carry no value, or null
  const float* slopes;  // [num_heads], ALiBi: slope * (key position - query position) is added to a logit; or null
  bool float32 = false;  // products of a bfloat16 cache in float32: Tuning::float32, one decision for all of a process
};

// One sequence's part of a step. Row i of the span is the query at position kv_length - length + i.
struct SpanView {
  int64_t first_row;  // of the span in the step's rows
  int64_t length;
  int64_t kv_length;    // tokens in the cache once the step's are written
  int64_t first_token;  // position of the first token of `table`, a multiple of the block size
  const int64_t* table;  // block ids
  int64_t bidirectional_block;  // 1: causal; k: rows attend to everything before and inside their block of k rows
};

// What one call of attention computes: queries [row_begin, row_end) of the span, of the query heads that share KV head
// `head`, over the keys at positions [key_begin, key_end), a multiple-of-block-size range.
struct AttentionPart {
  SpanView span;
  int32_t head;
  int64_t row_begin, row_end, key_begin, key_end;
};

}  // namespace ridgeline
