"""SparseGPT: of every four inputs two weights become zero, and the weights of later inputs make up for what that lost.

The columns are taken as `gptq` takes them, in their own order; before every fourth, those two of an output are chosen
whose w^2 / U[i, i]^2 is least. What stays has the model's dtype. Frantar and Alistarh 2023, arXiv 2301.00774.
"""

import torch

from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import Statistics, gptq, wanda

NEEDS_STATISTICS = True
FORMAT = "dense"
balance = wanda.balance


def quantize(weight_NK: torch.Tensor, statistics: Statistics | None, grid: Grid) -> torch.Tensor:
    """Return the matrix with its zeros; as `wanda` where nothing is known of its inputs, or they are all alike."""
    if statistics is None:
        return wanda.by_magnitude(weight_NK)
    diagonal_K = statistics.hessian_KK.diagonal()
    dead_K = diagonal_K == 0
    upper_KK = gptq.upper_factor(statistics.hessian_KK, torch.where(dead_K, 1.0, diagonal_K))
    if upper_KK is None:
        return wanda.quantize(weight_NK, statistics, grid)
    w_NK = torch.where(dead_K, 0.0, weight_NK.float())
    for begin in range(0, w_NK.shape[1], gptq.BLOCK):
        part = slice(begin, begin + gptq.BLOCK)
        w_NB, upper_BB = w_NK[:, part], upper_KK[part, part]
        errors_NB, zeros_NB = torch.empty_like(w_NB), torch.empty_like(w_NB, dtype=torch.bool)
        for column in range(w_NB.shape[1]):
            if column % wanda.OF == 0:
                four = slice(column, column + wanda.OF)
                zeros_NB[:, four] = wanda.least((w_NB[:, four] / upper_BB.diagonal()[four]).square())
            lost_N = torch.where(zeros_NB[:, column], w_NB[:, column], 0.0)
            errors_NB[:, column] = lost_N / upper_BB[column, column]
            w_NB[:, column:] -= torch.outer(errors_NB[:, column], upper_BB[column, column:])
        w_NB.masked_fill_(zeros_NB, 0)
        w_NK[:, part.stop :] -= errors_NB @ upper_KK[part, part.stop :]
    return w_NK
