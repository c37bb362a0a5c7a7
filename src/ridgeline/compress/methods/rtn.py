"""Round to nearest: what `--quantize` does while a model is loaded. It looks at no inputs."""

from collections.abc import Callable, Sequence

import torch

from ridgeline.backends.reference.tensors import as_array
from ridgeline.compress.grid import Grid
from ridgeline.compress.methods import Statistics
from ridgeline.quant import quantize as rounded
from ridgeline.quant.stored import StoredMatrix

NEEDS_STATISTICS = False


def balance(weights: Sequence[torch.Tensor], statistics: Statistics, grid: Grid) -> torch.Tensor | None:
    return None


def of_scheme(name: str) -> Callable[[torch.Tensor, Statistics | None, Grid], StoredMatrix]:
    """Return the `quantize` of a method that rounds as `--quantize NAME` does."""
    return lambda weight_NK, statistics, grid: rounded(name, as_array(weight_NK), grid.form)


def quantize(weight_NK: torch.Tensor, statistics: Statistics | None, grid: Grid) -> StoredMatrix:
    """Scale every group by its largest magnitude."""
    w_NGS = grid.grouped(weight_NK)
    scale, zero = grid.fit(w_NGS)
    return grid.stored(grid.codes(w_NGS, scale, zero).flatten(1), scale, zero)
