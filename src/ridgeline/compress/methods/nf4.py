"""NF4: quantiles of a normal distribution in blocks of 64, to nearest, in a folder as bitsandbytes writes it."""

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
    return rounded("nf4", as_array(weight_NK), grid.form)
