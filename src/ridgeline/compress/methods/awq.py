"""AWQ: inputs of large activations are scaled up before weights are rounded, and down where they are made.

The scale of an input is m_x^r / m_w^(1-r), of its mean magnitude and of that of its weights beside the largest of their
group; r is the best of 20, or no scale at all. Ranges of groups are then shrunk where that loses less.
Lin et al. 2023, arXiv 2306.00978.
"""

from collections.abc import Sequence

import torch

from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import Statistics, rtn
from ridgeline.quant.stored import StoredMatrix

NEEDS_STATISTICS = True
STEPS = 20


def balance(weights: Sequence[torch.Tensor], statistics: Statistics, grid: Grid) -> torch.Tensor | None:
    """Return the scales whose rounded weights change the outputs least; None where none is better than no scale."""
    w_NK = torch.cat(list(weights)).float()
    grouped = grid.grouped(w_NK.abs())
    share_K = (grouped / grouped.amax(-1, keepdim=True).clamp(min=1e-12)).flatten(1).mean(0)
    best, found = _loss(w_NK, torch.ones_like(share_K), statistics, grid), None
    for step in range(STEPS):
        ratio = step / STEPS
        s_K = (statistics.mean_abs_K**ratio / (share_K ** (1 - ratio) + 1e-4)).clamp(min=1e-4)
        s_K = s_K / (s_K.max() * s_K.min()).sqrt()
        s_K[~s_K.isfinite()] = 1
        loss = _loss(w_NK, s_K, statistics, grid)
        if loss < best:
            best, found = loss, s_K
    return found


def quantize(weight_NK: torch.Tensor, statistics: Statistics | None, grid: Grid) -> StoredMatrix:
    """Round to nearest, in ranges that lose least of what the inputs' squares weigh."""
    if statistics is None:
        return rtn.quantize(weight_NK, None, grid)
    w_NGS = grid.grouped(weight_NK)
    scale, zero = grid.fit(w_NGS, grid.grouped(statistics.hessian_KK.diagonal().float()))
    return grid.stored(grid.codes(w_NGS, scale, zero).flatten(1), scale, zero)


def _loss(w_NK: torch.Tensor, s_K: torch.Tensor, statistics: Statistics, grid: Grid) -> float:
    w_NGS = grid.grouped(w_NK * s_K)
    scale, zero = grid.fit(w_NGS)
    rounded_NK = grid.values(grid.codes(w_NGS, scale, zero), scale, zero).flatten(1)
    return statistics.loss(rounded_NK / s_K - w_NK)
