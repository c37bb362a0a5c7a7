// The paged cache's memory: where a token's keys and values lie in a block, writing them and reading them back.
//
// A block holds for each head a slice of keys and then one of values: one head's keys and values of a block are read as
// one stream, whose length decides how fast scattered blocks can be read. What is in a slice is known to this folder
// alone. With S elements a 32-bit word, a slice is panels of 64-byte steps, a step is one word for each of 16 lanes:
//
//   keys    [P / 16][D / S steps][16 tokens][S]      a step is S dims of 16 tokens
//   values  [V / 16][P / S steps][16 dims][S]        a step is S tokens of 16 dims
//
// with P the block size, D and V the entries of a key and of a value, each rounded up to 16. Latents have no slice of
// values: attention makes it from the keys, a tile at a time. The even elements of a word are its lower half, so
// that element 2i and the one behind it are i elements above the lower ends of the halves. int8 is unsigned, 128 = zero;
// fp8 is E4M3 without its subnormals. int4 is what `rotate` gives: values of 4 bits, 8 = zero, and keys of 6 bits, 32 =
// zero, which for every 16 dims are two steps of their lower 4 bits and one step of their upper 2. The first half of the
// panels of values is fine, with 5 bits: for every 16 tokens, after two steps of 4 bits, 16 fifth bits a lane, those of
// even tokens lower. After the panels of kinds with scales come P bfloat16 scales, one a token, up to a multiple of 64
// bytes. What they mean is `ridgeline.quant.kv:as_cached`, bit by bit.
#pragma once

#include "kernels/attention/rotate.h"
#include "kernels/types.h"

namespace ridgeline::RIDGELINE_LEVEL {

inline constexpr int64_t kGroup = 16;      // lanes of a panel: tokens of keys, dims of values
inline constexpr int64_t kStepBytes = 64;  // one 32-bit word a lane
inline constexpr int64_t kFineBytes = 2 * kStepBytes + 2 * kGroup;  // of 16 tokens in a fine panel of values

struct KvSlice {
  int64_t data_bytes;  // scales not counted
  int64_t num_bytes;
};

struct KvShape {
  int64_t tokens;        // P
  int64_t dims;          // D, padded
  int64_t value_dims;    // V, padded
  int64_t key_bits, value_bits;
  int64_t fine_panels;  // of values, before the others
  KvSlice keys, values;  // no bytes of values where the keys hold them

  int64_t slice_bytes() const { return keys.num_bytes + values.num_bytes; }
  int64_t key_panel_bytes() const { return dims * kGroup * key_bits / 8; }
  int64_t value_panel_bytes() const { return tokens * kGroup * value_bits / 8; }
  int64_t fine_panel_bytes() const { return tokens / kGroup * kFineBytes; }
  int64_t fine_bytes() const { return fine_panels * fine_panel_bytes(); }
  int64_t group_bytes() const { return kGroup * kGroup * value_bits / 8; }  // of 16 tokens in a panel of values
};

RL_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

inline constexpr int64_t bits_of(KvKind kind, bool of_keys) {
  if (kind == KvKind::int4) return of_keys ? 6 : 4;
  return kind == KvKind::f32 ? 32 : kind == KvKind::bf16 ? 16 : 8;
}

RL_INLINE KvShape kv_shape(const KvLayout& layout) {
  KvShape shape{};
  shape.tokens = round_up(layout.block_size, kGroup);
  shape.dims = round_up(layout.head_dim, kGroup);
  shape.value_dims = round_up(layout.value_dim, kGroup);
  shape.key_bits = bits_of(layout.kind, true), shape.value_bits = bits_of(layout.kind, false);
  shape.fine_panels = layout.kind == KvKind::int4 ? shape.value_dims / kGroup / 2 : 0;
  const int64_t scale_bytes = has_scales(layout.kind) ? round_up(shape.tokens * 2, kStepBytes) : 0;
  const int64_t key_bytes = shape.tokens * shape.dims * shape.key_bits / 8;
  const int64_t coarse = shape.value_dims - shape.fine_panels * kGroup;
  const int64_t value_bytes = shape.fine_bytes() + shape.tokens * coarse * shape.value_bits / 8;
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

// One token's entries in a slice: of entry d the word and its lowest bit there. Keys run over d in steps, values in lanes.
struct TokenEntries {
  int64_t base, panel_bytes;
  int64_t first_bit;  // of values
  int64_t element_bits;
  bool in_steps;
  int64_t fine_dims, fine_panel_bytes, fine_base, token;  // of values with fine panels; the token in its group

  int64_t word(int64_t d) const {
    if (d < fine_dims) return fine_base + token / 8 * kStepBytes + lane_offset(d, fine_panel_bytes);
    return base + (in_steps ? step_offset(d, element_bits) : lane_offset(d - fine_dims, panel_bytes));
  }
  int64_t fifth(int64_t d) const { return fine_base + 2 * kStepBytes + lane_offset(d, 2 * fine_panel_bytes) / 2; }
  int64_t fifth_bit() const { return token / 2 + token % 2 * 8; }
  int64_t bit(int64_t d) const { return in_steps ? bit_in_word(d, element_bits == 6 ? 4 : element_bits) : first_bit; }
  int64_t word_of_upper(int64_t d) const { return base + (d / kGroup * 3 + 2) * kStepBytes; }  // of 6 bits

  static int64_t step_offset(int64_t element, int64_t element_bits) {
    if (element_bits == 6) return (element / kGroup * 3 + element % kGroup / 8) * kStepBytes;
    return element * element_bits / 32 * kStepBytes;
  }
  static constexpr int64_t bit_in_word(int64_t element, int64_t element_bits) {
    const int64_t in_word = 32 / element_bits, at = element % in_word;
    return ((at >> 1) + (at & 1) * (in_word / 2)) * element_bits;
  }
  static int64_t lane_offset(int64_t lane, int64_t panel_bytes) {
    return lane / kGroup * panel_bytes + lane % kGroup * 4;
  }
};

RL_INLINE TokenEntries key_entries(const KvShape& shape, int64_t token) {
  return {TokenEntries::lane_offset(token, shape.key_panel_bytes()), 0, 0, shape.key_bits, true, 0, 0, 0, 0};
}

RL_INLINE TokenEntries value_entries(const KvShape& shape, int64_t token) {
  return {shape.fine_bytes() + TokenEntries::step_offset(token, shape.value_bits), shape.value_panel_bytes(),
          TokenEntries::bit_in_word(token, shape.value_bits), shape.value_bits, false,
          shape.fine_panels * kGroup, shape.fine_panel_bytes(), token / kGroup * kFineBytes, token % kGroup};
}

// The zero of int4's levels; twice as many in fine panels, half as far apart.
inline constexpr int32_t zero_of(bool of_keys) { return of_keys ? 32 : 8; }

// What an entry of a token is divided by: int8's largest magnitude becomes 127, fp8's 448, and int4's extreme level 0,
// whatever its sign. NaN where an entry is not finite, so that it shows in whatever reads the token.
RL_INLINE float token_scale(KvKind kind, bool of_keys, const float* x, int64_t width) {
  Floats most{}, least{}, poison{};
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) {
    const Floats v = load<Floats>(x + d);
    most = max(v, most), least = min(v, least);
    poison += v * 0.0f;
  }
  float top = largest(most), low = -largest(-least), rest = sum(poison);
  for (; d < width; d++) {
    top = x[d] > top ? x[d] : top, low = x[d] < low ? x[d] : low;
    rest += x[d] * 0.0f;
  }
  const float extreme = -low > top ? low : top, magnitude = __builtin_fabsf(extreme);
  const float level = kind == KvKind::int8 ? 127.0f : 448.0f;  // the highest
  return (kind == KvKind::int4 ? extreme / (float)-zero_of(of_keys) : magnitude / level) + rest;
}

// x / scale to the nearest integer, ties to even, within -low and `top`, as an unsigned number around `low`'s zero.
RL_INLINE Words to_levels(Floats x, float scale, float low, float top, int32_t zero) {
  if (!(__builtin_fabsf(scale) > 0.0f)) return (Words)splat_int(zero);
  return (Words)(truncate_to_ints(round_even(max(min(x / scale, splat(top)), splat(low)))) + zero);
}

// x / scale to the nearest E4M3 number, ties to even; of those below 2^-6, which is the smallest normal one, to that or 0.
RL_INLINE Words to_e4m3(Floats x, float scale) {
  if (!(scale > 0.0f)) return Words{};
  const Words bits = (Words)(x / scale), magnitude = bits & 0x7fffffffu;
  const Words code = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u) - (120u << 23)) >> 20;
  const Words normal = magnitude < 121u << 23 ? (Words)splat_int(8) : code;
  return (magnitude > 120u << 23 ? normal : Words{}) | (bits >> 24 & 0x80u);
}

// Sixteen entries as the bits of their elements. `scale` is that of kinds that have one.
template <KvKind kind>
RL_INLINE void encode(const float* x, float scale, int32_t zero, uint32_t (&bits)[kGroup]) {
  for (int64_t i = 0; i < kGroup; i += kLanes) {
    const Floats v = load<Floats>(x + i);
    if constexpr (kind == KvKind::int8) store(bits + i, to_levels(v, scale, -127.0f, 127.0f, 128));
    else if constexpr (kind == KvKind::int4) store(bits + i, to_levels(v, scale, (float)-zero, (float)(zero - 1), zero));
    else if constexpr (kind == KvKind::fp8) store(bits + i, to_e4m3(v, scale));
    else store(bits + i, kind == KvKind::f32 ? (Words)v : bf16_bits(v));
  }
}

// What `encode` made of an entry.
RL_INLINE float decode(KvKind kind, int32_t zero, uint32_t bits, float scale) {
  if (kind == KvKind::int8) return (float)((int32_t)bits - 128) * scale;
  if (kind == KvKind::int4) return (float)((int32_t)bits - zero) * scale;
  if (kind == KvKind::bf16) return from_bf16((uint16_t)bits);
  if (kind == KvKind::fp8) bits = (bits & 0x7fu ? (bits & 0x7fu) * (1u << 20) + (120u << 23) : 0) | (bits & 0x80u) << 24;
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return kind == KvKind::fp8 ? x * scale : x;
}

// Entries along the steps: whole words, one a step.
template <int64_t element_bits>
RL_INLINE void write_steps(uint8_t* to, const uint32_t (&bits)[kGroup]) {
  typedef uint16_t Narrow __attribute__((vector_size(2 * kLanes)));
  alignas(64) uint16_t pairs[kGroup];
  if constexpr (element_bits == 16)
    for (int64_t i = 0; i < kGroup; i += kLanes)
      store(pairs + i, __builtin_convertvector(load<Words>(bits + i), Narrow));
  constexpr int64_t in_word = 32 / element_bits;
#pragma GCC unroll 16
  for (int64_t step = 0; step < kGroup / in_word; step++) {
    uint32_t word = 0;
    if constexpr (in_word == 2) __builtin_memcpy(&word, pairs + 2 * step, 4);
    else
#pragma GCC unroll 8
      for (int64_t i = 0; i < in_word; i++) word |= bits[step * in_word + i] << TokenEntries::bit_in_word(i, element_bits);
    __builtin_memcpy(to + step * kStepBytes, &word, 4);
  }
}

// Those of 6 bits: 8 lower parts a word, and all upper parts in one.
RL_INLINE void write_split_steps(uint8_t* to, const uint32_t (&bits)[kGroup]) {
  uint32_t words[3] = {};
#pragma GCC unroll 16
  for (int64_t i = 0; i < kGroup; i++) {
    words[i / 8] |= (bits[i] & 15) << TokenEntries::bit_in_word(i, 4);
    words[2] |= bits[i] >> 4 << TokenEntries::bit_in_word(i, 2);
  }
  for (int64_t step = 0; step < 3; step++) __builtin_memcpy(to + step * kStepBytes, words + step, 4);
}

// Entries along the lanes: a part of one word each, beside those of other tokens.
template <int64_t element_bits>
RL_INLINE void write_lanes(uint8_t* to, int64_t first_bit, const uint32_t (&bits)[kGroup]) {
  const uint32_t part = element_bits == 32 ? ~0u : ((1u << element_bits % 32) - 1) << first_bit;
  for (int64_t i = 0; i < kGroup; i += kLanes) {
    const Words old = load<Words>(to + i * 4), mine = load<Words>(bits + i) << (uint32_t)first_bit;
    store(to + i * 4, (old & ~part) | mine);
  }
}

// The upper bits of entries of 5 along the lanes, which are taken away.
RL_INLINE void write_fifths(uint8_t* to, int64_t bit, uint32_t (&bits)[kGroup]) {
  for (int64_t i = 0; i < kGroup; i++) {
    uint16_t old;
    __builtin_memcpy(&old, to + 2 * i, 2);
    old = (uint16_t)((old & ~(1u << bit)) | bits[i] >> 4 << bit);
    __builtin_memcpy(to + 2 * i, &old, 2);
    bits[i] &= 15;
  }
}

// Entries past `width`, up to a multiple of 16, are written as zeros.
template <KvKind kind>
RL_INLINE void write_entries(uint8_t* slice, const KvSlice& size, TokenEntries entries, int64_t token,
                             const float* x, int64_t width) {
  constexpr int64_t kKeyBits = bits_of(kind, true), kValueBits = bits_of(kind, false);
  entries.element_bits = entries.in_steps ? kKeyBits : kValueBits;  // nothing is divided for an offset
  alignas(64) float rotated[kind == KvKind::int4 ? kMaxScaledHeadDim : kLanes];
  if constexpr (kind == KvKind::int4) x = rotate_copy(x, rotated, width);
  float scale = 0;
  if constexpr (has_scales(kind)) {
    const uint16_t stored = to_bf16(token_scale(kind, entries.in_steps, x, width));
    __builtin_memcpy(slice + size.data_bytes + token * 2, &stored, 2);
    scale = from_bf16(stored);
  }
  for (int64_t d = 0; d < width; d += kGroup) {
    const int64_t left = width - d;
    float padded[kGroup] = {};
    if (left < kGroup) __builtin_memcpy(padded, x + d, (size_t)left * 4);
    uint32_t bits[kGroup];
    const bool fine = d < entries.fine_dims;
    encode<kind>(left < kGroup ? padded : x + d, fine ? scale / 2 : scale, fine ? 16 : zero_of(entries.in_steps), bits);
    uint8_t* to = slice + entries.word(d);
    if (fine) write_fifths(slice + entries.fifth(d), entries.fifth_bit(), bits);
    if (!entries.in_steps) write_lanes<kValueBits>(to, entries.first_bit, bits);
    else if constexpr (kKeyBits == 6) write_split_steps(to, bits);
    else write_steps<kKeyBits>(to, bits);
  }
}

RL_INLINE void write_token(KvKind kind, uint8_t* slice, const KvSlice& size, const TokenEntries& entries,
                           int64_t token, const float* x, int64_t width) {
  if (kind == KvKind::f32) return write_entries<KvKind::f32>(slice, size, entries, token, x, width);
  if (kind == KvKind::bf16) return write_entries<KvKind::bf16>(slice, size, entries, token, x, width);
  if (kind == KvKind::fp8) return write_entries<KvKind::fp8>(slice, size, entries, token, x, width);
  if (kind == KvKind::int4) return write_entries<KvKind::int4>(slice, size, entries, token, x, width);
  write_entries<KvKind::int8>(slice, size, entries, token, x, width);
}

RL_INLINE void read_token(KvKind kind, const uint8_t* slice, const KvSlice& size, const TokenEntries& entries,
                          int64_t token, float* x, int64_t width) {
  uint16_t stored = 0x3f80, fifths = 0;
  if (has_scales(kind)) __builtin_memcpy(&stored, slice + size.data_bytes + token * 2, 2);
  const float scale = from_bf16(stored);
  for (int64_t d = 0; d < width; d++) {
    uint32_t word, upper = 0;
    const bool fine = d < entries.fine_dims;
    if (fine) __builtin_memcpy(&fifths, slice + entries.fifth(d), 2);
    __builtin_memcpy(&word, slice + entries.word(d), 4);
    const bool is_split = entries.element_bits == 6;
    if (is_split) __builtin_memcpy(&upper, slice + entries.word_of_upper(d), 4);
    upper = fine ? fifths >> entries.fifth_bit() & 1 : upper >> TokenEntries::bit_in_word(d, 2) & 3;
    const uint32_t lower = word >> entries.bit(d) & ~0u >> (32 - (is_split ? 4 : entries.element_bits));
    x[d] = decode(kind, fine ? 16 : zero_of(entries.in_steps), upper << 4 | lower, fine ? scale / 2 : scale);
  }
  if (kind != KvKind::int4) return;
  alignas(64) float rotated[kMaxScaledHeadDim];
  rotate_copy(x, rotated, width);
  for (int64_t d = 0; d < width; d++) x[d] = rotated[d] / (float)rotation_width(width);
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
  for (int64_t at = 0; at < shape.key_panel_bytes(); at += kStepBytes) __builtin_prefetch(keys + key.base + at, 1);
  if (memory.layout.values_in_keys) return;
  const uint8_t* values = keys + shape.keys.num_bytes;
  for (int64_t d = 0; d < memory.layout.value_dim; d += kGroup) __builtin_prefetch(values + value.word(d), 1);
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
