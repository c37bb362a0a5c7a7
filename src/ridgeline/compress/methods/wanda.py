"""Wanda: of every four inputs of an output, those two become zero whose weight times the norm of the input is least.

The others stay what they are, in the model's dtype. Sun et al. 2023, arXiv 2306.11695.
"""

import torch

from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import Statistics, rtn

NEEDS_STATISTICS = True
FORMAT = "dense"
OF, ZEROS = 4, 2
balance = rtn.balance


def quantize(weight_NK: torch.Tensor, statistics: Statistics | None, grid: Grid) -> torch.Tensor:
    """Return the matrix with its zeros; without statistics those of the least weights."""
    if statistics is None:
        return by_magnitude(weight_NK)
    score_NK = weight_NK.float().square() * statistics.hessian_KK.diagonal().float()
    return weight_NK.masked_fill(least(score_NK), 0)


def by_magnitude(weight_NK: torch.Tensor) -> torch.Tensor:
    """Return the matrix without the two least weights of every four."""
    return weight_NK.masked_fill(least(weight_NK.abs()), 0)


def least(score_NK: torch.Tensor) -> torch.Tensor:
    """Return where of every four inputs the two least scores are, bool [N, K]."""
    score_NGS = score_NK.unflatten(1, (-1, OF))
    chosen = score_NGS.argsort(dim=-1, stable=True)[..., :ZEROS]
    return torch.zeros_like(score_NGS, dtype=torch.bool).scatter_(-1, chosen, True).flatten(1)
