// The vector type of one ISA level and the few operations that kernels are written in.
//
// Compiled once per level inside namespace ridgeline::RIDGELINE_LEVEL. The width is the level's native one, so kernels
// loop over `kPanel / kLanes` vectors; gcc and clang vector extensions supply + - * / and comparisons at every level.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ridgeline::RIDGELINE_LEVEL {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif
inline constexpr int kVectorBytes = 4 * kLanes;

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef int32_t Ints __attribute__((vector_size(kVectorBytes)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef int16_t Shorts __attribute__((vector_size(kVectorBytes)));
typedef uint16_t UShorts __attribute__((vector_size(kVectorBytes)));
typedef uint8_t Bytes __attribute__((vector_size(kVectorBytes)));

// A vector of float64, and what converts to and from it: half as many floats.
inline constexpr int kDoubleLanes = kLanes / 2;
typedef double Doubles __attribute__((vector_size(kVectorBytes)));
typedef int64_t Longs __attribute__((vector_size(kVectorBytes)));
typedef float HalfFloats __attribute__((vector_size(kVectorBytes / 2)));

#define RL_INLINE static inline __attribute__((always_inline))

template <class Vector>
RL_INLINE Vector load(const void* from) {
  Vector v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class Vector>
RL_INLINE void store(void* to, Vector v) {
  __builtin_memcpy(to, &v, sizeof v);
}

RL_INLINE Floats splat(float x) { return x - Floats{}; }
RL_INLINE Ints splat_int(int32_t x) { return x - Ints{}; }

// The 4 bytes at `from` in every 32-bit lane.
RL_INLINE Ints splat_word(const void* from) {
  int32_t word;
  __builtin_memcpy(&word, from, 4);
  return splat_int(word);
}

RL_INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }
RL_INLINE Ints truncate_to_ints(Floats v) { return __builtin_convertvector(v, Ints); }
RL_INLINE Floats bits_to_floats(Words v) { return (Floats)v; }

// a * b + c, fused where the level can.
RL_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// The larger of each lane; of a NaN in `a` and a number in `b`, the number.
RL_INLINE Floats max(Floats a, Floats b) { return a > b ? a : b; }
RL_INLINE Floats min(Floats a, Floats b) { return a < b ? a : b; }

// The lanes in memory, to be read one by one: compilers otherwise take them out of the register by a chain of shuffles,
// several times slower where they become addresses.
struct Lanes {
  int32_t lane[kLanes];
};

RL_INLINE Lanes spill(Ints v) {
  Lanes lanes;
  store(lanes.lane, v);
  __asm__("" : "+m"(lanes));
  return lanes;
}

// Whether a comparison, of Floats or HalfFloats, holds in any lane.
template <class Mask>
RL_INLINE bool any(Mask mask) {
#if defined(__AVX512F__)
  if constexpr (sizeof mask == 64) return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#endif
#if defined(__AVX2__)
  if constexpr (sizeof mask == 32) return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#endif
#if defined(__SSE2__)
  if constexpr (sizeof mask == 16) return _mm_movemask_epi8((__m128i)mask) != 0;
#endif
  uint64_t words[sizeof mask / 8], all = 0;
  __builtin_memcpy(words, &mask, sizeof mask);
  for (uint64_t word : words) all |= word;
  return all != 0;
}

// The nearest integer, ties to even, for |v| < 2^22.
RL_INLINE Floats round_even(Floats v) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no room for a fraction
  return (v + magic) - magic;
}

// The same as integers.
RL_INLINE Ints nearest(Floats v) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)v);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)v);
#elif defined(__SSE2__)
  return (Ints)_mm_cvtps_epi32((__m128)v);
#else
  return truncate_to_ints(round_even(v));
#endif
}

RL_INLINE int32_t sum(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__AVX2__)
  __m128i half = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
#else
  int32_t total = 0;
  for (int lane = 0; lane < kLanes; lane++) total += v[lane];
  return total;
#endif
}

RL_INLINE int32_t largest(Ints v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(__AVX2__)
  __m128i half = _mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
#else
  int32_t most = v[0];
  for (int lane = 1; lane < kLanes; lane++) most = v[lane] > most ? v[lane] : most;
  return most;
#endif
}

RL_INLINE float sum(Floats v) {
  float total = 0;
  for (int lane = 0; lane < kLanes; lane++) total += v[lane];
  return total;
}

RL_INLINE float largest(Floats v) {
  float most = v[0];
  for (int lane = 1; lane < kLanes; lane++) most = v[lane] > most ? v[lane] : most;
  return most;
}

// The high and low bfloat16 of each 32-bit lane as float32. Memory order is (low, high).
RL_INLINE Floats bf16_low(Words pair) { return (Floats)(pair << 16); }
RL_INLINE Floats bf16_high(Words pair) { return (Floats)(pair & 0xffff0000u); }

RL_INLINE float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float x;
  __builtin_memcpy(&x, &wide, 4);
  return x;
}

// Round to nearest even; a NaN stays a NaN.
RL_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

// float16 bits as float32, exact also where the float unit counts subnormals as 0.
RL_INLINE float from_half(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fffu;
  if (magnitude < 0x400u) return (bits & 0x8000u ? -1.0f : 1.0f) * (float)magnitude * 0x1p-24f;
  const uint32_t wide =
      (bits & 0x8000u) << 16 | ((magnitude << 13) + (magnitude < 0x7c00u ? 112u << 23 : 224u << 23));
  float x;
  __builtin_memcpy(&x, &wide, 4);
  return x;
}

// Round to nearest even; a NaN stays a NaN.
RL_INLINE uint16_t to_half(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // adding 1/2 leaves the multiples of 2^-24, float16's subnormals
    float shifted;
    __builtin_memcpy(&shifted, &magnitude, 4);
    shifted += 0.5f;
    __builtin_memcpy(&bits, &shifted, 4);
    return (uint16_t)(sign | (bits - 0x3f000000u));
  }
  return (uint16_t)(sign | (magnitude + 0xfffu + (magnitude >> 13 & 1u) - 0x38000000u) >> 13);
}

// kLanes numbers of 16 bits.
RL_INLINE Words load_shorts(const void* from) {
  typedef uint16_t Narrow __attribute__((vector_size(2 * kLanes)));
  Narrow v;
  __builtin_memcpy(&v, from, sizeof v);
  return __builtin_convertvector(v, Words);
}

// kLanes float16 as float32.
RL_INLINE Floats load_half(const void* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  uint16_t bits[kLanes];
  __builtin_memcpy(bits, from, sizeof bits);
  Floats v;
  for (int lane = 0; lane < kLanes; lane++) v[lane] = from_half(bits[lane]);
  return v;
#endif
}

// kLanes bytes as signed words.
RL_INLINE Ints load_signed_bytes(const void* from) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  const int8_t* bytes = (const int8_t*)from;
  Ints v;
  for (int lane = 0; lane < kLanes; lane++) v[lane] = bytes[lane];
  return v;
#endif
}

// kLanes bytes as unsigned words.
RL_INLINE Words load_bytes(const void* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  const uint8_t* bytes = (const uint8_t*)from;
  Words v;
  for (int lane = 0; lane < kLanes; lane++) v[lane] = bytes[lane];
  return v;
#endif
}

// Each lane as bfloat16 in its low half: round to nearest even; a NaN stays a NaN.
RL_INLINE Words bf16_bits(Floats v) {
  const Words bits = (Words)v;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded;
}

// 2 * kLanes floats as bfloat16, in order, round to nearest even.
RL_INLINE void store_bf16(uint16_t* to, Floats low, Floats high) {
#if defined(__AVX512BF16__)
  const __m512bh packed = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  __builtin_memcpy(to, &packed, 64);
#else
  const Words a = bf16_bits(low), b = bf16_bits(high);
  for (int lane = 0; lane < kLanes; lane++) to[lane] = (uint16_t)a[lane];
  for (int lane = 0; lane < kLanes; lane++) to[kLanes + lane] = (uint16_t)b[lane];
#endif
}

// acc + a.low * b.low + a.high * b.high over bfloat16 pairs; operands and result below 2^-126 count as 0 where the
// hardware does it (AVX512-BF16), not elsewhere.
RL_INLINE Floats dot_bf16(Floats acc, Ints a, Ints b) {
#if defined(__AVX512BF16__)
#if defined(__clang__)
  __asm__("" : "+v"(a), "+v"(b));  // clang 16 never ends weighing a broadcast it sees as a vector of bfloat16
#endif
  return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  acc = fma(bf16_low((Words)a), bf16_low((Words)b), acc);
  return fma(bf16_high((Words)a), bf16_high((Words)b), acc);
#endif
}

// acc + a.low * b.low + a.high * b.high over int16 pairs, exact modulo 2^32.
RL_INLINE Ints dot_i16(Ints acc, Ints a, Ints b) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return acc + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
  return acc + (Ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
  return acc + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// acc + the sum of the four products of unsigned bytes of `u` with signed bytes of `s` in each lane, exact.
RL_INLINE Ints dot_u8s8(Ints acc, Ints u, Ints s) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s);
#else
  const Ints u_even = u & 0x00ff00ff, u_odd = (Ints)((Words)u >> 8) & 0x00ff00ff;
  const Ints s_even = (Ints)((Shorts)((UShorts)s << 8) >> 8), s_odd = (Ints)((Shorts)s >> 8);
  return dot_i16(dot_i16(acc, u_even, s_even), u_odd, s_odd);
#endif
}

// AVX2 without AVX-512: 16 registers, and an instruction that sums products of two bytes.
#if defined(__AVX2__) && !defined(__AVX512F__)
#define RIDGELINE_BYTE_PAIRS 1
// The vector, of which the compiler knows no more: sums stay in the order they are written in. gcc otherwise adds up what
// it finds in unrolled code as a tree, whose leaves do not fit the registers.
template <class Vector>
RL_INLINE Vector in_order(Vector v) {
  __asm__("" : "+x"(v));
  return v;
}

// acc + the products of unsigned bytes of `u` with signed bytes of `s`, summed by pairs in 16 bits, which must hold them.
RL_INLINE Shorts add_u8s8(Shorts acc, Ints u, Ints s) {
  return in_order(acc + (Shorts)_mm256_maddubs_epi16((__m256i)u, (__m256i)s));
}
#endif

// The products above with the 4 bytes at `word` in every lane as one factor, which the level's instructions read from
// memory themselves: one instruction, where compilers make two as soon as two products share the word.
#if defined(__AVX512VNNI__)
#define RL_BROADCAST(name, Sum, instruction, Factor)                                                         \
  RL_INLINE Sum name(Sum acc, Factor factor, const void* word) {                                             \
    typedef int32_t __attribute__((may_alias, aligned(1))) Word;                                             \
    __asm__(instruction " %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(factor), "m"(*(const Word*)word));          \
    return acc;                                                                                              \
  }
RL_BROADCAST(fma_broadcast, Floats, "vfmadd231ps", Floats)
RL_BROADCAST(dot_i16_broadcast, Ints, "vpdpwssd", Ints)
RL_BROADCAST(dot_u8s8_broadcast, Ints, "vpdpbusd", Ints)  // the word's bytes are signed
#undef RL_BROADCAST
#else
RL_INLINE Floats fma_broadcast(Floats acc, Floats factor, const void* word) {
  return fma((Floats)splat_word(word), factor, acc);
}
RL_INLINE Ints dot_i16_broadcast(Ints acc, Ints factor, const void* word) {
  return dot_i16(acc, factor, splat_word(word));
}
RL_INLINE Ints dot_u8s8_broadcast(Ints acc, Ints factor, const void* word) {
  return dot_u8s8(acc, factor, splat_word(word));
}
#endif

// exp(x) / 2^n = exp(r), r = x - n ln 2, for n = round(x / ln 2), so |r| <= ln 2 / 2: by Cephes' polynomial of degree 6.
RL_INLINE Floats exp_fraction(Floats x, Floats n) {
  Floats r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Floats p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  return fma(p, r * r, r) + 1.0f;
}

// e^x within 2 units in the last place for x <= 88; 0 below -87.3; NaN stays NaN.
RL_INLINE Floats exp(Floats x) {
  const Floats n = round_even(min(max(x, splat(-104.0f)), splat(89.0f)) * 1.44269504088896341f);
  const Floats clipped = min(x, splat(89.0f));
  const Floats p = exp_fraction(clipped, n);
  const Ints exponent = truncate_to_ints(n) + 127;
  const Floats scaled = p * (Floats)(exponent << 23);
  const Floats bounded = x < -87.3f ? Floats{} : scaled;
  return x != x ? x : bounded;
}

}  // namespace ridgeline::RIDGELINE_LEVEL
