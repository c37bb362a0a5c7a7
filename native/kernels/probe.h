// The ceilings that kernels are measured against: memory read bandwidth, and register-only loops of products.
#pragma once

#include "kernels/table.h"
#include "kernels/tiles.h"

namespace ridgeline::RIDGELINE_LEVEL {

// Four streams of two cache lines a round: within noise of the best of 1 to 8 streams x 1 to 16 vectors on Zen 4, for
// one thread and for all. The prefetch crosses the page ends at which the hardware's stops.
inline constexpr int kReadStreams = 4, kReadBytes = 128, kPrefetchBytes = 512;

// The exclusive or of the 64-bit words of the buffer, the last one padded with zeros.
inline uint64_t read(const uint8_t* from, int64_t bytes) {
  Words even[kReadStreams] = {}, odd[kReadStreams] = {};
  const int64_t share = bytes / (kReadStreams * kReadBytes) * kReadBytes;
  for (int64_t at = 0; at < share; at += kReadBytes) {
#pragma GCC unroll 4
    for (int stream = 0; stream < kReadStreams; stream++) {
      const uint8_t* line = from + stream * share + at;
      __builtin_prefetch(line + kPrefetchBytes);
      __builtin_prefetch(line + kPrefetchBytes + 64);
#pragma GCC unroll 8
      for (int byte = 0; byte < kReadBytes; byte += 2 * kVectorBytes) {
        even[stream] ^= load<Words>(line + byte);
        odd[stream] ^= load<Words>(line + byte + kVectorBytes);
      }
    }
  }
  Words all = {};
  for (int stream = 0; stream < kReadStreams; stream++) all ^= even[stream] ^ odd[stream];
  uint64_t words[kVectorBytes / 8], result = 0;
  __builtin_memcpy(words, &all, sizeof words);
  for (const uint64_t word : words) result ^= word;
  for (int64_t at = kReadStreams * share; at < bytes; at += 8) {
    uint64_t word = 0;
    __builtin_memcpy(&word, from + at, bytes - at < 8 ? bytes - at : 8);
    result ^= word;
  }
  return result;
}

// Makes the compiler forget what it knows of a vector, at no cost: products of it are computed again.
#if defined(__x86_64__)
#define RL_OPAQUE(v) __asm__ volatile("" : "+x"(v))
#else
#define RL_OPAQUE(v) __asm__ volatile("" : "+w"(v))
#endif

// Independent sums: two instructions a cycle of latency 6 need 12, which leave room for operands in 16 registers. Where
// there are 32 registers, 16 sums reach the last few percent.
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int kSums = 16;
#else
inline constexpr int kSums = 12;
#endif

template <class Vector, class Product>
RL_INLINE void repeat(Vector a, Vector b, int64_t rounds, Product product) {
  Vector sums[kSums] = {};
  for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i++) {
      RL_OPAQUE(a);
      sums[i] = product(sums[i], a, b);
    }
  }
  for (int i = 0; i < kSums; i++) RL_OPAQUE(sums[i]);
}

inline double peak_f32(int64_t rounds) {
  repeat(splat(0.5f), splat(0.25f), rounds, [](Floats sum, Floats a, Floats b) { return fma(a, b, sum); });
  return (double)rounds * kSums * 2 * kLanes;
}

inline double peak_i16(int64_t rounds) {
  const Ints a = splat_int(0x00030005), b = splat_int(0x00070002);
  repeat(a, b, rounds, [](Ints sum, Ints x, Ints y) { return dot_i16(sum, x, y); });
  return (double)rounds * kSums * 4 * kLanes;
}

#if RIDGELINE_BYTE_PAIRS

// Sums of 16 bits hold eight products of pairs and are then widened, as in linear/int_gemm.h.
inline double peak_int4(int64_t rounds) {
  constexpr int kPairs = 8, kChains = 4;
  const Ints weights = splat_int(0x03030303), inputs = splat_int(0x01020102);
  Ints u = weights, sums[kChains] = {};
  for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; chain++) {
      Shorts pairs{};
#pragma GCC unroll 8
      for (int i = 0; i < kPairs; i++) {
        RL_OPAQUE(u);
        pairs = add_u8s8(pairs, u, inputs);
      }
      sums[chain] = dot_i16(sums[chain], (Ints)pairs, splat_int(0x00010001));
    }
  }
#pragma GCC unroll 4
  for (int chain = 0; chain < kChains; chain++) RL_OPAQUE(sums[chain]);
  return (double)rounds * kChains * kPairs * 8 * kLanes;
}

#endif

#if RIDGELINE_TILES

inline constexpr int kTileSums = 6;  // of eight tiles; the other two are the operands

inline double peak_tiles(InputKind kind, int64_t rounds) {
  alignas(64) uint8_t operand[kTileRows][kTileBytes];
  for (auto& row : operand)
    for (uint8_t& byte : row) byte = 1;
  set_tiles(TileShapes::uniform());
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>(), tile_zero<4>(), tile_zero<5>();
  tile_load<6>(operand, kTileBytes);
  tile_load<7>(operand, kTileBytes);
  for (int64_t round = 0; round < rounds; round++) {
    if (kind == InputKind::bf16) {
      tile_dot_bf16<0, 6, 7>(), tile_dot_bf16<1, 6, 7>(), tile_dot_bf16<2, 6, 7>();
      tile_dot_bf16<3, 6, 7>(), tile_dot_bf16<4, 6, 7>(), tile_dot_bf16<5, 6, 7>();
    } else {
      tile_dot_s8u8<0, 6, 7>(), tile_dot_s8u8<1, 6, 7>(), tile_dot_s8u8<2, 6, 7>();
      tile_dot_s8u8<3, 6, 7>(), tile_dot_s8u8<4, 6, 7>(), tile_dot_s8u8<5, 6, 7>();
    }
  }
  release_tiles();
  const int products = kTileRows * 16 * kTileBytes / (kind == InputKind::bf16 ? 2 : 1);
  return (double)rounds * kTileSums * 2 * products;
}

#endif

// Where a level has no instruction for bfloat16 its products are float32 ones, for bytes 16-bit ones: so are the peaks.
inline double peak(InputKind kind, int64_t rounds) {
#if RIDGELINE_TILES
  if (kind == InputKind::bf16 || kind == InputKind::int8) return peak_tiles(kind, rounds);
#endif
#if defined(__AVX512BF16__)
  if (kind == InputKind::bf16) {
    const Ints ones = splat_int(0x3f803f80);
    repeat((Floats)ones, (Floats)ones, rounds,
           [](Floats sum, Floats a, Floats b) { return dot_bf16(sum, (Ints)a, (Ints)b); });
    return (double)rounds * kSums * 4 * kLanes;
  }
#endif
#if defined(__AVX512VNNI__)
  if (kind == InputKind::int8) {
    const Ints ones = splat_int(0x01010101);
    repeat(ones, ones, rounds, [](Ints sum, Ints u, Ints s) { return dot_u8s8(sum, u, s); });
    return (double)rounds * kSums * 8 * kLanes;
  }
#endif
  return kind == InputKind::f32 || kind == InputKind::bf16 ? peak_f32(rounds) : peak_i16(rounds);
}

}  // namespace ridgeline::RIDGELINE_LEVEL
