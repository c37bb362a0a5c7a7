"""Matrices of bytes, int8 or float8, beside scales that one number, an output, a group or a block of numbers share."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.core.dtypes import Array, Float32s, float32
from ridgeline.core.errors import ModelLoadError
from ridgeline.quant.stored import StoredFormat, StoredMatrix
from ridgeline.weights.checkpoint import FLOATS, Checkpoint
from ridgeline.weights.formats import PackedTensor
from ridgeline.weights.packing.parts import checked, matrix_entry, scale_type

INT8, E4M3, E8M0 = ("I8",), ("F8_E4M3",), ("U8", "F8_E8M0")


@dataclass(frozen=True, slots=True)
class Blocks:
    """`rows` outputs and `columns` inputs share a scale, fewer at the ends; 0: all of them do."""

    rows: int = 0
    columns: int = 0

    def shape(self, matrix: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the scales of a matrix [N, K]."""
        return tuple(-(-size // (block or size)) for size, block in zip(matrix, (self.rows, self.columns)))

    def of_rows(self, scales: Array, matrix: tuple[int, ...], rows: slice) -> Array:
        """Return the scales [n, G] of the outputs `rows`."""
        return scales.reshape(self.shape(matrix))[np.arange(matrix[0])[rows] // (self.rows or matrix[0])]


def same_scales(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return `shape` where it holds what `wanted` does but for dims of 1, which writers leave out, else `wanted`."""
    return shape if [size for size in shape if size != 1] == [size for size in wanted if size != 1] else wanted


@dataclass(frozen=True, slots=True)
class ScaledBytes:
    """A way to store matrices: numbers of these dtypes, and scales, which `value` makes float32 of.

    With `points` a third tensor holds int8 zero points like the scales.
    """

    what: str
    dtypes: Collection[str]
    blocks: Blocks
    scale_dtypes: Collection[str] = tuple(FLOATS)
    value: Callable[[Array], Float32s] = float32

    def packed(
        self, checkpoint: Checkpoint, name: str, numbers: str, scales: str, points: str = "", unused: Sequence[str] = ()
    ) -> PackedTensor:
        """Return the tensor `name` that is stored as these; `unused` are others that belong to it.

        Raises ModelLoadError where one is missing or they do not fit together.
        """
        entries, shape = checkpoint.entries, matrix_entry(checkpoint.entries, numbers).shape
        expected, used = self.blocks.shape(shape), [part for part in (scales, points) if part]
        actual = {part: entries[part].shape if part in entries else expected for part in used}
        dtypes = {scales: self.scale_dtypes, points: INT8}
        wanted = {part: (dtypes[part], same_scales(actual[part], expected)) for part in used}
        checked(entries, {numbers: (self.dtypes, shape), **wanted}, self.what)
        form = self._format(checkpoint, shape, scales, bool(points))
        return PackedTensor(name, shape, (numbers, *used, *unused), form, _Reader(self, form, shape))

    def _format(self, checkpoint: Checkpoint, shape: tuple[int, ...], scales: str, points: bool) -> StoredFormat:
        group = 0 if self.blocks.shape(shape)[1] == 1 else self.blocks.columns
        if "I8" not in self.dtypes:
            return StoredFormat("e4m3", 8, group, scale="float32")
        scale = scale_type(checkpoint, scales) if group and self.value is float32 else "float32"
        return StoredFormat("uniform", 8, group, "points" if points else "fixed", scale)


@dataclass(frozen=True, slots=True)
class _Reader:
    way: ScaledBytes
    form: StoredFormat
    shape: tuple[int, ...]

    def __call__(self, parts: Sequence[Array], rows: slice) -> StoredMatrix:
        offset = np.uint8(self.form.fixed_zero)
        codes = parts[0][rows].view(np.uint8) ^ offset
        scales_NG = self.way.blocks.of_rows(self.way.value(parts[1]), self.shape, rows)
        points = None
        if self.form.zero == "points":
            points = self.way.blocks.of_rows(parts[2].view(np.uint8), self.shape, rows) ^ offset
        return StoredMatrix(self.form, codes, scales_NG, points)


def require_scalar(checkpoint: Checkpoint, name: str, beside: str) -> np.float32:
    """Return the one positive float32 of a tensor. Raises ModelLoadError where it is missing or something else."""
    checked(
        checkpoint.entries,
        {
            beside: (checkpoint.entries[beside].dtype, checkpoint.entries[beside].shape),
            name: (("F32",), same_scales(checkpoint.entries[name].shape, ()) if name in checkpoint.entries else ()),
        },
        "a matrix",
    )
    value = np.float32(checkpoint.tensor(name).reshape(()))
    if not 0 < value < np.inf:
        raise ModelLoadError(f"{checkpoint.entries[name].file}: {name} is {value}; it must be a positive number")
    return value
