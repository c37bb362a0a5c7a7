"""SmoothQuant: inputs and weights of 8 bits, with what makes inputs hard to round moved into the weights.

Inputs are divided, where their norm makes them, by s = max|x|^0.5 / max|w|^0.5, and weights multiplied: both have then
the same largest magnitude in every channel, and rounding a token by one scale loses as much of each. Weights are
rounded to nearest. Xiao et al. 2022, arXiv 2211.10438.
"""

from collections.abc import Sequence

import torch

from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import Statistics, rtn

NEEDS_STATISTICS = True
MIGRATION = 0.5  # the share of the difficulty that goes to the weights
quantize = rtn.quantize


def balance(weights: Sequence[torch.Tensor], statistics: Statistics, grid: Grid) -> torch.Tensor | None:
    """Return the smoothing factors; 1 where inputs or weights are all zero."""
    largest_K = torch.cat(list(weights)).abs().amax(0).float()
    s_K = statistics.max_abs_K**MIGRATION / largest_K ** (1 - MIGRATION)
    return torch.where(s_K.isfinite() & (s_K > 0), s_K.clamp(min=1e-5), 1.0)
