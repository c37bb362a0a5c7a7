"""NVIDIA's ModelOpt: FP8 with a scale for a matrix or an output, and NVFP4, in one model where the algorithm is mixed.

`X.weight` is float8 [N, K] with `X.weight_scale` [] or [N], or uint8 [N, K / 2] with float8 `X.weight_scale`
[N, K / 16] that `X.weight_scale_2` multiplies. The settings are in config.json or hf_quant_config.json.
"""

from collections.abc import Sequence

from ridgeline.core.errors import ConfigError
from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.formats import PackedTensor, without_effect
from ridgeline.weights.packing.fp4 import packed_fp4
from ridgeline.weights.packing.scaled import E4M3, Blocks, ScaledBytes

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")


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
            each = scales in entries and entries[scales].shape not in ((), (1,))
            way = ScaledBytes("ModelOpt's fp8", E4M3, Blocks(1 if each else 0))
            found.append(way.packed(checkpoint, name, name, scales, unused=unused))
    return found


def _check_algorithm(settings: ConfigReader) -> None:
    settings.ignore(*without_effect("modelopt"))
    algorithm = settings.text("quant_algo")
    if algorithm not in ALGORITHMS:
        known = ", ".join(ALGORITHMS)
        raise ConfigError(f"quantization_config: quant_algo={algorithm!r} is not supported; supported: {known}")
    settings.finish()
