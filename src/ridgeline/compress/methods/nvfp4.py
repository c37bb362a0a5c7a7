"""NVFP4: 4-bit floats in groups of 16 that share an 8-bit float, and a float32 that all of a matrix do, to nearest."""

import numpy as np
import torch

from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import Statistics, rtn
from ridgeline.quant.schemes.nvfp4 import LARGEST_WEIGHT, quantize_by
from ridgeline.quant.stored import StoredMatrix

NEEDS_STATISTICS = False
balance = rtn.balance


def quantize(weight_NK: torch.Tensor, statistics: Statistics | None, grid: Grid) -> StoredMatrix:
    """Round to nearest; what divides the scales makes the largest weight the largest that there is."""
    w_NK = weight_NK.float().numpy()
    divisor_N1 = np.full((len(w_NK), 1), LARGEST_WEIGHT / (np.abs(w_NK).max() or LARGEST_WEIGHT), dtype=np.float32)
    return quantize_by(w_NK, grid.form, -divisor_N1)
