"""Phi 1, 1.5 and 2."""

from ridgeline.spec.gguf.common import Shapes, read_common
from ridgeline.spec.reader import ConfigReader


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {"model_type": "phi", **read_common(metadata, shapes, layer_norm=True, free_head_dim=False)}
