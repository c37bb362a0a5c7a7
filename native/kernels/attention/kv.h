// The paged cache's memory: where a token's keys and values lie in a block, writing them and reading them back.
//
// A block holds for each head a slice of keys and then one of values: one head's keys and values of a block are read as
// one stream, whose length decides how fast scattered blocks can be read. What is in a slice is known to this folder
// alone. With E bytes an element and S = 4 / E elements a word, a slice is panels of 64-byte steps, a step is one word
// for each of 16 lanes:
//
//   keys    [P / 16][D / S steps][16 tokens][S]      a step is S dims of 16 tokens
//   values  [V / 16][P / S steps][16 dims][S]        a step is S tokens of 16 dims
//
// with P the block size, D and V the entries of a key and of a value, each rounded up to 16. Latents have no slice of
// values: attention makes it from the keys, a tile at a time. int8 is unsigned, 128 = zero; the bytes of a word
// are its elements 0, 2, 1, 3, so that its even bytes and its odd bytes are pairs in order; after the panels come P
// float scales, one a token.
#pragma once

#include "kernels/simd.h"
#include "kernels/types.h"

namespace ridgeline::RIDGELINE_LEVEL {

inline constexpr int64_t kGroup = 16;      // lanes of a panel: tokens of keys, dims of values
inline constexpr int64_t kStepBytes = 64;  // one 32-bit word a lane

struct KvSlice {
  int64_t data_bytes;  // scales not counted
  int64_t num_bytes;
};

struct KvShape {
  int64_t tokens;         // P
  int64_t dims;           // D, padded
  int64_t value_dims;     // V, padded
  int64_t element_bytes;  // E
  KvSlice keys, values;   // no bytes of values where the keys hold them

  int64_t slice_bytes() const { return keys.num_bytes + values.num_bytes; }
  int64_t key_panel_bytes() const { return dims * kGroup * element_bytes; }
  int64_t value_panel_bytes() const { return tokens * kGroup * element_bytes; }
};

RL_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

RL_INLINE KvShape kv_shape(const KvLayout& layout) {
  KvShape shape{};
  shape.tokens = round_up(layout.block_size, kGroup);
  shape.dims = round_up(layout.head_dim, kGroup);
  shape.value_dims = round_up(layout.value_dim, kGroup);
  shape.element_bytes = layout.kind == KvKind::f32 ? 4 : layout.kind == KvKind::bf16 ? 2 : 1;
  const int64_t scale_bytes = layout.kind == KvKind::int8 ? shape.tokens * 4 : 0;
  const int64_t key_bytes = shape.tokens * shape.dims * shape.element_bytes;
  const int64_t value_bytes = shape.tokens * shape.value_dims * shape.element_bytes;
  shape.keys = {key_bytes, key_bytes + scale_bytes};
  if (!layout.values_in_keys) shape.values = {value_bytes, value_bytes + scale_bytes};
  return shape;
}

static inline int64_t kv_block_bytes(const KvLayout& layout) {
  return kv_shape(layout).slice_bytes() * layout.num_heads;
}

// The keys of a head in a block; its values are one slice further.
RL_INLINE uint8_t* slice_of(const KvMemory& memory, const KvShape& shape, int64_t block, int64_t head) {
  return memory.blocks + (block * memory.layout.num_heads + head) * shape.slice_bytes();
}

// One token's entries in a slice: entry d is at base + d's own offset. Keys run over d in steps, values in lanes.
struct TokenEntries {
  int64_t base, panel_bytes;
  int64_t element_bytes;
  bool in_steps;

  int64_t at(int64_t d) const {
    return base + (in_steps ? step_offset(d, element_bytes) : lane_offset(d, panel_bytes));
  }

  static int64_t step_offset(int64_t element, int64_t element_bytes) {
    const int64_t in_word = element % (4 / element_bytes);
    const int64_t place = element_bytes == 1 ? (in_word >> 1) | ((in_word & 1) << 1) : in_word;
    return element * element_bytes / 4 * kStepBytes + place * element_bytes;
  }
  static int64_t lane_offset(int64_t lane, int64_t panel_bytes) {
    return lane / kGroup * panel_bytes + lane % kGroup * 4;
  }
};

RL_INLINE TokenEntries key_entries(const KvShape& shape, int64_t token) {
  return {TokenEntries::lane_offset(token, shape.key_panel_bytes()), 0, shape.element_bytes, true};
}

RL_INLINE TokenEntries value_entries(const KvShape& shape, int64_t token) {
  return {TokenEntries::step_offset(token, shape.element_bytes), shape.value_panel_bytes(), shape.element_bytes, false};
}

// max |x| / 127; NaN where an entry is not finite, so that it shows in whatever reads the token.
RL_INLINE float int8_scale(const float* x, int64_t width) {
  Floats most{}, poison{};
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) {
    const Floats v = load<Floats>(x + d);
    most = max((Floats)((Words)v & 0x7fffffffu), most);
    poison += v * 0.0f;
  }
  float top = largest(most), rest = sum(poison);
  for (; d < width; d++) {
    const float magnitude = __builtin_fabsf(x[d]);
    top = magnitude > top ? magnitude : top;
    rest += x[d] * 0.0f;
  }
  return top / 127.0f + rest;
}

// x / scale to the nearest integer, ties to even, as an unsigned byte around 128.
RL_INLINE Words to_bytes(Floats x, float scale) {
  if (!(scale > 0.0f)) return (Words)splat_int(128);
  return (Words)(truncate_to_ints(round_even(max(min(x / scale, splat(127.0f)), splat(-127.0f)))) + 128);
}

// Sixteen entries as the bits of their elements. `scale` is int8's.
template <KvKind kind>
RL_INLINE void encode(const float* x, float scale, uint32_t (&bits)[kGroup]) {
  for (int64_t i = 0; i < kGroup; i += kLanes) {
    const Floats v = load<Floats>(x + i);
    store(bits + i, kind == KvKind::f32 ? (Words)v : kind == KvKind::bf16 ? bf16_bits(v) : to_bytes(v, scale));
  }
}

// Entries along the steps: whole words, one a step.
template <int64_t element_bytes>
RL_INLINE void write_steps(uint8_t* to, const uint32_t (&bits)[kGroup]) {
  typedef uint16_t Narrow __attribute__((vector_size(2 * kLanes)));
  alignas(64) uint16_t pairs[kGroup];
  if constexpr (element_bytes == 2)
    for (int64_t i = 0; i < kGroup; i += kLanes)
      store(pairs + i, __builtin_convertvector(load<Words>(bits + i), Narrow));
  constexpr int64_t in_word = 4 / element_bytes;
#pragma GCC unroll 16
  for (int64_t step = 0; step < kGroup / in_word; step++) {
    const uint32_t* b = bits + step * in_word;
    uint32_t word;
    if constexpr (in_word == 2) __builtin_memcpy(&word, pairs + 2 * step, 4);
    else word = in_word == 1 ? b[0] : b[0] | b[2] << 8 | b[1] << 16 | b[3] << 24;
    __builtin_memcpy(to + step * kStepBytes, &word, 4);
  }
}

// Entries along the lanes: a part of one word each, beside those of other tokens.
template <int64_t element_bytes>
RL_INLINE void write_lanes(uint8_t* to, int64_t first_bit, const uint32_t (&bits)[kGroup]) {
  const uint32_t part = element_bytes == 4 ? ~0u : ((1u << element_bytes * 8 % 32) - 1) << first_bit;
  for (int64_t i = 0; i < kGroup; i += kLanes) {
    const Words old = load<Words>(to + i * 4), mine = load<Words>(bits + i) << (uint32_t)first_bit;
    store(to + i * 4, (old & ~part) | mine);
  }
}

// Entries past `width`, up to a multiple of 16, are written as zeros.
template <KvKind kind>
RL_INLINE void write_entries(uint8_t* slice, const KvSlice& size, TokenEntries entries, int64_t token,
                             const float* x, int64_t width) {
  constexpr int64_t element_bytes = kind == KvKind::f32 ? 4 : kind == KvKind::bf16 ? 2 : 1;
  entries.element_bytes = element_bytes;  // known when compiled: nothing is divided for an offset
  float scale = 0;
  if constexpr (kind == KvKind::int8) {
    scale = int8_scale(x, width);
    __builtin_memcpy(slice + size.data_bytes + token * 4, &scale, 4);
  }
  const int64_t in_line = entries.base % kStepBytes, first_bit = in_line % 4 * 8;
  for (int64_t d = 0; d < width; d += kGroup) {
    const int64_t left = width - d;
    float padded[kGroup] = {};
    if (left < kGroup) __builtin_memcpy(padded, x + d, (size_t)left * 4);
    uint32_t bits[kGroup];
    encode<kind>(left < kGroup ? padded : x + d, scale, bits);
    if (entries.in_steps)
      write_steps<element_bytes>(slice + entries.at(d), bits);
    else
      write_lanes<element_bytes>(slice + entries.at(d) - first_bit / 8, first_bit, bits);
  }
}

RL_INLINE void write_token(KvKind kind, uint8_t* slice, const KvSlice& size, const TokenEntries& entries,
                           int64_t token, const float* x, int64_t width) {
  if (kind == KvKind::f32) return write_entries<KvKind::f32>(slice, size, entries, token, x, width);
  if (kind == KvKind::bf16) return write_entries<KvKind::bf16>(slice, size, entries, token, x, width);
  write_entries<KvKind::int8>(slice, size, entries, token, x, width);
}

RL_INLINE void read_token(KvKind kind, const uint8_t* slice, const KvSlice& size, const TokenEntries& entries,
                          int64_t token, float* x, int64_t width) {
  float scale = 1.0f;
  if (kind == KvKind::int8) __builtin_memcpy(&scale, slice + size.data_bytes + token * 4, 4);
  for (int64_t d = 0; d < width; d++) {
    const uint8_t* from = slice + entries.at(d);
    uint16_t bits;
    switch (kind) {
      case KvKind::f32:
        __builtin_memcpy(x + d, from, 4);
        break;
      case KvKind::bf16:
        __builtin_memcpy(&bits, from, 2);
        x[d] = from_bf16(bits);
        break;
      case KvKind::int8:
        x[d] = (float)((int32_t)*from - 128) * scale;
        break;
    }
  }
}

RL_INLINE void clear_slice(KvKind kind, uint8_t* slice, const KvSlice& size) {
  __builtin_memset(slice, kind == KvKind::int8 ? 128 : 0, (size_t)size.data_bytes);
  __builtin_memset(slice + size.data_bytes, 0, (size_t)(size.num_bytes - size.data_bytes));
}

static inline void kv_write(const KvMemory& memory, int64_t slot, int32_t head, const float* k, const float* v) {
  const KvLayout& layout = memory.layout;
  const KvShape shape = kv_shape(layout);
  const int64_t token = slot % layout.block_size;
  uint8_t* keys = slice_of(memory, shape, slot / layout.block_size, head);
  uint8_t* values = keys + shape.keys.num_bytes;
  if (token == 0) clear_slice(layout.kind, keys, shape.keys), clear_slice(layout.kind, values, shape.values);
  write_token(layout.kind, keys, shape.keys, key_entries(shape, token), token, k, layout.head_dim);
  if (layout.values_in_keys) return;
  write_token(layout.kind, values, shape.values, value_entries(shape, token), token, v, layout.value_dim);
}

// Fetches the lines that kv_write will write, which are as far apart as a key has words.
static inline void kv_fetch(const KvMemory& memory, int64_t slot, int32_t head) {
  const KvShape shape = kv_shape(memory.layout);
  const int64_t token = slot % memory.layout.block_size;
  if (token == 0) return;  // written whole
  const uint8_t* keys = slice_of(memory, shape, slot / memory.layout.block_size, head);
  const TokenEntries key = key_entries(shape, token), value = value_entries(shape, token);
  const int64_t in_word = 4 / shape.element_bytes;
  for (int64_t d = 0; d < memory.layout.head_dim; d += in_word) __builtin_prefetch(keys + key.at(d), 1);
  if (memory.layout.values_in_keys) return;
  const uint8_t* values = keys + shape.keys.num_bytes;
  for (int64_t d = 0; d < memory.layout.value_dim; d += kGroup) __builtin_prefetch(values + value.at(d), 1);
}

static inline void kv_read(const KvMemory& memory, int64_t slot, int32_t head, float* k, float* v) {
  const KvLayout& layout = memory.layout;
  const KvShape shape = kv_shape(layout);
  const int64_t token = slot % layout.block_size;
  const uint8_t* keys = slice_of(memory, shape, slot / layout.block_size, head);
  read_token(layout.kind, keys, shape.keys, key_entries(shape, token), token, k, layout.head_dim);
  if (layout.values_in_keys) return;
  const uint8_t* values = keys + shape.keys.num_bytes;
  read_token(layout.kind, values, shape.values, value_entries(shape, token), token, v, layout.value_dim);
}

}  // namespace ridgeline::RIDGELINE_LEVEL
