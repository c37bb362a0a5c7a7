"""How checkpoints store quantized weights: one file per format, named after config.json's `quant_method`.

A module has `find`, a `Find`; PackedCheckpoint shows the model its tensors by their own names.

`settings` reads the quantization_config; the format takes from it what it understands, and what is left over is an
error. A hyphen in `quant_method` is an underscore in the file name. Called by load.py, which then sees the
model's tensors as if they were stored plainly, or as stored matrices.
"""

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from ridgeline.core.dtypes import Array, assign
from ridgeline.core.errors import ConfigError
from ridgeline.core.files import read_toml
from ridgeline.quant.stored import StoredFormat, StoredMatrix, dequantize
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import WHOLE, Checkpoint, TensorEntry, take_ranges
from ridgeline.weights.folder import QUANTIZATION

ReadMatrix = Callable[[Sequence[Array], slice], StoredMatrix]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor [N, K] of the model that is stored as several, such as small numbers and their scales.

    `name` is what renames call it. `matrix` takes the stored tensors `parts` and a range of the N rows; of a stack
    [E, N, K] it is called for each of its matrices, with its parts.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    format: StoredFormat
    matrix: ReadMatrix


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """A plain tensor that a format stores otherwise: `change` makes rows of it what the model has, of this `shape`."""

    name: str
    shape: tuple[int, ...]
    change: Callable[[Array], Array]


Find = Callable[[Checkpoint, ConfigReader], Sequence[PackedTensor | ChangedTensor]]
"""Returns all packed and changed tensors of a checkpoint; of data, only scales and orders are read.

Raises ModelLoadError where parts are missing or do not fit together.
"""


class PackedCheckpoint:
    """A checkpoint's tensors as the model has them: packed ones under one name, decoded whenever they are asked for.

    As `weights.checkpoint.Checkpoint`; what is packed becomes `dtype`.
    """

    def __init__(self, stored: Checkpoint, found: Sequence[PackedTensor | ChangedTensor], dtype: np.dtype[Any]) -> None:
        self.path = stored.path
        self._stored, self._dtype = stored, dtype
        self._packed = {tensor.name: tensor for tensor in found if isinstance(tensor, PackedTensor)}
        self._changed = {tensor.name: tensor for tensor in found if isinstance(tensor, ChangedTensor)}
        parts = {part for tensor in self._packed.values() for part in tensor.parts}
        self.entries: Mapping[str, TensorEntry] = {
            **{name: entry for name, entry in stored.entries.items() if name not in parts},
            **{t.name: TensorEntry(stored.entries[t.parts[0]].file, t.shape, "F32") for t in self._packed.values()},
            **{name: replace(stored.entries[name], shape=t.shape) for name, t in self._changed.items()},
        }

    def read(self, name: str, dim: int, ranges: Sequence[slice]) -> Array:
        """Return `ranges` of the tensor along `dim`, one after the other; of rows nothing else is decoded."""
        packed = self._packed.get(name)
        if packed is None:
            plain = self._stored.read(name, dim, ranges)
            return self._changed[name].change(plain) if name in self._changed else plain
        by_rows = dim == len(packed.shape) - 2
        rows = ranges if by_rows else WHOLE
        *stack, num_rows, num_inputs = packed.shape
        num_rows = sum(len(range(*part.indices(num_rows))) for part in rows)
        out = np.empty((math.prod(stack), num_rows, num_inputs), self._dtype)
        for index, matrix in enumerate(out):
            begin = 0
            for part in rows:
                decoded = dequantize(self.matrix(name, index if stack else None)(part), self._dtype)
                assign(matrix[begin : begin + len(decoded)], decoded)
                begin += len(decoded)
        out = out.reshape(*stack, num_rows, num_inputs)
        return out if by_rows else take_ranges(out, dim, ranges)

    def format_of(self, name: str) -> StoredFormat | None:
        """Return how the matrix, or every matrix of a stack, is stored; None: as plain numbers."""
        return self._packed[name].format if name in self._packed else None

    def stored_bytes(self, name: str) -> int:
        """Return the bytes that a tensor takes in the files, with all its parts."""
        parts = self._packed[name].parts if name in self._packed else (name,)
        return sum(self._stored.entries[part].num_bytes for part in parts)

    def matrix(self, name: str, index: int | None) -> Callable[[slice], StoredMatrix]:
        """Return what reads rows of a packed matrix, or of matrix `index` of a packed stack; its file stays mapped."""
        packed = self._packed[name]
        parts = [self._stored.tensor(part) for part in packed.parts]
        return partial(packed.matrix, parts if index is None else [part[index] for part in parts])


def names() -> list[str]:
    """Return all supported values of `quant_method`."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


@cache
def without_effect(method: str) -> Sequence[str]:
    """Return the keys of a format's settings that change nothing here."""
    return read_toml(__file__, "ignored.toml")[method]


def unpacked(
    checkpoint: Checkpoint, config: Mapping[str, object], dtype: np.dtype[Any]
) -> Checkpoint | PackedCheckpoint:
    """Return the checkpoint as config.json's quantization_config says that it is stored, its matrices as `dtype`.

    Raises ConfigError for a method or a setting that is not known, ModelLoadError for parts that do not fit together.
    """
    settings = ConfigReader(config).section(QUANTIZATION)
    if settings is None:
        return checkpoint
    method = settings.text("quant_method").replace("_", "-")
    if method not in names():
        what = f"{checkpoint.path}: quantization_config has quant_method {method!r}, which is not supported"
        raise ConfigError(f"{what}; supported: {', '.join(names())}")
    find: Find = importlib.import_module(f"{__name__}.{method.replace('-', '_')}").find
    found = find(checkpoint, settings)
    settings.finish()
    return PackedCheckpoint(checkpoint, found, dtype)
