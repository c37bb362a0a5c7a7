#include "runtime/tuning.h"

#include <algorithm>
#include <span>
#include <stdexcept>

#include "runtime/cpu.h"

namespace ridgeline {
namespace {

// Kinds of matrices, as bits.
enum Kinds : unsigned {
  kF32 = 1,
  kBf16 = 2,
  kInt8 = 4,
  kInt4 = 8,
  kFloats = kF32 | kBf16,
  kIntegers = kInt8 | kInt4,
  kAll = kFloats | kIntegers
};

// What a level must have for a variant: vectors of half a panel, and so registers for several panels and larger blocks;
// registers for blocks of six rows, but not for several panels (AVX2); or an instruction for pairs of bfloat16 on top of
// wide vectors, without a matrix unit, for which the inputs have to be pairs.
enum class Needs : uint8_t { nothing, wide, six_rows, pairs };

struct Row {
  Variant variant;
  unsigned kinds;
  Needs needs;
  void (*apply)(Tuning&);
};

template <int rows, bool from_memory>
void block(Tuning& tuning) {
  tuning.block_rows = rows;
  tuning.from_memory = from_memory;
}

template <int panels, int ahead>
void stream(Tuning& tuning) {
  tuning.panels = panels;
  tuning.ahead = ahead;
}

// A variant is a row here, named after its values, and code that reads them where the kernel is chosen. The first of a
// choice is what the levels were made for. `kernels/tuning.h` says what may change bits; nothing else does.
const Row kRows[] = {
    // Panels at once x bytes ahead, for one to four rows.
    {{"stream", "1x0"}, kFloats, Needs::nothing, stream<1, 0>},
    {{"stream", "1x384"}, kIntegers, Needs::nothing, stream<1, 384>},
    {{"stream", "1x2048"}, kAll, Needs::nothing, stream<1, 2048>},
    {{"stream", "1x4096"}, kAll, Needs::nothing, stream<1, 4096>},
    {{"stream", "1x8192"}, kAll, Needs::nothing, stream<1, 8192>},
    {{"stream", "2x0"}, kFloats, Needs::wide, stream<2, 0>},
    {{"stream", "2x384"}, kIntegers, Needs::wide, stream<2, 384>},
    {{"stream", "2x2048"}, kAll, Needs::wide, stream<2, 2048>},
    {{"stream", "2x4096"}, kAll, Needs::wide, stream<2, 4096>},
    {{"stream", "2x8192"}, kAll, Needs::wide, stream<2, 8192>},
    {{"stream", "4x0"}, kFloats, Needs::wide, stream<4, 0>},
    {{"stream", "4x384"}, kIntegers, Needs::wide, stream<4, 384>},
    {{"stream", "4x2048"}, kAll, Needs::wide, stream<4, 2048>},
    {{"stream", "4x4096"}, kAll, Needs::wide, stream<4, 4096>},
    {{"stream", "4x8192"}, kAll, Needs::wide, stream<4, 8192>},
    // Rows x vectors of a block of rows; where said, inputs go through a register.
    {{"block", "8x2"}, kIntegers, Needs::wide, block<8, true>},
    {{"block", "12x2"}, kIntegers, Needs::wide, block<12, true>},
    {{"block", "8x2-register"}, kIntegers, Needs::wide, block<8, false>},
    {{"block", "12x2-register"}, kIntegers, Needs::wide, block<12, false>},
    {{"block", "6x2"}, kInt8, Needs::wide, block<6, true>},
    {{"block", "6x2"}, kInt8, Needs::six_rows, block<6, false>},
    {{"block", "4x2"}, kIntegers, Needs::six_rows, block<4, false>},
    {{"block", "6x2"}, kInt4, Needs::six_rows, block<6, false>},
    // Where weights are fetched that a step reads once.
    {{"fetch", "into-l2"}, kFloats, Needs::nothing, [](Tuning& tuning) { tuning.past_l2 = false; }},
    {{"fetch", "past-l2"}, kFloats, Needs::nothing, [](Tuning& tuning) { tuning.past_l2 = true; }},
    // What multiplies bfloat16: the one choice that changes bits.
    {{"product", "pairs"}, kBf16, Needs::pairs, [](Tuning& tuning) { tuning.float32 = false; }},
    {{"product", "float32"}, kBf16, Needs::pairs, [](Tuning& tuning) { tuning.float32 = true; }},
    // Whose turn it is after a group of 5 to 64 rows' products: the next block of rows, or the block's next group.
    {{"turns", "group"}, kIntegers, Needs::nothing, [](Tuning& tuning) { tuning.turns = true; }},
    {{"turns", "panel"}, kIntegers, Needs::nothing, [](Tuning& tuning) { tuning.turns = false; }},
};

Kinds kind_of(const Matrix& matrix) {
  switch (matrix.kind) {
    case WeightKind::f32: return kF32;
    case WeightKind::bf16:
    case WeightKind::e4m3: return kBf16;
    case WeightKind::int8:
    case WeightKind::int8_groups:
    case WeightKind::int8_minima:
    case WeightKind::int8_super:
    case WeightKind::int8_super_minima: return kInt8;
    default: return kInt4;
  }
}

bool has(const KernelTable& kernels, const Matrix& matrix, const Row& row) {
  if (!(row.kinds & kind_of(matrix))) return false;
  switch (row.needs) {
    case Needs::wide: return kernels.linear.wide;
    case Needs::six_rows: return kernels.linear.most_block_rows == 6;
    case Needs::pairs: return kernels.linear.pairs && !kernels.probe.tiles;
    default: return true;
  }
}

const Row* find(const KernelTable& kernels, const Matrix& matrix, const std::string& choice, const std::string& name) {
  for (const Row& row : kRows)
    if (choice == row.variant.choice && name == row.variant.name && has(kernels, matrix, row)) return &row;
  return nullptr;
}

// What others than AMD's cores want, the best first: the first that there is at a level is taken.
const Variant kIntel[] = {
    {"product", "float32"}, {"stream", "4x4096"}, {"stream", "1x4096"}, {"block", "12x2"},
};
// From Zen 5 on two products of whole vectors a cycle meet two loads: a load for every product would bind. Products are
// so fast that ending a group weighs more than overlap with memory. Memory wants 8 KB asked ahead: 384 bytes reach 3/4 of it.
// What leaves the second-level cache is written to the third: it does not hold weights that are read once.
const Variant kZen5[] = {
    {"stream", "1x8192"}, {"block", "12x2-register"}, {"turns", "panel"}, {"fetch", "past-l2"},
};
constexpr unsigned kZen5Family = 0x1a;

}  // namespace

std::string cpu_family() {
#if defined(__x86_64__)
  const Registers name = cpuid(0, 0);  // "AuthenticAMD" in b, d, c; Hygon's cores are AMD's
  const unsigned version = cpuid(1, 0).a, family = (version >> 8 & 0xf) + (version >> 20 & 0xff);
  if (name.b == 0x68747541 || name.b == 0x6f677948) return family >= kZen5Family ? "zen5" : "amd";
  if (name.b == 0x756e6547) return "intel";
#endif
  return "other";
}

std::vector<Variant> variants_of(const KernelTable& kernels, const Matrix& matrix) {
  std::vector<Variant> variants;
  for (const Row& row : kRows)
    if (has(kernels, matrix, row)) variants.push_back(row.variant);
  return variants;
}

Variants default_variants(const KernelTable& kernels, const Matrix& matrix, const std::string& family) {
  const bool zen5 = family == "zen5", others = family == "intel" || family == "other";
  if (family != "amd" && !zen5 && !others)
    throw std::invalid_argument("a family of CPUs is amd, zen5, intel or other, not '" + family + "'");
  Variants chosen;
  const std::span<const Variant> wanted = zen5 ? std::span<const Variant>(kZen5) : std::span<const Variant>(kIntel);
  if (family != "amd")
    for (const Variant& variant : wanted)
      if (find(kernels, matrix, variant.choice, variant.name)) chosen.emplace(variant.choice, variant.name);
  // Two panels of bytes do not fit Zen 4's first cache: fetched into the second one they are read at full speed.
  const bool bytes = family == "amd" && kernels.linear.wide && kind_of(matrix) == kInt8;
  if (bytes && find(kernels, matrix, "turns", "panel")) chosen.emplace("turns", "panel");
  if (others && matrix.group == 32 && find(kernels, matrix, "turns", "panel")) chosen.emplace("turns", "panel");
  for (const Variant& variant : variants_of(kernels, matrix)) chosen.emplace(variant.choice, variant.name);
  return chosen;
}

Tuning tuning_of(const KernelTable& kernels, const Matrix& matrix, const Variants& variants) {
  Tuning tuning;
  for (const auto& [choice, name] : default_variants(kernels, matrix, "amd"))
    find(kernels, matrix, choice, name)->apply(tuning);
  for (const auto& [choice, name] : variants) {
    const Row* row = find(kernels, matrix, choice, name);
    if (row) {
      row->apply(tuning);
      continue;
    }
    std::string known;
    for (const Variant& variant : variants_of(kernels, matrix))
      known += (known.empty() ? "" : ", ") + std::string(variant.choice) + "=" + variant.name;
    throw std::invalid_argument("these matrices have no variant " + choice + "=" + name + " at level " + kernels.name +
                                "; there is " + known);
  }
  return tuning;
}

}  // namespace ridgeline
