// Matrix products with int8 and int4 weights.
#pragma once

#include "kernels/epilogue.h"
#include "kernels/simd.h"
#include "kernels/types.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_int {}
