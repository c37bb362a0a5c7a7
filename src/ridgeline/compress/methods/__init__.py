"""Ways to make small numbers of weights: one file per method, named as it, with what `Method` says. Adding one is
adding a file.
"""

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from ridgeline.compress.grid import Grid
from ridgeline.core.errors import ConfigError
from ridgeline.quant.stored import StoredMatrix


@dataclass(frozen=True, slots=True)
class Statistics:
    """Holds what T rows of inputs x [T, K] say: `hessian_KK` is the mean of x xᵀ, the others are of |x|."""

    hessian_KK: torch.Tensor
    mean_abs_K: torch.Tensor
    max_abs_K: torch.Tensor
    num_rows: int

    def divided(self, s_K: torch.Tensor) -> "Statistics":
        """Return those of inputs divided by `s_K`."""
        hessian_KK = self.hessian_KK / torch.outer(s_K, s_K)
        return Statistics(hessian_KK, self.mean_abs_K / s_K, self.max_abs_K / s_K, self.num_rows)

    def loss(self, error_NK: torch.Tensor) -> float:
        """Return the mean square by which a matrix with this error changes its outputs, summed over outputs."""
        return float(((error_NK @ self.hessian_KK) * error_NK).sum())


class Method(Protocol):
    """Describes a file of this folder. `NEEDS_STATISTICS`: it looks at a model's inputs.

    What is not written as the form of its matrices says has a FORMAT: "llm-int8", or "dense", where they stay plain.
    """

    NEEDS_STATISTICS: bool

    def balance(self, weights: Sequence[torch.Tensor], statistics: Statistics, grid: Grid) -> torch.Tensor | None:
        """Return by what inputs are divided, and weights multiplied, that these matrices [N, K] alone read.

        None leaves both as they are.
        """
        ...

    def quantize(
        self, weight_NK: torch.Tensor, statistics: Statistics | None, grid: Grid
    ) -> StoredMatrix | torch.Tensor:
        """Quantize a float32 matrix; `statistics` None: nothing is known of its inputs. A tensor: it stays plain."""
        ...


def names() -> list[str]:
    """Return the names of all methods: the files of this folder, hyphens for underscores."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def load(name: str) -> Method:
    """Look up a method. Raises ConfigError where there is none of that name."""
    if name not in names():
        raise ConfigError(f"method must be one of {', '.join(names())}, got {name!r}")
    return cast("Method", importlib.import_module(f"{__name__}.{name.replace('-', '_')}"))
