"""Matrices of 4-bit floats (E2M1), two in a byte: NVFP4 with scales of 8-bit floats, MXFP4 with powers of two."""

from collections.abc import Sequence

import numpy as np

from ridgeline.core.dtypes import Array, float32
from ridgeline.core.errors import ModelLoadError
from ridgeline.quant.stored import StoredFormat, StoredMatrix, from_e8m0, nibbles
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.formats import PackedTensor
from ridgeline.weights.packing.parts import Wanted, checked, matrix_entry
from ridgeline.weights.packing.scaled import E4M3, E8M0, present, same_scales

NVFP4_GROUP, MXFP4_GROUP = 16, 32
LARGEST = 448 * 6  # of NVFP4, times the scale of the whole matrix
PLAUSIBLE = (1e-6, 1e4)  # the largest weight that a matrix can hold; beyond, the scale is upside down


def packed_fp4(
    checkpoint: Checkpoint, name: str, numbers: str, scales: str, overall: str = "", *, divides: bool = False,
    unused: Sequence[str] = (),
) -> PackedTensor:  # fmt: skip
    """Return the tensor `name`: E2M1 numbers uint8 [N, K / 2], the earlier in the low half, and scales [N, K / g].

    MXFP4; or with the tensor of one number `overall` NVFP4, whose scales it multiplies, or `divides`. Raises
    ModelLoadError where parts do not fit together, or `overall` is upside down.
    """
    num_outputs, num_bytes = matrix_entry(checkpoint.entries, numbers).shape
    group = NVFP4_GROUP if overall else MXFP4_GROUP
    entries, scalar = checkpoint.entries, np.float32(1)
    wanted: Wanted = {
        numbers: (("U8",), (num_outputs, num_bytes)),
        scales: (E4M3 if overall else E8M0, (num_outputs, -(-2 * num_bytes // group))),
    }
    if overall:
        wanted[overall] = ("F32",), same_scales(entries[overall].shape, ()) if overall in entries else ()
    checked(entries, wanted, "NVFP4" if overall else "MXFP4")
    if overall:
        scalar = np.float32(checkpoint.tensor(overall).reshape(()))
        if not 0 < scalar < np.inf:
            raise ModelLoadError(f"{entries[overall].file}: {overall} is {scalar}; it must be a positive number")
    largest = LARGEST / float(scalar) if divides else LARGEST * float(scalar)
    if overall and not PLAUSIBLE[0] < largest < PLAUSIBLE[1]:
        what = f"{overall} is {scalar}, with which weights reach {largest:.3g}"
        raise ModelLoadError(f"{entries[overall].file}: {what}; is it the reciprocal of what this format has?")
    form = StoredFormat("e2m1", 4, group, scale="e4m3" if overall else "e8m0")
    parts = (*wanted, *present(checkpoint, unused))

    def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
        codes = nibbles(parts[0][rows])
        if not overall:
            return StoredMatrix(form, codes, from_e8m0(parts[1][rows]))
        stored_scales = float32(parts[1][rows])
        if (stored_scales < 0).any():
            raise ModelLoadError(f"{entries[scales].file}: {scales} has a negative scale; the file is damaged")
        outer = np.full((len(codes), 1), -scalar if divides else scalar, dtype=np.float32)
        return StoredMatrix(form, codes, stored_scales, outer=outer)

    return PackedTensor(name, (num_outputs, 2 * num_bytes), parts, form, matrix)
