"""Gemma. Its norms are stored with the 1 that the family adds."""

from ridgeline.spec.gguf.common import Shapes, plus_one_tensors, read_common
from ridgeline.spec.reader import ConfigReader

tensors = plus_one_tensors


def config(metadata: ConfigReader, shapes: Shapes) -> dict[str, object]:
    return {"model_type": "gemma", **read_common(metadata, shapes)}
