"""What a scheme of weight quantization is, and the registry of them: the files of `schemes/`."""

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch

from ridgeline.core.errors import ConfigError, ModelLoadError
from ridgeline.quant import schemes

CHUNK_ELEMENTS = 2**17  # of float32 at a time: temporaries stay in a core's cache


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [N, K] as `values`, uint8 [N, K], with `scales`, float32 [N, G], and maybe `zero_points`, uint8 [N, G].

    An output's consecutive inputs share a scale, `group_size` of them; the last group may be shorter.
    """

    values: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    group_size: int


class Scheme(Protocol):
    """The functions of a file of `schemes/`."""

    def quantize(self, weight_NK: torch.Tensor, group_size: int, zero_points: bool) -> Quantized:
        """Rounds a matrix of any float dtype to nearest.

        Raises ConfigError for a group size or zero points that the scheme does not have, ModelLoadError where the
        matrix has NaN, infinity or a magnitude that a scale cannot hold.
        """
        ...

    def dequantize(self, quantized: Quantized) -> torch.Tensor:
        """What the integers mean, float32 [N, K]."""
        ...

    def stored_bytes(self, shape: tuple[int, int], group_size: int, zero_points: bool) -> int:
        """Bytes of a matrix [N, K] as a backend stores it, without padding."""
        ...


def names() -> list[str]:
    """All schemes: the files of `schemes/`."""
    return sorted(module.name for module in pkgutil.iter_modules(schemes.__path__))


def scheme(name: str) -> Scheme:
    """Raises ConfigError for a name that is no scheme's."""
    if name not in names():
        raise ConfigError(f"{name!r} is no quantization scheme; there are {', '.join(names())}")
    return cast("Scheme", importlib.import_module(f"{schemes.__name__}.{name}"))


def row_chunks(weight_NK: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Consecutive rows of the matrix as float32, a few at a time."""
    num_rows = max(1, CHUNK_ELEMENTS // max(1, weight_NK.shape[1]))
    for begin in range(0, weight_NK.shape[0], num_rows):
        rows = slice(begin, min(begin + num_rows, weight_NK.shape[0]))
        yield rows, weight_NK[rows].to(torch.float32)


def require_finite(scales: torch.Tensor, first_row: int) -> None:
    """Raises ModelLoadError that names the first row whose scales are no finite numbers."""
    bad = ~scales.isfinite().flatten(1).all(dim=1)
    if bad.any():
        row = first_row + int(bad.int().argmax())
        raise ModelLoadError(
            f"row {row} of a weight matrix has NaN, infinity or a value too large to quantize; "
            "the checkpoint is damaged, or run it without quantization"
        )
