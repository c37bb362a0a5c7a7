"""Matrices of bytes, int8 or float8, beside scales that one number, an output, a group or a block of numbers share."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ridgeline.core.dtypes import Array, Float32s, float32
from ridgeline.quant.stored import StoredFormat, StoredMatrix
from ridgeline.weights.checkpoint import FLOATS, Checkpoint
from ridgeline.weights.formats import PackedTensor
from ridgeline.weights.packing.parts import Wanted, checked, matrix_entry, scale_type

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


def present(checkpoint: Checkpoint, names: Iterable[str]) -> list[str]:
    """Return those of `names` that a checkpoint has."""
    return [name for name in names if name in checkpoint.entries]


@dataclass(frozen=True, slots=True)
class ScaledBytes:
    """A way to store matrices: int8 or float8, and scales, which `value` makes float32 of."""

    what: str
    dtypes: tuple[str, ...]
    blocks: Blocks
    scale_dtypes: Collection[str] = tuple(FLOATS)
    value: Callable[[Array], Float32s] = float32

    def packed(
        self, checkpoint: Checkpoint, name: str, numbers: str, scales: str, points: str = "", unused: Sequence[str] = ()
    ) -> PackedTensor:
        """Return the tensor `name` that is stored as these; those of `unused` that are there belong to it too.

        `points` holds int8 zero points like the scales. Raises ModelLoadError where one is missing or they do not fit
        together.
        """
        entries, blocks = checkpoint.entries, self.blocks
        shape = matrix_entry(entries, numbers).shape
        expected = blocks.shape(shape)
        wanted: Wanted = {numbers: (self.dtypes, shape)}
        for part, dtypes in ((scales, self.scale_dtypes), (points, INT8)):
            if part:
                actual = entries[part].shape if part in entries else expected
                wanted[part] = dtypes, same_scales(actual, expected)
        names, group = checked(entries, wanted, self.what), 0 if expected[1] == 1 else blocks.columns
        form = StoredFormat("e4m3", 8, group, scale="float32")
        if self.dtypes == INT8:
            scale = scale_type(checkpoint, scales) if group and self.value is float32 else "float32"
            form = StoredFormat("uniform", 8, group, "points" if points else "fixed", scale)
        offset = np.uint8(form.fixed_zero)

        def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
            zeros = blocks.of_rows(parts[2].view(np.uint8), shape, rows) ^ offset if points else None
            scales_NG = self.value(blocks.of_rows(parts[1], shape, rows))
            return StoredMatrix(form, parts[0][rows].view(np.uint8) ^ offset, scales_NG, zeros)

        return PackedTensor(name, shape, (*names, *present(checkpoint, unused)), form, matrix)
