"""MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss is published: 4-bit floats in blocks of 32 that share a scale.

`X_blocks` [.., O, I/32, 16] uint8 holds two E2M1 numbers in a byte, the earlier in the low half; `X_scales`
[.., O, I/32] uint8 holds E8M0 exponents. Together they are the tensor [.., O, I] that renames call `X_blocks`.
"""

from collections.abc import Mapping, Sequence

from ridgeline.core.dtypes import Array
from ridgeline.core.errors import ModelLoadError
from ridgeline.quant.stored import StoredMatrix, from_e8m0, nibbles
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import Checkpoint, TensorEntry
from ridgeline.weights.formats import PackedTensor
from ridgeline.weights.packing.fp4 import MXFP4

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.ignore("modules_to_not_convert")  # the names of the tensors say it too
    return [_packed(name, checkpoint.entries) for name in checkpoint.entries if name.endswith(BLOCKS)]


def _packed(name: str, entries: Mapping[str, TensorEntry]) -> PackedTensor:
    scales_name = name.removesuffix(BLOCKS) + SCALES
    blocks, scales = entries[name], entries.get(scales_name)
    if scales is None:
        raise ModelLoadError(f"{blocks.file}: {name} has no {scales_name} beside it; download the model again")
    is_wrong = (blocks.dtype, scales.dtype) != ("U8", "U8") or scales.shape != blocks.shape[:-1]
    if is_wrong or len(blocks.shape) < 3 or blocks.shape[-1] != BLOCK_BYTES:
        found = f"{blocks.dtype} {list(blocks.shape)} and {scales_name} is {scales.dtype} {list(scales.shape)}"
        known = f"MXFP4 has U8 [.., rows, blocks, {BLOCK_BYTES}] and U8 [.., rows, blocks]"
        raise ModelLoadError(f"{blocks.file}: {name} is {found}; {known}")
    *rows, num_blocks = scales.shape
    return PackedTensor(name, (*rows, num_blocks * 2 * BLOCK_BYTES), (name, scales_name), MXFP4, _matrix)


def _matrix(parts: Sequence[Array], rows: slice) -> StoredMatrix:
    """Return the stored matrix; a scale of 255 is NaN, as the format has it."""
    blocks_OGB, exponents_OG = (part[rows] for part in parts)
    codes = nibbles(blocks_OGB)
    return StoredMatrix(MXFP4, codes.reshape(len(codes), -1), from_e8m0(exponents_OG))
