// The table of variants for Python, and matrices that are computed by some of them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <nanobind/stl/pair.h>

#include "bind/bind.h"
#include "bind/matrix.h"
#include "runtime/isa.h"
#include "runtime/tuning.h"

namespace nb = nanobind;
using namespace nanobind::literals;

namespace ridgeline {

void bind_tuning(nb::module_& module) {
  module.def("cpu_family", &cpu_family, "Whose cores these are: amd, intel or other.");
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
}

}  // namespace ridgeline
