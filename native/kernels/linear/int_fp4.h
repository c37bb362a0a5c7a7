// 4-bit floats (E2M1) as factors of integer products: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. Twice the number plus
// 12 is an integer from 0 to 24, so that sums are exact as those of int4; the 12 goes by the correction of the sums, the
// 2 into the inputs' scales. Scales of groups are bytes: a power of two (E8M0), or an 8-bit float without sign (E4M3).
#pragma once

#include "kernels/simd.h"
#include "kernels/types.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_int {

inline constexpr int32_t kE2m1Zero = 12;
inline constexpr float kE4m3Unit = 256.0f;  // bits of E4M3 are those of a float16 that is this much smaller

// Twice what a code of 4 bits stands for.
RL_INLINE int32_t e2m1_twice(uint32_t code) {
  const int32_t index = (int32_t)(code & 7u);
  const int32_t twice = index + (index > 4 ? index - 4 : 0) + (index > 6 ? 2 : 0);
  return code & 8u ? -twice : twice;
}

// The same plus 12 for the code in every byte, whose high bits are 0.
RL_INLINE Ints e2m1_factors(Ints codes) {
#if defined(__AVX2__)
  const __m128i factors = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
#endif
#if defined(__AVX512BW__)
  return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(factors), (__m512i)codes);
#elif defined(__AVX2__)
  return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(factors), (__m256i)codes);
#else
  typedef int8_t SignedBytes __attribute__((vector_size(kVectorBytes)));
  const SignedBytes index = (SignedBytes)codes & 7, negative = (SignedBytes)codes > 7;
  const SignedBytes twice = index + ((index > 4) & (index - 4)) + ((index > 6) & 2);
  return (Ints)(((twice ^ negative) - negative) + (int8_t)kE2m1Zero);
#endif
}

// What the scale byte stands for; of E4M3, divided by kE4m3Unit.
RL_INLINE float fp4_scale(WeightKind kind, uint8_t byte) {
  if (kind == WeightKind::nvfp4) return from_half((uint16_t)(byte << 7));
  const uint32_t bits = byte ? (uint32_t)byte << 23 : 1u << 22;  // 2^-127 is subnormal
  float scale;
  __builtin_memcpy(&scale, &bits, 4);
  return scale;
}

// The byte of such a scale, which is one.
RL_INLINE uint8_t fp4_scale_byte(WeightKind kind, float scale) {
  if (kind == WeightKind::nvfp4) return (uint8_t)(to_half(scale / kE4m3Unit) >> 7);
  uint32_t bits;
  __builtin_memcpy(&bits, &scale, 4);
  return (uint8_t)(bits >> 23);
}

// kLanes scales, as fp4_scale has them.
template <WeightKind kind>
RL_INLINE Floats load_fp4_scales(const uint8_t* from) {
  if constexpr (kind == WeightKind::nvfp4) {
#if defined(__AVX512F__)
    const __m256i halves = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)from)), 7);
    return (Floats)_mm512_maskz_cvtph_ps(0xffff, halves);
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)from)), 7));
#else
    Floats v;
    for (int lane = 0; lane < kLanes; lane++) v[lane] = fp4_scale(kind, from[lane]);
    return v;
#endif
  }
  const Words bits = load_bytes(from) << 23, least = Words{} + (1u << 22);
  return (Floats)(bits > least ? bits : least);
}

// Sums in units of E4M3 times what an output's scales are multiplied by or, where it is negative, divided by without
// its sign.
RL_INLINE Floats times_outer(Floats sums, Floats outer) { return outer < 0.0f ? sums / -outer : sums * outer; }

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_int
