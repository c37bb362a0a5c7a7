"""MXFP4: 4-bit floats in groups of 32 that share a power of two, to nearest as `--quantize mxfp4` rounds."""

import torch

from ridgeline.backends.reference.tensors import as_array
from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import Statistics, rtn
from ridgeline.quant import quantize as rounded
from ridgeline.quant.stored import StoredMatrix

NEEDS_STATISTICS = False
balance = rtn.balance


def quantize(weight_NK: torch.Tensor, statistics: Statistics | None, grid: Grid) -> StoredMatrix:
    """Round to nearest."""
    return rounded("mxfp4", as_array(weight_NK), grid.form)
