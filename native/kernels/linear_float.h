// Matrix products with float32 and bfloat16 weights.
#pragma once

#include "kernels/epilogue.h"
#include "kernels/simd.h"
#include "kernels/types.h"

namespace ridgeline::RIDGELINE_LEVEL::linear_float {}
