// The one matrix product of attention: some rows against some panels of the cache (kernels/attention/kv.h). Scores are
// queries against panels of keys, outputs are weights against panels of values.
#pragma once

#include "kernels/attention/kv.h"

#if defined(__clang__)
#define RL_UNROLL _Pragma("unroll")
#else
#define RL_UNROLL _Pragma("GCC unroll 16")
#endif

namespace ridgeline::RIDGELINE_LEVEL {

inline constexpr int kParts = kGroup / kLanes;  // vectors of a step
inline constexpr int kWidth = kLanes == 16 ? 4 : 1;  // panels that are multiplied together

// How an element kind is multiplied. A row holds kRowWords words a step: the S elements that meet one of the panel's
// words. kRows x kWidth x kParts sums, and what they are made from, fit the level's registers.
struct F32 {
  using Sum = Floats;
  static constexpr int kElements = 1, kRowWords = 1, kRows = kLanes == 4 ? 2 : 6;

  struct Lanes {
    Floats x;
  };
  struct Entry {
    Floats x;
  };
  RL_INLINE Lanes lanes(const uint8_t* step) { return {load<Floats>(step)}; }
  RL_INLINE Entry entry(const uint32_t* row) { return {(Floats)splat_word(row)}; }
  RL_INLINE Sum dot(Sum sum, Entry a, Lanes b) { return fma(a.x, b.x, sum); }
};

struct Bf16 {
  using Sum = Floats;
#if defined(__AVX512BF16__)
  static constexpr int kRows = 6;
#else
  static constexpr int kRows = kLanes == 4 ? 2 : 4;
#endif
  static constexpr int kElements = 2, kRowWords = 1;

  struct Lanes {
    Ints x;
  };
  struct Entry {
    Ints x;
  };
  RL_INLINE Lanes lanes(const uint8_t* step) { return {load<Ints>(step)}; }
  RL_INLINE Entry entry(const uint32_t* row) { return {splat_word(row)}; }
  RL_INLINE Sum dot(Sum sum, Entry a, Lanes b) { return dot_bf16(sum, a.x, b.x); }
};

// Rows are int16; sums are exact: 255 * 32767 * 256 < 2^31.
struct Int8 {
  using Sum = Ints;
  static constexpr int kElements = 4, kRowWords = 2, kRows = kLanes == 4 ? 2 : 4;

  struct Lanes {
    Ints even, odd;
  };
  struct Entry {
    Ints even, odd;
  };
  RL_INLINE Lanes lanes(const uint8_t* step) {
    const Ints x = load<Ints>(step);
    return {x & 0x00ff00ff, (Ints)((UShorts)x >> 8)};
  }
  RL_INLINE Entry entry(const uint32_t* row) { return {splat_word(row), splat_word(row + 1)}; }
  RL_INLINE Sum dot(Sum sum, Entry a, Lanes b) { return dot_i16(dot_i16(sum, a.even, b.even), a.odd, b.odd); }
};

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
    for (int64_t at = 0; at < steps * kStepBytes; at += kStepBytes) {
      typename Kind::Lanes lanes[Panels * kParts];
      RL_UNROLL for (int p = 0; p < Panels; p++) {
        __builtin_prefetch(wanted[p] + at, 0, 2);
        RL_UNROLL for (int part = 0; part < kParts; part++)
          lanes[p * kParts + part] = Kind::lanes(from[p] + at + part * kVectorBytes);
      }
      RL_UNROLL for (int r = 0; r < Rows; r++) {
        const auto entry = Kind::entry(rows + r * row_stride);
        RL_UNROLL for (int p = 0; p < Panels * kParts; p++) sums[r][p] = Kind::dot(sums[r][p], entry, lanes[p]);
      }
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
