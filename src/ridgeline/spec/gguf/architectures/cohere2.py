"""Command R7B and Command A."""

from ridgeline.spec.gguf.common import Shapes, read_common
from ridgeline.spec.reader import ConfigReader


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {
        "model_type": "cohere2",
        "sliding_window": metadata.integer("attention.sliding_window"),
        "sliding_window_pattern": metadata.integer("attention.sliding_window_pattern", 4),
        "logit_scale": metadata.number("logit_scale"),
        **read_common(metadata, shapes, layer_norm=True),
    }
