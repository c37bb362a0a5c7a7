// The matrix unit: eight tiles of 16 rows x 64 bytes, and products of them. The amx level has the hardware's; the
// amx_emulated level the same operations over plain memory, so that tile kernels are tested where there is no AMX.
//
// Tile numbers are template parameters because the instructions encode them.
#pragma once

#include "kernels/simd.h"

#if RIDGELINE_TILES

namespace ridgeline::RIDGELINE_LEVEL {

inline constexpr int kTiles = 8, kTileRows = 16, kTileBytes = 64;

// Rows and bytes per row of each tile while a kernel runs.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  static inline TileShapes uniform() {
    TileShapes shapes;
    for (int t = 0; t < kTiles; t++) shapes.row_bytes[t] = kTileBytes, shapes.rows[t] = kTileRows;
    return shapes;
  }
};

#if RIDGELINE_EMULATED_TILES

struct TileState {
  TileShapes shapes;
  alignas(64) uint8_t data[kTiles][kTileRows][kTileBytes];
};
inline thread_local TileState tile_state;

RL_INLINE void set_tiles(const TileShapes& shapes) {
  tile_state.shapes = shapes;
  __builtin_memset(tile_state.data, 0, sizeof tile_state.data);
}
RL_INLINE void release_tiles() { tile_state.shapes = {}; }

template <int T>
RL_INLINE void tile_zero() {
  __builtin_memset(tile_state.data[T], 0, sizeof tile_state.data[T]);
}

template <int T>
RL_INLINE void tile_load(const void* from, int64_t stride_bytes) {
  tile_zero<T>();
  for (int r = 0; r < tile_state.shapes.rows[T]; r++)
    __builtin_memcpy(tile_state.data[T][r], (const uint8_t*)from + r * stride_bytes, tile_state.shapes.row_bytes[T]);
}

template <int T>
RL_INLINE void tile_store(void* to, int64_t stride_bytes) {
  for (int r = 0; r < tile_state.shapes.rows[T]; r++)
    __builtin_memcpy((uint8_t*)to + r * stride_bytes, tile_state.data[T][r], tile_state.shapes.row_bytes[T]);
}

// C[m][n] += dot(A[m][k], B[k][n]) over 32-bit groups of bytes: `product` adds the dot product of two groups.
template <int C, int A, int B, class Product>
RL_INLINE void tile_product(Product product) {
  const TileShapes& shapes = tile_state.shapes;
  for (int m = 0; m < shapes.rows[C]; m++)
    for (int k = 0; k < shapes.row_bytes[A] / 4; k++)
      for (int n = 0; n < shapes.row_bytes[C] / 4; n++) {
        uint32_t acc;
        __builtin_memcpy(&acc, &tile_state.data[C][m][4 * n], 4);
        acc = product(acc, &tile_state.data[A][m][4 * k], &tile_state.data[B][k][4 * n]);
        __builtin_memcpy(&tile_state.data[C][m][4 * n], &acc, 4);
      }
}

// As the hardware does it: even and odd products in sums of their own over all k, which C gets at the end.
template <int C, int A, int B>
RL_INLINE void tile_dot_bf16() {
  const TileShapes& shapes = tile_state.shapes;
  for (int m = 0; m < shapes.rows[C]; m++) {
    float even[16] = {}, odd[16] = {};
    for (int k = 0; k < shapes.row_bytes[A] / 4; k++) {
      uint16_t a[2], b[32];
      __builtin_memcpy(a, &tile_state.data[A][m][4 * k], sizeof a);
      __builtin_memcpy(b, tile_state.data[B][k], sizeof b);
      for (int n = 0; n < shapes.row_bytes[C] / 4; n++) {
        even[n] = __builtin_fmaf(from_bf16(a[0]), from_bf16(b[2 * n]), even[n]);
        odd[n] = __builtin_fmaf(from_bf16(a[1]), from_bf16(b[2 * n + 1]), odd[n]);
      }
    }
    for (int n = 0; n < shapes.row_bytes[C] / 4; n++) {
      float acc;
      __builtin_memcpy(&acc, &tile_state.data[C][m][4 * n], 4);
      acc += even[n] + odd[n];
      __builtin_memcpy(&tile_state.data[C][m][4 * n], &acc, 4);
    }
  }
}

// Signed bytes of A with unsigned bytes of B.
template <int C, int A, int B>
RL_INLINE void tile_dot_s8u8() {
  tile_product<C, A, B>([](uint32_t acc, const uint8_t* a, const uint8_t* b) {
    for (int i = 0; i < 4; i++) acc += (uint32_t)((int32_t)(int8_t)a[i] * (int32_t)b[i]);
    return acc;
  });
}

// Unsigned bytes of both.
template <int C, int A, int B>
RL_INLINE void tile_dot_u8u8() {
  tile_product<C, A, B>([](uint32_t acc, const uint8_t* a, const uint8_t* b) {
    for (int i = 0; i < 4; i++) acc += (uint32_t)a[i] * (uint32_t)b[i];
    return acc;
  });
}

#else

// Assembly, because gcc 12's intrinsics take no template parameter for a tile and declare too little of what they read.
RL_INLINE void set_tiles(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
RL_INLINE void release_tiles() { __asm__ volatile("tilerelease"); }

template <int T>
RL_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
RL_INLINE void tile_load(const void* from, int64_t stride_bytes) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride_bytes), "i"(T) : "memory");
}
template <int T>
RL_INLINE void tile_store(void* to, int64_t stride_bytes) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride_bytes), "i"(T) : "memory");
}
template <int C, int A, int B>
RL_INLINE void tile_dot_bf16() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
RL_INLINE void tile_dot_s8u8() {
  __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
template <int C, int A, int B>
RL_INLINE void tile_dot_u8u8() {
  __asm__ volatile("tdpbuud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace ridgeline::RIDGELINE_LEVEL

#endif  // RIDGELINE_TILES
