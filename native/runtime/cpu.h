// What this processor and its operating system offer. Included by isa.cpp, and by host_level.cpp when a build asks for
// this machine's level alone.
#pragma once

#if RIDGELINE_TILE_TRAP
#include "tile_trap.h"
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ridgeline {

#if defined(__x86_64__)
struct Registers {
  unsigned a, b, c, d;
};

inline Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r{};
  if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return {};
  return r;
}

inline unsigned enabled_states() {
  if (!(cpuid(1, 0).c & (1u << 27))) return 0;  // OSXSAVE
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

inline bool bit(unsigned word, int index) { return (word >> index) & 1u; }

inline bool has_avx2() {
  const Registers basic = cpuid(1, 0), extended = cpuid(7, 0);
  return (enabled_states() & 0x6) == 0x6 && bit(basic.c, 12) && bit(basic.c, 29) && bit(extended.b, 5);
}

inline bool has_avx512() {
  const Registers extended = cpuid(7, 0);
  const bool foundation = bit(extended.b, 16) && bit(extended.b, 17) && bit(extended.b, 30) && bit(extended.b, 31);
  return has_avx2() && (enabled_states() & 0xe6) == 0xe6 && foundation && bit(extended.c, 11);
}

inline bool has_avx512bf16() { return has_avx512() && bit(cpuid(7, 1).a, 5); }

#if RIDGELINE_TILE_TRAP  // a build for tests: tile instructions are emulated
inline bool has_amx() { return has_avx512bf16() && install_tile_trap(); }
#else
// Linux hands out the tile registers on request, once per process.
inline bool has_amx() {
  const Registers extended = cpuid(7, 0);
  const bool tiles = bit(extended.d, 22) && bit(extended.d, 24) && bit(extended.d, 25);
  if (!has_avx512bf16() || !tiles || (enabled_states() & 0x60000) != 0x60000) return false;
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif
#endif

}  // namespace ridgeline
