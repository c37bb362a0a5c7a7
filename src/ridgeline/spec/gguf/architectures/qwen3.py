"""Qwen 3 (dense)."""

from ridgeline.spec.gguf.common import Shapes, read_common
from ridgeline.spec.reader import ConfigReader


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {"model_type": "qwen3", **read_common(metadata, shapes)}
