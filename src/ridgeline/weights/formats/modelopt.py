"""NVIDIA's ModelOpt: FP8 with a scale for a matrix, an output or a block, MXFP8 and NVFP4, in one model where the
algorithm is mixed.

`X.weight` is float8 [N, K] with `X.weight_scale` [], [N], [N / 128, 1, K / 128, 1], or of MXFP8 uint8 [N, K / 32]; or
uint8 [N, K / 2] with float8 `X.weight_scale` [N, K / 16] that `X.weight_scale_2` multiplies. The settings are in
config.json or hf_quant_config.json.
"""

from collections.abc import Sequence

from ridgeline.core.errors import ConfigError
from ridgeline.quant.stored import from_e8m0
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.formats import PackedTensor, without_effect
from ridgeline.weights.packing.fp4 import packed_fp4
from ridgeline.weights.packing.scaled import E4M3, E8M0, Blocks, ScaledBytes

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "MIXED_PRECISION")
MXFP8 = ScaledBytes("ModelOpt's MXFP8", E4M3, Blocks(1, 32), E8M0, from_e8m0)
BLOCKS = Blocks(128, 128)


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.ignore(*without_effect("modelopt"))
    inner = settings.section("quantization")
    _check_algorithm(settings if inner is None else inner)
    entries, found = checkpoint.entries, list[PackedTensor]()
    for name in [name for name in entries if name.endswith(".weight") and entries[name].dtype in (*E4M3, "U8")]:
        scales, unused = f"{name}_scale", (f"{name[:-7]}.input_scale",)
        if entries[name].dtype == "U8":
            found.append(packed_fp4(checkpoint, name, name, scales, f"{name}_scale_2", unused=unused))
        else:
            shape = entries[scales].shape if scales in entries else ()
            blocks = BLOCKS if len(shape) == 4 else Blocks(1 if shape not in ((), (1,)) else 0)
            is_mx = scales in entries and entries[scales].dtype in E8M0
            way = MXFP8 if is_mx else ScaledBytes("ModelOpt's fp8", E4M3, blocks)
            found.append(way.packed(checkpoint, name, name, scales, unused=unused))
    return found


def _check_algorithm(settings: ConfigReader) -> None:
    settings.ignore(*without_effect("modelopt"))
    algorithm = settings.text("quant_algo").upper()
    if algorithm not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise ConfigError(f"quantization_config: quant_algo={algorithm!r} is not supported; supported: {known}")
    settings.finish()
