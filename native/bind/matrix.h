// A packed matrix as Python sees it, and the names of what a linear layer can be asked for.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "kernels/types.h"

namespace ridgeline {

// The packed bytes belong to the caller, who keeps them alive as long as anything multiplies by them.
struct NativeMatrix {
  Matrix matrix;
};

// Each throws std::invalid_argument that lists the names there are.
WeightKind weight_kind_of(const std::string& name);
InputKind input_kind_of(const std::string& name);
NormKind norm_kind_of(const std::string& name);
Activation activation_of(const std::string& name);
EpilogueKind epilogue_kind_of(const std::string& name);

}  // namespace ridgeline
