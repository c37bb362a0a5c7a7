"""ERNIE 4.5 (dense)."""

from ridgeline.spec.gguf.common import Shapes, read_common
from ridgeline.spec.reader import ConfigReader


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "ernie4_5",
        "use_bias": "blk.0.attn_q.bias" in shapes,
        **read_common(metadata, shapes),
    }
