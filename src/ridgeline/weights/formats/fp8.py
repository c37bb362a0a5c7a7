"""FP8 as transformers and vLLM write it and DeepSeek-V3 is published: E4M3 numbers, and scales that multiply them.

`X` [O, I] float8 and `X_scale_inv` [O / rows, I / columns], rounded up, are together the tensor [O, I] called `X`: each
number times its block's scale. Without blocks there is one scale, `X_scale` or `X_scale_inv`.
"""

from collections.abc import Sequence

from ridgeline.core.errors import ConfigError
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.formats import PackedTensor
from ridgeline.weights.packing.scaled import E4M3, Blocks, ScaledBytes

SCALES, SCALE = "_scale_inv", "_scale"


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.expect("fmt", "e4m3")
    settings.expect("activation_scheme", "dynamic", "static")  # inputs are rounded as --quantize-inputs says
    settings.expect("scale_fmt", "ue8m0", None)  # scales that are powers of two
    settings.ignore("modules_to_not_convert", "ignored_layers", "kv_cache_scheme", "dequantize")  # the tensors say it
    block, entries = settings.integers("weight_block_size", low=1), checkpoint.entries
    if len(block) not in (0, 2):
        known = "fp8 weights have one scale for every block of [rows, columns], or one for a matrix"
        raise ConfigError(f"quantization_config: weight_block_size={list(block)} is not supported; {known}")
    what = f"fp8 in blocks of {block[0]} x {block[1]}" if block else "fp8 with one scale"
    way = ScaledBytes(what, E4M3, Blocks(*block), ("F32", "BF16"))
    found: list[PackedTensor] = []
    for name in [name for name, entry in entries.items() if entry.dtype in E4M3]:
        scales = name + (SCALE if not block and name + SCALE in entries else SCALES)
        unused = (f"{name.rpartition('.')[0]}.input_scale",)
        found.append(way.packed(checkpoint, name, name, scales, unused=unused))
    return found
