#include "runtime/isa.h"

#include <stdexcept>

#include "kernels/level.h"
#include "runtime/cpu.h"

namespace ridgeline {
namespace {

struct Level {
  bool runs;
  KernelTable table;
};

// A level's table is filled by code compiled for that level, so only where the machine runs it.
#define RIDGELINE_LEVEL_IF(level, can_run)       \
  [](bool runs) {                                \
    KernelTable table{};                         \
    table.name = #level;                         \
    if (runs) {                                  \
      level::fill_linear(table.linear);          \
      level::fill_attention(table.attention);    \
      level::fill_rows(table.rows);              \
      level::fill_recurrent(table.recurrent);    \
      level::fill_sample(table.sample);          \
      level::fill_probe(table.probe);            \
    }                                            \
    return Level{runs, table};                   \
  }(can_run)

// Narrowest first; the build leaves out what its compiler could not make. The machine is asked once: in a virtual
// machine cpuid is slow.
const std::vector<Level>& levels() {
  static const std::vector<Level> all{
      RIDGELINE_LEVEL_IF(portable, true),
#if RIDGELINE_HAS_avx2
      RIDGELINE_LEVEL_IF(avx2, has_avx2()),
#endif
#if RIDGELINE_HAS_avx512
      RIDGELINE_LEVEL_IF(avx512, has_avx512()),
#endif
#if RIDGELINE_HAS_avx512bf16
      RIDGELINE_LEVEL_IF(avx512bf16, has_avx512bf16()),
#endif
#if RIDGELINE_HAS_amx
      RIDGELINE_LEVEL_IF(amx, has_amx()),
#endif
#if RIDGELINE_HAS_amx_emulated
      RIDGELINE_LEVEL_IF(amx_emulated, has_avx512bf16()),
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

std::vector<std::string> filled_levels() {
  std::vector<std::string> names;
  for (const Level& level : levels()) {
    const KernelTable& table = level.table;
    if (table.linear.pack || table.attention.attend || table.rows.normalize || table.recurrent.recur ||
        table.sample.sample || table.probe.read)
      names.emplace_back(table.name);
  }
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
