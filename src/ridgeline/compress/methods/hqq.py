"""HQQ: minima that make few large errors of many small ones, by half-quadratic splitting. It looks at no inputs.

What is lost is split in errors that may stay, e = sign(d) max(|d| - |d|^(p-1) / beta, 0) of d = w - w', p = 0.7, and a
rest whose mean moves the minimum of a group; beta grows. Scales stay those of the range. Badri and Shaji 2023,
https://mobiusml.github.io/hqq_blog/
"""

import torch

from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import Statistics, rtn
from ridgeline.quant.stored import StoredMatrix

NEEDS_STATISTICS = False
NORM, BETA, GROWTH, STEPS = 0.7, 10.0, 1.01, 20
balance = rtn.balance


def quantize(weight_NK: torch.Tensor, statistics: Statistics | None, grid: Grid) -> StoredMatrix:
    """Round to nearest above the best minima; those of a step that loses more than the one before are not taken."""
    w_NGS, beta, least = grid.grouped(weight_NK.float()), BETA, torch.inf
    minimum = w_NGS.amin(-1, keepdim=True)
    scale = _float16((w_NGS.amax(-1, keepdim=True) - minimum) / grid.highest)
    scale[scale == 0] = 1  # all numbers of a group are alike, or nearly
    codes = found = minimum = _float16(minimum)
    for _ in range(STEPS):
        tried = ((w_NGS - minimum) / scale).round().clamp(0, grid.highest)
        lost = w_NGS - (tried * scale + minimum)
        loss = float(lost.abs().mean())
        if loss >= least:
            break
        least, codes, found = loss, tried, minimum
        stays = lost.sign() * (lost.abs() - lost.abs() ** (NORM - 1) / beta).clamp(min=0)
        minimum = _float16((w_NGS - stays - tried * scale).mean(-1, keepdim=True))
        beta *= GROWTH
    numbers = codes.flatten(1).to(torch.uint8).numpy()
    return StoredMatrix(grid.form, numbers, scale[..., 0].numpy(), minima=found[..., 0].numpy())


def _float16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float16).float()
