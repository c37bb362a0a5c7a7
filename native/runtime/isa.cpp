#include "runtime/isa.h"

#include <stdexcept>

#include "kernels/level.h"
#include "runtime/cpu.h"

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
