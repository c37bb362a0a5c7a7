"""FP8 as FBGEMM's kernels read it and Llama 3.1 is published: `X.weight` float8 [N, K] by `X.weight_scale` [N, 1]."""

from collections.abc import Sequence

from ridgeline.spec.reader import ConfigReader
from ridgeline.weights.checkpoint import Checkpoint
from ridgeline.weights.formats import PackedTensor
from ridgeline.weights.packing.scaled import E4M3, Blocks, ScaledBytes

WAY = ScaledBytes("FBGEMM's fp8", E4M3, Blocks(1))


def find(checkpoint: Checkpoint, settings: ConfigReader) -> Sequence[PackedTensor]:
    settings.ignore("activation_scale_ub", "modules_to_not_convert")  # inputs are rounded as --quantize-inputs says
    names = [name for name, entry in checkpoint.entries.items() if entry.dtype in E4M3]
    unused = {name: [f"{name.rpartition('.')[0]}.input_scale_ub"] for name in names}
    return [WAY.packed(checkpoint, name, name, f"{name}_scale", unused=unused[name]) for name in names]
