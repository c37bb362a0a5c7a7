"""Matrices of 4-bit floats (E2M1), two in a byte: NVFP4 with scales of 8-bit floats, MXFP4 with powers of two."""

from collections.abc import Sequence

import numpy as np

from ridgeline.core.dtypes import Array, float32
from ridgeline.core.errors import ModelLoadError
from ridgeline.quant.stored import Bytes, StoredFormat, StoredMatrix, from_e8m0, nibbles
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.formats import PackedTensor
from ridgeline.weights.packing.parts import Wanted, checked, matrix_entry
from ridgeline.weights.packing.scaled import E4M3, E8M0, present, same_scales

NVFP4, MXFP4 = StoredFormat("e2m1", 4, 16, scale="e4m3"), StoredFormat("e2m1", 4, 32, scale="e8m0")
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
    form, entries, scalar = NVFP4 if overall else MXFP4, checkpoint.entries, np.float32(1)
    wanted: Wanted = {
        numbers: (("U8",), (num_outputs, num_bytes)),
        scales: (E4M3 if overall else E8M0, (num_outputs, form.num_groups(2 * num_bytes))),
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
    parts, outer = (*wanted, *present(checkpoint, unused)), float(-scalar if divides else scalar)

    def matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
        codes = nibbles(parts[0][rows])
        if not overall:
            return StoredMatrix(form, codes, from_e8m0(parts[1][rows]))
        return nvfp4_matrix(f"{entries[scales].file}: {scales}", codes, parts[1][rows], outer)

    return PackedTensor(name, (num_outputs, 2 * num_bytes), parts, form, matrix)


def nvfp4_matrix(where: str, codes: Bytes, scales_NG: Array, outer: float) -> StoredMatrix:
    """Return a matrix of NVFP4 with one `outer` scale. Raises ModelLoadError, which begins with `where`."""
    if (float32(scales_NG) < 0).any():
        raise ModelLoadError(f"{where} has a negative scale; the file is damaged")
    return StoredMatrix(NVFP4, codes, float32(scales_NG), outer=np.full((len(codes), 1), outer, np.float32))
