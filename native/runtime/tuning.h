// The table of variants: what each choice of a Tuning can be, for which kinds of matrices and at which levels, and what
// is taken where nothing was measured.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "kernels/table.h"

namespace ridgeline {

// The name of the variant taken for each choice that there is.
using Variants = std::map<std::string, std::string>;

struct Variant {
  const char* choice;
  const char* name;
};

// "amd", "zen5" (and later ones of AMD), "intel" or "other".
std::string cpu_family();

// The variants that matrices of a kind have at a level, those of a choice together.
std::vector<Variant> variants_of(const KernelTable& kernels, const Matrix& matrix);

// What every choice is where nothing was measured: for AMD what Zen 4 does best, or Zen 5, for all others what Intel's
// cores do.
// Throws std::invalid_argument for another family.
Variants default_variants(const KernelTable& kernels, const Matrix& matrix, const std::string& family);

// The tuning that such variants make; choices that are not named stay as the level is made for.
// Throws std::invalid_argument for a variant that the matrix does not have at this level.
Tuning tuning_of(const KernelTable& kernels, const Matrix& matrix, const Variants& variants);

}  // namespace ridgeline
