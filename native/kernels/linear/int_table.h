// 4-bit codes of bitsandbytes as factors of integer products: a table of 16 numbers, NF4's or FP4's, as integers of 16
// bits in a unit of their own, which goes into the inputs' scales. FP4's are whole 192nds. NF4's are within 2.3e-5 of
// themselves where inputs have 8 bits, and within 5.5e-7 where they have 16: there in two planes, 1024 * high + low, so
// that sums of 64 products fit 32 bits.
#pragma once

#include "kernels/simd.h"
#include "kernels/types.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_int {

inline constexpr int32_t kPlane = 1024;  // what one of NF4's high plane is of its low one

// What a table holds, and how much of it is 1.
struct Table {
  int16_t factors[16];
  float unit;
};

template <WeightKind kind>
inline constexpr Table kTable = {};
template <>
inline constexpr Table kTable<WeightKind::fp4> = {
    {0, 1, 128, 192, 64, 96, 32, 48, 0, -1, -128, -192, -64, -96, -32, -48}, 192.0f};
template <>
inline constexpr Table kTable<WeightKind::nf4> = {
    {-32169, -22396, -16891, -12704, -9150, -5944, -2929, 0, 2560, 5177, 7917, 10870, 14177, 18099, 23256, 32169},
    32168.5692f};
template <>
inline constexpr Table kTable<WeightKind::nf4_high> = {
    {-984, -685, -517, -389, -280, -182, -90, 0, 78, 158, 242, 332, 433, 553, 710, 983}, 1006995.375f};
template <>
inline constexpr Table kTable<WeightKind::nf4_low> = {
    {621, 377, 662, 656, 289, 302, 473, 0, 265, 264, 26, 311, 401, 281, 974, 403}, 1006995.375f};

// What inputs are divided by, where the weights are so read.
RL_INLINE float table_unit(WeightKind kind, InputKind input) {
  if (kind == WeightKind::fp4) return kTable<WeightKind::fp4>.unit;
  return input == InputKind::int8 ? kTable<WeightKind::nf4>.unit : kTable<WeightKind::nf4_high>.unit;
}

// What a code stands for.
RL_INLINE float table_level(WeightKind kind, uint32_t code) {
  constexpr float kNf4[16] = {-1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
                              -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
                              0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
                              0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
  return kind == WeightKind::fp4 ? (float)kTable<WeightKind::fp4>.factors[code] / 192.0f : kNf4[code];
}

// The code of zero.
RL_INLINE uint8_t table_zero(WeightKind kind) { return kind == WeightKind::nf4 ? 7 : 0; }

// The factors of words of int4's layout: w[i] those of nibble i of both halves.
template <WeightKind kind>
RL_INLINE void table_factors(Ints words, Ints (&w)[4]) {
  constexpr const Table& table = kTable<kind>;
#if defined(__AVX512BW__)
  // Twice, since an index has five bits, of which the highest is another code's.
  const __m256i once = _mm256_loadu_si256((const __m256i*)table.factors);
  const __m512i twice = _mm512_maskz_broadcast_i64x4(0xff, once);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    w[i] = (Ints)_mm512_maskz_permutexvar_epi16(0xffffffffu, (__m512i)((UShorts)words >> 4 * i), twice);
#elif defined(__AVX2__)
  const __m256i factors = _mm256_loadu_si256((const __m256i*)table.factors), bytes = _mm256_set1_epi16(255);
  const __m256i halves = _mm256_packus_epi16(_mm256_and_si256(factors, bytes), _mm256_srli_epi16(factors, 8));
  const __m256i low_bytes = _mm256_permute4x64_epi64(halves, 0x88), high_bytes = _mm256_permute4x64_epi64(halves, 0xdd);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const __m256i codes = (__m256i)((Ints)((UShorts)words >> 4 * i) & 0x0f0f0f0f);
    const UShorts low = (UShorts)_mm256_shuffle_epi8(low_bytes, codes);
    const UShorts high = (UShorts)_mm256_shuffle_epi8(high_bytes, codes);
    w[i] = (Ints)((low & 255) | (high << 8));
    w[i + 2] = (Ints)((low >> 8) | (high & 0xff00));
  }
#else
  uint16_t halves[2 * kLanes];
  store(halves, words);
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    int16_t found[2 * kLanes];
    for (int half = 0; half < 2 * kLanes; half++) found[half] = table.factors[halves[half] >> 4 * i & 15];
    w[i] = load<Ints>(found);
  }
#endif
}

}  // namespace ridgeline::RIDGELINE_LEVEL::linear_int
