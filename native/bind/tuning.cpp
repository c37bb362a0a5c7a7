// The table of variants for Python, and matrices that are computed by some of them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/pair.h>

#include <algorithm>
#include <atomic>

#include "bind/arguments.h"
#include "bind/bind.h"
#include "bind/gil.h"
#include "bind/matrix.h"
#include "runtime/isa.h"
#include "runtime/pool.h"
#include "runtime/tuning.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace ridgeline {

namespace {

struct Read {
  const ProbeKernels& kernels;
  const uint8_t* from;
  int64_t bytes;
  int workers;
  std::atomic<uint64_t> sink{0};
};

uint64_t read_all(const std::string& level, Pool& pool, uintptr_t address, int64_t num_bytes) {
  require(num_bytes >= 0 && num_bytes % 8 == 0, "whole words of 64 bits are read");
  Read read{kernels_of(level).probe, reinterpret_cast<const uint8_t*>(address), num_bytes, pool.size()};
  const WithoutGil unlocked;
  pool.run(
      [](void* context, int worker) {
        Read& all = *static_cast<Read*>(context);
        const int64_t share = (all.bytes / all.workers + 63) / 64 * 64;
        const int64_t begin = std::min(share * worker, all.bytes), end = std::min(begin + share, all.bytes);
        all.sink ^= all.kernels.read(all.from + begin, end - begin);
      },
      &read);
  return read.sink;
}

}  // namespace

void bind_tuning(nb::module_& module) {
  module.def("cpu_family", &cpu_family, "Whose cores these are: amd, zen5, intel or other.");
  module.def(
      "variants_of",
      [](const std::string& level, const NativeMatrix& matrix) {
        std::vector<std::pair<std::string, std::string>> names;
        for (const Variant& variant : variants_of(kernels_of(level), matrix.matrix))
          names.emplace_back(variant.choice, variant.name);
        return names;
      },
      "level"_a, "matrix"_a, "(choice, variant) for each variant that such matrices have at a level.");
  module.def(
      "default_variants",
      [](const std::string& level, const NativeMatrix& matrix, const std::string& family) {
        return default_variants(kernels_of(level), matrix.matrix, family);
      },
      "level"_a, "matrix"_a, "family"_a, "The variant of each choice where nothing was measured.");
  module.def(
      "tuned",
      [](const std::string& level, const NativeMatrix& matrix, const Variants& variants) {
        NativeMatrix tuned = matrix;
        tuned.matrix.tuning = tuning_of(kernels_of(level), matrix.matrix, variants);
        return tuned;
      },
      "level"_a, "matrix"_a, "variants"_a,
      "The same matrix, computed by the variants that are named; other choices as the level is made for.");
  module.def("read_all", read_all, "level"_a, "pool"_a, "address"_a, "num_bytes"_a,
             "The exclusive or of the 64-bit words of memory, read by all threads of a pool, each a share.");
}

}  // namespace ridgeline
