#include "runtime/isa.h"

#include <stdexcept>

#include "kernels/level.h"

#if RIDGELINE_TILE_TRAP
#include "tests/tile_trap.h"
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace ridgeline {
namespace {

#define RIDGELINE_TABLE(level)                        \
  [] {                                                \
    KernelTable table{};                              \
    table.name = #level;                              \
    level::fill_linear(table.linear);                 \
    level::fill_attention(table.attention);           \
    level::fill_rows(table.rows);                     \
    level::fill_recurrent(table.recurrent);           \
    level::fill_sample(table.sample);                 \
    level::fill_probe(table.probe);                   \
    return table;                                     \
  }()

#if defined(__x86_64__)
struct Registers {
  unsigned a, b, c, d;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r{};
  if (!__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d)) return {};
  return r;
}

unsigned enabled_states() {
  if (!(cpuid(1, 0).c & (1u << 27))) return 0;  // OSXSAVE
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

bool bit(unsigned word, int index) { return (word >> index) & 1u; }

[[maybe_unused]] bool has_avx2() {
  const Registers basic = cpuid(1, 0), extended = cpuid(7, 0);
  return (enabled_states() & 0x6) == 0x6 && bit(basic.c, 12) && bit(basic.c, 29) && bit(extended.b, 5);
}

[[maybe_unused]] bool has_avx512() {
  const Registers extended = cpuid(7, 0);
  const bool foundation = bit(extended.b, 16) && bit(extended.b, 17) && bit(extended.b, 30) && bit(extended.b, 31);
  return has_avx2() && (enabled_states() & 0xe6) == 0xe6 && foundation && bit(extended.c, 11);
}

[[maybe_unused]] bool has_avx512bf16() { return has_avx512() && bit(cpuid(7, 1).a, 5); }

#if RIDGELINE_TILE_TRAP  // a build for tests: tile instructions are emulated
[[maybe_unused]] bool has_amx() { return has_avx512bf16() && install_tile_trap(); }
#else
// Linux hands out the tile registers on request, once per process.
[[maybe_unused]] bool has_amx() {
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

bool always() { return true; }

struct Level {
  bool runs;
  KernelTable table;
};

// Narrowest first; the build leaves out what its compiler could not make. The machine is asked once: in a virtual
// machine cpuid is slow.
const std::vector<Level>& levels() {
  static const std::vector<Level> all{
      {always(), RIDGELINE_TABLE(portable)},
#if RIDGELINE_HAS_avx2
      {has_avx2(), RIDGELINE_TABLE(avx2)},
#endif
#if RIDGELINE_HAS_avx512
      {has_avx512(), RIDGELINE_TABLE(avx512)},
#endif
#if RIDGELINE_HAS_avx512bf16
      {has_avx512bf16(), RIDGELINE_TABLE(avx512bf16)},
#endif
#if RIDGELINE_HAS_amx
      {has_amx(), RIDGELINE_TABLE(amx)},
#endif
#if RIDGELINE_HAS_amx_emulated
      {has_avx512bf16(), RIDGELINE_TABLE(amx_emulated)},
#endif
  };
  return all;
}

}  // namespace

std::vector<std::string> runnable_levels() {
  std::vector<std::string> names;
  for (const Level& level : levels())
    if (level.runs) names.emplace_back(level.table.name);
  return names;
}

std::string best_level() {
  std::string best;
  for (const std::string& name : runnable_levels())
    if (name != "amx_emulated") best = name;
  return best;
}

const KernelTable& kernels_of(const std::string& name) {
  std::string known;
  for (const Level& level : levels()) {
    if (!level.runs) continue;
    if (name == level.table.name) return level.table;
    known += known.empty() ? level.table.name : std::string(", ") + level.table.name;
  }
  throw std::invalid_argument("ISA level '" + name + "' does not run here; those that do: " + known);
}

}  // namespace ridgeline
