"""MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss is published: 4-bit floats in blocks of 32 that share a scale.

`X_blocks` [.., O, I/32, 16] uint8 holds two E2M1 numbers in a byte, the earlier in the low half; `X_scales`
[.., O, I/32] uint8 holds E8M0 exponents. Together they are the tensor [.., O, I] that renames call `X_blocks`.
"""

from collections.abc import Mapping, Sequence

import torch

from ridgeline.core.errors import ModelLoadError
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import TensorEntry
from ridgeline.weights.formats import PackedTensor

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the low three bits; the fourth is the sign
EXPONENT_BIAS = 127


def find(entries: Mapping[str, TensorEntry], settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.ignore("modules_to_not_convert")  # the names of the tensors say it too
    return [_packed(name, entries) for name in entries if name.endswith(BLOCKS)]


def _packed(name: str, entries: Mapping[str, TensorEntry]) -> PackedTensor:
    scales_name = name.removesuffix(BLOCKS) + SCALES
    blocks, scales = entries[name], entries.get(scales_name)
    if scales is None:
        raise ModelLoadError(f"{blocks.file}: {name} has no {scales_name} beside it; download the model again")
    if (
        (blocks.dtype, scales.dtype) != ("U8", "U8")
        or len(blocks.shape) < 3
        or blocks.shape[-1] != BLOCK_BYTES
        or scales.shape != blocks.shape[:-1]
    ):
        raise ModelLoadError(
            f"{blocks.file}: {name} is {blocks.dtype} {list(blocks.shape)} and {scales_name} is {scales.dtype} "
            f"{list(scales.shape)}; MXFP4 has U8 [.., rows, blocks, {BLOCK_BYTES}] and U8 [.., rows, blocks]"
        )
    *rows, num_blocks = scales.shape
    return PackedTensor(name, (*rows, num_blocks * 2 * BLOCK_BYTES), (name, scales_name), _decode)


def _decode(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """[.., O, I] in `dtype`, one matrix at a time. A scale of 255 is NaN, as the format has it."""
    blocks, scales = parts
    *rows, num_blocks = scales.shape
    decoded = torch.empty((*rows, num_blocks * 2 * BLOCK_BYTES), dtype=dtype)
    numbers = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)])
    pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1)  # of every byte
    powers = torch.exp2(torch.arange(256, dtype=torch.float64) - EXPONENT_BIAS).float()
    powers[255] = float("nan")
    matrices = (x.view(-1, *x.shape[-num_dims:]) for x, num_dims in ((decoded, 2), (blocks, 3), (scales, 2)))
    for out_OI, blocks_OGB, scales_OG in zip(*matrices):
        values = pairs.index_select(0, blocks_OGB.flatten().int()).view(-1, 2 * BLOCK_BYTES)
        values *= powers.index_select(0, scales_OG.flatten().int())[:, None]
        out_OI.copy_(values.view(out_OI.shape))
    return decoded
