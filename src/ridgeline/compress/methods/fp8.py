"""FP8: 8-bit floats (E4M3) by a scale of each output, to nearest; inputs are rounded likewise where they are used."""

import torch

from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import Statistics, rtn
from ridgeline.quant.schemes.fp8 import LARGEST, quantize_by
from ridgeline.quant.stored import StoredMatrix

NEEDS_STATISTICS = False
balance = rtn.balance


def quantize(weight_NK: torch.Tensor, statistics: Statistics | None, grid: Grid) -> StoredMatrix:
    """Round to nearest, by scales that the model's dtype holds."""
    scale_N1 = (weight_NK.abs().amax(1, keepdim=True) / float(LARGEST)).to(grid.scale_dtype).float()
    return quantize_by(weight_NK.float().numpy(), grid.form, scale_N1.numpy())
