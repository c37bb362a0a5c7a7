// 8-bit floats (E4M3: a sign, 4 bits of exponent, 3 of mantissa) as factors of float products, exact: as pairs of
// bfloat16, or as float32. A word holds inputs k, k + 2, k + 1 and k + 3 of an output, so that its even bytes are a pair,
// and its odd ones. NaN codes are not among weights.
#pragma once

#include "kernels/simd.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_float {

inline constexpr int kByteOf[4] = {0, 2, 1, 3};  // of a word, the place of each of its inputs

RL_INLINE float e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const uint32_t bits = (uint32_t)(exponent + 120) << 23 | (uint32_t)mantissa << 20;
  float normal;
  __builtin_memcpy(&normal, &bits, 4);
  const float magnitude = exponent ? normal : (float)mantissa * 0x1p-9f;
  return code & 128 ? -magnitude : magnitude;
}

#if defined(__AVX512BW__)
// The bfloat16 of the low byte of every half; high bytes are ignored. What is subnormal, the first 8 codes, is a table.
RL_INLINE Ints e4m3_pairs(Ints halves) {
  const __m512i kSmall = _mm512_maskz_broadcast_i64x4(
      0xff, _mm256_setr_epi16(0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60, 0, 0, 0, 0, 0, 0, 0, 0));
  const UShorts magnitude = (UShorts)halves & 0x7f;
  const __m512i normal = (__m512i)((magnitude << 4) + 0x3c00);
  const __mmask32 small = _mm512_cmplt_epu16_mask((__m512i)magnitude, _mm512_set1_epi16(8));
  const UShorts found = (UShorts)_mm512_mask_permutexvar_epi16(normal, small, (__m512i)magnitude, kSmall);
  return (Ints)(found | (((UShorts)halves << 8) & 0x8000));
}
#endif

// Input `at` of words as float32.
template <int at>
RL_INLINE Floats e4m3_floats(Ints words) {
#if defined(__AVX512BW__)
  const Words pairs = (Words)e4m3_pairs(at < 2 ? words : (Ints)((UShorts)words >> 8));
  return at % 2 ? bf16_high(pairs) : bf16_low(pairs);
#else
  const Words code = (Words)words >> 8 * kByteOf[at], magnitude = code & 0x7f;
  const Words small = (Words)(magnitude < 8);  // subnormal: counted as 1 + m / 8, from which 1 is taken
  const Floats value = (Floats)((magnitude << 20) + (120u << 23) + (small & (1u << 23))) -
                       (Floats)(small & (121u << 23));
  return (Floats)((Words)value | (code & 0x80) << 24);
#endif
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_float
