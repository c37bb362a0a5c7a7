// The one matrix product of attention: some rows against some panels of the cache (kernels/attention/kv.h). Scores are
// queries against panels of keys, outputs are weights against panels of values.
#pragma once

#include <type_traits>

#include "kernels/attention/kv.h"

#if defined(__clang__)
#define RL_UNROLL _Pragma("unroll")
#else
#define RL_UNROLL _Pragma("GCC unroll 16")
#endif

namespace ridgeline::RIDGELINE_LEVEL {

inline constexpr int kParts = kGroup / kLanes;  // vectors of a step
inline constexpr int kWidth = kLanes == 16 ? 4 : 1;  // panels that are multiplied together

// How an element kind is multiplied: in `kPasses` over the words of a step, each of which makes operands of them. A row
// holds kRowWords words a step: the elements that meet one of the panel's words, one word a pass. kRows x kWidth x
// kParts sums and the operands of a pass fit the level's registers.
//
// A step has kSteps times 64 bytes, or what `kStride` says. `lanes` gets vector `part` of it.
struct F32 {
  using Sum = Floats;
  static constexpr bool kScaled = false;
  static constexpr int kSteps = 1;
  static constexpr int kElements = 1, kRowWords = 1, kPasses = 1, kRows = kLanes == 4 ? 2 : 6;

  template <int Pass>
  RL_INLINE Floats lanes(const uint8_t* step, int) {
    return load<Floats>(step);
  }
  RL_INLINE Sum dot(Sum sum, Ints row, Floats lanes) { return fma((Floats)row, lanes, sum); }
};

#if defined(__AVX512BF16__)
// Pairs of bfloat16: one product of the level's own.
struct Bf16Pairs {
  using Sum = Floats;
  static constexpr bool kScaled = false;
  static constexpr int kSteps = 1;
  static constexpr int kElements = 2, kRowWords = 1, kPasses = 1, kRows = 6;

  template <int Pass>
  RL_INLINE Ints lanes(const uint8_t* step, int) {
    return load<Ints>(step);
  }
  RL_INLINE Sum dot(Sum sum, Ints row, Ints lanes) { return dot_bf16(sum, row, lanes); }
};
#endif

// bfloat16 by products of float32. Rows hold what was rounded to bfloat16 as float32.
struct Bf16Floats {
  using Sum = Floats;
  static constexpr bool kScaled = false;
  static constexpr int kSteps = 1;
  static constexpr int kElements = 2, kRowWords = 2, kPasses = 2, kRows = kLanes == 4 ? 2 : 6;

  template <int Pass>
  RL_INLINE Floats lanes(const uint8_t* step, int) {
    return Pass == 0 ? bf16_low(load<Words>(step)) : bf16_high(load<Words>(step));
  }
  RL_INLINE Sum dot(Sum sum, Ints row, Floats lanes) { return fma((Floats)row, lanes, sum); }
};

// Kinds whose tokens have scales. A row's largest magnitude becomes kTop, and a sum is kDivisor times as large as that
// of the values as they are; magnitudes below kLeast count as 0.
//
// Rows of integers are int16; sums are exact: 255 * 32767 * 256 < 2^31. kZero is the element that means 0.
struct Int16Rows {
  using Sum = Ints;
  static constexpr bool kScaled = true;
  static constexpr int kSteps = 1;
  static constexpr float kTop = 32767.0f, kDivisor = 32767.0f, kLeast = 1e-30f;

  RL_INLINE Sum dot(Sum sum, Ints row, Ints lanes) { return dot_i16(sum, row, lanes); }
};

struct Int8 : Int16Rows {
  static constexpr int kZero = 128;
  static constexpr int kElements = 4, kRowWords = 2, kPasses = 2, kRows = kLanes == 16 ? 6 : kLanes == 8 ? 4 : 2;

  template <int Pass>
  RL_INLINE Ints lanes(const uint8_t* step, int) {
    const Ints words = load<Ints>(step);
    return Pass == 0 ? words & 0x00ff00ff : (Ints)((UShorts)words >> 8);
  }
};

struct Int4 : Int16Rows {
  static constexpr int kZero = 8;
  static constexpr int kElements = 8, kRowWords = 4, kPasses = 4, kRows = Int8::kRows;

  template <int Pass>
  RL_INLINE Ints lanes(const uint8_t* step, int) {
    return (Ints)(load<Words>(step) >> 4 * Pass) & 0x000f000f;
  }
};

// Values of Int4's fine panels: the levels are half as far apart.
struct Int5 : Int16Rows {
  static constexpr int kZero = 16, kSteps = 3;
  static constexpr int kElements = 16, kRowWords = 8, kPasses = 8, kRows = Int8::kRows;

  template <int Pass>
  RL_INLINE Ints lanes(const uint8_t* step, int part) {
    const Words lower = load<Words>(step + Pass / 4 * kStepBytes);
    const Words fifths = load_shorts(step + 2 * kStepBytes - part * (kVectorBytes / 2));
    const Words spread = (fifths & 0xffu) | (fifths & 0xff00u) << 8;
    const Words above = Pass < 4 ? spread << (4 - Pass % 4) : spread >> Pass % 4;
    return (Ints)((lower >> Pass % 4 * 4 & 0x000f000fu) | (above & 0x00100010u));
  }
};

// Keys beside values of Int4.
struct Int6 : Int16Rows {
  static constexpr int kZero = 32, kSteps = 3;
  static constexpr int kElements = 16, kRowWords = 8, kPasses = 8, kRows = Int8::kRows;

  template <int Pass>
  RL_INLINE Ints lanes(const uint8_t* step, int) {
    constexpr int kShift = 2 * Pass - 4;  // of the upper bits, to stand above the lower ones
    const Words lower = load<Words>(step + Pass / 4 * kStepBytes), upper = load<Words>(step + 2 * kStepBytes);
    const Words above = kShift < 0 ? upper << -kShift : upper >> (kShift < 0 ? 0 : kShift);
    return (Ints)((lower >> Pass % 4 * 4 & 0x000f000fu) | (above & 0x00300030u));
  }
};

// The kind of the keys beside values of a kind.
template <class Kind>
using KeysOf = std::conditional_t<std::is_same_v<Kind, Int4>, Int6, Kind>;

// E4M3 without subnormals, its exponent taken for that of a wider float: 2^-120 of the value, and 0 is 0.
struct Fp8Rows {
  using Sum = Floats;
  static constexpr bool kScaled = true;
  static constexpr int kSteps = 1;
  static constexpr float kTop = 0x1p63f, kDivisor = 0x1p-57f, kLeast = 1e-18f;
};

#if defined(__AVX512BF16__)
struct Fp8Pairs : Fp8Rows {
  static constexpr int kElements = 4, kRowWords = 2, kPasses = 2, kRows = 6;

  template <int Pass>
  RL_INLINE Ints lanes(const uint8_t* step, int) {
    const UShorts halves = load<UShorts>(step);
    return (Ints)((Words)((Shorts)(Pass == 0 ? halves << 8 : halves) >> 4) & 0x87f087f0u);
  }
  RL_INLINE Sum dot(Sum sum, Ints row, Ints lanes) { return dot_bf16(sum, row, lanes); }
};
#endif

struct Fp8Floats : Fp8Rows {
  static constexpr int kElements = 4, kRowWords = 4, kPasses = 4, kRows = kLanes == 4 ? 2 : 6;

  template <int Pass>
  RL_INLINE Floats lanes(const uint8_t* step, int) {
    constexpr int kFromTop = 24 - 8 * (Pass / 2 + Pass % 2 * 2);
    return (Floats)((Words)((Ints)(load<Words>(step) << kFromTop) >> 4) & 0x87f00000u);
  }
  RL_INLINE Sum dot(Sum sum, Ints row, Floats lanes) { return fma((Floats)row, lanes, sum); }
};

template <class Kind>
inline constexpr bool kIsInteger = std::is_same_v<typename Kind::Sum, Ints>;

template <class Kind>
inline constexpr bool kIsFine = std::is_same_v<Kind, Int5>;

template <class Kind>
inline constexpr int64_t kStride = kIsFine<Kind> ? kFineBytes : Kind::kSteps * kStepBytes;

template <class Kind>
inline constexpr bool kIsRotated = std::is_same_v<Kind, Int4>;

// Adds one pass over a step, and over those behind it.
template <class Kind, int Rows, int Panels, int Pass = 0>
RL_INLINE void add_step(const uint32_t* rows, int64_t row_stride, const uint8_t* const (&from)[Panels], int64_t at,
                        typename Kind::Sum (&sums)[Rows][Panels * kParts]) {
  decltype(Kind::template lanes<Pass>(nullptr, 0)) lanes[Panels * kParts];
  RL_UNROLL for (int p = 0; p < Panels; p++)
    RL_UNROLL for (int part = 0; part < kParts; part++)
      lanes[p * kParts + part] = Kind::template lanes<Pass>(from[p] + at + part * kVectorBytes, part);
  RL_UNROLL for (int r = 0; r < Rows; r++) {
    const Ints row = splat_word(rows + r * row_stride + Pass);
    RL_UNROLL for (int p = 0; p < Panels * kParts; p++) sums[r][p] = Kind::dot(sums[r][p], row, lanes[p]);
  }
  if constexpr (Pass + 1 < Kind::kPasses) add_step<Kind, Rows, Panels, Pass + 1>(rows, row_stride, from, at, sums);
}

// sum[r][p] = begin(r, p) + rows[r] . panel[p], then end(r, p, sum); p counts vectors of lanes. The product runs over
// `num_pieces` pieces of `steps` steps: piece i of panel p starts at panels[i][p]. Every sum is one chain in the order
// of the steps, whatever Rows and Panels: rows do not depend on what they are computed with. ahead[i][p] is memory
// wanted soon, as large as the panel.
template <class Kind, int Rows, int Panels, class Begin, class End>
RL_INLINE void product(const uint32_t* rows, int64_t row_stride, const uint8_t* const (*panels)[kWidth],
                       const uint8_t* const (*ahead)[kWidth], int64_t num_pieces, int64_t steps, Begin begin,
                       End end) {
  typename Kind::Sum sums[Rows][Panels * kParts];
  RL_UNROLL for (int r = 0; r < Rows; r++)
    RL_UNROLL for (int p = 0; p < Panels * kParts; p++) sums[r][p] = begin(r, p);
  for (int64_t piece = 0; piece < num_pieces; piece++) {
    const uint8_t *from[Panels], *wanted[Panels];
    RL_UNROLL for (int p = 0; p < Panels; p++) from[p] = panels[piece][p], wanted[p] = ahead[piece][p];
    for (int64_t at = 0; at < steps * kStride<Kind>; at += kStride<Kind>) {
      RL_UNROLL for (int p = 0; p < Panels * Kind::kSteps; p++)
        __builtin_prefetch(wanted[p / Kind::kSteps] + at + p % Kind::kSteps * kStepBytes, 0, 2);
      add_step<Kind, Rows, Panels>(rows, row_stride, from, at, sums);
      rows += Kind::kRowWords;
    }
  }
  RL_UNROLL for (int r = 0; r < Rows; r++)
    RL_UNROLL for (int p = 0; p < Panels * kParts; p++) end(r, p, sums[r][p]);
}

// Calls call.operator()<R>() for R = rows, 1 <= rows <= Max.
template <int Max, class Call>
RL_INLINE void with_rows(int64_t rows, Call call) {
  if (rows == Max) return call.template operator()<Max>();
  if constexpr (Max > 1) with_rows<Max - 1>(rows, call);
}

}  // namespace ridgeline::RIDGELINE_LEVEL
