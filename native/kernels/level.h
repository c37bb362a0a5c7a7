// One namespace per ISA level, and the functions by which each kernel file adds its part to the level's table.
#pragma once

#include "kernels/table.h"

#define RIDGELINE_DECLARE_LEVEL(level)      \
  namespace ridgeline::level {              \
  void fill_linear(LinearKernels&);         \
  void fill_attention(AttentionKernels&);   \
  void fill_rows(RowKernels&);              \
  void fill_recurrent(RecurrentKernels&);   \
  void fill_sample(SampleKernels&);         \
  void fill_probe(ProbeKernels&);           \
  }

RIDGELINE_DECLARE_LEVEL(portable)
RIDGELINE_DECLARE_LEVEL(avx2)
RIDGELINE_DECLARE_LEVEL(avx512)
RIDGELINE_DECLARE_LEVEL(avx512bf16)
RIDGELINE_DECLARE_LEVEL(amx)
RIDGELINE_DECLARE_LEVEL(amx_emulated)
